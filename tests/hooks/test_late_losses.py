"""A loss that is known only some steps after its update is traced to its batch.

The CPU stands in for the device: a value has arrived once its marker word is there.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import msgspec
import numpy
import pytest
import torch
from torch import Tensor, nn

from sentinel import wire
from sentinel.hooks.evidence import recent_batches
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.loop.forward_passes import CallSlot, keep
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.transport.records import Record, Transfers
from sentinel.wire.evidence import Provenance
from tests.hooks.faulty import WIDTH, Net


class Loop:
    """A loop whose losses arrive at `arrive`, and whose weights break at `ask`."""

    def __init__(self) -> None:
        self.net = Net(nn.GELU())
        self.sent: list[wire.Message] = []
        self.slot = CallSlot(self.net)
        self.collector = EvidenceCollector([self.slot], self.sent.append)
        self.seq = 0
        self.write_over = False
        """Whether the loop writes into its batch after the forward pass."""
        self._on_the_way: list[Record] = []

    def step(self, *batch: Tensor, loss: float = 1.0) -> None:
        record = Record(0, self.seq, 0.0, wire.LayerTable(digest="", layers=()))
        record.transfer = Transfers().begin([("loss", False, torch.tensor(loss))])
        record.transfer._buffer[0] = 0.0
        self.slot.kept = keep(batch, {})
        if self.write_over:
            batch[0].fill_(math.nan)
        self.collector.look(Step(self.seq, None, StepTotals(loss=torch.tensor(loss))), withheld=False, exact=True)
        self.collector.hold_batch(self.seq, lambda: record.peek("loss"))
        self.collector.end_step(self.seq, first=True)
        self.seq += 1
        self._on_the_way.append(record)

    def arrive(self) -> None:
        """Let all values that are under way arrive."""
        for record in self._on_the_way:
            assert record.transfer is not None
            record.transfer._buffer[0] = 1.0
        self._on_the_way.clear()

    def ask(self) -> Provenance:
        """Break the weights, ask for the origin, and return the answer of the next step."""
        with torch.no_grad():
            next(self.net.parameters()).fill_(math.nan)
        self.collector.ask("provenance")
        self.step(healthy(), loss=math.nan)
        (found,) = self.list_answers()
        return found

    def list_answers(self) -> list[Provenance]:
        return [msgspec.convert(one.content, Provenance) for one in self.sent if isinstance(one, wire.Collected)]


def healthy() -> Tensor:
    return torch.ones(4, WIDTH)


def watched_memory() -> tuple[Tensor, weakref.ref[Any]]:
    """Return a healthy batch, and a reference that is dead once its memory is free."""
    array = numpy.ones((4, WIDTH), numpy.float32)
    return torch.from_numpy(array), weakref.ref(array)


def bad(value: float = math.nan) -> Tensor:
    batch = torch.ones(4, WIDTH)
    batch[2, 3] = value
    return batch


def run(*batches: Any, lag: int = 2) -> Provenance:
    """Return the answer of a loop whose losses arrive every `lag` steps, and are NaN from the first bad value on."""
    loop, broken = Loop(), False
    for place, batch in enumerate(batches):
        broken = broken or not bool(batch[0].isfinite().all())
        loop.step(*batch, loss=math.nan if broken else 1.0)
        if place % lag == lag - 1:
            loop.arrive()
    loop.arrive()
    return loop.ask()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_batch_is_named_though_the_weights_are_broken_by_then(value: float) -> None:
    found = run([healthy()], [healthy()], [healthy()], [bad(value)], [healthy()], [healthy()])
    assert (found.origin, found.seq, found.tensors) == ("data", 3, ("args[0]",))
    assert not found.rerun
    assert not found.exact
    assert found.missing


def test_a_batch_that_is_finite_is_not_blamed() -> None:
    loop = Loop()
    for seq in range(6):
        loop.step(healthy(), loss=math.nan if seq > 3 else 1.0)
    loop.arrive()
    assert loop.ask().origin == "weights"


def test_a_mask_of_infinities_is_not_blamed() -> None:
    mask = torch.full((4, WIDTH), -math.inf)
    found = run([healthy(), healthy()], [healthy(), healthy()], [bad(), mask], [healthy(), healthy()])
    assert (found.seq, found.tensors) == (2, ("args[0]",))


def test_nan_that_marks_missing_values_is_not_blamed() -> None:
    loop = Loop()
    for seq in range(6):
        loop.step(bad(), loss=math.nan if seq > 3 else 1.0)
    loop.arrive()
    assert loop.ask().origin == "weights"


def test_a_bad_loss_that_broke_nothing_is_not_blamed_for_weights_that_break_later() -> None:
    """A step that a GradScaler withheld has a bad loss, and breaks no weights."""
    loop = Loop()
    for seq in range(6):
        loop.step(bad() if seq == 2 else healthy(), loss=math.nan if seq == 2 else 1.0)
        loop.arrive()
    assert loop.ask().origin == "weights"


def test_the_graph_of_an_input_is_not_held() -> None:
    loop = Loop()
    weight, memory = watched_memory()
    loop.step(weight.requires_grad_() * weight)
    del weight
    assert memory() is None


def test_a_view_counts_with_all_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, held = Loop(), list[weakref.ref[Any]]()
    monkeypatch.setattr(recent_batches, "MOST_BYTES", 3 * healthy().nbytes)
    for _ in range(5):
        chunk, memory = watched_memory()
        held.append(memory)
        loop.step(chunk[:1])
        del chunk
    assert [memory() is not None for memory in held] == [False] * 2 + [True] * 3


def test_a_batch_that_was_written_over_is_not_judged() -> None:
    loop, buffer = Loop(), healthy()
    for seq in range(4):
        loop.step(buffer, loss=math.nan if seq == 3 else 1.0)
        buffer.fill_(math.nan)
    loop.arrive()
    assert loop.ask().origin == "weights"


def test_a_batch_that_was_written_over_within_its_step_is_not_judged() -> None:
    loop = Loop()
    loop.step(healthy())
    loop.write_over = True
    loop.step(healthy(), loss=math.nan)
    loop.write_over = False
    loop.arrive()
    assert loop.ask().origin == "weights"


def test_after_a_rollback_no_earlier_batch_is_blamed() -> None:
    loop = Loop()
    loop.step(healthy())
    loop.step(bad(), loss=math.nan)
    loop.arrive()
    loop.collector.rewound()
    assert loop.ask().origin == "weights"


def test_what_running_a_batch_again_finds_is_not_replaced() -> None:
    loop = Loop()
    loop.step(healthy())
    loop.step(bad(), loss=math.nan)
    loop.arrive()
    loop.collector.ask("provenance")
    loop.step(bad(), loss=math.nan)  # the weights are whole: the step was not applied
    (found,) = loop.list_answers()
    assert (found.seq, found.rerun) == (2, True)


def test_batches_are_let_go_once_their_losses_are_known_and_finite() -> None:
    loop, held = Loop(), list[weakref.ref[Any]]()
    for _ in range(5):
        batch, memory = watched_memory()
        held.append(memory)
        loop.step(batch)
        del batch
    assert all(one() is not None for one in held)
    loop.arrive()
    loop.step(torch.ones(4, WIDTH, dtype=torch.long))
    assert [one() is not None for one in held] == [False] * 4 + [True]


def test_batches_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_batches, "MOST_BYTES", 3 * healthy().nbytes)
    loop, held = Loop(), list[weakref.ref[Any]]()
    for _ in range(5):
        batch, memory = watched_memory()
        held.append(memory)
        loop.step(batch)
        del batch
    assert [one() is not None for one in held] == [False] * 2 + [True] * 3


def test_the_batch_of_a_broken_step_is_let_go_if_nothing_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_batches, "HELD_STEPS", 10)
    loop = Loop()
    batch, held = watched_memory()
    loop.step(batch, loss=math.nan)
    del batch
    loop.arrive()
    for _ in range(10):
        loop.step(healthy(), loss=math.nan)
    assert held() is not None
    loop.step(healthy(), loss=math.nan)
    assert held() is None
