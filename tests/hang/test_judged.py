"""How the daemon judges a heartbeat page, without a process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import sentinel
from sentinel.daemon.ranks.heartbeats import LONG_SECONDS, RankHeartbeat, judge_heartbeat
from sentinel.diagnose.standstill.stacks import threads
from sentinel.wire.heartbeat_page import (
    BLANK,
    PAGE,
    SIGNAL,
    SIZE,
    STACKS,
    Heartbeat,
    Kind,
    Place,
    pack_heartbeat,
    unpack_heartbeat,
)

NOW = 10_000.0


def beat(**changed: Any) -> Heartbeat:
    """Return the heartbeat of a rank in its loop that progressed just now and never stood still for more than 0.5 s."""
    usual = Heartbeat(
        beat=NOW, progress=400, progressed=NOW, steps=100, work=1, place=Place.LOOP, paused=0, longest=0.5, cpu=0.0,
        thread=1, ident=1, moved=0.0, signal=SIGNAL,
    )  # fmt: skip
    return usual._replace(**changed)


def alarms(heartbeat: Heartbeat, **how: Any) -> bool:
    """Return whether the stock rule would fire: the stall is longer than its limit."""
    stall = judge_heartbeat(heartbeat, NOW, **how)
    return stall.seconds > stall.limit


def test_a_page_is_read_as_it_was_written() -> None:
    assert unpack_heartbeat(pack_heartbeat(beat())) == beat()


def test_a_torn_or_blank_page_is_not_read() -> None:
    page = pack_heartbeat(beat())
    torn = page[:8] + pack_heartbeat(beat(beat=NOW + 1))[8:16] + page[16:]
    assert [unpack_heartbeat(bad) for bad in (page[:-1], b"", BLANK, torn)] == [None] * 4


@pytest.mark.parametrize(
    ("longest", "stands_for", "expected"),
    [
        (0.5, 59, False),  # nothing under a minute
        (0.5, 61, True),
        (20.0, 199, False),  # ten times what it has shown
        (20.0, 201, True),
        (100.0, 479, False),
        (100.0, 481, True),  # before NCCL's time-out of 600 s
        (500.0, 999, False),  # but a run whose own gaps are longer gets no alert at each of them
        (500.0, 1001, True),
    ],
)
def test_the_limit_follows_the_runs_own_gaps(longest: float, stands_for: float, expected: bool) -> None:
    assert alarms(beat(longest=longest, progressed=NOW - stands_for), alone=False) is expected


@pytest.mark.parametrize(
    ("place", "longest", "stands_for", "expected"),
    [
        (Place.LOOP, 0.5, 479, False),  # no other rank waits for it, and no process group ends it
        (Place.LOOP, 0.5, 481, True),
        (Place.LOOP, 100.0, 999, True),
        (Place.AWAITS, 0.5, 1799, False),  # the last checkpoint is on its way to slow storage
        (Place.AWAITS, 0.5, 1801, True),
        (Place.AWAITS, 1000.0, 1999, False),
    ],
)
def test_a_single_rank_that_waits_has_longer(place: Place, longest: float, stands_for: float, expected: bool) -> None:
    assert alarms(beat(place=place, longest=longest, progressed=NOW - stands_for)) is expected


def test_a_rank_of_several_that_waits_for_a_future_has_no_longer_limit() -> None:
    assert alarms(beat(place=Place.AWAITS, progressed=NOW - 61), alone=False)


@pytest.mark.parametrize(
    ("alone", "stands_for", "expected"),
    [(True, 599, False), (True, 601, True), (False, 479, False), (False, 481, True)],
)
def test_a_thread_that_computes_has_longer_but_not_as_long_as_a_process_group(
    alone: bool, stands_for: float, expected: bool
) -> None:
    assert alarms(beat(progressed=NOW - stands_for), busy=True, alone=alone) is expected


@pytest.mark.parametrize(
    "quiet",
    [
        {"place": Place.LEFT},
        {"place": Place.DEBUGGER},
        {"paused": 1},
        {"progress": 0, "steps": 0, "place": Place.UNKNOWN},
    ],
)
def test_nothing_is_expected_beyond_the_loop(quiet: dict[str, Any]) -> None:
    stall = judge_heartbeat(beat(progressed=0.0, **quiet), NOW)
    assert (stall.seconds, stall.quiet) == (0.0, NOW)


def test_a_checkpoint_has_two_hours() -> None:
    assert judge_heartbeat(beat(place=Place.LONG, progressed=NOW - LONG_SECONDS), NOW).seconds == 0
    assert alarms(beat(place=Place.LONG, progressed=NOW - LONG_SECONDS - 61))


def test_a_process_that_moves_has_two_hours_and_one_that_stopped_moving_has_not() -> None:
    moving = beat(progressed=NOW - 3600, moved=NOW - 1)
    assert judge_heartbeat(moving, NOW).kind == Kind.MOVING
    assert not alarms(moving)
    assert alarms(moving._replace(moved=NOW - 61), alone=False)  # an upload that went well for an hour, then a deadlock
    assert alarms(moving._replace(progressed=NOW - LONG_SECONDS - 61))


def test_a_process_that_was_stopped_raises_no_alert_when_it_goes_on() -> None:
    asleep = beat(progressed=NOW - 3600, beat=NOW - 3600)
    assert not alarms(asleep, stopped=True, resumed=NOW)
    assert not alarms(asleep, resumed=NOW - 1)  # its watchdog has not run yet
    assert alarms(asleep, resumed=NOW - 61)


def test_a_watchdog_that_is_silent_does_not_get_the_gil() -> None:
    held = beat(progressed=NOW - 61, beat=NOW - 61, place=Place.UNKNOWN)
    assert judge_heartbeat(held, NOW).kind == Kind.HOLDING
    assert alarms(held)


def test_a_gil_held_before_any_progress_counts_from_the_last_heartbeat() -> None:
    held = beat(progress=0, steps=0, place=Place.UNKNOWN, progressed=NOW - 3600, beat=NOW - 20)
    assert judge_heartbeat(held, NOW)[:3] == (20, 480, Kind.HOLDING)
    assert not alarms(held)  # a library is loaded or a kernel built, after an hour of nothing
    assert alarms(held._replace(beat=NOW - 481))
    assert not alarms(held._replace(beat=NOW - 481), busy=True)


def test_the_first_steps_have_longer() -> None:
    first = beat(steps=1, place=Place.UNKNOWN, progressed=NOW - 479)
    assert not alarms(first)
    assert alarms(first._replace(progressed=NOW - 481))  # a first collective that no other rank joins
    assert not alarms(first._replace(progressed=NOW - 3600), busy=True)


# Descriptors that a peer handed over.


def memfd(name: str, content: bytes = b"") -> int:
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.pwrite(descriptor, content, 0)
    return descriptor


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_descriptors_that_are_not_ours_are_closed_and_never_read() -> None:
    stranger, (pipe, other_end) = memfd("something"), os.pipe()
    page, stacks, second = memfd(PAGE), memfd(STACKS), memfd(PAGE)
    heartbeat_writer = RankHeartbeat([pipe, stranger, page, stacks, second], os.getpid())
    assert [is_open(each) for each in (pipe, stranger, second, page, stacks)] == [False] * 3 + [True] * 2
    heartbeat_writer.close()
    os.close(other_end)
    assert not is_open(page)
    assert not is_open(stacks)


def test_a_page_that_shrinks_or_goes_blank_is_no_hang() -> None:
    page = memfd(PAGE, pack_heartbeat(beat(progressed=0.0, beat=0.0, thread=os.getpid())))
    heartbeat_writer = RankHeartbeat([page], os.getpid())
    assert heartbeat_writer.look(100.0) is None  # it stands already, and what it does is not known yet
    hung = heartbeat_writer.look(102.0)
    assert hung is not None
    assert hung.seconds == 102
    os.ftruncate(page, 3)
    assert heartbeat_writer.look(102.5) == hung
    os.ftruncate(page, 0)
    os.ftruncate(page, SIZE)
    blank = heartbeat_writer.look(103.0)
    assert blank is not None
    assert blank.seconds == 0
    heartbeat_writer.close()


def test_a_daemon_that_was_frozen_goes_on_counting_where_it_was() -> None:
    now = time.monotonic()
    page = memfd(PAGE, pack_heartbeat(beat(progressed=now - 40, beat=now, thread=1 << 30)))
    heartbeat_writer = RankHeartbeat([page], os.getpid())
    for second in range(3):
        stall = heartbeat_writer.look(now + second)
    assert stall is not None
    assert stall.seconds == pytest.approx(42)
    heartbeat_writer.look(now + 3600)  # the container was frozen meanwhile, this daemon with it
    for second in (3602, 3632):
        stall = heartbeat_writer.look(now + second)
        assert stall is not None
        assert stall.seconds == pytest.approx(42, abs=3), "a case that is open stays open, and none is opened for this"
    os.pwrite(page, pack_heartbeat(beat(progressed=now + 3640, progress=99, beat=now + 3640, thread=1 << 30)), 0)
    for second in range(3641, 3648):
        stall = heartbeat_writer.look(now + second)
    assert stall is not None
    assert stall.seconds == pytest.approx(6), "of what was not seen, as much as came after that"
    heartbeat_writer.close()


@pytest.mark.parametrize(("before", "then", "kind"), [(0.1, 1.0, Kind.BUSY), (1.0, 0.0, Kind.BLOCKED)])
def test_what_a_thread_does_counts_from_where_it_came_to_stand(before: float, then: float, kind: Kind) -> None:
    """An evaluation of half an hour that waits, and then one long call that computes; and the other way round."""
    page = memfd(PAGE, pack_heartbeat(beat(progressed=0.0, cpu=0.0, thread=1 << 30)))
    heartbeat = RankHeartbeat([page], os.getpid())
    cpu = 0.0
    for second in range(1, 1900):
        moved = min(second, 1800)
        cpu += before if moved == second else then
        written = beat(progressed=0.0, moved=float(moved), beat=float(second), cpu=cpu, thread=1 << 30)
        os.pwrite(page, pack_heartbeat(written), 0)
        stall = heartbeat.look(float(second))
        assert stall is not None or second in (2, 3), "as it begins to stand"
    assert stall is not None
    assert (stall.kind, stall.seconds) == (kind, 99.0)
    heartbeat.close()


def test_the_launchers_sitecustomize_is_no_code_of_the_users() -> None:
    launch = Path(sentinel.__file__).parent / "launch" / "sitecustomize.py"
    (thread,) = threads(
        "Current thread 0x0000000000000002 (most recent call first):\n"
        f'  File "{launch}", line 83 in backward\n  File "/home/me/train.py", line 12 in main\n'
    )
    assert str(thread.users) == "/home/me/train.py:12 in main"


def test_of_several_dumps_the_last_is_read() -> None:
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
