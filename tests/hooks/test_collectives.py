"""torch's flight recorders as a rank reads them (synthetic: NCCL's content is made up here)."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sentinel
from sentinel import wire
from sentinel.hooks.torch_interop import internals
from sentinel.wire.flight_recorder import Flight
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, model


def entry(group: str, seq: int, op: str) -> dict[str, Any]:
    return {
        "process_group": [group, "default_pg"],
        "pg_id": int(group),
        "collective_seq_id": seq,
        "profiling_name": op,
        "state": "scheduled",
        "time_created_ns": seq,
    }


def dump(*entries: dict[str, Any], **status: int) -> bytes:
    """Return a ring as JSON; an empty one has no `entries`: seen with NCCL on a GPU and in FlightRecorderDetail.hpp."""
    said = {group: {"last_completed_collective": seq} for group, seq in status.items()}
    ring = {"entries": entries} if entries else {}
    return json.dumps({"version": "2.10", "pg_status": said, **ring}).encode()


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Name of torch's function that dumps a ring -> what it returns."""
    found: dict[str, bytes] = {}
    module = torch._C._distributed_c10d
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # with no group in it
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.setattr(module, name, lambda name=name: found[name], raising=False)
    return found


def test_nccl_has_a_ring_of_its_own(recorders: dict[str, bytes]) -> None:
    recorders["_dump_fr_trace_json"] = dump(entry("1", 4, "gloo:barrier"), entry("0", 7, "gloo:broadcast"))
    recorders["_dump_nccl_trace_json"] = dump(entry("0", 7, "nccl:all_reduce"), entry("0", 8, "nccl:all_gather"))
    found = internals.read_flight_record()
    assert {name: group.enqueued for name, group in found.groups.items()} == {"0": 8, "1": 4}
    issued = found.find_issued("0", 7)
    assert issued is not None
    assert issued.op == "all_reduce"


def test_where_all_groups_are_on_nccl_the_general_ring_is_empty(recorders: dict[str, bytes]) -> None:
    recorders["_dump_fr_trace_json"] = dump()
    recorders["_dump_nccl_trace_json"] = dump(entry("0", 7, "nccl:all_reduce"))
    assert [one.seq for one in internals.read_flight_record().collectives] == [7]


def test_before_the_first_collective_nothing_is_recorded() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert internals.read_flight_record().collectives == ()
    finally:
        dist.destroy_process_group()


def test_what_both_rings_have_counts_once(recorders: dict[str, bytes]) -> None:
    both = dump(entry("0", 7, "nccl:all_reduce"), **{"0": 6})
    recorders.update(_dump_fr_trace_json=both, _dump_nccl_trace_json=both)
    found = internals.read_flight_record()
    assert [one.seq for one in found.collectives] == [7]
    assert found.groups["0"].completed == 6


def test_both_rings_number_groups_by_themselves(recorders: dict[str, bytes]) -> None:
    """Group 3 is the first of gloo in this process, and group 0 the first of NCCL: both have the id 0."""
    recorders["_dump_fr_trace_json"] = dump({**entry("3", 4, "gloo:barrier"), "pg_id": 0, "retired": True}, **{"0": 4})
    recorders["_dump_nccl_trace_json"] = dump(entry("0", 7, "nccl:all_reduce"), **{"0": 6})
    found = internals.read_flight_record()
    assert {name: (each.enqueued, each.completed) for name, each in found.groups.items()} == {"0": (7, 6), "3": (4, 4)}


def test_without_process_groups_there_is_nothing() -> None:
    assert not dist.is_initialized()
    assert internals.read_flight_record().groups == {}


def test_a_recorder_that_blocks_delays_no_other_request(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of NCCL's events may wait for as long as the loop waits for the device."""
    reads: list[bool] = []
    moves = threading.Event()

    def read() -> Flight:
        reads.append(moves.wait(60))
        return Flight()

    monkeypatch.setattr(internals, "read_flight_record", read)
    net = model()
    watched = Loop(net, torch.optim.SGD(net.parameters(), lr=0.01))
    with sentinel.attach(net, watched.optimizer):
        watched.run(1)
        daemon.wait(lambda: daemon.of(wire.Hello))
        for number, what in enumerate(["collectives", "collectives", "stacks"], 1):
            daemon.send(wire.Ask(id=number, what=what))
        daemon.wait(lambda: daemon.of(wire.Reply))
        assert [reply.id for reply in daemon.of(wire.Reply)] == [3]
        moves.set()
        daemon.wait(lambda: len(daemon.of(wire.Reply)) == 2)
    assert [reply.id for reply in daemon.of(wire.Reply)] == [3, 2]
    assert reads == [True]
