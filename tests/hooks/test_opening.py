"""The first steps of a run are examined in full, within a limit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

import sentinel
from sentinel.hooks.core import opening
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.core.opening import (
    END,
    SECONDS,
    SHARE,
    STAGE_SECONDS,
    STAGE_STEPS,
    STEPS,
    UNMARKED,
    WINDOW,
    Opening,
)
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, model

pytestmark = pytest.mark.governed


@pytest.fixture(autouse=True)
def own_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process has the processor during the times that are made up here."""
    monkeypatch.setattr(opening, "thread_time", itertools.count(1e6, 1e6).__next__)


def look(governor: Governor, seqs: range, *, step: float, sample: float) -> tuple[dict[int, list[int]], list[float]]:
    """Simulate steps of `step` seconds, and `sample` more for each tier that is sampled.

    Returns (tier -> its sampled steps, our seconds of each step).
    """
    taken: dict[int, list[int]] = {1: [], 2: [], 3: []}
    spent = []
    for seq in seqs:
        tiers = {3} if governor.take_rare_turn(seq) else set[int]()
        tiers |= {tier for tier in (1, 2) if tiers or governor.due(tier, seq)}
        for tier in tiers:
            taken[tier].append(seq)
            governor.record_sample(tier, sample)
        spent.append(sample * len(tiers))
        governor.record_step(seq, step + spent[-1], spent[-1])
    return taken, spent


def test_all_of_the_first_steps_are_sampled_and_then_ever_fewer() -> None:
    taken, _ = look(Governor(0.01, Opening()), range(2 * END), step=0.01, sample=1e-3)
    assert taken[1][:STEPS] == taken[2][:STEPS] == list(range(STEPS))
    assert [seq for seq in taken[3] if seq < STEPS] == [0, 1, 8, 16, 24, 32, 40, 48, 56]
    by_stretch = [sum(low <= seq < high for seq in taken[2]) for low, high in ((64, 128), (128, 256), (256, 512))]
    assert by_stretch == [16, 16, 16]
    assert len([seq for seq in taken[2] if seq >= END]) <= END // 32, "what the governor allows"


def test_steps_of_the_opening_are_marked_and_those_after_it_are_not() -> None:
    governor = Governor(0.01, Opening())
    marks = {}
    for seq in range(2 * END):
        look(governor, range(seq, seq + 1), step=0.01, sample=1e-3)
        marks[seq] = governor.mark_opening(seq)
    assert all(marks[seq] == 1.0 for seq in range(STEPS))
    assert 32 <= sum(marks[seq] == 1.0 for seq in range(STEPS, END)) <= 48
    assert [marks[seq] for seq in range(END, END + UNMARKED)] == [0.0] * UNMARKED
    assert marks[END + UNMARKED] is None
    assert Governor(0.0, Opening(0.0)).mark_opening(0) == 0.0


@pytest.mark.parametrize("sample", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_the_limit_wins(sample: float) -> None:
    governor = Governor(0.01, Opening())
    look(governor, range(4), step=0.01, sample=sample)  # its cost must be seen first
    _, spent = look(governor, range(4, END), step=0.01, sample=sample)
    for first in range(0, END - 4 - WINDOW):
        ours = sum(spent[first : first + WINDOW])
        assert ours <= SHARE * (0.01 * WINDOW + ours) + 3 * sample * (sample > 0.02), first
    assert sum(spent) <= SECONDS + 3 * sample


def test_turns_of_other_processes_in_a_sample_keep_no_step_from_being_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "thread_time", itertools.count(0.0, 2.2e-3).__next__)
    governor, taken = Governor(0.01, Opening()), []
    for seq in range(STEPS):
        if governor.due(2, seq):
            taken.append(seq)
            turn = 0.04 if seq % 12 == 11 else 0.0
            for tier, seconds in ((1, 1e-4), (2, 1e-4 + turn)):
                governor.record_sample(tier, seconds)
            governor.record_step(seq, 2e-3 + turn, 2e-4 + turn)
        else:
            governor.record_step(seq, 2e-3, 0.0)
    assert taken == list(range(STEPS))


def list_taken(sample: float, step: Callable[[int], float]) -> list[int]:
    """Return the steps that are sampled; a sample takes `sample` seconds, and step `seq` without it `step(seq)`."""
    examination, taken = Opening(), []
    for seq in range(END):
        own = sample if examination.wants(2, seq, expected=sample) else 0.0
        examination.record_step(seq, step(seq) + own, own)
        taken += [seq] if own else []
    return taken


@pytest.mark.parametrize("slow", [{1}, {2}, {20}, {2, 20}])
def test_a_slow_step_makes_no_sample_free(slow: set[int]) -> None:
    """30 s at one or two of the first steps, as a compilation takes: that buys two samples each, and not 16."""
    usual = list_taken(0.05, lambda seq: 0.01)
    taken = list_taken(0.05, lambda seq: 30.0 if seq in slow else 0.01)
    assert sum(seq < STEPS for seq in taken) <= sum(seq < STEPS for seq in usual) + 2 * len(slow)
    assert taken[-1] == usual[-1]


@pytest.mark.parametrize(
    ("sample", "every", "seconds", "least"), [(1e-3, 10, 0.2, 59), (1e-3, 16, 1.0, 57), (1e-2, 8, 0.1, 45)]
)
def test_slow_steps_that_come_regularly_give_their_time(sample: float, every: int, seconds: float, least: int) -> None:
    """Steps may be slow now and then, as where each tenth step has a rollout."""
    taken = list_taken(sample, lambda seq: 1e-3 if seq % every else seconds)
    assert sum(seq < STEPS for seq in taken) >= least


def test_turns_of_the_processes_that_compile_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on it is known for how much of our time the thread had the processor."""
    monkeypatch.setattr(opening, "thread_time", itertools.count(60.0, 0.02).__next__)
    examination = Opening()
    examination.record_first_step(0.01)
    examination.record_step(1, seconds=30.0, own=2.5)
    assert examination.wants(2, 2, expected=1e-3)


def test_another_thread_that_trains_gives_no_time_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread's clock begins at 0: what the examination may spend in all stays the same."""
    monkeypatch.setattr(opening, "thread_time", iter([60.0, 1.0]).__next__)
    examination = Opening()
    for seq in (1, 2):
        examination.record_step(seq, seconds=100.0, own=1.9)
    assert not examination.wants(2, 3, expected=0.2)


def test_samples_that_grow_count_as_what_they_are() -> None:
    """Samples grow where an optimizer begins with a part of the model, or gradients come late."""
    examination, spent = Opening(), 0.0
    for seq in range(STEPS):
        own = 0.0
        if examination.wants(2, seq, expected=1e-5):  # by the shortest sample
            own = 1e-5 if seq < 2 else 0.3
        examination.record_step(seq, 0.01 + own, own)
        spent += own
    assert 0.3 <= spent <= SECONDS


def test_the_users_overhead_is_a_ceiling() -> None:
    _, free = look(Governor(0.01, Opening()), range(STEPS), step=0.01, sample=1e-4)
    _, held = look(Governor(0.001, Opening(0.001)), range(STEPS), step=0.01, sample=1e-4)
    assert sum(held) < sum(free) / 4


def test_a_stage_is_examined_shortly_and_the_next_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(opening, "monotonic", lambda: now)
    governor = Governor(0.01, Opening())
    look(governor, range(2 * END), step=0.001, sample=1e-4)
    first = 2 * END + 1
    governor.begin_stage(first)
    assert governor.fast_path_end(first) == first, "the fast path waits"
    taken, _ = look(governor, range(first, first + 64), step=0.01, sample=1e-4)
    assert taken[2][:STAGE_STEPS] == list(range(first, first + STAGE_STEPS))
    assert len(taken[2]) < STAGE_STEPS + 8
    governor.begin_stage(later := first + END + 1)
    assert len(look(governor, range(later, later + STAGE_STEPS), step=0.01, sample=1e-4)[0][2]) < STAGE_STEPS
    now += STAGE_SECONDS
    governor.begin_stage(again := later + STAGE_STEPS + 1)
    assert len(look(governor, range(again, again + STAGE_STEPS), step=0.01, sample=1e-4)[0][2]) == STAGE_STEPS


def test_a_stage_in_the_first_steps_after_the_full_ones_is_examined_too() -> None:
    governor = Governor(0.01, Opening())
    look(governor, range(200), step=0.01, sample=1e-4)
    governor.begin_stage(200)
    taken, _ = look(governor, range(200, 300), step=0.01, sample=1e-4)
    assert taken[2][:STAGE_STEPS] == list(range(200, 200 + STAGE_STEPS))
    assert taken[3][0] == 200


@pytest.mark.parametrize(("share", "sample"), [(None, 7.0), (None, 0.9), (0.005, 0.06)])
def test_it_decides_by_the_first_step_alone_where_a_sample_is_expensive(share: float | None, sample: float) -> None:
    governor = Governor(share or 0.02, Opening(share), norm_first=share is None)
    for tier in (1, 2, 3):
        assert governor.take_rare_turn(0) if tier == 3 else governor.due(tier, 0)
        governor.record_sample(tier, sample / 3)
    governor.record_first_step(sample)
    _, spent = look(governor, range(1, STEPS), step=0.3, sample=sample / 3)
    assert sample + sum(spent[:3]) <= max(SECONDS, sample)
    assert sum(spent[:WINDOW]) <= (share or SHARE) * 0.3 * 2 * WINDOW


def test_a_run_at_default_settings_sends_the_first_steps_in_full(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "SHARE", math.inf)  # a busy machine does not decide
    net = model()
    loop = Loop(net, torch.optim.AdamW(net.parameters()))
    with sentinel.attach(net, loop.optimizer):
        loop.run(STEPS)
    daemon.ended()
    assert list(daemon.series("grad_norm")) == list(daemon.layers("layer_grad_norm")) == list(range(STEPS))
