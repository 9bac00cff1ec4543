/* Batches that a DataLoader's iterator gives, on the fast path: `batches.py` in C, where the batch is not looked at. */
#pragma once

#include "_fast_path_objects.h"

/* ---- The loop fetches a batch: `Listening.to_skip`. ---- */

PyDoc_STRVAR(fetch_begins_doc,
"fetch_begins(batches)\n--\n\n`Listening.to_skip`: whether nobody is to be told of it, and no batch is to be thrown away.");

static PyObject *fetch_begins(PyObject *Py_UNUSED(module), PyObject *batches)
{
    if (!ready || !is(batches, Batches))
        Py_RETURN_FALSE;
    PyObject *ledger = GET(Batches, batches, _ledger), *to_skip = GET(Batches, batches, _to_skip);
    bool none = is_int(to_skip) && PyLong_AsLongLong(to_skip) == 0;
    return told(none && is(ledger, Ledger) && GET(Ledger, ledger, when_next) == Py_None);
}

/* ---- It has one: `Batches.batch_fetched`. ---- */

/* Whether it is as the batches before it: of the iterator that gave the last one, and not fetched ahead of the loop. */
static bool is_next_batch(PyObject *batches, PyObject *feed, PyObject *iterator)
{
    PyObject *outer = GET(Batches, batches, _outer), *ahead = GET(Batches, batches, _ahead);
    if (!is_int(outer) || PyLong_AsLongLong(outer) != 0 || !is(ahead, Ahead) || GET(Ahead, ahead, any) != Py_False)
        return false;
    if (!is(feed, Feed) || GET(Feed, feed, exhausted) != Py_False || !is_int(GET(Feed, feed, batches)))
        return false;
    if (GET(Feed, feed, source) == NULL)
        return false;
    PyObject *source = PyObject_CallNoArgs(GET(Feed, feed, source));
    Py_XDECREF(source); /* the caller holds the iterator */
    return source == iterator;
}

/* Whether its time to be looked at has not come: `Contents.of`. */
static bool is_passed_over(PyObject *contents, double now)
{
    if (!is(contents, Contents))
        return false;
    PyObject *again_at = GET(Contents, contents, _again_at), *count = GET(Contents, contents, _count);
    PyObject *came_at = GET(Contents, contents, _came_at), *spacing = GET(Contents, contents, _spacing);
    return is_float(came_at) && is_float(spacing) && now - value_of(came_at) < value_of(spacing)
           && is_float(again_at) && now < value_of(again_at) && is_int(count)
           && PyLong_AsLongLong(count) % burst_every >= burst;
}

static bool fetched(PyObject *batches, PyObject *iterator, double begin, double now)
{
    PyObject *ledger = GET(Batches, batches, _ledger), *contents = GET(Batches, batches, _contents);
    if (!is_mine(ledger) || !is(GET(Ledger, ledger, feeds), Feeds))
        return false;
    PyObject *feed = GET(Feeds, GET(Ledger, ledger, feeds), last), *tally = GET(Ledger, ledger, tally);
    if (!is_next_batch(batches, feed, iterator) || !is_passed_over(contents, now))
        return false;
    if (!is_int(GET(Tally, tally, batches)) || !is_float(GET(Tally, tally, data_seconds)))
        return false;
    return count_up(AT(Contents, contents, _count))
           && put_float(AT(Contents, contents, _came_at), now)
           && count_up(AT(Tally, tally, batches))
           && add(AT(Tally, tally, data_seconds), now - begin)
           && count_up(AT(Feed, feed, batches))
           && progressed(ledger, BATCH);
}

PyDoc_STRVAR(fetch_ended_doc,
"fetch_ended(batches, iterator, begin)\n--\n\n`Batches.batch_fetched`: whether it did all that there was to be done.");

static PyObject *fetch_ended(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    double now = perf_counter();
    if (!ready || count != 3 || !is(arguments[0], Batches) || !is_float(arguments[2]))
        Py_RETURN_FALSE;
    return told(fetched(arguments[0], arguments[1], value_of(arguments[2]), now));
}
