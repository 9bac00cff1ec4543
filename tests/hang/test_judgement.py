"""What a heartbeat page means, and what is taken for one."""

from __future__ import annotations

import os

import pytest

from sentinel.daemon.pulses import (
    BUSY_CEILING_SECONDS,
    CEILING_SECONDS,
    FLOOR_SECONDS,
    LONG_SECONDS,
    Pulse,
    judged,
)
from sentinel.diagnose.stacks import threads
from sentinel.heartbeat import PAGE, STACKS, Heartbeat, Kind, Place, Work, packed, unpacked

NOW = 1000.0
TRAINING = Heartbeat(
    beat=NOW, progress=400, progressed=NOW - 90, steps=100, work=Work.STEP, place=Place.LOOP, paused=0, longest=0.5,
    cpu=1.0, thread=1, ident=2, changes=0,
)  # fmt: skip


def test_the_page_is_read_as_it_was_written() -> None:
    assert unpacked(packed(TRAINING)) == TRAINING
    torn = packed(TRAINING)[:-8] + packed(TRAINING._replace(beat=NOW + 1))[-8:]
    assert unpacked(torn) is None
    assert unpacked(b"") is None
    assert unpacked(b"\7" + packed(TRAINING)[1:]) is None  # another version's


@pytest.mark.parametrize(
    ("change", "busy", "kind", "limit"),
    [
        ({}, False, Kind.BLOCKED, FLOOR_SECONDS),
        ({"longest": 20.0}, False, Kind.BLOCKED, 200.0),
        ({"longest": 300.0}, False, Kind.BLOCKED, CEILING_SECONDS),
        ({}, True, Kind.BUSY, 10 * FLOOR_SECONDS),
        ({"longest": 20.0}, True, Kind.BUSY, BUSY_CEILING_SECONDS),
        ({"changes": 1}, True, Kind.MOVING, LONG_SECONDS),
        ({"place": Place.LONG}, False, Kind.LONG, LONG_SECONDS),
        ({"steps": 0, "place": Place.UNKNOWN}, False, Kind.STARTING, LONG_SECONDS),
        ({"beat": NOW - 6, "place": Place.UNKNOWN}, False, Kind.HOLDING, FLOOR_SECONDS),
        ({"beat": NOW - 6, "place": Place.UNKNOWN}, True, Kind.HOLDING, 10 * FLOOR_SECONDS),
    ],
)
def test_what_a_rank_does_sets_its_limit(change: dict[str, float], busy: bool, kind: Kind, limit: float) -> None:
    stall = judged(TRAINING._replace(**change), NOW, busy=busy, stopped=False)
    assert (stall.kind, stall.limit, stall.seconds) == (kind, limit, 90.0)


@pytest.mark.parametrize(
    ("change", "stopped"),
    [
        ({"place": Place.LEFT}, False),
        ({"place": Place.DEBUGGER}, False),
        ({"paused": 1}, False),
        ({"progress": 0, "steps": 0}, False),
        ({}, True),
    ],
)
def test_where_no_progress_is_expected_none_is_missed(change: dict[str, float], stopped: bool) -> None:
    stall = judged(TRAINING._replace(**change), NOW, busy=False, stopped=stopped)
    assert (stall.kind, stall.seconds, stall.quiet) == (Kind.NONE, 0.0, 90.0)


def test_only_files_in_memory_of_our_names_are_taken() -> None:
    reader, writer = os.pipe()
    ours, theirs = os.memfd_create(PAGE), os.memfd_create("other")
    given = [reader, theirs, os.open("/dev/zero", os.O_RDONLY), ours, os.memfd_create(STACKS)]
    pulse = Pulse(given, os.getpid())
    os.pwrite(ours, packed(TRAINING), 0)
    assert pulse.look(NOW + 1) is not None
    for descriptor in given[:3]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    os.ftruncate(ours, 0)  # a peer that takes its page away
    assert pulse.look(NOW + 2) is not None
    pulse.close()
    os.close(writer)


def test_a_rank_without_a_page_is_not_judged() -> None:
    assert Pulse([], os.getpid()).look(NOW) is None


def test_dumps_are_read_the_last_one_of_several() -> None:
    one = "Timeout (0:00:30)!\nThread 0x0000000000000002 (most recent call first):\n"
    two = (
        "Timeout (0:00:30)!\nThread 0x0000000000000001 [sender] (most recent call first):\n"
        '  File "/usr/lib/python3.11/selectors.py", line 468 in select\n\n'
        "Current thread 0x0000000000000002 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
        '  File "/home/me/train.py", line 12 in main\n  File "cut'
    )
    found = threads(one + "\n" + two)
    assert [thread.ident for thread in found] == [1, 2]
    assert found[0].name == "sender"
    assert str(found[1].users) == "/home/me/train.py:12 in main"
    assert found[0].users is None
