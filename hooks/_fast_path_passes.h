/* Forward and backward passes on the fast path: `forward.py` and `backward_patch.py` in C. */
#pragma once

#include "_fast_path_objects.h"

/* ---- A forward pass begins: `Stopwatch.start`. ---- */

/* The only argument of the pass, where it is an ordinary tensor. */
static PyObject *batch_of(PyObject *args, PyObject *kwargs)
{
    if (!is(args, &PyTuple_Type) || PyTuple_GET_SIZE(args) != 1 || !is(kwargs, &PyDict_Type) || PyDict_GET_SIZE(kwargs))
        return NULL;
    PyObject *batch = PyTuple_GET_ITEM(args, 0);
    return (PyObject *)Py_TYPE(batch) == Tensor ? batch : NULL;
}

static bool keep(PyObject *slot, PyObject *args, PyObject *kwargs)
{
    PyObject *batch = batch_of(args, kwargs);
    if (batch == NULL)
        return false;
    long long nbytes = number_of(batch, name_nbytes);
    if (nbytes < 0 || nbytes > batch_bytes)
        return false;
    PyObject *version = PyObject_GetAttr(batch, name__version); /* none in inference mode */
    if (version == NULL)
        return false;
    PyObject *before = GET(Slot, slot, _kept), *args_before = GET(Slot, slot, _args);
    put(AT(Slot, slot, _version), version);
    GET(Slot, slot, _kept) = Py_NewRef(Py_None);
    GET(Slot, slot, _args) = Py_NewRef(args);
    Py_XDECREF(before); /* with the batch code of the user's may run, which may detach: that closes the slot */
    Py_XDECREF(args_before);
    return true;
}

static bool begin_pass(PyObject *stopwatch, PyObject *ledger, PyObject *called)
{
    if (!is(called, &PyTuple_Type) || PyTuple_GET_SIZE(called) != 3)
        return false;
    PyObject *slot = GET(Stopwatch, stopwatch, _slot);
    if (!is_mine(ledger) || GET(Ledger, ledger, when_next) != Py_None || !is(slot, Slot))
        return false;
    if (GET(Slot, slot, running) != Py_False || GET(Slot, slot, frozen) != Py_False || GET(Slot, slot, draws) != Py_False)
        return false;
    if (!returns(is_grad_enabled, Py_True) || !returns(any_autocast, Py_False))
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

static bool forward_begins(PyObject *hook, PyObject *called)
{
    PyObject *stopwatch = GET(ForwardHook, hook, stopwatch);
    if (!is(stopwatch, Stopwatch))
        return false;
    PyObject *ledger = ledger_of(stopwatch);
    bool done = begin_pass(stopwatch, ledger, called);
    Py_XDECREF(ledger);
    return done;
}

/* ---- It is over: `Stopwatch.stop`. ---- */

static bool end_pass(PyObject *stopwatch, PyObject *ledger, double now)
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

static bool forward_ends(PyObject *hook, PyObject *Py_UNUSED(called))
{
    double now = perf_counter();
    PyObject *stopwatch = GET(ForwardHook, hook, stopwatch);
    if (!is(stopwatch, Stopwatch))
        return false;
    PyObject *ledger = ledger_of(stopwatch);
    bool done = end_pass(stopwatch, ledger, now);
    Py_XDECREF(ledger);
    return done;
}

/* ---- A backward pass: `BackwardPatch.__call__`. ---- */

static bool is_single(const DLTensor *tensor)
{
    for (int32_t dimension = 0; dimension < tensor->ndim; dimension++)
        if (tensor->shape[dimension] != 1)
            return false;
    return true;
}

/* The loss, read from memory: torch's own way takes several times as long. NaN where it is not a float32 on the host. A
 * hook may have put anything into its place since the pass began there. */
static double loss_in_memory(PyObject *root)
{
    DLTensor tensor;
    if (exchange == NULL || !has_true(root, name_is_cpu))
        return Py_NAN;
    if (exchange->borrow(root, &tensor) != 0 || tensor.device.type != CPU || tensor.data == NULL || !is_single(&tensor))
        return Py_NAN;
    if (tensor.dtype.code != FLOAT || tensor.dtype.bits != 32 || tensor.dtype.lanes != 1)
        return Py_NAN;
    float loss = *(float *)((char *)tensor.data + tensor.byte_offset);
    PyObject *negated = PyObject_CallMethodNoArgs(root, name_is_neg); /* memory holds -loss: an imaginary part, say */
    Py_XDECREF(negated);
    return negated == Py_False ? loss : Py_NAN;
}

/* `BackwardPatch._ended`. */
static bool note_loss(PyObject *ledger, double loss, double seconds)
{
    PyObject *tally = GET(Ledger, ledger, tally);
    if (!is(tally, Tally) || !is_calm(ledger, loss) || !is_int(GET(Ledger, ledger, progress)))
        return false;
    PyObject *before = GET(Tally, tally, loss);
    if (!(before == Py_None || is_float(before)))
        return false;
    if (!is_float(GET(Tally, tally, backward_seconds)) || !is_int(GET(Tally, tally, backwards)))
        return false;
    return put_float(AT(Tally, tally, loss), before == Py_None ? loss : value_of(before) + loss)
           && add(AT(Tally, tally, backward_seconds), seconds)
           && count_up(AT(Tally, tally, backwards))
           && progressed(ledger, BACKWARD);
}

/* Whether it is the first pass of its step, of the one model that is watched, from a loss that nobody scaled. */
static bool is_usual_pass(PyObject *ledger, PyObject *args, PyObject *kwargs)
{
    PyObject *tally = GET(Ledger, ledger, tally), *calm_to = GET(Ledger, ledger, calm_to);
    if (!is(tally, Tally) || !is_float(calm_to) || value_of(calm_to) == -INFINITY)
        return false;
    PyObject *backwards = GET(Tally, tally, backwards), *forwards = GET(Tally, tally, forwards);
    if (!is_int(backwards) || PyLong_AsLongLong(backwards) != 0 || !is_int(forwards))
        return false;
    if (PyLong_AsLongLong(forwards) == 0 && GET(Ledger, ledger, sees_forwards) != Py_False)
        return false;
    Py_ssize_t given = PyTuple_GET_SIZE(args);
    if (given == 0 || (PyObject *)Py_TYPE(PyTuple_GET_ITEM(args, 0)) != Tensor || GET(ScaledLosses, scaled, ever) != Py_False)
        return false;
    if (given > 1 ? PyTuple_GET_ITEM(args, 1) != Py_None : kwargs != NULL)
        return false;
    return is_outermost() && returns(any_mode, Py_False);
}

/* It raised: tell so, and let it. */
static void tell_failure(PyObject *patch)
{
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(PyObject_CallMethodOneArg(patch, name__failed, error));
    if (!PyErr_Occurred()) {
        PyErr_Restore(type, error, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

static PyObject *pass(PyObject *patch, PyObject *original, PyObject *ledger, PyObject *args, PyObject *kwargs)
{
    double begin = perf_counter();
    PyObject *result = PyObject_Call(original, args, kwargs);
    if (result == NULL) {
        tell_failure(patch);
        return NULL;
    }
    double seconds = perf_counter() - begin;
    PyObject *root = PyTuple_GET_ITEM(args, 0);
    bool plain = GET(ScaledLosses, scaled, ever) == Py_False; /* still */
    if (plain && note_loss(ledger, loss_in_memory(root), seconds))
        return result;
    PyObject *took = failure_is_left() ? PyFloat_FromDouble(seconds) : NULL;
    PyObject *told = took != NULL ? PyObject_CallMethodObjArgs(patch, name__ended, root, took, ledger, NULL) : NULL;
    if (told == NULL)
        Py_CLEAR(result);
    Py_XDECREF(took);
    Py_XDECREF(told);
    return result;
}

static ternaryfunc backward_otherwise;

static PyObject *backward(PyObject *patch, PyObject *args, PyObject *kwargs)
{
    PyObject *ledger = GET(BackwardPatch, patch, ledger), *original = GET(BackwardPatch, patch, _original);
    if (!ready || !is(ledger, Ledger) || original == NULL || !is_usual_pass(ledger, args, kwargs))
        return failure_is_left() ? backward_otherwise(patch, args, kwargs) : NULL;
    Py_INCREF(ledger);
    Py_INCREF(original);
    PyObject *result = pass(patch, original, ledger, args, kwargs);
    Py_DECREF(original);
    Py_DECREF(ledger);
    return result;
}
