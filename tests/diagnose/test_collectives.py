"""Flight recorders of several ranks, compared with each other."""

from __future__ import annotations

from typing import Any

import pytest

from sentinel.diagnose.standstill.collectives import find_desync, find_standstill
from sentinel.wire.flight_recorder import KEPT, Flight, flight_of


def entry(seq: int, op: str = "all_reduce", size: int = 5, done: bool = True, group: str = "0") -> dict[str, Any]:
    """Return an entry of a flight record, as torch 2.13 writes it."""
    return {
        "collective_seq_id": seq,
        "profiling_name": f"gloo:{op}",
        "input_sizes": [[size]],
        "is_p2p": False,
        "pg_id": int(group),
        "retired": done,
        "state": "scheduled",
        "process_group": [group, "default_pg" if group == "0" else "tensor parallel"],
        "time_created_ns": 1_000_000_000 * (seq + 1000 * int(group)),
        "timeout_ms": 77_000,
    }


def flight(*entries: dict[str, Any]) -> Flight:
    return flight_of({"entries": list(entries)}, {"0": [0, 1, 2], "1": [0, 1]})


def upto(last: int, *more: dict[str, Any]) -> Flight:
    return flight(*map(entry, range(1, last + 1)), *more)


def test_a_rank_that_never_came_is_missing() -> None:
    found = find_standstill({0: upto(8, entry(9, done=False)), 1: upto(8), 2: upto(8, entry(9, done=False))}, 3)
    assert found is not None
    assert str(found.wait) == "all_reduce of 5, number 9"
    assert (found.wait.waiting, found.wait.missing, found.wait.differing, found.wait.unknown) == ((0, 2), (1,), {}, ())


def test_ranks_that_said_nothing_are_not_known_to_be_missing() -> None:
    found = find_standstill({0: upto(8, entry(9, done=False))}, 3)
    assert found is not None
    assert (found.wait.missing, found.wait.unknown) == ((), (1, 2))


def test_a_rank_that_issued_another_collective_differs() -> None:
    flights = {0: upto(8, entry(9, done=False)), 1: upto(8, entry(9, "barrier", 0, done=False))}
    found = find_standstill(flights, 2)
    assert found is not None
    assert found.wait.waiting == (0,)
    assert found.wait.differing[1].op == "barrier"


def test_a_rank_that_is_a_step_ahead_does_not_hide_the_earlier_wait() -> None:
    found = find_standstill({0: upto(9, entry(10, done=False)), 1: upto(8, entry(9, done=False)), 2: upto(8)}, 3)
    assert found is not None
    assert (found.wait.collective.seq, found.wait.waiting, found.wait.missing) == (9, (1,), (2,))


def test_of_several_groups_the_first_to_stand_still_is_found() -> None:
    flights = {
        0: upto(8, entry(9, done=False), entry(3, done=False, group="1")),
        1: upto(8, entry(9, done=False)),
        2: upto(8),
    }
    found = find_standstill(flights, 3)
    assert found is not None
    assert (found.wait.description, found.wait.missing) == ("default_pg", (2,))


def test_ranks_outside_of_collectives_are_no_standstill() -> None:
    assert find_standstill({0: upto(8), 1: upto(8)}, 2) is None
    assert find_standstill({}, 2) is None


def test_sizes_that_do_not_fit_are_seen_when_the_collective_is_over_too() -> None:
    flights = {0: upto(7, entry(8), entry(9)), 1: upto(7, entry(8, size=1), entry(9))}
    found = find_desync(flights, 2)
    assert found is not None
    assert (found.collective.seq, found.differing[1].sizes) == (8, ((1,),))
    assert find_desync({0: upto(9), 1: upto(9)}, 2) is None
    gathers = {rank: upto(7, entry(8, "all_gather", size=rank)) for rank in (0, 1)}
    assert find_desync(gathers, 2) is None, "shards of an all_gather may be uneven"


def test_a_recorder_is_kept_in_part_and_read_with_its_status() -> None:
    dump = {
        "entries": [entry(seq) for seq in range(1, 2001)],
        "pg_status": {"0": {"last_enqueued_collective": "2001", "last_completed_collective": "2000"}},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    }
    found = flight_of(dump)
    assert len(found.collectives) == KEPT
    assert (found.groups["0"].enqueued, found.groups["0"].completed, found.groups["0"].ranks) == (2001, 2000, (0, 1))


def test_a_status_that_fell_behind_its_entries_accuses_no_other_rank() -> None:
    """torch writes the status after the loop has gone on, from two threads; ranks at 10 of 10 recorded such ones."""

    def behind(*entries: dict[str, Any], enqueued: int, completed: int) -> Flight:
        status = {"0": {"last_enqueued_collective": str(enqueued), "last_completed_collective": str(completed)}}
        return flight_of({"entries": list(entries), "pg_status": status}, {"0": [0, 1]})

    ten = [entry(seq) for seq in range(1, 11)]
    waits = behind(*ten, entry(11, done=False), enqueued=11, completed=9)
    elsewhere = behind(*ten, enqueued=10, completed=9)
    assert find_standstill({0: elsewhere, 1: elsewhere}, 2) is None
    found = find_standstill({0: waits, 1: elsewhere}, 2)
    assert found is not None
    assert (found.wait.collective.seq, found.wait.waiting, found.wait.missing) == (11, (0,), (1,))


@pytest.mark.parametrize("dump", [{}, {"entries": 3}, {"entries": "x"}])
def test_content_that_is_no_dump_is_refused(dump: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="entries"):
        flight_of(dump)
