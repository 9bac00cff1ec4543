"""Searching the objects of the process disturbs nothing that other threads do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

from sentinel.hooks.torch_interop.discovery import list_instances

TUPLES = 20


def test_a_tuple_that_another_thread_fills_is_left_alone() -> None:
    """`tuple(generator)` ends with a SystemError where anything else refers to its tuple."""
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

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    thread = threading.Thread(target=make)
    thread.start()
    while thread.is_alive():
        assert optimizer in list_instances(torch.optim.Optimizer)
    thread.join()
    assert made == [(0, 1, 2)] * TUPLES
    assert objects
