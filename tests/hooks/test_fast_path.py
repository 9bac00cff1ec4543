"""Steps of which only the loss is taken, in loops so fast that the cost of anything more is measurable."""

from __future__ import annotations

import functools
import importlib.metadata
import math
import signal
import threading
import time
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import wire
from sentinel.hooks import Probe, Step
from sentinel.hooks.core import governor, opening
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.loop import forward_passes, patches
from sentinel.hooks.loop.forward_passes import CallSlot
from sentinel.hooks.loop.losses import scaled as scaled_losses
from sentinel.hooks.loop.step_accumulator import StepAccumulator, StepTotals, Work
from sentinel.hooks.measure import probe
from sentinel.hooks.session.command_handler import CommandHandler
from sentinel.hooks.session.event_router import EventRouter
from sentinel.hooks.step import loss_outliers
from sentinel.hooks.step.fast_path import FastPath
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model
from tests.hooks.sessions import find_session

WHOLE = [0, 1, 2, 3, 4, 8, 12, 16, 20]
"""The steps, of 24, that are examined in full."""


@pytest.fixture(autouse=True)
def every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "FIRST", {0: 4, 1: 8, 2: 8, 3: 256})
    monkeypatch.setattr(governor, "FULL_STEPS", 4)
    monkeypatch.setattr(governor, "SLOW_SECONDS", 60.0)  # on a busy machine any step may take 50 ms
    monkeypatch.setattr(opening, "END", 4)
    monkeypatch.setattr(probe, "EARLY", 4)


def adamw(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def test_loss_and_norm_of_every_step_and_the_rest_of_every_fourth(daemon: FakeDaemon) -> None:
    bare = Loop(net := model(), adamw(net), clip=0.5, accumulate=2)
    losses = bare.run(24)
    watched = Loop(net := model(), adamw(net), clip=0.5, accumulate=2)
    with sentinel.attach(watched.net, watched.optimizer):
        assert watched.run(24) == losses
    daemon.ended()
    assert daemon.seqs() == list(range(24))
    assert daemon.series("loss") == dict(enumerate(losses))
    assert list(daemon.series("grad_norm")) == list(daemon.series("clip_limit")) == list(range(24))
    assert list(daemon.series("learning_rate")) == WHOLE
    assert daemon.series("micro_batches") == dict.fromkeys(WHOLE, 2.0)
    for one, other in zip(bare.net.parameters(), watched.net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_signal_while_the_loss_alone_is_read(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    class TimeUp(Exception):
        pass

    def time_up(number: int, frame: FrameType | None) -> None:
        raise TimeUp

    def read(root: torch.Tensor) -> float:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return root.item()

    former = signal.signal(signal.SIGUSR1, time_up)
    loop = Loop(net := model(), adamw(net))
    try:
        with sentinel.attach(loop.net, loop.optimizer):
            monkeypatch.setattr(patches, "plain_loss", read)
            with pytest.raises(TimeUp):
                loop.run(24)
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_times_are_means_of_the_steps_between(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        accumulator = find_session(monitor).accumulator

        def wait(step: int) -> None:
            if step == 6:
                accumulator.batch_fetched(iter(DataLoader(range(1))), 4.0, None)

        loop.run(13, wait)
    daemon.ended()
    assert daemon.series("data_seconds")[8] == pytest.approx(1.0)
    assert 12 not in daemon.series("data_seconds")
    assert accumulator.work == Work.STEP
    assert accumulator.steps == 13
    whole = daemon.series("step_seconds")
    parts = ("forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")
    assert sum(daemon.series(part)[12] for part in parts) == pytest.approx(whole[12])


def test_times_are_taken_at_every_step_once_a_step_was_slow(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule about time would otherwise wait for samples of one step in 64, at the pace of the slow ones."""
    monkeypatch.setattr(governor, "SLOW_SECONDS", 0.05)
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        loop.run(24, lambda step: time.sleep(0.06 if step in (9, 10) else 0.0))
    daemon.ended()
    assert set(range(11, 24)) <= set(daemon.series("step_seconds"))


def test_a_loss_that_is_not_finite_is_seen_whole_at_once(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        for seq, batch in enumerate(batches(8)):
            if seq == 6:
                batch[0, 0] = math.nan
            loop.optimizer.zero_grad()
            loss_of(net, batch).backward()
            loop.optimizer.step()
    daemon.ended()
    assert math.isnan(daemon.series("loss")[6])
    assert list(daemon.series("learning_rate")) == [0, 1, 2, 3, 4, 6, 7]
    assert 6 in daemon.layers("layer_nonfinite")
    (found,) = [message for message in daemon.of(wire.Collected) if message.what == "provenance"]
    assert found.seq == 6
    assert found.content["origin"] == "data"


def test_after_a_norm_that_is_not_finite_steps_are_seen_whole(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net), clip=0.5, overflow=frozenset({6}))
    attentive = []
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        pace = find_session(monitor).governor
        loop.run(8, lambda step: attentive.append(pace.fast_path_end(7) == 7))
    daemon.ended()
    assert not math.isfinite(daemon.series("grad_norm")[6])
    assert list(daemon.series("learning_rate")) == [0, 1, 2, 3, 4, 7]
    assert attentive == [False] * 7 + [True], "before the loss of the next step tells"


def test_a_norm_of_another_type_that_is_not_finite_ends_the_fast_path(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for seq, batch in enumerate(batches(7)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if seq == 6:
                net[0].weight.grad[0] = torch.inf  # type: ignore[index]
            nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=math.inf)
            optimizer.step()
    daemon.ended()
    assert 5 not in daemon.series("grad_norm"), "on the fast path"
    assert math.isinf(daemon.series("grad_norm")[6])


def test_events_between_full_steps_are_not_lost(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    data = iter(DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=8))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        for seq in range(12):
            (batch,) = next(data)
            net.train(seq not in (0, 6))
            if seq == 7:
                monitor.log(reward=3.0)
            loop.optimizer.zero_grad()
            loss_of(net, batch).backward()
            loop.optimizer.step()
    daemon.ended()
    assert daemon.series("eval_mode") == {0: 1.0}, "of the step that is measured alone"
    assert daemon.series("reward") == {7: 3.0}
    assert list(daemon.series("batch_identity")) == list(range(12)), "the first batches are all looked at"


def test_where_a_scaler_may_withhold_a_step_all_are_whole(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net), GradScaler("cpu", init_scale=1024.0), overflow=frozenset({6}))
    with sentinel.attach(loop.net, loop.optimizer):
        loop.run(8)
    daemon.ended()
    assert daemon.series("step_skipped") == {seq: float(seq == 6) for seq in range(8)}
    assert list(daemon.series("loss_scale")) == list(range(8))


class Counter(Probe):
    tier = 0

    def after(self, step: Step) -> None:
        step.values["counted"] = float(step.seq)


def test_a_probe_of_another_package_is_called_at_every_step(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: Any = [importlib.metadata.EntryPoint("Counter", f"{__name__}:Counter", probe.ENTRY_POINTS)]
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",  # triton looks for its own, where it is loaded meanwhile
        lambda **selected: points if selected == {"group": probe.ENTRY_POINTS} else real(**selected),
    )
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        loop.run(8)
    daemon.ended()
    assert daemon.series("counted") == {seq: float(seq) for seq in range(8)}


def test_each_of_two_optimizers_takes_its_part_at_once(daemon: FakeDaemon) -> None:
    first, second = model(), model(1)
    optimizers = [adamw(first), adamw(second)]
    with sentinel.attach([first, second], optimizers):
        for batch in batches(8):
            for net, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
    daemon.ended()
    for stream in (0, 1):
        assert list(daemon.series("micro_batches", stream)) == list(range(8))


def test_gradients_that_are_never_cleared_are_found_later_too(daemon: FakeDaemon) -> None:
    """A suspicion is confirmed by the steps that follow at once, as many as the rule asks for."""
    looks = 1 + probe.CONFIRMING
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer):
        for seq, batch in enumerate(batches(2 * probe.OCCASION + 2 * looks)):
            if seq < probe.OCCASION + 8:
                loop.optimizer.zero_grad()
            loss_of(net, batch).backward()
            loop.optimizer.step()
    daemon.ended()
    kept = daemon.series("gradients_kept")
    found = list(range(2 * probe.OCCASION, 2 * probe.OCCASION + looks))
    assert list(kept) == [*range(1, probe.EARLY), probe.OCCASION, *found]
    assert [seq for seq, value in kept.items() if value] == found


def train_with(steps: int, before_step: dict[int, Any], after_backward: Any = None) -> None:
    """Train with the loss 2; a number in `before_step` is its step's loss, a function is called before the step."""
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer) as monitor:
        for seq, batch in enumerate(batches(steps)):
            optimizer.zero_grad()
            change = before_step.get(seq)
            loss = loss_of(net, batch)
            loss = loss - loss.detach() + (change if isinstance(change, float) else 2.0)
            loss.backward()
            if callable(change):
                change(monitor)
            optimizer.step()


@pytest.mark.parametrize("loss", [100.0, math.inf, -math.inf, math.nan], ids=str)
def test_a_loss_out_of_the_noise_makes_its_own_step_whole(
    loss: float, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_outliers, "SPAN", 4)
    train_with(24, {14: loss})
    daemon.ended()
    assert 14 in daemon.layers("layer_grad_norm")
    assert daemon.series("loss")[14] == pytest.approx(loss, nan_ok=True)
    assert [seq for seq in daemon.series("learning_rate") if seq < 14] == [0, 1, 2, 3, 4, 8, 12]


@pytest.mark.parametrize("value", [1e6, math.inf, math.nan], ids=str)
def test_a_gradient_out_of_the_ordinary_makes_its_own_step_whole(
    value: float, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its update: a step later the weights would be broken, and its origin gone."""
    monkeypatch.setattr(loss_outliers, "SPAN", 2)
    loop = Loop(net := model(), adamw(net))

    def disturb(step: int) -> None:
        if step == 14:
            net[0].weight.grad[0, 0] = value  # type: ignore[union-attr, index]

    with sentinel.attach(loop.net, loop.optimizer):
        loop.run(16, disturb)
    daemon.ended()
    assert daemon.series("grad_norm")[14] == pytest.approx(value, nan_ok=True)
    assert 14 in daemon.layers("layer_grad_norm")
    assert not {9, 10, 11} & daemon.series("grad_norm").keys(), "a norm that is as usual is not sent"


def test_the_norm_before_a_loss_out_of_the_noise_is_sent(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_outliers, "SPAN", 2)
    loop, norms = Loop(net := model(), adamw(net)), []

    def disturb(step: int) -> None:
        norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
        if step == 13:  # the next loss is out of the noise, and this gradient is not
            net[-1].bias.data += 100.0  # type: ignore[union-attr, operator]

    with sentinel.attach(loop.net, loop.optimizer):
        losses = loop.run(16, disturb)
    daemon.ended()
    assert losses[14] > 100 * losses[13]
    assert daemon.series("grad_norm")[13] == pytest.approx(norms[13])
    assert daemon.series("loss")[13] == pytest.approx(losses[13])


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that were not on the fast path."""
    seqs: list[int] = []
    original = OptimizerMonitor._enter_full_step

    def enter(self: OptimizerMonitor, closure: object) -> None:
        seqs.append(self.seq)
        original(self, closure)

    monkeypatch.setattr(OptimizerMonitor, "_enter_full_step", enter)
    return seqs


def attended(monitor: sentinel.Monitor) -> None:
    CommandHandler(find_session(monitor)).receive(wire.Attend(steps=2))


def asked_for_moments(monitor: sentinel.Monitor) -> None:
    CommandHandler(find_session(monitor)).receive(wire.Ask(id=1, what="moments"))


def scaled(monitor: sentinel.Monitor) -> None:
    """Scale a loss, as of another model."""
    GradScaler("cpu").scale(torch.ones((), requires_grad=True))


def said(monitor: sentinel.Monitor) -> None:
    monitor.log(reward=1.0)


@pytest.mark.parametrize(
    ("what", "whole"),
    [(attended, [14, 15]), (asked_for_moments, [14]), (scaled, [14, 15]), (said, [14])],
    ids=["the daemon attends", "moments are asked for", "a loss was scaled", "a number was logged"],
)
def test_a_step_of_which_more_is_wanted_is_examined_in_full_at_once(
    what: Any, whole: list[int], daemon: FakeDaemon, entered: list[int]
) -> None:
    train_with(24, {14: what})
    daemon.ended()
    assert [seq for seq in entered if seq >= 4] == sorted({4, 8, 12, *whole, 16, 20}), "and then it goes on as before"
    assert len(daemon.of(wire.Collected)) == (what is asked_for_moments)
    assert daemon.series("reward") == ({14: 1.0} if what is said else {})


def test_a_step_that_raised_or_came_without_a_pass_is_not_on_the_fast_path(
    daemon: FakeDaemon, entered: list[int]
) -> None:
    net = model()
    optimizer = Clumsy(net.parameters(), lr=1e-2)
    with sentinel.attach(net, optimizer):
        for seq, batch in enumerate(batches(16)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.breaks = seq == 9
            if optimizer.breaks:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                optimizer.breaks = False
            optimizer.step()
            if seq == 13:
                optimizer.step()
    daemon.ended()
    assert daemon.seqs() == list(range(17))
    assert list(daemon.series("loss")) == [*range(14), 15, 16]
    assert [seq for seq in entered if seq >= 4] == [4, 8, 12, 14, 16], "14 has no loss to decide by"
    assert daemon.series("clip_limit") == {}, "of the step that raised, and of no other"


class Clumsy(torch.optim.SGD):
    breaks = False

    def step(self, closure: Any = None) -> Any:
        if self.breaks:
            raise ZeroDivisionError
        return super().step(closure)


def test_a_thread_that_takes_over_is_noticed(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        accumulator = find_session(monitor).accumulator
        loop.run(9)
        threads: list[tuple[int, int]] = []

        def take_over() -> None:
            loop.run(2, lambda _: threads.append((accumulator.thread, accumulator.totals.forwards)))
            threads.append((threading.get_ident(), 1))

        thread = threading.Thread(target=take_over)
        thread.start()
        thread.join()
        assert threads[1] == threads[2], "from its first step on"
    daemon.ended()
    assert daemon.seqs() == list(range(11))


def test_a_pass_of_another_model_on_another_thread_is_not_ours(daemon: FakeDaemon) -> None:
    net, other, losses = model(), torch.nn.Linear(6, 1), []
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for seq, batch in enumerate(batches(24)):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            if seq:  # before the first pass here, a thread may run this model's passes
                thread = threading.Thread(target=(other(batch).sum() * 0.0 - 1000.0).backward)
                thread.start()
                thread.join()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    daemon.ended()
    assert daemon.series("loss") == dict(enumerate(losses))


def test_between_full_steps_no_listener_is_called(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        session = find_session(monitor)
        assert session is not None
        original = EventRouter.backward_ended

        def backward_ended(self: EventRouter, loss: Any, seconds: float) -> None:
            told.append(session.next_seq)
            original(self, loss, seconds)

        monkeypatch.setattr(EventRouter, "backward_ended", backward_ended)
        loop.run(24)
    daemon.ended()
    assert told == WHOLE


@pytest.mark.faults
@pytest.mark.parametrize("name", ["_try_enter", "_try_exit", "_begin_stretch"])
def test_a_fault_in_the_fast_path_does_not_reach_the_loop(
    name: str, daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    expected = Loop(net := model(), adamw(net)).run(12)
    monkeypatch.setattr(FastPath, name, fail)
    watched = Loop(net := model(), adamw(net))
    with sentinel.attach(watched.net, watched.optimizer):
        assert watched.run(12) == expected
    assert len(swallowed) == 1
    assert "a fault of ours" in swallowed[0]


class Eventful(torch.optim.SGD):
    happens: Any = None
    late = False

    def step(self, closure: Any = None) -> Any:
        if self.happens is not None and not self.late:
            self.happens()
        result = super().step(closure)
        if self.happens is not None and self.late:
            self.happens()
        return result


def train_with_event(happens: Any, *, late: bool = False) -> list[float]:
    """Return the losses of a loop whose step 6, on the fast path, calls `happens`. `late`: at the step's end."""
    net, losses = model(), []
    optimizer = Eventful(net.parameters(), lr=1e-2)
    optimizer.late = late
    with sentinel.attach(net, optimizer) as monitor:
        for seq, batch in enumerate(batches(13)):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.happens = functools.partial(happens, monitor) if seq == 6 else None
            optimizer.step()
            scaled_losses.by = None  # from `scaled`, which has no backward pass
    return losses


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["reward", "loss"])
def test_a_number_that_is_logged_inside_a_step_belongs_to_that_step(name: str, late: bool, daemon: FakeDaemon) -> None:
    train_with_event(lambda monitor: monitor.log(**{name: 3.0}), late=late)
    daemon.ended()
    assert [seq for seq, value in daemon.series(name).items() if value == 3.0] == [6]


def test_scaling_on_another_thread_inside_a_step_loses_no_loss(daemon: FakeDaemon) -> None:
    def beside(monitor: sentinel.Monitor) -> None:
        thread = threading.Thread(target=scaled, args=(monitor,))
        thread.start()
        thread.join()

    losses = train_with_event(beside)
    daemon.ended()
    assert daemon.series("loss") == dict(enumerate(losses))


def test_a_loss_inside_a_step_that_is_not_finite_is_noticed(daemon: FakeDaemon, entered: list[int]) -> None:
    train_with_event(lambda _: (torch.ones((), requires_grad=True) * math.nan).backward())
    daemon.ended()
    assert math.isnan(daemon.series("loss")[6])
    assert entered == [0, 1, 2, 3, 4, *range(7, 13)]


def test_none_as_the_closure_is_no_closure(daemon: FakeDaemon, entered: list[int]) -> None:
    """Accelerate passes None on as the closure."""
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for seq, batch in enumerate(batches(13)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step(None) if seq % 2 else optimizer.step(closure=None)
    daemon.ended()
    assert entered == [0, 1, 2, 3, 4, 8, 12]


@pytest.mark.parametrize("named", [False, True])
def test_a_step_with_a_closure_is_looked_at_whole(named: bool, daemon: FakeDaemon, entered: list[int]) -> None:
    """The closure's backward pass may come inside the step, even where there was one before it."""
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for seq, batch in enumerate(batches(13)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if seq != 10:
                optimizer.step()
            elif named:
                optimizer.step(closure=lambda: 0.0)
            else:
                optimizer.step(lambda: 0.0)
    daemon.ended()
    assert entered == [0, 1, 2, 3, 4, 8, 10, 12]


def test_an_optimizer_monitor_that_is_stopped_in_a_stretch_counts_no_more_steps(daemon: FakeDaemon) -> None:
    loop = Loop(net := model(), adamw(net))
    with sentinel.attach(loop.net, loop.optimizer) as monitor:
        (watching,) = find_session(monitor).monitors
        loop.run(10)
        watching.stop()
        loop.run(1)
        assert watching.seq == 10


@pytest.mark.faults
def test_a_device_that_cannot_be_asked_does_not_break_the_forward_pass(
    daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise RuntimeError("a fault of the device's")

    expected = Loop(net := model(), adamw(net)).run(3)
    watched = Loop(net := model(), adamw(net))
    monkeypatch.setattr(forward_passes, "CUDA", True)
    monkeypatch.setattr(forward_passes, "is_capturing", fail)
    with sentinel.attach(watched.net, watched.optimizer):
        assert watched.run(3) == expected
    assert len(swallowed) == 1


class Overflowing(nn.Linear):
    """A layer that overflows in the backward pass if the gradient that comes back is not 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).mul(0.0).mul(1e30).mul(1e30)


def test_a_call_that_runs_a_batch_again_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fast loop no gradient is held; the call that runs the batch again is slow, and not the loop's."""
    net, accumulator = Overflowing(6, 1), StepAccumulator()
    sent: list[Any] = []
    slot = CallSlot(net)
    collector = EvidenceCollector([slot], sent.append)
    slot.known, slot.returned_at = True, math.inf
    forward_passes.watch(net, accumulator, slot, [])
    net(torch.ones(2, 6)).sum().backward()
    slot.returned_at = 0.0
    step = Step(7, None, StepTotals(loss=0.0), values={"grad_norm": math.nan})
    collector.look(step, withheld=False, exact=True)
    assert sent[0].content["origin"] == "operation"
    assert "a constant stood for it" in sent[0].content["missing"][0]


def test_a_loss_outlier_among_those_since_the_last_look_is_noticed_at_the_next(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_outliers, "SPAN", 4)
    noise = {seq: 1.0 + 2.0 * (seq % 2) for seq in range(9)}
    train_with(24, {**noise, 11: 8.0})
    daemon.ended()
    assert [seq for seq in daemon.series("learning_rate") if seq >= 8] == [8, 12, 13, 14, 15, 16, 20]
