"""Code that only runs with a GPU, with stand-ins for torch.cuda (synthetic: not recorded on a GPU)."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure import statistics
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.measure.probes.memory import MemoryProbe
from sentinel.hooks.measure.statistics import TorchStatistics
from sentinel.hooks.snapshot import snapshot
from sentinel.hooks.snapshot.capture import Capture, Copies, Part
from sentinel.hooks.snapshot.host_buffer import HostBuffer, estimate_bytes, round_up_pinned
from sentinel.hooks.snapshot.snapshot import Ring, Snapshot
from tests.rollback.training import Parts


class Stream:
    """A device's stream that records the streams it waits for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.awaited: list[Any] = []
        self.synchronized = 0

    def wait_stream(self, other: Any) -> None:
        self.awaited.append(other)

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, Stream]:
    """Device -> its current stream."""
    current: dict[torch.device, Stream] = {}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.setdefault(device, Stream(device)))
    monkeypatch.setattr(snapshot, "_streams", {})
    return current


def on(*devices: str) -> list[Any]:
    """Return cells that say that they are on these devices."""
    return [SimpleNamespace(device=torch.device(device), kept=torch.zeros(100), source=None) for device in devices]


class Spread(Part):
    """State on two GPUs."""

    name = "spread"

    def take(self, capture: Capture) -> None:
        capture.volatile += on("cuda:0")
        capture.stable += on("cuda:1")

    def give(self, kept: Any, copies: Copies) -> None: ...


def test_each_gpu_has_a_stream_for_copies_behind_the_loops(
    streams: dict[torch.device, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert snapshot.gpus_of(on("cuda:1", "cpu", "cuda:0", "cuda:1")) == [first, second]
    entered: list[Stream] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext(entered.append(stream)))
    for part in ("seat", "fill"):
        monkeypatch.setattr(HostBuffer, part, lambda self, cells: None)
    ring = Ring(Parts(Spread()), keep=2, margin=0, afford=lambda nbytes: None)
    for seq in range(2):
        ring.make_room(seq)
        ring.begin(seq)
        ring.settle()
    ring.close()
    assert ring.overlap
    behind = entered[:2]
    assert entered == behind * 2
    assert [stream.awaited for stream in behind] == [[streams[first]] * 2, [streams[second]] * 2]
    assert not {*behind} & {*streams.values()}


def test_a_copy_is_over_when_every_gpu_says_so(
    streams: dict[torch.device, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Snapshot()
    for part in ("seat", "fill"):
        monkeypatch.setattr(HostBuffer, part, lambda self, cells: None)
    taken.take(0, [Spread()], lambda nbytes: None)
    taken.copy()
    assert {str(device): stream.synchronized for device, stream in streams.items()} == {"cuda:0": 1, "cuda:1": 1}


def test_pinned_memory_is_counted_as_torch_takes_it() -> None:
    assert [round_up_pinned(size) for size in (0, 1, 64, 65, 605_000_000)] == [0, 1, 64, 128, 1 << 30]
    assert HostBuffer.count_taken_bytes(on("cpu", "cpu")) == HostBuffer.count_needed_bytes(on("cpu", "cpu")) == 896
    assert HostBuffer.count_taken_bytes(on("cpu", "cuda:0")) == 1024
    held = [torch.zeros(100)]
    assert estimate_bytes(held, [], {}) == 400


def test_the_allocators_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counters(device: torch.device) -> dict[str, Any]:
        asked.append(device)
        one = {"all": {"current": 4, "peak": 5, "allocated": 6, "freed": 2}, "small_pool": {"current": 1}}
        return {"allocated_bytes": one, "reserved_bytes": one, "active_bytes": one, "num_alloc_retries": 3}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counters)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10))
    parameters = [SimpleNamespace(device=torch.device("cuda", 1), dtype=torch.float32)]
    optimizer = SimpleNamespace(param_groups=[{"params": []}, {"params": parameters}])
    step = Step(8, optimizer, StepTotals())
    MemoryProbe().after(step)
    assert asked == [torch.device("cuda", 1)]
    rss, held, left = (step.values.pop(f"{name}_bytes") for name in ("rss", "memory_held", "memory_left"))
    assert 1e6 < held <= rss
    assert left > 1e6
    assert step.values == {
        "memory_allocated_bytes": 4.0,
        "device_memory_left_bytes": 6.0,
        "memory_peak_bytes": 5.0,
        "memory_reserved_bytes": 4.0,
        "memory_active_bytes": 4.0,
        "memory_inactive_split_bytes": 0.0,
        "allocation_retries": 3.0,
        "out_of_memory_errors": 0.0,
    }


def test_elements_that_are_not_finite_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All elements are counted, as a device is not asked which to examine, and in pieces, as it may lack memory."""
    pieces: list[int] = []
    isfinite = torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda part: pieces.append(part.numel()) or isfinite(part))
    monkeypatch.setattr(statistics, "PIECE", 64)
    tensors = [torch.randn(10, 20), torch.randn(64), torch.randn(16, 16)[:, ::2]]
    tensors[0][3, 4] = tensors[0][9, 19] = tensors[2][1, 1] = torch.nan
    found = TorchStatistics(tensors)
    found.on_host = False
    assert found.nonfinite.tolist() == [2.0, 0.0, 1.0]
    assert pieces == [64, 64, 64, 8, 64, 128]
