"""Searching the objects of the process disturbs nothing that other threads do meanwhile."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from sentinel.hooks.evidence.object_growth import census
from sentinel.hooks.torch_interop.discovery import list_instances

TUPLES = 6


@pytest.fixture
def usual_collection() -> Iterator[None]:
    """Undo what the test changes of the garbage collector."""
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


def fill_tuples_while(search: Callable[[], object]) -> list[tuple[int, ...]]:
    """Return tuples that another thread fills while this one searches over and over."""
    searched = threading.Event()
    made: list[tuple[int, ...]] = []
    objects = [[number] for number in range(100_000)]

    def count() -> Iterator[int]:
        for number in range(3):
            searched.wait(0.001)
            yield number

    def make() -> None:
        while len(made) < TUPLES:
            made.append(tuple(count()))

    thread = threading.Thread(target=make)
    thread.start()
    while thread.is_alive():
        search()
    thread.join()
    assert objects
    return made


def test_a_tuple_that_another_thread_fills_is_left_alone() -> None:
    """`tuple(generator)` ends with a SystemError where anything else refers to its tuple."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    made = fill_tuples_while(lambda: list_instances(torch.optim.Optimizer))
    assert made == [(0, 1, 2)] * TUPLES
    assert optimizer in list_instances(torch.optim.Optimizer)


@pytest.mark.parametrize("turn_off", [gc.disable, partial(gc.set_threshold, 0)], ids=["disabled", "threshold of 0"])
def test_a_census_without_garbage_collection(turn_off: Callable[[], None], usual_collection: None) -> None:
    """All objects are young then, and a list of them would hold the tuples for long."""
    turn_off()
    assert fill_tuples_while(lambda: next(census(lambda: 0, list))) == [(0, 1, 2)] * TUPLES
