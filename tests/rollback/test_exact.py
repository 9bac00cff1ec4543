"""A run that was rolled back is, to the bit, as it would have been without the fault."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy
import pytest
import torch

from sentinel import wire
from tests.rollback.training import OPTIMIZERS, Training, assert_same, batches, of_type, poisoned, roll_back

DATA = batches(24)
TO, AT, END = 5, 12, 20


def wreck_and_roll_back(training: Training, *, at: int = AT) -> list[Any]:
    """Train healthily up to TO, then with ever larger and at last non-finite batches, and roll back at `at`."""
    restorer, sent = training.arm()
    for seq in range(END):
        if seq == at:
            roll_back(restorer, at=at, to=TO)
        bad = TO < seq <= at
        training.step(poisoned(DATA[seq]) if bad and seq >= at - 1 else DATA[seq] * (50 if bad else 1))
    (answer,) = of_type(sent, wire.RolledBack)
    assert answer == wire.RolledBack(id=at, ok=True, to=TO, at=at, seconds=answer.seconds, void=(10,))
    assert restorer.held[:1] == (TO,)
    return sent


@pytest.mark.sampled(6)
@pytest.mark.parametrize("schedule", ["cosine", "lambda"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rolled_back_equals_the_run_that_never_saw_the_bad_batches(optimizer: str, schedule: str) -> None:
    rolled = Training(optimizer, schedule=schedule)
    wreck_and_roll_back(rolled)
    state = rolled.state()

    healthy = Training(optimizer, schedule=schedule)
    for seq in [*range(TO + 1), *range(AT + 1, END)]:
        healthy.step(DATA[seq])
    assert_same(state, healthy.state())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw", "sgd nesterov"])
@pytest.mark.parametrize("zero", ["start", "end", "accumulate"])
@pytest.mark.parametrize("amp", [False, True])
def test_gradients_of_the_undone_step_are_not_applied(optimizer: str, zero: str, amp: bool) -> None:
    """True however the loop zeroes gradients; with a scaler, the step at which the rollback happens is withheld."""
    rolled = Training(optimizer, zero=zero, amp=amp)
    wreck_and_roll_back(rolled)
    state = rolled.state()

    healthy = Training(optimizer, zero=zero, amp=amp)
    for seq in [*range(TO + 1), *range(AT + 1, END)]:
        healthy.step(DATA[seq])
    assert_same(state, healthy.state())


@pytest.mark.parametrize("optimizer", ["adamw", "fused adamw"])
def test_scale_of_a_snapshot_whose_own_step_was_withheld(optimizer: str) -> None:
    """`update()` must then back off as it did after the snapshot, though the step of the rollback did not overflow."""

    def run(steps: Iterable[int], *, armed: bool) -> dict[str, Any]:
        training = Training(optimizer, amp=True)
        overflow = {"now": False}
        training.model[0].weight.register_hook(lambda gradient: gradient * torch.inf if overflow["now"] else gradient)
        restorer = training.arm()[0] if armed else None
        for seq in steps:
            if restorer is not None and seq == AT:
                roll_back(restorer, at=AT, to=TO)
            overflow["now"] = seq == TO
            training.step(DATA[seq])
        return training.state()

    assert_same(run(range(END), armed=True), run([*range(TO + 1), *range(AT + 1, END)], armed=False))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "lbfgs"])
def test_rolled_back_equals_one_restored_by_hand(optimizer: str, amp: bool) -> None:
    rolled = Training(optimizer, amp=amp)
    wreck_and_roll_back(rolled)
    state = rolled.state()

    by_hand = Training(optimizer, amp=amp)
    kept: dict[str, Any] = {}

    def at_exit(seq: int, skipped: bool) -> None:
        flags = by_hand.scaler._per_optimizer_states[id(by_hand.optimizer)] if by_hand.scaler else {}
        if seq == TO:
            kept.update(by_hand.state(), flags=copy.deepcopy(flags))
        if seq == AT:
            with torch.no_grad():
                for parameter, value in zip(by_hand.model.parameters(), kept["parameters"], strict=True):
                    parameter.copy_(value)
                    parameter.grad = None
                for name, buffer in by_hand.model.named_buffers():
                    buffer.copy_(kept["buffers"][name])
            by_hand.optimizer.load_state_dict(kept["optimizer"])
            by_hand.schedule.load_state_dict(kept["schedule"])
            by_hand.ema.load_state_dict(kept["ema"])
            torch.set_rng_state(kept["torch"])
            random.setstate(kept["python"])
            numpy.random.set_state(kept["numpy"])
            if by_hand.scaler:
                by_hand.scaler.load_state_dict(kept["scaler"])
                flags.update(kept["flags"])

    by_hand.on_exit = at_exit
    for seq in range(END):
        bad = TO < seq <= AT
        by_hand.step(poisoned(DATA[seq]) if bad and seq >= AT - 1 else DATA[seq] * (50 if bad else 1))
    assert_same(state, by_hand.state())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("optimizer", "amp"), [(name, amp) for name in OPTIMIZERS for amp in (False, True) if not (amp and name == "lbfgs")]
)
def test_snapshots_alone_change_nothing(optimizer: str, amp: bool) -> None:
    runs = []
    for armed in (False, True):
        training = Training(optimizer, amp=amp)
        if armed:
            training.arm()
        for batch in DATA:
            training.step(batch)
        runs.append(training.state())
    assert_same(*runs)
