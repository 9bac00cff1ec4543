/* Statistics of tensors in host memory, in one read of each.
 *
 * A tensor is found through DLPack (`_dlpack.h`). It is measured if it is of float32, bfloat16, float16 or float64 and
 * its elements fill their memory without gaps, in whatever order. Other tensors are left to the caller.
 *
 * The loops are written for the compiler's vectoriser: signs, magnitudes and order are derived from integers, and
 * squares are summed in double, which neither overflows nor loses what float32 holds. For NaN and infinity a block is
 * read a second time, from the first-level cache.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "_dlpack.h"

/* The sums over a tensor, or a block. Magnitudes and order are bit patterns of float32, or of float64. */
typedef struct {
    double squares;
    int64_t low, high;  /* smallest and largest element, as integers of the same order */
    uint64_t small;     /* smallest magnitude over 0, minus 1; all ones if there is none */
    int64_t zeros, infinite, nan;
} Sums;

enum {
    BLOCK = 512,  /* elements: 1 to 4 KiB */
    AHEAD = 4096, /* bytes to prefetch while a block is computed. With much computation per line, a processor by itself
                     prefetches too few lines: 6 GB/s of memory instead of 13 on one of Intel's */
    LINE = 64,
};

#define INFINITY32 0x7f800000
#define INFINITY64 0x7ff0000000000000

static inline uint32_t bits_float32(uint32_t bits) { return bits; }

static inline uint32_t bits_bfloat16(uint16_t bits) { return (uint32_t)bits << 16; }

static inline uint32_t bits_float16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    uint32_t normal = (magnitude << 13) + (112u << 23); /* 112: the difference of the exponents' biases */
    float counted = (float)(int32_t)magnitude * 0x1p-24f;
    uint32_t subnormal;
    memcpy(&subnormal, &counted, 4);
    uint32_t finite = magnitude < 0x400 ? subnormal : normal;
    return sign | (magnitude < 0x7c00 ? finite : finite + (112u << 23));
}

static inline uint64_t bits_float64(uint64_t bits) { return bits; }

/* Scans one block. TYPE: of an element in memory; WORD, SIGNED: its bits as integers; REAL: WORD's bits as a number. */
#define SCAN(NAME, TARGET, TYPE, WORD, SIGNED, REAL, BITS, TOP)                                                        \
    TARGET static void NAME(const void *data, int64_t count, Sums *into)                                               \
    {                                                                                                                  \
        const TYPE *elements = data;                                                                                   \
        double squares = 0.0;                                                                                          \
        SIGNED low = into->low, high = into->high;                                                                     \
        WORD small = (WORD)into->small;                                                                                \
        int32_t zeros = 0, infinite = 0, nan = 0;                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            WORD bits = BITS(elements[i]), magnitude = bits & ((WORD)-1 >> 1);                                         \
            REAL value;                                                                                                \
            memcpy(&value, &bits, sizeof value);                                                                       \
            squares += (double)value * (double)value;                                                                  \
            SIGNED order = (SIGNED)bits ^ (SIGNED)((WORD)((SIGNED)bits >> (sizeof(WORD) * 8 - 1)) >> 1);               \
            low = order < low ? order : low;                                                                           \
            high = order > high ? order : high;                                                                        \
            small = magnitude - 1 < small ? magnitude - 1 : small;                                                     \
            zeros += magnitude == 0;                                                                                   \
        }                                                                                                              \
        if (high >= TOP || low <= ~(SIGNED)TOP) {                                                                      \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                WORD magnitude = BITS(elements[i]) & ((WORD)-1 >> 1);                                                  \
                infinite += magnitude == TOP;                                                                          \
                nan += magnitude > TOP;                                                                                \
            }                                                                                                          \
        }                                                                                                              \
        into->squares += squares;                                                                                      \
        into->low = low, into->high = high, into->small = small == (WORD)-1 ? UINT64_MAX : small;                      \
        into->zeros += zeros, into->infinite += infinite, into->nan += nan;                                            \
    }

#define SCANS(SUFFIX, TARGET)                                                                                          \
    SCAN(float32_##SUFFIX, TARGET, uint32_t, uint32_t, int32_t, float, bits_float32, INFINITY32)                       \
    SCAN(bfloat16_##SUFFIX, TARGET, uint16_t, uint32_t, int32_t, float, bits_bfloat16, INFINITY32)                     \
    SCAN(float16_##SUFFIX, TARGET, uint16_t, uint32_t, int32_t, float, bits_float16, INFINITY32)                       \
    SCAN(float64_##SUFFIX, TARGET, uint64_t, uint64_t, int64_t, double, bits_float64, INFINITY64)

typedef void (*Scan)(const void *, int64_t, Sums *);

enum { FLOAT32, BFLOAT16, FLOAT16, FLOAT64 };

SCANS(plain, )
#if defined(__x86_64__) && defined(__GNUC__)
#define WIDE_SETS
SCANS(avx2, __attribute__((target("avx2,fma"))))
SCANS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))))
#endif

/* The scans for each instruction set, the widest last. */
static struct {
    const char *name;
    bool there;
    Scan scans[4];
} sets[] = {
    {"plain", true, {float32_plain, bfloat16_plain, float16_plain, float64_plain}},
#ifdef WIDE_SETS
    {"avx2", false, {float32_avx2, bfloat16_avx2, float16_avx2, float64_avx2}},
    {"avx512", false, {float32_avx512, bfloat16_avx512, float16_avx512, float64_avx512}},
#endif
};
static const Scan *scans = sets[0].scans;

/* A tensor to read, and its column in the output. */
typedef struct {
    const char *data;
    int64_t count, column;
    int kind;
} Span;

static bool dense(const DLTensor *tensor, int64_t *count)
{
    *count = 1;
    for (int dimension = 0; dimension < tensor->ndim; dimension++)
        *count *= tensor->shape[dimension];
    int64_t expected = 1;
    while (expected < *count) { /* find the dimension whose stride is the elements of the faster ones */
        int dimension = 0;
        while (dimension < tensor->ndim
               && (tensor->strides[dimension] != expected || tensor->shape[dimension] == 1))
            dimension++;
        if (dimension == tensor->ndim)
            return false;
        expected *= tensor->shape[dimension];
    }
    return true;
}

static bool readable(const DLTensor *tensor, Span *span)
{
    if (tensor->device.type != CPU || tensor->data == NULL || tensor->dtype.lanes != 1)
        return false; /* NULL: a wrapper around other tensors */
    if (!dense(tensor, &span->count) || span->count == 0)
        return false;
    span->data = (const char *)tensor->data + tensor->byte_offset;
    switch (tensor->dtype.code << 8 | tensor->dtype.bits) {
    case FLOAT << 8 | 32: span->kind = FLOAT32; return true;
    case FLOAT << 8 | 16: span->kind = FLOAT16; return true;
    case FLOAT << 8 | 64: span->kind = FLOAT64; return true;
    case BFLOAT << 8 | 16: span->kind = BFLOAT16; return true;
    default: return false;
    }
}

static double real(uint64_t bits, int kind)
{
    double wide;
    float narrow;
    uint32_t half = (uint32_t)bits;
    if (kind == FLOAT64)
        return memcpy(&wide, &bits, sizeof wide), wide;
    return memcpy(&narrow, &half, sizeof narrow), (double)narrow;
}

static double ordered(int64_t order, int kind)
{
    if (kind == FLOAT64)
        return real((uint64_t)(order ^ (int64_t)((uint64_t)(order >> 63) >> 1)), kind);
    return real((uint32_t)((int32_t)order ^ (int32_t)((uint32_t)((int32_t)order >> 31) >> 1)), kind);
}

/* Rows of `out`: norm, minimum, maximum, non-finite elements, smallest magnitude over 0, zeros. */
enum { ROWS = 6 };

/* Prefetches so many bytes, but none beyond `end`. */
static void ask_for(const char *from, int64_t bytes, const char *end)
{
#if defined(__GNUC__)
    for (int64_t line = 0; line < bytes && from + line < end; line += LINE)
        __builtin_prefetch(from + line, 0, 2);
#else
    (void)from, (void)bytes, (void)end;
#endif
}

static double read_once(const Span *span, double scale, float *out, int64_t columns)
{
    static const int64_t size[] = {4, 2, 2, 8};
    Sums sums = {.low = span->kind == FLOAT64 ? INT64_MAX : INT32_MAX, .small = UINT64_MAX};
    sums.high = span->kind == FLOAT64 ? INT64_MIN : INT32_MIN;
    const char *end = span->data + span->count * size[span->kind];
    for (int64_t begin = 0; begin < span->count; begin += BLOCK) {
        const char *block = span->data + begin * size[span->kind];
        int64_t rest = span->count - begin;
        ask_for(block + AHEAD, BLOCK * size[span->kind], end);
        scans[span->kind](block, rest < BLOCK ? rest : BLOCK, &sums);
    }
    uint64_t infinity = span->kind == FLOAT64 ? INFINITY64 : INFINITY32;
    bool none = sums.small >= infinity - 1;
    out[0 * columns] = (float)(sqrt(sums.squares) / scale);
    out[1 * columns] = sums.nan ? (float)Py_NAN : (float)(ordered(sums.low, span->kind) / scale);
    out[2 * columns] = sums.nan ? (float)Py_NAN : (float)(ordered(sums.high, span->kind) / scale);
    out[3 * columns] = (float)(sums.nan + sums.infinite);
    out[4 * columns] = none ? 0.0f : (float)(real(sums.small + 1, span->kind) / scale);
    out[5 * columns] = (float)sums.zeros;
    return sums.squares;
}

PyDoc_STRVAR(measure_doc,
"measure(exchange, tensors, scale, out, whole)\n--\n\n"
"Fill `out`, float32 of (6, tensors), with the statistics of `tensors` over `scale`. Return the L2 norm over all that\n"
"were read, and the places of those that were not; with `whole`, read nothing and return None where there are such.");

static PyObject *measure(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    PyObject *capsule, *tensors, *out, *answer = NULL;
    double scale, squares = 0.0;
    int whole;
    if (!PyArg_ParseTuple(arguments, "OO!dO!p:measure", &capsule, &PyList_Type, &tensors, &scale, &PyByteArray_Type, &out,
                          &whole))
        return NULL;
    Py_ssize_t columns = PyList_GET_SIZE(tensors), spans = 0;
    if (PyByteArray_GET_SIZE(out) != columns * ROWS * (Py_ssize_t)sizeof(float))
        return PyErr_Format(PyExc_ValueError, "out must have %zd bytes", columns * ROWS * (Py_ssize_t)sizeof(float));
    const Exchange *exchange = exchange_of(capsule);
    Span *read = exchange == NULL ? NULL : PyMem_New(Span, columns);
    PyObject *left = read == NULL ? NULL : PyList_New(0);
    if (left == NULL)
        goto done;
    for (Py_ssize_t column = 0; column < columns; column++) {
        DLTensor tensor;
        PyObject *object = PyList_GET_ITEM(tensors, column);
        if (object != Py_None && exchange->borrow(object, &tensor) == 0 && readable(&tensor, &read[spans])) {
            read[spans++].column = column;
            continue;
        }
        PyErr_Clear(); /* a tensor without memory of its own: sparse, or meta */
        if (whole) {
            answer = Py_NewRef(Py_None);
            goto done;
        }
        PyObject *place = PyLong_FromSsize_t(column);
        int failed = place == NULL || PyList_Append(left, place) != 0;
        Py_XDECREF(place);
        if (failed)
            goto done;
    }
    float *table = (float *)PyByteArray_AS_STRING(out);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t span = 0; span < spans; span++)
        squares += read_once(&read[span], scale, table + read[span].column, columns);
    Py_END_ALLOW_THREADS
    answer = Py_BuildValue("dO", sqrt(squares) / scale, left);

done:
    PyMem_Free(read);
    Py_XDECREF(left);
    return answer != NULL || PyErr_Occurred() ? answer : PyErr_NoMemory();
}

enum { SETS = sizeof sets / sizeof sets[0] };

PyDoc_STRVAR(use_doc,
"use(instructions)\n--\n\n"
"Read with the set of instructions of this name from now on. Return the names of those that this processor has, the\n"
"widest last, which is in use at first. ValueError: it has none of that name.");

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *name)
{
    const char *wanted = PyUnicode_AsUTF8(name);
    PyObject *names = wanted == NULL ? NULL : PyList_New(0);
    const Scan *found = NULL;
    for (int set = 0; names != NULL && set < SETS; set++) {
        if (!sets[set].there)
            continue;
        PyObject *known = PyUnicode_FromString(sets[set].name);
        if (known == NULL || PyList_Append(names, known) != 0)
            Py_CLEAR(names);
        Py_XDECREF(known);
        if (strcmp(sets[set].name, wanted) == 0)
            found = sets[set].scans;
    }
    if (names != NULL && found == NULL) {
        PyErr_Format(PyExc_ValueError, "this processor has no instructions %R", name);
        Py_CLEAR(names);
    }
    scans = found != NULL ? found : scans;
    return names;
}

static PyMethodDef functions[] = {
    {"measure", measure, METH_VARARGS, measure_doc},
    {"use", use, METH_O, use_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_onepass", "Statistics of tensors in host memory, in one read of each.", -1, functions,
};

#ifndef SOURCE
#define SOURCE "" // built without setup.py, which sets the checksum of the sources
#endif

PyMODINIT_FUNC PyInit__onepass(void)
{
#ifdef WIDE_SETS
    sets[1].there = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    sets[2].there = sets[1].there && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                    && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    for (int set = 0; set < SETS; set++)
        scans = sets[set].there ? sets[set].scans : scans;
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && PyModule_AddStringConstant(module, "SOURCE", SOURCE) < 0)
        Py_CLEAR(module);
    return module;
}
