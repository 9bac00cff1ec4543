/* The fast path of an optimizer step, in C: what `forward.py`, `backward_patch.py`, `batches.py`, `stream.py` and
 * `fast_path.py` do when nothing unusual happens, on the same objects.
 *
 * In a loop of 3 ms what costs is not the work but the way to it: bytecode, dictionaries and frames that training has
 * driven out of the processor's caches (see docs/performance.md). So what PyTorch calls at every step is called here
 * first (`call_first`). Each function here either does all that there is to be done; or, wherever something unusual
 * happens, does nothing, and what the class has in Python is called: its `__call__`, or the method that is named. What is written here is written
 * there, too, for machines without a C compiler, and tests run with both.
 *
 * Attributes lie where `__slots__` has them, and `learn` asks their class where that is.
 */
#define PY_SSIZE_T_CLEAN
#include "_fast_path_fetches.h"
#include "_fast_path_objects.h"
#include "_fast_path_passes.h"
#include "_fast_path_steps.h"

/* ---- The ends of a step, for a stream that has more to do there. ---- */

PyDoc_STRVAR(enter_doc, "enter(stream)\n--\n\n`FastPath._try_enter`: whether it was done.");

static PyObject *enter(PyObject *Py_UNUSED(module), PyObject *stream)
{
    return told(ready && PyObject_TypeCheck(stream, FastPath) && try_enter(stream, perf_counter()));
}

PyDoc_STRVAR(leave_doc, "leave(stream)\n--\n\n`FastPath._try_exit`: whether it was done.");

static PyObject *leave(PyObject *Py_UNUSED(module), PyObject *stream)
{
    return told(ready && PyObject_TypeCheck(stream, FastPath) && try_exit(stream, perf_counter()));
}

/* ---- What is called first. ---- */

#define HOOKS(EACH) EACH(forward_begins) EACH(forward_ends) EACH(step_begins) EACH(step_ends)

#define CALL(NAME)                                                                                                     \
    static ternaryfunc NAME##_otherwise;                                                                               \
    static PyObject *NAME##_call(PyObject *hook, PyObject *called, PyObject *named)                                    \
    {                                                                                                                  \
        if (ready && NAME(hook, called))                                                                               \
            Py_RETURN_NONE;                                                                                            \
        return failure_is_left() ? NAME##_otherwise(hook, called, named) : NULL;                                       \
    }
HOOKS(CALL)

#define KNOWN_CALL(NAME) {#NAME, NAME##_call, &NAME##_otherwise},
static const struct {
    const char *name;
    ternaryfunc call, *otherwise;
} calls[] = {HOOKS(KNOWN_CALL) {"backward", backward, &backward_otherwise}};

PyDoc_STRVAR(call_first_doc,
"call_first(class, name)\n--\n\n"
"Have the function of this name called when an instance is, and the `__call__` of the class where something is unusual.");

static PyObject *call_first(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyTypeObject *class;
    const char *name;
    if (!PyArg_ParseTuple(arguments, "O!s:call_first", &PyType_Type, &class, &name))
        return NULL;
    for (size_t place = 0; place < COUNT(calls); place++)
        if (strcmp(calls[place].name, name) == 0 && class->tp_call != calls[place].call) {
            *calls[place].otherwise = class->tp_call;
            class->tp_call = calls[place].call;
            return Py_NewRef((PyObject *)class);
        }
    return PyErr_Format(PyExc_ValueError, "there is no function %s", name);
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
"know(objects, fast_seconds, batch_bytes, queue_steps, burst, burst_every)\n--\n\n"
"Take what else is needed, and be used from now on. KeyError: an object is missing. RuntimeError: so is a class.");

static PyObject *know(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "O!dLnLL:know", &PyDict_Type, &given, &fast_seconds, &batch_bytes, &queue_steps, &burst,
                          &burst_every))
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
    PyObject *capsule = PyObject_GetAttrString(Tensor, "__dlpack_c_exchange_api__");
    exchange = capsule != NULL ? exchange_of(capsule) : NULL; /* since torch 2.10; the struct lives for ever */
    Py_XDECREF(capsule);
    PyErr_Clear();
    known = ready = true;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc, "use(yes)\n--\n\nWhether the functions are to be used, once all is known: else all is done in Python. For tests.");

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *yes)
{
    ready = known && yes == Py_True;
    Py_RETURN_NONE;
}

enum { LAYOUT = 3 }; /* as in fast_path_native.py */

static PyMethodDef functions[] = {
    {"call_first", call_first, METH_VARARGS, call_first_doc},
    {"enter", enter, METH_O, enter_doc},
    {"fetch_begins", fetch_begins, METH_O, fetch_begins_doc},
    {"fetch_ended", (PyCFunction)(void (*)(void))fetch_ended, METH_FASTCALL, fetch_ended_doc},
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
    for (size_t place = 0; place < COUNT(names); place++) {
        *names[place].object = PyUnicode_InternFromString(names[place].text);
        if (*names[place].object == NULL)
            return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "LAYOUT", LAYOUT) != 0)
        Py_CLEAR(module);
    return module;
}
