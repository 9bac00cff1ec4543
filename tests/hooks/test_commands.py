"""Messages of the daemon and their effects: notices, governor, rollback, skipped batches."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import wire
from sentinel.errors import RunStopped
from sentinel.hooks.core.governor import COARSEST, RARE_STEPS
from sentinel.hooks.session.command_handler import CommandHandler
from sentinel.hooks.session.monitor import Monitor
from sentinel.hooks.session.session import RunSession
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.transport.sender import Sender
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model
from tests.hooks.sessions import find_session


def loop(**options: Any) -> Loop:
    net = model()
    return Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2), **options)


def internals(monitor: Monitor) -> tuple[RunSession, OptimizerMonitor]:
    return find_session(monitor), find_session(monitor).monitors[0]


def received(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set once the rank has acted on a message other than the welcome."""
    done, original = threading.Event(), CommandHandler.receive

    def receive(self: CommandHandler, message: wire.ToRank) -> None:
        original(self, message)
        if not isinstance(message, wire.Welcome):
            done.set()

    monkeypatch.setattr(CommandHandler, "receive", receive)
    return done


def test_a_notice_reaches_the_terminal_and_the_user(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    watched, got, alerts = loop(), threading.Event(), []
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        monitor.on_alert(lambda alert: (alerts.append(alert), got.set()))
        daemon.wait(lambda: daemon.of(wire.Hello))
        daemon.send(wire.Notice(text="LossSpike at step 3", alert={"alert": "LossSpike", "step": 3}))
        assert got.wait(20)
    assert "LossSpike at step 3\n" in capsys.readouterr().err
    assert alerts == [{"alert": "LossSpike", "step": 3}]


def test_attention_samples_every_step(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    done = received(monkeypatch)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(4)
        daemon.wait(lambda: daemon.of(wire.Hello))
        daemon.send(wire.Attend(steps=3))
        assert done.wait(20)
        watched.run(6)
    daemon.ended()
    assert list(daemon.layers("layer_grad_norm")) == [0, 4, 5, 6, 8]


def test_batches_come_close_together_while_something_looks_odd(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sentinel.hooks.transport.sender.INTERVAL_SECONDS", 1000.0)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        daemon.wait(lambda: daemon.of(wire.Hello))
        watched.run(10)
        find_session(monitor).governor.attend(10, 50)
        find_session(monitor).sender.wake()
        daemon.wait(lambda: 9 in daemon.seqs())
        monkeypatch.setattr(find_session(monitor).sender, "wake", lambda: None)
        watched.run(2)
        daemon.wait(lambda: 11 in daemon.seqs())


def test_an_ordered_spacing_is_taken_and_reported(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    done = received(monkeypatch)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(1)
        daemon.wait(lambda: daemon.of(wire.Batch))
        daemon.send(wire.Spacing(at=4, tiers={"1": 2, "2": 2}))
        assert done.wait(20)
        watched.run(9)
    daemon.ended()
    assert list(daemon.layers("layer_grad_norm")) == [0, 4, 6, 8]
    paces = [batch.pace for batch in daemon.of(wire.Batch) if batch.pace]
    assert [pace.spacing for pace in paces] == [{"0": 1, "1": 1, "2": 8, "3": 256}, {"0": 1, "1": 2, "2": 2, "3": 256}]
    assert [pace.wanted for pace in paces] == [{"0": 1, "1": 1, "2": 8, "3": 256}] * 2


@pytest.mark.governed
def test_what_the_daemon_costs_makes_sampling_rarer(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    done = received(monkeypatch)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer, overhead=1.0) as monitor:
        governor = internals(monitor)[0].governor
        watched.run(20)
        assert governor.spacing[2] < COARSEST, "as much as the loop itself may be spent"
        daemon.send(wire.DaemonCost(share=1.5))
        assert done.wait(20)
        watched.run(30)
        coarsest = {0: governor.spacing[0], 1: COARSEST, 2: COARSEST, 3: governor.spacing[3]}
        assert governor.spacing == coarsest
        assert governor.spacing[3] >= RARE_STEPS
    daemon.ended()
    paces = [batch.pace for batch in daemon.of(wire.Batch) if batch.pace]
    assert paces[-1].costs["daemon"] == 1.5
    assert paces[-1].spacing == {str(tier): every for tier, every in coarsest.items()}


def test_a_request_that_cannot_be_served_is_answered(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(2)
        daemon.wait(lambda: daemon.of(wire.Hello))
        daemon.send(wire.Prepare(id=1, at=9, to=0))
        daemon.send(wire.Ask(id=2, what="the weather"))
        daemon.wait(lambda: daemon.of(wire.Prepared) and daemon.of(wire.Reply))
    assert daemon.of(wire.Prepared) == [wire.Prepared(id=1, ok=False, seq=1, reason="no rollback is armed")]
    assert [(reply.id, reply.ok) for reply in daemon.of(wire.Reply)] == [(2, False)]


def test_phases(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        watched.run(2)
        with monitor.phase("eval"):
            pass
    daemon.ended()
    assert [(phase.name, phase.seq) for phase in daemon.of(wire.PhaseChanged)] == [("eval", 2), ("", 2)]
    kinds = [type(message) for message in daemon.messages]
    assert kinds.index(wire.Batch) < kinds.index(wire.PhaseChanged), "steps come before what was said after them"


def test_stages(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        watched.run(2)
        monitor.stage("longer\nsequences")
        watched.run(1)
    daemon.ended()
    assert [(stage.name, stage.seq) for stage in daemon.of(wire.StageBegan)] == [("longer\nsequences", 2)]
    kinds = [type(message) for message in daemon.messages]
    assert kinds.index(wire.Batch) < kinds.index(wire.StageBegan), "steps come before what was said after them"


def test_a_stage_is_sent_between_the_steps_before_it_and_its_first(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage keeps its place among the steps also where the sender gets to both late, as beside a fast loop."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with sentinel.attach(net, optimizer) as monitor:
        with monkeypatch.context() as held:
            held.setattr(Sender, "_encode", lambda self, connection: None)
            for seq, batch in enumerate(batches(12)):
                if seq in (5, 9):
                    monitor.stage(f"from {seq}")
                loss_of(net, batch).backward()
                optimizer.step()
        monitor.stage("after them")
    daemon.ended()
    order: list[object] = []
    for message in daemon.messages:
        if isinstance(message, wire.Batch):
            order += wire.unpack_column("q", message.seqs)
        elif isinstance(message, wire.StageBegan):
            order.append(message.name)
    assert order == [*range(5), "from 5", *range(5, 9), "from 9", *range(9, 12), "after them"]


def test_notes_are_printed_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = lambda _: wire.frame(wire.Welcome(version="1", notes=("no history",)))
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        watched.run(1)
        daemon.wait(lambda: daemon.of(wire.Batch))
        daemon.hang_up()
        watched.run(1)
        daemon.wait(lambda: len(daemon.of(wire.Hello)) == 2)
        del monitor
    said = capsys.readouterr().err
    assert said.count("no history") == 1


# Rollback: the restorer, and when it is called.


class Recorder:
    """Records the calls that the restorer would get."""

    def __init__(self, watched: Loop) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at = -1
        self._weight = next(watched.net.parameters())
        self._before = self._weight.detach().clone()

    def _moved(self) -> bool:
        moved = not torch.equal(self._before, self._weight)
        self._before = self._weight.detach().clone()
        return moved

    def enter_step(self, seq: int) -> None:
        self.calls.append(("enter", seq, self._moved()))

    def suspect(self) -> None:
        pass

    def close(self) -> None:
        pass

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        self.calls.append(("exit", seq, self._moved(), skipped))
        if seq == self.stop_at:
            raise RunStopped("budget spent")


@pytest.mark.parametrize("fused", [False, True])
def test_the_restorer_is_called_at_both_ends_of_each_step(fused: bool, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    watched = Loop(net, optimizer, GradScaler("cpu", 64.0), half=True, overflow=frozenset({1}))
    with sentinel.attach(net, optimizer) as monitor:
        internals(monitor)[1].guard = recorder = Recorder(watched)
        watched.run(3)
    entered = [("enter", 1, False)] if fused else []  # else the scaler does not even call the optimizer
    assert recorder.calls == [
        ("enter", 0, False),
        ("exit", 0, True, False),
        *entered,
        ("exit", 1, False, True),
        ("enter", 2, False),
        ("exit", 2, True, False),
    ]


def test_a_run_that_is_stopped_says_why(daemon: FakeDaemon) -> None:
    watched = loop()

    def train() -> None:
        with sentinel.attach(watched.net, watched.optimizer) as monitor:
            internals(monitor)[1].guard = recorder = Recorder(watched)
            recorder.stop_at = 2
            watched.run(9)

    with pytest.raises(RunStopped, match="86"):
        train()
    assert daemon.ended_as(reason="stopped", next_seq=3, detail="budget spent", status=86)
    assert daemon.seqs() == [0, 1, 2], "the step at which it was stopped is told, too"


@pytest.mark.faults
def test_a_restorer_that_fails_is_disarmed(daemon: FakeDaemon, swallowed: list[str]) -> None:
    class Broken(Recorder):
        def enter_step(self, seq: int) -> None:
            raise ZeroDivisionError

    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        internals(monitor)[1].guard = Broken(watched)
        watched.run(3)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert len(swallowed) == 1


def test_snapshots_pause_while_the_daemon_is_gone(daemon: FakeDaemon) -> None:
    """Steps are not judged then: snapshots of a fault would pass for good ones by their age, and replace those."""
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer, rollback=sentinel.Rollback(every=1, margin=1)) as monitor:
        restorer = find_session(monitor).restorer
        assert restorer is not None
        watched.run(6)
        daemon.answer = lambda _: b""
        daemon.hang_up()
        daemon.wait(lambda: len(daemon.of(wire.Hello)) == 2)  # a successor listens, and has not answered yet
        held = restorer.held
        watched.run(10)
        assert held == restorer.held != ()
        daemon.send(wire.Welcome(version="t"))
        until = time.monotonic() + WAIT
        while restorer.held == held and time.monotonic() < until:
            watched.run(1)
        assert restorer.held[-1] >= 16


def test_a_rollback_over_the_wire(daemon: FakeDaemon) -> None:
    """A rollback is prepared, committed, restored and reported: by the real restorer, unnoticed by the loop."""
    watched, told = loop(), []
    with sentinel.attach(watched.net, watched.optimizer, step=100, rollback=sentinel.Rollback(every=4, margin=2)) as m:
        m.on_rollback(lambda to, at: told.append((to, at)))
        watched.run(6)
        daemon.wait(lambda: [s for s in daemon.of(wire.SnapshotTaken) if s.seq == 4])
        kept = {}
        daemon.send(wire.Prepare(id=1, at=8, to=4))
        daemon.wait(lambda: daemon.of(wire.Prepared))
        assert daemon.of(wire.Prepared)[0].ok
        daemon.send(wire.Commit(id=1))
        for step, batch in enumerate(batches(4, seed=5), start=6):
            watched.optimizer.zero_grad()
            loss_of(watched.net, batch).backward()
            watched.optimizer.step()
            kept[step] = watched.net[0].weight.detach().clone()  # type: ignore[index]
        daemon.wait(lambda: daemon.of(wire.RolledBack))
    reference = loop()
    reference.run(5)
    assert torch.equal(kept[8], reference.net[0].weight)  # type: ignore[index]
    done = daemon.of(wire.RolledBack)[0]
    assert (done.ok, done.to, done.at) == (True, 4, 8)
    assert told == [(104, 108)]
    kinds = [type(message) for message in daemon.messages]
    batch_of_8 = next(i for i, m in enumerate(daemon.messages) if isinstance(m, wire.Batch) and b"\x08\0\0\0" in m.seqs)
    assert batch_of_8 < kinds.index(wire.RolledBack)


def test_detaching_inside_a_step(daemon: FakeDaemon) -> None:
    """PyTorch is iterating over the hooks during a step: removing them then would raise into the loop."""
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)

    class Leaver(Recorder):
        def exit_step(self, seq: int, *, skipped: bool) -> None:
            monitor.detach()

    internals(monitor)[1].guard = Leaver(watched)
    watched.optimizer.register_step_post_hook(lambda *_: None)
    watched.run(3)
    assert daemon.ended().reason == "detach"
    assert daemon.seqs() == [0]
    # Attaching again removes what was left.
    sentinel.attach(watched.net, watched.optimizer).detach()
    assert len(watched.optimizer._optimizer_step_post_hooks) == 1  # type: ignore[attr-defined]
    assert not watched.net._forward_hooks


# Batches.


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(6.0)), batch_size=1)


def numbers(source: Any) -> list[int]:
    return [int(batch) for (batch,) in source]


def test_batches_of_the_given_loader_are_skipped(daemon: FakeDaemon) -> None:
    watched, data, other = loop(), loader(), loader()
    with sentinel.attach(watched.net, watched.optimizer, loader=data) as monitor:
        source = internals(monitor)[0].batches
        iterator = iter(data)
        assert int(next(iterator)[0]) == 0
        source.skip(2)
        assert numbers(other) == [0, 1, 2, 3, 4, 5], "an evaluation's loader is left alone"
        assert numbers(iterator) == [3, 4, 5]
        source.skip(8)
        assert numbers(data) == []
        assert numbers(data) == [2, 3, 4, 5], "what an epoch could not give the next one gives"


def test_batches_of_any_iterable_are_skipped(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        source = internals(monitor)[0].batches
        seen = []
        for item in monitor.batches(range(6)):
            seen.append(item)
            if item == 1:
                source.skip(2)
        assert seen == [0, 1, 4, 5]
        assert list(monitor.batches(range(3))) == [0, 1, 2]


def test_skipping_needs_a_loader(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        assert "pass attach(loader=...)" in internals(monitor)[0].batches.skip(2)
        assert numbers(loader()) == [0, 1, 2, 3, 4, 5]


# What rollback needs and `attach` was not given.


def test_scaler_and_schedulers_are_found() -> None:
    gc.collect()  # scalers of tests before this one
    one, other = loop(), loop()
    mine = torch.optim.lr_scheduler.StepLR(one.optimizer, 3)
    theirs = torch.optim.lr_scheduler.StepLR(other.optimizer, 3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(one.optimizer)
    scaler, off = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    scalers, schedulers = discovery.bystanders([one.optimizer])
    assert scalers == [scaler]
    assert {id(found) for found in schedulers} == {id(mine), id(plateau)}
    del theirs, off
