/* Steps of the optimizer on the fast path: `stream.py` and `fast_path.py` in C. */
#pragma once

#include "_fast_path_objects.h"

/* ---- `optimizer.step` begins, without a closure: `FastPath._try_enter`. ---- */

static bool try_enter(PyObject *stream, double begin)
{
    PyObject *ledger = GET(FastPath, stream, _ledger), *note_at = GET(FastPath, stream, _note_at);
    if (!is_mine(ledger))
        return false;
    PyObject *loss = GET(Tally, GET(Ledger, ledger, tally), loss);
    if (!is_float(loss) || !is_calm(ledger, value_of(loss)) || GET(FastPath, stream, _clipped) != Py_False)
        return false;
    if (!is_float(note_at) || begin >= value_of(note_at) || !is_float(GET(FastPath, stream, _stretch_own)))
        return false;
    put(AT(FastPath, stream, _loss), Py_NewRef(loss));
    put(AT(FastPath, stream, _clip), Py_NewRef(Py_None));
    double entered = perf_counter();
    bool done = put_float(AT(FastPath, stream, _entered_at), entered)
                && add(AT(FastPath, stream, _stretch_own), entered - begin);
    if (done)
        put(AT(FastPath, stream, _on_fast_path), Py_NewRef(Py_True));
    return done;
}

static bool is_watched(PyObject *stream, long inside)
{
    if (!PyObject_TypeCheck(stream, FastPath) || GET(FastPath, stream, _dead) != Py_False)
        return false;
    PyObject *depth = GET(FastPath, stream, _inside);
    return GET(FastPath, stream, guard) == Py_None && is_int(depth) && PyLong_AsLong(depth) == inside;
}

/* Called with the optimizer, and with the arguments of its step: the optimizer again, where it was called plainly. */
static bool is_plain_step(PyObject *called)
{
    if (!is(called, &PyTuple_Type) || PyTuple_GET_SIZE(called) != 3)
        return false;
    PyObject *args = PyTuple_GET_ITEM(called, 1), *kwargs = PyTuple_GET_ITEM(called, 2);
    return is(args, &PyTuple_Type) && PyTuple_GET_SIZE(args) == 1 && is(kwargs, &PyDict_Type) && !PyDict_GET_SIZE(kwargs);
}

static bool step_begins(PyObject *hook, PyObject *called)
{
    double begin = perf_counter();
    PyObject *stream = GET(StepHook, hook, stream);
    if (stream == NULL || !is_watched(stream, 0) || !is_plain_step(called))
        return false;
    /* Once an optimizer has stepped inside a backward pass, no step of its run is on the fast path any more. */
    if (GET(FastPath, stream, within) != Py_None && !is_outermost())
        return false;
    return try_enter(stream, begin) && put_int(AT(FastPath, stream, _inside), 1);
}

/* ---- It is over: `FastPath._try_exit`. ---- */

/* Whether it is a tally whose step can be passed. */
static bool is_passable(PyObject *ledger)
{
    PyObject *tally = GET(Ledger, ledger, tally), *batch = GET(Tally, tally, batch);
    return is(GET(Ledger, ledger, feeds), Feeds) && GET(Feeds, GET(Ledger, ledger, feeds), last) != NULL
           && is_int(GET(Ledger, ledger, steps))
           && (batch == Py_None || is(batch, &PyDict_Type)) && is_int(GET(Tally, tally, steps))
           && is_float(GET(Tally, tally, optimizer_seconds));
}

/* `Ledger.passed`. */
static bool passed(PyObject *ledger, double seconds)
{
    PyObject *tally = GET(Ledger, ledger, tally), *feeds = GET(Ledger, ledger, feeds);
    put(AT(Tally, tally, loss), Py_NewRef(Py_None));
    put(AT(Tally, tally, batch), Py_NewRef(Py_None));
    put(AT(Ledger, ledger, captured), Py_NewRef(Py_False));
    put(AT(Feeds, feeds, training), Py_NewRef(GET(Feeds, feeds, last)));
    return put_int(AT(Tally, tally, backwards), 0)
           && put_int(AT(Tally, tally, batches), 0)
           && put_int(AT(Tally, tally, forwards), 0)
           && count_up(AT(Tally, tally, steps))
           && add(AT(Tally, tally, optimizer_seconds), seconds)
           && count_up(AT(Ledger, ledger, steps))
           && progressed(ledger, STEP);
}

/* The one place where a model's last call is kept; NULL where there are others. */
static PyObject *only_slot(PyObject *inquest)
{
    PyObject *slots = is(inquest, Inquest) ? GET(Inquest, inquest, _slots) : NULL;
    if (slots == NULL || !PyList_CheckExact(slots) || PyList_GET_SIZE(slots) != 1)
        return NULL;
    return is(PyList_GET_ITEM(slots, 0), Slot) ? PyList_GET_ITEM(slots, 0) : NULL;
}

static bool queue(PyObject *stream, PyObject *loss, PyObject *seq, PyObject *batch)
{
    PyObject *layers = GET(FastPath, stream, layers), *append = GET(FastPath, stream, _append);
    PyObject *number = GET(Layers, layers, stream), *table = GET(Layers, layers, table);
    PyObject *values = NULL, *now = NULL, *record = NULL, *queued = NULL;
    if (append == NULL || number == NULL || table == NULL)
        return false;
    PyObject *held[] = {append, number, table, batch}; /* at each allocation code of the user's may run, or a thread */
    for (size_t place = 0; place < COUNT(held); place++)
        Py_INCREF(held[place]);
    values = PyDict_New();
    if (values == NULL || PyDict_SetItem(values, name_loss, loss) != 0)
        goto done;
    if (batch != Py_None && PyDict_Update(values, batch) != 0)
        goto done;
    now = PyFloat_FromDouble(clock_seconds(CLOCK_REALTIME));
    if (now == NULL)
        goto done;
    PyObject *parts[] = {number, seq, now, table, values};
    record = PyObject_Vectorcall(Record, parts, COUNT(parts), NULL);
    if (record != NULL)
        queued = PyObject_CallOneArg(append, record);
done:
    for (size_t place = 0; place < COUNT(held); place++)
        Py_DECREF(held[place]);
    Py_XDECREF(values);
    Py_XDECREF(now);
    Py_XDECREF(record);
    Py_XDECREF(queued);
    return queued != NULL;
}

static bool exit_step(PyObject *stream, PyObject *ledger, PyObject *loss, PyObject *seq, double now)
{
    if (!is_mine(ledger) || GET(Tally, GET(Ledger, ledger, tally), loss) != loss || !is_float(loss))
        return false;
    PyObject *calm_to = GET(Ledger, ledger, calm_to);
    if (!is_float(calm_to) || value_of(calm_to) == -INFINITY || !is_passable(ledger))
        return false;
    PyObject *slot = only_slot(GET(FastPath, stream, inquest)), *before = GET(FastPath, stream, _previous_exit);
    PyObject *losses = GET(FastPath, stream, _losses), *end = GET(FastPath, stream, _stretch_end);
    if (slot == NULL || !is_float(before) || !is(losses, &PyList_Type) || !is_int(seq) || !is_int(end))
        return false;
    if (GET(FastPath, stream, _clip) != Py_None || !is(GET(FastPath, stream, layers), Layers))
        return false;
    if (!is_float(GET(FastPath, stream, _entered_at)) || !is_float(GET(FastPath, stream, _stretch_seconds))
        || !is_float(GET(FastPath, stream, _stretch_own)) || !is_int(GET(FastPath, stream, _stretch_steps)))
        return false;
    Py_ssize_t waiting = PyObject_Size(GET(FastPath, stream, _queued));
    if (waiting < 0 || waiting >= queue_steps)
        return false;
    long long next = PyLong_AsLongLong(seq) + 1, until = PyLong_AsLongLong(end);
    double since = value_of(before);
    if (PyErr_Occurred())
        return false;
    Py_INCREF(losses);
    bool queued = queue(stream, loss, seq, GET(Tally, GET(Ledger, ledger, tally), batch))
                  && PyList_Append(losses, loss) == 0; /* where memory is short the record may come twice */
    Py_DECREF(losses);
    if (!queued)
        return false;
    put(AT(FastPath, stream, _on_fast_path), Py_NewRef(Py_False));
    if (!passed(ledger, now - value_of(GET(FastPath, stream, _entered_at))))
        return false;
    if (next >= until && !put_float(AT(Ledger, ledger, calm_to), -INFINITY))
        return false;
    bool done = count_up(AT(FastPath, stream, _stretch_steps))
                && add(AT(FastPath, stream, _stretch_seconds), now - since)
                && put_float(AT(FastPath, stream, _previous_exit), now)
                && put_int(AT(FastPath, stream, seq), next)
                && add(AT(FastPath, stream, _stretch_own), perf_counter() - now);
    slot = only_slot(GET(FastPath, stream, inquest)); /* none any more, where a finalizer has detached us meanwhile */
    if (slot == NULL)
        return done;
    put(AT(Slot, slot, frozen), Py_NewRef(Py_False));
    PyObject *kept = GET(Slot, slot, _kept), *args = GET(Slot, slot, _args);
    GET(Slot, slot, _kept) = Py_NewRef(Py_None);
    GET(Slot, slot, _args) = Py_NewRef(Py_None);
    Py_XDECREF(kept); /* the last: with the batch code of the user's may run */
    Py_XDECREF(args);
    return done;
}

static bool try_exit(PyObject *stream, double now)
{
    if (GET(FastPath, stream, _on_fast_path) != Py_True)
        return false;
    PyObject *held[] = {GET(FastPath, stream, _ledger), GET(FastPath, stream, _loss), GET(FastPath, stream, seq)};
    for (size_t place = 0; place < COUNT(held); place++)
        Py_XINCREF(held[place]);
    bool done = exit_step(stream, held[0], held[1], held[2], now);
    for (size_t place = 0; place < COUNT(held); place++)
        Py_XDECREF(held[place]);
    return done;
}

static bool step_ends(PyObject *hook, PyObject *Py_UNUSED(called))
{
    double now = perf_counter();
    PyObject *stream = GET(StepHook, hook, stream);
    if (stream == NULL || !is_watched(stream, 1) || !try_exit(stream, now))
        return false;
    return put_int(AT(FastPath, stream, _inside), 0);
}
