/* What the fast path in C (`_fast_path.c`) knows of the objects that it reads and writes: classes, where their attributes
 * lie, names, and what it was given of torch's and Sentinel's.
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <structmember.h>
#include <time.h>

#include "_dlpack.h"

#if defined(Py_GIL_DISABLED) || !defined(__linux__)
#error "attributes are written under the GIL; the clock is that of Linux"
#endif

#define CLASSES(EACH)                                                                                                  \
    EACH(Ahead) EACH(BackwardPatch) EACH(Batches) EACH(Contents) EACH(FastPath) EACH(Feed) EACH(Feeds)                 \
    EACH(ForwardHook) EACH(Inquest) EACH(Layers) EACH(Ledger) EACH(ScaledLosses) EACH(Slot) EACH(StepHook)             \
    EACH(Stopwatch) EACH(Tally)

#define ATTRIBUTES(EACH)                                                                                               \
    EACH(Ahead, any)                                                                                                   \
    EACH(BackwardPatch, _original) EACH(BackwardPatch, ledger)                                                         \
    EACH(Batches, _ahead) EACH(Batches, _contents) EACH(Batches, _ledger) EACH(Batches, _outer)                        \
    EACH(Batches, _to_skip)                                                                                            \
    EACH(Contents, _again_at) EACH(Contents, _came_at) EACH(Contents, _count) EACH(Contents, _spacing)                 \
    EACH(FastPath, _append) EACH(FastPath, _clip) EACH(FastPath, _clipped) EACH(FastPath, _dead)                       \
    EACH(FastPath, _entered_at) EACH(FastPath, _inside) EACH(FastPath, _ledger) EACH(FastPath, _loss)                  \
    EACH(FastPath, _losses) EACH(FastPath, _note_at) EACH(FastPath, _on_fast_path) EACH(FastPath, _previous_exit)      \
    EACH(FastPath, _queued) EACH(FastPath, _stretch_end) EACH(FastPath, _stretch_own)                                  \
    EACH(FastPath, _stretch_seconds) EACH(FastPath, _stretch_steps) EACH(FastPath, guard) EACH(FastPath, inquest)      \
    EACH(FastPath, layers) EACH(FastPath, seq) EACH(FastPath, within)                                                  \
    EACH(Feed, batches) EACH(Feed, exhausted) EACH(Feed, source)                                                       \
    EACH(Feeds, last) EACH(Feeds, training)                                                                            \
    EACH(ForwardHook, stopwatch)                                                                                       \
    EACH(Inquest, _slots)                                                                                              \
    EACH(Layers, stream) EACH(Layers, table)                                                                           \
    EACH(Ledger, calm_to) EACH(Ledger, captured) EACH(Ledger, feeds) EACH(Ledger, progress)                            \
    EACH(Ledger, sees_forwards) EACH(Ledger, steps) EACH(Ledger, tally) EACH(Ledger, thread)                           \
    EACH(Ledger, when_next) EACH(Ledger, work)                                                                         \
    EACH(ScaledLosses, ever)                                                                                           \
    EACH(Slot, _args) EACH(Slot, _kept) EACH(Slot, _version) EACH(Slot, draws) EACH(Slot, frozen) EACH(Slot, known)    \
    EACH(Slot, returned_at) EACH(Slot, running)                                                                        \
    EACH(StepHook, stream)                                                                                             \
    EACH(Stopwatch, _begin) EACH(Stopwatch, _keeps) EACH(Stopwatch, _ledger) EACH(Stopwatch, _slot)                    \
    EACH(Tally, backward_seconds) EACH(Tally, backwards) EACH(Tally, batch) EACH(Tally, batches)                       \
    EACH(Tally, data_seconds) EACH(Tally, forward_seconds) EACH(Tally, forwards) EACH(Tally, loss)                     \
    EACH(Tally, optimizer_seconds) EACH(Tally, steps)

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
    EACH(Record) EACH(Tensor) EACH(any_autocast) EACH(any_mode) EACH(is_grad_enabled) EACH(present_pass) EACH(scaled)  \
    EACH(BACKWARD) EACH(BATCH) EACH(FORWARD) EACH(STEP)

#define OBJECT(NAME) static PyObject *NAME;
OBJECTS(OBJECT)

#define KNOWN_OBJECT(NAME) {#NAME, &NAME},
static const struct {
    const char *name;
    PyObject **object;
} objects[] = {OBJECTS(KNOWN_OBJECT)};

static double fast_seconds;
static long long batch_bytes, burst, burst_every;
static Py_ssize_t queue_steps;
static bool known; /* all of the above */
static bool ready; /* and the functions are to be used */
static const Exchange *exchange; /* NULL: this torch has none */

#define NAMES(EACH) EACH(_ended) EACH(_failed) EACH(_version) EACH(is_cpu) EACH(is_neg) EACH(loss) EACH(nbytes) EACH(training)
#define NAME(TEXT) static PyObject *name_##TEXT;
NAMES(NAME)
#define KNOWN_NAME(TEXT) {#TEXT, &name_##TEXT},
static const struct {
    const char *text;
    PyObject **object;
} names[] = {NAMES(KNOWN_NAME)};

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

static bool returns(PyObject *function, PyObject *expected)
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

/* Whether no backward pass is under way. */
static bool is_outermost(void)
{
    PyObject *task = PyObject_CallNoArgs(present_pass);
    bool outermost = task != NULL && is_int(task) && PyLong_AsLongLong(task) == -1;
    Py_XDECREF(task);
    return outermost;
}

/* The attribute, a number that is not negative; else -1. */
static long long number_of(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    long long number = value != NULL && is_int(value) ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

/* What failed here is tried again in Python. But for what ends the program, such as KeyboardInterrupt: then false. */
static bool failure_is_left(void)
{
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return false;
        PyErr_Clear();
    }
    return true;
}

/* True or False to Python. */
static PyObject *told(bool done)
{
    return done || failure_is_left() ? PyBool_FromLong(done) : NULL;
}

/* The ledger of a run; None where that is over. A new reference. */
static PyObject *ledger_of(PyObject *stopwatch)
{
    PyObject *reference = GET(Stopwatch, stopwatch, _ledger);
    return reference != NULL ? PyObject_CallNoArgs(reference) : NULL;
}
