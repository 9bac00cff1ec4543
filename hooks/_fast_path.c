/* The fast path of an optimizer step, in C: what `forward.py`, `patches.py` and `fast_path.py` do when nothing unusual
 * happens, on the same objects.
 *
 * In a loop of 3 ms what costs is not the work but the way to it: bytecode, dictionaries and frames that training has
 * driven out of the processor's caches (see docs/performance.md). Each function here either does all that the Python
 * function that it names does, and answers True; or, wherever something unusual happens, does nothing and answers
 * False, and the caller calls the Python function. What is written here is written there, too, for machines without a
 * C compiler, and tests run with both.
 *
 * Attributes lie where `__slots__` has them, and `learn` asks their class where that is.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <structmember.h>
#include <time.h>

#if defined(Py_GIL_DISABLED) || !defined(__linux__)
#error "attributes are written under the GIL; the clock is that of Linux"
#endif

#define CLASSES(EACH)                                                                                                  \
    EACH(FastPath) EACH(Feeds) EACH(Inquest) EACH(Layers) EACH(Ledger) EACH(Slot) EACH(Stopwatch) EACH(Tally)

#define ATTRIBUTES(EACH)                                                                                               \
    EACH(Feeds, last) EACH(Feeds, training)                                                                            \
    EACH(FastPath, _append) EACH(FastPath, _clip) EACH(FastPath, _clipped) EACH(FastPath, _entered_at)                 \
    EACH(FastPath, _ledger) EACH(FastPath, _loss) EACH(FastPath, _losses) EACH(FastPath, _note_at)                     \
    EACH(FastPath, _on_fast_path) EACH(FastPath, _previous_exit) EACH(FastPath, _queued)                               \
    EACH(FastPath, _stretch_end) EACH(FastPath, _stretch_own) EACH(FastPath, _stretch_seconds)                         \
    EACH(FastPath, _stretch_steps) EACH(FastPath, inquest) EACH(FastPath, layers) EACH(FastPath, seq)                  \
    EACH(Inquest, _slots)                                                                                              \
    EACH(Layers, stream) EACH(Layers, table)                                                                           \
    EACH(Ledger, calm_to) EACH(Ledger, captured) EACH(Ledger, feeds) EACH(Ledger, progress) EACH(Ledger, steps)        \
    EACH(Ledger, tally) EACH(Ledger, thread) EACH(Ledger, when_next) EACH(Ledger, work)                                \
    EACH(Slot, draws) EACH(Slot, frozen) EACH(Slot, kept) EACH(Slot, known) EACH(Slot, returned_at)                    \
    EACH(Slot, running)                                                                                                \
    EACH(Stopwatch, _begin) EACH(Stopwatch, _keeps) EACH(Stopwatch, _ledger) EACH(Stopwatch, _slot)                    \
    EACH(Tally, backward_seconds) EACH(Tally, backwards) EACH(Tally, batch) EACH(Tally, batches)                       \
    EACH(Tally, forward_seconds) EACH(Tally, forwards) EACH(Tally, loss) EACH(Tally, optimizer_seconds)                \
    EACH(Tally, steps)

#define TYPE(CLASS) static PyTypeObject *CLASS;
CLASSES(TYPE)

#define PLACE(CLASS, NAME) static Py_ssize_t CLASS##_##NAME;
ATTRIBUTES(PLACE)

#define KNOWN_CLASS(CLASS) {#CLASS, &CLASS},
static const struct {
    const char *name;
    PyTypeObject **type;
} classes[] = {CLASSES(KNOWN_CLASS)};

#define KNOWN_ATTRIBUTE(CLASS, NAME) {#CLASS, #NAME, &CLASS##_##NAME},
static const struct {
    const char *of, *name;
    Py_ssize_t *place;
} attributes[] = {ATTRIBUTES(KNOWN_ATTRIBUTE)};

/* What else the Python side has, by the names under which `know` is given it. */
#define OBJECTS(EACH)                                                                                                  \
    EACH(Kept) EACH(Record) EACH(Tensor) EACH(any_autocast) EACH(is_grad_enabled) EACH(BACKWARD) EACH(FORWARD) EACH(STEP)

#define OBJECT(NAME) static PyObject *NAME;
OBJECTS(OBJECT)

#define KNOWN_OBJECT(NAME) {#NAME, &NAME},
static const struct {
    const char *name;
    PyObject **object;
} objects[] = {OBJECTS(KNOWN_OBJECT)};

static double fast_seconds;
static long long batch_bytes;
static Py_ssize_t queue_steps;
static bool ready; /* all is known, and the functions are to be used */
static PyObject *name_is_cpu, *name_item, *name_loss, *name_nbytes, *name_training, *name_version;

#define COUNT(ARRAY) (sizeof(ARRAY) / sizeof(ARRAY)[0])
#define AT(CLASS, OBJECT, NAME) ((PyObject **)((char *)(OBJECT) + CLASS##_##NAME))
#define GET(CLASS, OBJECT, NAME) (*AT(CLASS, OBJECT, NAME))

static double clock_seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return ((double)now.tv_sec * 1e9 + (double)now.tv_nsec) / 1e9;
}

/* As `time.perf_counter` has it. */
static double perf_counter(void) { return clock_seconds(CLOCK_MONOTONIC); }

static bool is(PyObject *object, PyTypeObject *type) { return object != NULL && Py_TYPE(object) == type; }

static bool is_float(PyObject *object) { return is(object, &PyFloat_Type); }

static bool is_int(PyObject *object) { return is(object, &PyLong_Type); }

static double value_of(PyObject *number) { return PyFloat_AS_DOUBLE(number); }

/* Put an object there, and take over the reference to it. */
static void put(PyObject **place, PyObject *object)
{
    PyObject *old = *place;
    *place = object;
    Py_XDECREF(old);
}

static bool put_float(PyObject **place, double value)
{
    PyObject *number = PyFloat_FromDouble(value);
    if (number != NULL)
        put(place, number);
    return number != NULL;
}

static bool put_int(PyObject **place, long long value)
{
    PyObject *number = PyLong_FromLongLong(value);
    if (number != NULL)
        put(place, number);
    return number != NULL;
}

static bool count_up(PyObject **place) { return put_int(place, PyLong_AsLongLong(*place) + 1); }

static bool add(PyObject **place, double value) { return put_float(place, value_of(*place) + value); }

/* The run came a little further. */
static bool progressed(PyObject *ledger, PyObject *work)
{
    put(AT(Ledger, ledger, work), Py_NewRef(work));
    return count_up(AT(Ledger, ledger, progress));
}

/* Whether it is a ledger as it is nearly always, and of this thread. */
static bool is_mine(PyObject *ledger)
{
    if (!is(ledger, Ledger) || !is(GET(Ledger, ledger, tally), Tally) || !is_int(GET(Ledger, ledger, progress)))
        return false;
    PyObject *thread = GET(Ledger, ledger, thread);
    return is_int(thread) && PyLong_AsUnsignedLong(thread) == PyThread_get_thread_ident();
}

/* Whether the loss is no surprise. */
static bool is_calm(PyObject *ledger, double loss)
{
    PyObject *to = GET(Ledger, ledger, calm_to);
    return is_float(to) && loss <= value_of(to) && loss - loss == 0.0; /* the last: minus infinity */
}

static bool answers(PyObject *function, PyObject *expected)
{
    PyObject *answer = PyObject_CallNoArgs(function);
    Py_XDECREF(answer); /* True and False live for ever */
    return answer == expected;
}

static bool has_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    return value == Py_True;
}

/* The attribute, a number that is not negative; else -1. */
static long long number_of(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    long long number = value != NULL && is_int(value) ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* True or False: what fails here is tried again in Python. But for what ends the program, such as KeyboardInterrupt. */
static PyObject *answer(bool done)
{
    if (!done && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
    }
    return PyBool_FromLong(done);
}

static bool keep(PyObject *slot, PyObject *args, PyObject *kwargs)
{
    if (!is(args, &PyTuple_Type) || PyTuple_GET_SIZE(args) != 1 || !is(kwargs, &PyDict_Type) || PyDict_GET_SIZE(kwargs))
        return false;
    PyObject *batch = PyTuple_GET_ITEM(args, 0);
    if ((PyObject *)Py_TYPE(batch) != Tensor)
        return false;
    long long nbytes = number_of(batch, name_nbytes), version = number_of(batch, name_version);
    if (nbytes < 0 || nbytes > batch_bytes || version < 0)
        return false;
    PyObject *versions = Py_BuildValue("[L]", version);
    if (versions == NULL)
        return false;
    PyObject *parts[] = {args, kwargs, args, versions};
    PyObject *kept = PyObject_Vectorcall(Kept, parts, COUNT(parts), NULL);
    Py_DECREF(versions);
    if (kept != NULL)
        put(AT(Slot, slot, kept), kept);
    return kept != NULL;
}

static bool started(PyObject *stopwatch, PyObject *ledger, PyObject *called)
{
    if (!is(called, &PyTuple_Type) || PyTuple_GET_SIZE(called) != 3)
        return false;
    PyObject *slot = GET(Stopwatch, stopwatch, _slot);
    if (!is_mine(ledger) || GET(Ledger, ledger, when_next) != Py_None || !is(slot, Slot))
        return false;
    if (GET(Slot, slot, running) != Py_False || GET(Slot, slot, frozen) != Py_False || GET(Slot, slot, draws) != Py_False)
        return false;
    if (!answers(is_grad_enabled, Py_True) || !answers(any_autocast, Py_False))
        return false;
    Py_INCREF(slot); /* what follows may run code of the user's */
    bool kept = has_true(PyTuple_GET_ITEM(called, 0), name_training)
                && keep(slot, PyTuple_GET_ITEM(called, 1), PyTuple_GET_ITEM(called, 2));
    Py_DECREF(slot);
    if (!kept)
        return false;
    put(AT(Stopwatch, stopwatch, _keeps), Py_NewRef(Py_True));
    return put_float(AT(Stopwatch, stopwatch, _begin), perf_counter());
}

PyDoc_STRVAR(start_doc, "start(stopwatch, called)\n--\n\n`Stopwatch.start(*called)`: a forward pass begins.");

static PyObject *start(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (!ready || count != 2 || !is(arguments[0], Stopwatch))
        Py_RETURN_FALSE;
    PyObject *ledger = PyObject_CallNoArgs(GET(Stopwatch, arguments[0], _ledger));
    bool done = started(arguments[0], ledger, arguments[1]);
    Py_XDECREF(ledger);
    return answer(done);
}

static bool stopped(PyObject *stopwatch, PyObject *ledger, double now)
{
    PyObject *slot = GET(Stopwatch, stopwatch, _slot), *begin = GET(Stopwatch, stopwatch, _begin);
    if (!is_mine(ledger) || !is(slot, Slot) || !is_float(begin) || value_of(begin) == 0.0)
        return false;
    if (GET(Stopwatch, stopwatch, _keeps) != Py_True || GET(Slot, slot, running) != Py_False)
        return false;
    PyObject *before = GET(Slot, slot, returned_at), *tally = GET(Ledger, ledger, tally);
    if (GET(Slot, slot, known) != Py_True || !is_float(before) || now - value_of(before) >= fast_seconds)
        return false;
    if (!is_float(GET(Tally, tally, forward_seconds)) || !is_int(GET(Tally, tally, forwards)))
        return false;
    return add(AT(Tally, tally, forward_seconds), now - value_of(begin))
           && count_up(AT(Tally, tally, forwards))
           && put_float(AT(Stopwatch, stopwatch, _begin), 0.0)
           && put_float(AT(Slot, slot, returned_at), now)
           && progressed(ledger, FORWARD);
}

PyDoc_STRVAR(stop_doc, "stop(stopwatch)\n--\n\n`Stopwatch.stop`: a forward pass is over.");

static PyObject *stop(PyObject *Py_UNUSED(module), PyObject *stopwatch)
{
    double now = perf_counter();
    if (!ready || !is(stopwatch, Stopwatch))
        Py_RETURN_FALSE;
    PyObject *ledger = PyObject_CallNoArgs(GET(Stopwatch, stopwatch, _ledger));
    bool done = stopped(stopwatch, ledger, now);
    Py_XDECREF(ledger);
    return answer(done);
}

static bool noted(PyObject *ledger, PyObject *loss, double seconds)
{
    PyObject *tally = GET(Ledger, ledger, tally), *before = GET(Tally, tally, loss);
    if (!is_float(loss) || !is_calm(ledger, value_of(loss)) || !(before == Py_None || is_float(before)))
        return false;
    if (!is_float(GET(Tally, tally, backward_seconds)) || !is_int(GET(Tally, tally, backwards)))
        return false;
    if (before == Py_None)
        put(AT(Tally, tally, loss), Py_NewRef(loss));
    else if (!add(AT(Tally, tally, loss), value_of(loss)))
        return false;
    return add(AT(Tally, tally, backward_seconds), seconds)
           && count_up(AT(Tally, tally, backwards))
           && progressed(ledger, BACKWARD);
}

PyDoc_STRVAR(backward_ended_doc,
"backward_ended(root, seconds, ledger)\n--\n\n"
"`patches._record_plain_loss`, where no loss was ever scaled: a backward pass from `root` took `seconds`.");

static PyObject *backward_ended(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    if (!ready || count != 3 || (PyObject *)Py_TYPE(arguments[0]) != Tensor || !is_float(arguments[1]))
        Py_RETURN_FALSE;
    PyObject *ledger = arguments[2];
    if (!is(ledger, Ledger) || !is(GET(Ledger, ledger, tally), Tally) || !is_int(GET(Ledger, ledger, progress)))
        Py_RETURN_FALSE;
    if (!has_true(arguments[0], name_is_cpu))
        return answer(false);
    PyObject *loss = PyObject_CallMethodNoArgs(arguments[0], name_item);
    if (loss == NULL) /* it has several elements */
        return answer(false);
    bool done = noted(ledger, loss, value_of(arguments[1]));
    Py_DECREF(loss);
    return answer(done);
}

PyDoc_STRVAR(enter_doc, "enter(stream)\n--\n\n`FastPath._try_enter`: `optimizer.step` begins, without a closure.");

static PyObject *enter(PyObject *Py_UNUSED(module), PyObject *stream)
{
    double begin = perf_counter();
    if (!ready || !PyObject_TypeCheck(stream, FastPath) || !is_mine(GET(FastPath, stream, _ledger)))
        Py_RETURN_FALSE;
    PyObject *ledger = GET(FastPath, stream, _ledger), *note_at = GET(FastPath, stream, _note_at);
    PyObject *loss = GET(Tally, GET(Ledger, ledger, tally), loss);
    if (!is_float(loss) || !is_calm(ledger, value_of(loss)) || GET(FastPath, stream, _clipped) != Py_False)
        Py_RETURN_FALSE;
    if (!is_float(note_at) || begin >= value_of(note_at) || !is_float(GET(FastPath, stream, _stretch_own)))
        Py_RETURN_FALSE;
    put(AT(FastPath, stream, _loss), Py_NewRef(loss));
    put(AT(FastPath, stream, _clip), Py_NewRef(Py_None));
    double entered = perf_counter();
    bool done = put_float(AT(FastPath, stream, _entered_at), entered)
                && add(AT(FastPath, stream, _stretch_own), entered - begin);
    if (done)
        put(AT(FastPath, stream, _on_fast_path), Py_NewRef(Py_True));
    return answer(done);
}

/* Whether it is a tally whose step can be passed. */
static bool is_passable(PyObject *ledger)
{
    PyObject *tally = GET(Ledger, ledger, tally);
    return is(GET(Ledger, ledger, feeds), Feeds) && is_int(GET(Ledger, ledger, steps))
           && GET(Tally, tally, batch) == Py_None && is_int(GET(Tally, tally, steps))
           && is_float(GET(Tally, tally, optimizer_seconds));
}

/* `Ledger.passed`. */
static bool passed(PyObject *ledger, double seconds)
{
    PyObject *tally = GET(Ledger, ledger, tally), *feeds = GET(Ledger, ledger, feeds);
    put(AT(Tally, tally, loss), Py_NewRef(Py_None));
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

static bool queue(PyObject *stream, PyObject *loss, PyObject *seq)
{
    PyObject *layers = GET(FastPath, stream, layers), *values = PyDict_New();
    PyObject *now = NULL, *record = NULL, *queued = NULL;
    if (values == NULL || PyDict_SetItem(values, name_loss, loss) != 0)
        goto done;
    now = PyFloat_FromDouble(clock_seconds(CLOCK_REALTIME));
    if (now == NULL)
        goto done;
    PyObject *parts[] = {GET(Layers, layers, stream), seq, now, GET(Layers, layers, table), values};
    record = PyObject_Vectorcall(Record, parts, COUNT(parts), NULL);
    if (record != NULL)
        queued = PyObject_CallOneArg(GET(FastPath, stream, _append), record);
done:
    Py_XDECREF(values);
    Py_XDECREF(now);
    Py_XDECREF(record);
    Py_XDECREF(queued);
    return queued != NULL;
}

static bool left(PyObject *stream, PyObject *ledger, PyObject *loss, PyObject *seq, double now)
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
    long long next = PyLong_AsLongLong(seq) + 1;
    if (!queue(stream, loss, seq) || PyList_Append(losses, loss) != 0)
        return false;
    put(AT(FastPath, stream, _on_fast_path), Py_NewRef(Py_False));
    if (!passed(ledger, now - value_of(GET(FastPath, stream, _entered_at))))
        return false;
    if (next >= PyLong_AsLongLong(end) && !put_float(AT(Ledger, ledger, calm_to), -INFINITY))
        return false;
    bool done = count_up(AT(FastPath, stream, _stretch_steps))
                && add(AT(FastPath, stream, _stretch_seconds), now - value_of(before))
                && put_float(AT(FastPath, stream, _previous_exit), now)
                && put_int(AT(FastPath, stream, seq), next)
                && add(AT(FastPath, stream, _stretch_own), perf_counter() - now);
    slot = only_slot(GET(FastPath, stream, inquest)); /* none any more, where a finalizer has detached us meanwhile */
    if (slot == NULL)
        return done;
    put(AT(Slot, slot, frozen), Py_NewRef(Py_False));
    put(AT(Slot, slot, kept), Py_NewRef(Py_None)); /* the last: with the batch code of the user's may run */
    return done;
}

PyDoc_STRVAR(leave_doc, "leave(stream)\n--\n\n`FastPath._try_exit`: the same step is over.");

static PyObject *leave(PyObject *Py_UNUSED(module), PyObject *stream)
{
    double now = perf_counter();
    if (!ready || !PyObject_TypeCheck(stream, FastPath) || GET(FastPath, stream, _on_fast_path) != Py_True)
        Py_RETURN_FALSE;
    PyObject *held[] = {GET(FastPath, stream, _ledger), GET(FastPath, stream, _loss), GET(FastPath, stream, seq)};
    for (size_t place = 0; place < COUNT(held); place++)
        Py_XINCREF(held[place]);
    bool done = left(stream, held[0], held[1], held[2], now);
    for (size_t place = 0; place < COUNT(held); place++)
        Py_XDECREF(held[place]);
    return answer(done);
}

PyDoc_STRVAR(learn_doc,
"learn(class)\n--\n\nFind out where an instance has its attributes. TypeError: not all that are needed are in `__slots__`.");

static PyObject *learn(PyObject *Py_UNUSED(module), PyObject *class)
{
    const char *name = PyType_Check(class) ? strrchr(((PyTypeObject *)class)->tp_name, '.') : NULL;
    name = name != NULL ? name + 1 : PyType_Check(class) ? ((PyTypeObject *)class)->tp_name : "";
    for (size_t place = 0; place < COUNT(attributes); place++) {
        if (strcmp(attributes[place].of, name) != 0)
            continue;
        PyObject *member = PyObject_GetAttrString(class, attributes[place].name);
        if (member == NULL || Py_TYPE(member) != &PyMemberDescr_Type
            || ((PyMemberDescrObject *)member)->d_member->type != T_OBJECT_EX) {
            Py_XDECREF(member);
            return PyErr_Format(PyExc_TypeError, "%s.%s is no slot", name, attributes[place].name);
        }
        *attributes[place].place = ((PyMemberDescrObject *)member)->d_member->offset;
        Py_DECREF(member);
    }
    for (size_t place = 0; place < COUNT(classes); place++)
        if (strcmp(classes[place].name, name) == 0) {
            Py_XDECREF(*classes[place].type);
            *classes[place].type = (PyTypeObject *)Py_NewRef(class);
        }
    return Py_NewRef(class);
}

PyDoc_STRVAR(know_doc,
"know(objects, fast_seconds, batch_bytes, queue_steps)\n--\n\n"
"Take what else is needed, and be used from now on. KeyError: an object is missing. RuntimeError: so is a class.");

static PyObject *know(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "O!dLn:know", &PyDict_Type, &given, &fast_seconds, &batch_bytes, &queue_steps))
        return NULL;
    for (size_t place = 0; place < COUNT(objects); place++) {
        PyObject *object = PyDict_GetItemString(given, objects[place].name);
        if (object == NULL)
            return PyErr_Format(PyExc_KeyError, "%s", objects[place].name);
        put(objects[place].object, Py_NewRef(object));
    }
    for (size_t place = 0; place < COUNT(classes); place++)
        if (*classes[place].type == NULL)
            return PyErr_Format(PyExc_RuntimeError, "%s was not learned", classes[place].name);
    ready = true;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc, "use(yes)\n--\n\nWhether the functions are to be used: else each answers False. For tests.");

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *yes)
{
    ready = yes == Py_True;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_FASTCALL, start_doc},
    {"stop", stop, METH_O, stop_doc},
    {"backward_ended", (PyCFunction)(void (*)(void))backward_ended, METH_FASTCALL, backward_ended_doc},
    {"enter", enter, METH_O, enter_doc},
    {"leave", leave, METH_O, leave_doc},
    {"learn", learn, METH_O, learn_doc},
    {"know", know, METH_VARARGS, know_doc},
    {"use", use, METH_O, use_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fast_path", "The fast path of an optimizer step.", -1, functions,
};

PyMODINIT_FUNC PyInit__fast_path(void)
{
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_item = PyUnicode_InternFromString("item");
    name_loss = PyUnicode_InternFromString("loss");
    name_nbytes = PyUnicode_InternFromString("nbytes");
    name_training = PyUnicode_InternFromString("training");
    name_version = PyUnicode_InternFromString("_version");
    if (!name_is_cpu || !name_item || !name_loss || !name_nbytes || !name_training || !name_version)
        return NULL;
    return PyModule_Create(&definition);
}
