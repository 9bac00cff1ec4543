/* The needed parts of DLPack 1.x: https://github.com/dmlc/dlpack/blob/v1.3/include/dlpack/dlpack.h
 *
 * A tensor is found through the C exchange functions (torch has them since 2.10), a stable interface: no part of torch
 * is compiled in, and no address passes through Python.
 */
#pragma once

#include <Python.h>
#include <stdint.h>

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct Exchange {
    struct { uint32_t major, minor; } version;
    const struct Exchange *older;
    void *unused[3];
    int (*borrow)(void *object, DLTensor *out);
} Exchange;

enum { CPU = 1, FLOAT = 2, BFLOAT = 4 };

static const Exchange *exchange_of(PyObject *capsule)
{
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (exchange != NULL && exchange->version.major > 1)
        exchange = exchange->older;
    if (exchange != NULL && exchange->version.major == 1 && exchange->borrow != NULL)
        return exchange;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_NotImplementedError, "no DLPack 1.x exchange functions that borrow a tensor");
    return NULL;
}
