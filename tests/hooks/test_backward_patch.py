"""Which backward passes are recorded by the patch itself, and which are reported to listeners."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import sentinel
from sentinel.hooks.loop import losses
from sentinel.hooks.loop.patches import BackwardPatch, Listeners, LoopEvents
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import model


def run_pass(root: torch.Tensor, accumulator: StepAccumulator, *weights: torch.Tensor) -> list[str]:
    """Run a backward pass from `root`, and return the events that listeners get of it."""
    told: list[str] = []

    class Noting(Listeners):
        def tell_of_pass(self, event: str, call: Callable[[LoopEvents], object]) -> None:
            told.append(event)

    listeners = Noting()
    listeners.accumulator = accumulator
    backward = BackwardPatch(listeners).around(torch.autograd.backward, [True])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.autograd, "backward", backward)
        backward(root, *weights)
    return told


def scalars() -> dict[str, torch.Tensor]:
    """Return roots of backward passes, each with the value 2."""
    one = torch.ones((), requires_grad=True)
    conjugate = torch.complex(torch.zeros(()), -2.0 * one).conj()
    return {
        "float32": one * 2.0,
        "of memory of others": torch.cat([one[None], one[None] * 2.0])[1],
        "of a dimension": one[None] * 2.0,
        "float64": one.double() * 2.0,
        "bfloat16": one.bfloat16() * 2.0,
        "a negative in memory": conjugate.imag,
    }


@pytest.mark.parametrize("name", scalars())
def test_a_usual_loss_is_recorded_without_calling_listeners(name: str) -> None:
    accumulator, root = StepAccumulator(), scalars()[name]
    accumulator.fast_path_loss_limit = 10.0
    assert run_pass(root, accumulator) == []
    assert (accumulator.totals.loss, accumulator.totals.backwards) == (2.0, 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("value", [11.0, -math.inf, math.inf, math.nan])
def test_listeners_get_any_other_loss(value: float, device: str) -> None:
    accumulator = StepAccumulator()
    accumulator.fast_path_loss_limit = 10.0
    assert run_pass(torch.ones((), device=device, requires_grad=True) * value, accumulator) == ["backward_ended"]
    assert (accumulator.totals.loss, accumulator.totals.backwards) == (None, 0)


def test_listeners_get_a_loss_that_is_weighted_or_scaled() -> None:
    accumulator, one = StepAccumulator(), torch.ones((), requires_grad=True)
    accumulator.fast_path_loss_limit = 10.0
    assert run_pass(one * 2.0, accumulator, torch.tensor(0.5)) == ["backward_begins", "backward_ended"]
    losses.remember(scaled := one * 2.0 * 4.0, one * 2.0)
    losses.note_scale(torch.tensor(4.0))
    assert run_pass(scaled, accumulator) == ["backward_ended"]
    assert accumulator.totals.backwards == 0
    assert run_pass(one * 2.0, accumulator) == []


@pytest.mark.parametrize("fast_path_loss_limit", [10.0, -math.inf])
def test_a_pass_under_a_default_device_counts_once(fast_path_loss_limit: float) -> None:
    """A default device is a mode: torch calls the mode first, which calls the function again."""
    accumulator, root = StepAccumulator(), torch.ones((), requires_grad=True) * 2.0
    accumulator.fast_path_loss_limit = fast_path_loss_limit
    with torch.device("cpu"):
        told = run_pass(root, accumulator)
    assert told == (["backward_ended"] if fast_path_loss_limit > 0.0 else ["backward_begins", "backward_ended"])
    assert accumulator.totals.backwards == 0, "but by those who are told"


def test_a_loss_whose_data_a_hook_replaced_is_not_read() -> None:
    accumulator, doubled = StepAccumulator(), torch.ones((), requires_grad=True) * 2.0
    accumulator.fast_path_loss_limit, root = 10.0, doubled * 1.0
    doubled.register_hook(lambda _: setattr(root, "data", torch.tensor([5.0, 7.0])))  # type: ignore[no-untyped-call]
    assert run_pass(root, accumulator) == ["backward_ended"]
    assert accumulator.totals.loss is None


class Nested(torch.autograd.Function):
    """Runs another backward pass within its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (torch.ones((), requires_grad=True) * 5.0).backward()
        return gradient * 2.0


def test_a_pass_within_a_pass_is_part_of_it() -> None:
    accumulator = StepAccumulator()
    accumulator.fast_path_loss_limit = 10.0
    assert run_pass(Nested.apply(torch.ones((), requires_grad=True)), accumulator) == []  # type: ignore[no-untyped-call]
    assert (accumulator.totals.loss, accumulator.totals.backwards) == (2.0, 1)


def test_the_patch_is_copied_and_pickled_as_a_function_is(daemon: FakeDaemon) -> None:
    bare = torch.autograd.backward
    net = model()
    with sentinel.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3)):
        assert torch.autograd.backward is not bare
        assert copy.deepcopy(torch.autograd.backward) is torch.autograd.backward
        assert pickle.loads(pickle.dumps(torch.autograd.backward)) is torch.autograd.backward
        assert inspect.signature(torch.autograd.backward) == inspect.signature(bare)
        assert torch.autograd.backward.__doc__ == bare.__doc__
        assert weakref.ref(torch.autograd.backward)() is torch.autograd.backward
    assert torch.autograd.backward is bare


def test_a_pass_that_raises_still_raises_and_is_reported() -> None:
    accumulator, told = StepAccumulator(), []
    accumulator.fast_path_loss_limit = 10.0

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the loop's")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    class Listener:
        def __init__(self) -> None:
            self.accumulator = accumulator

        def backward_failed(self, error: Exception) -> None:
            told.append((repr(error), error.__traceback__ is not None))

    listeners = Listeners()
    listeners.replace((cast("LoopEvents", Listener()),))
    patch = BackwardPatch(listeners)
    with pytest.raises(ZeroDivisionError, match="of the loop's") as raised:
        patch.around(fail, [True])(torch.ones(()))
    assert raised.traceback[-1].name == "fail"
    assert told == [('ZeroDivisionError("of the loop\'s")', True)]
    with pytest.raises(KeyboardInterrupt):
        patch.around(interrupt, [True])(torch.ones(()))
    assert len(told) == 1
    assert accumulator.totals.backwards == 0


def test_ctrl_c_as_the_loss_is_read_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator, loss = StepAccumulator(), torch.ones(3, requires_grad=True).sum()
    accumulator.fast_path_loss_limit = 10.0

    def interrupted(_: torch.Tensor) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        for name in ("item", "is_neg"):
            patched.setattr(torch.Tensor, name, interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            run_pass(loss, accumulator)
    assert accumulator.totals.backwards == 0
    assert run_pass(loss.clone().detach().requires_grad_(), accumulator) == []


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may be one that torch does not know when torch is built, as some accelerators."""
    accumulator, loss, read = StepAccumulator(), torch.ones(3, device="meta", requires_grad=True).sum(), []
    accumulator.fast_path_loss_limit = 10.0
    monkeypatch.setattr(torch.Tensor, "item", read.append, raising=False)
    assert run_pass(loss, accumulator) == ["backward_ended"]
    assert read == []
