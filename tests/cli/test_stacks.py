"""The stacks of a case as `sentinel incidents show` prints them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sentinel.cli.stacks import FRAMES, RANKS, format_stacks
from sentinel.diagnose.standstill.stacks import training

LIBRARY = "/env/lib/python3.11/site-packages/torch/"
OWN = ("/job/train.py", 41, "loss")


def dump(*threads: tuple[int, str, Sequence[tuple[str, int, str]]]) -> str:
    return "\n\n".join(
        f"Thread 0x{ident:016x} [{name}] (most recent call first):\n"
        + "\n".join(f'  File "{file}", line {line} in {function}' for file, line, function in frames)
        for ident, name, frames in threads
    )


def library(count: int) -> list[tuple[str, int, str]]:
    return [(f"{LIBRARY}nn.py", number, f"inner{number}") for number in range(count)]


def test_the_training_thread_comes_first_and_the_users_line_is_marked() -> None:
    """Threads of Sentinel are left out, and of others only where they are, and for whom, is said."""
    text = dump(
        (1, "MainThread", [*library(1), OWN, ("/job/train.py", 90, "main")]),
        (2, "pin memory", [(f"{LIBRARY}queue.py", 3, "get"), ("/job/data.py", 7, "load")]),
        (3, "", [("/job/log.py", 5, "flush")]),
    )
    assert format_stacks({"1": text}).splitlines() == [
        "",
        "",
        "  stack of rank 1, the innermost call first",
        f"    {LIBRARY}nn.py:0  inner0",
        "  > /job/train.py:41  loss",
        "    /job/train.py:90  main",
        "",
        "  its other threads",
        f"    pin memory: {LIBRARY}queue.py:3  get",
        "      for /job/data.py:7  load",
        "    /job/log.py:5  flush",
    ]


@pytest.mark.parametrize("depth", [FRAMES, 45])
def test_the_users_line_is_found_below_a_frameworks_many(depth: int) -> None:
    text = dump((1, "MainThread", [*library(depth), OWN]))
    thread = training(text, 1)
    assert thread is not None
    assert str(thread.users) == "/job/train.py:41 in loss"
    lines = format_stacks({"0": text}).splitlines()
    assert lines[-2:] == [f"    {depth + 1 - FRAMES} more", "  > /job/train.py:41  loss"]
    assert len(lines) == 3 + FRAMES + 2


def test_many_ranks_are_counted() -> None:
    stacks = {str(rank): dump((1, "MainThread", [OWN])) for rank in range(RANKS + 3)}
    assert format_stacks(stacks).splitlines()[-1] == "  3 more ranks: see --json"
    assert format_stacks({}) == ""
