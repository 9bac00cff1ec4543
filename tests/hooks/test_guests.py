"""Sentinel survives passing errors of the machine, which cost a sample, and passes the user's own errors on."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import defer_signals
from sentinel.hooks.loop import patches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.measure.probes import accumulation
from sentinel.hooks.rollback.agreement import TwoPhaseCommit
from sentinel.hooks.session import monitor as monitor_module
from sentinel.hooks.session.event_router import EventRouter
from sentinel.hooks.snapshot.host_buffer import HostBuffer
from sentinel.hooks.step import optimizer_monitor
from sentinel.hooks.transport import records
from tests.hooks import loops
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import fit, sgd
from tests.hooks.sessions import list_sessions

HOOKS = str(Path(optimizer_monitor.__file__).parents[1])


class TimeUp(Exception):
    """Raised by a signal handler of the user's."""


def time_up(number: int, frame: FrameType | None) -> None:
    raise TimeUp


@pytest.fixture
def handler() -> Iterator[None]:
    former = signal.signal(signal.SIGUSR1, time_up)
    yield
    signal.signal(signal.SIGUSR1, former)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try what failed again at the next step."""
    monkeypatch.setattr(faults, "FIRST_PAUSE", 0.0)


@contextmanager
def signalled(at: int) -> Iterator[list[bool]]:
    """Raise the signal at the beginning of call `at`, counted from now on and from 0, of a function of ours."""
    calls, came = 0, [False]

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        function = frame.f_code
        # A generator is also "called" where it is freed, and nothing can be raised there.
        if event == "call" and function.co_filename.startswith(HOOKS) and not function.co_flags & CO_GENERATOR:
            calls += 1
            if calls > at and not came[0]:
                came[0] = True
                signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(profile)
    try:
        yield came
    finally:
        sys.setprofile(None)


@contextmanager
def signalled_in(function: str) -> Iterator[None]:
    """Raise the signal at the beginning of the first call of a function of ours of that name."""
    came = False

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal came
        code = frame.f_code
        if event == "call" and code.co_name == function and code.co_filename.startswith(HOOKS) and not came:
            came = True
            signal.raise_signal(signal.SIGUSR1)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("armed", [False, True])
def test_what_a_signal_handler_raises_in_our_frames_reaches_the_loop(
    armed: bool, handler: None, daemon: FakeDaemon, fast: None
) -> None:
    """Wherever the signal comes, monitoring goes on, and rollback stays armed."""
    net = loops.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    terms = sentinel.Rollback(every=2, margin=0) if armed else None
    monitor = sentinel.attach(net, optimizer, rollback=terms)
    fit(net, optimizer, 8)
    reached, at = 0, 0
    while True:
        with signalled(at) as came:
            try:
                fit(net, optimizer, 8)
            except TimeUp:
                reached += 1
        if not came[0]:
            break
        at += 1 + at // 4
    assert reached > 12, "the loop got every one"
    session = list_sessions()[-1]
    fit(net, optimizer, 8)
    (watching,) = session.monitors
    last = watching.seq - 1
    daemon.wait(lambda: last in daemon.series("loss"))
    assert session.accumulator.unseen.texts == ()
    assert watching.collector is not None
    if armed:
        restorer = session.restorer
        assert restorer is not None
        assert restorer.held
    monitor.detach()


def test_a_signal_while_a_snapshot_is_copied(handler: None, daemon: FakeDaemon) -> None:
    """What fails in the copy is raised again as a RollbackError, but what a signal handler raises is not."""
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0))
    with signalled_in("copy"), pytest.raises(TimeUp):
        fit(net, optimizer, 8)
    fit(net, optimizer, 8)
    session = list_sessions()[-1]
    assert session.unseen.texts == (), "rollback is still armed"
    assert session.restorer is not None
    assert session.restorer.held
    monitor.detach()


def test_a_signal_while_gradients_are_added_up(handler: None) -> None:
    """The sum lacks a gradient from then on, and the next step begins a new one, as after a passing error."""

    def alone() -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return True

    gradients = accumulation._Sum(alone)
    with pytest.raises(TimeUp):
        gradients.add((torch.ones(4),))
    assert gradients.broken
    assert gradients.passes


def test_a_handler_that_assigns_to_its_arguments() -> None:
    def translate(number: Any, frame: Any) -> None:
        number = signal.Signals(number).name
        raise TimeUp(number)

    former = signal.signal(signal.SIGUSR1, translate)
    try:
        with pytest.raises(TimeUp), faults.swallow_faults("a test", "without it"):
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, former)


@pytest.mark.faults  # a rollback that fails is logged
def test_a_signal_while_a_rank_waits_for_the_verdict(
    handler: None, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0))
    fit(net, optimizer, 4)
    daemon.wait(lambda: len(daemon.of(wire.SnapshotTaken)) >= 2)
    restorer = list_sessions()[-1].restorer
    assert restorer is not None
    to, at = restorer.held[-1], list_sessions()[-1].next_seq + 1
    daemon.send(wire.Prepare(id=1, at=at, to=to))
    daemon.wait(lambda: daemon.of(wire.Prepared))
    assert daemon.of(wire.Prepared)[-1].ok

    wait = TwoPhaseCommit.wait

    def note(promise: TwoPhaseCommit, seconds: float) -> Any:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return wait(promise, seconds)

    with monkeypatch.context() as noting:
        noting.setattr(TwoPhaseCommit, "wait", note)
        with pytest.raises(TimeUp):
            fit(net, optimizer, 4)
    daemon.wait(lambda: daemon.of(wire.RolledBack))
    assert "interrupted" in daemon.of(wire.RolledBack)[-1].reason
    taken = len(daemon.of(wire.SnapshotTaken))
    until = time.monotonic() + WAIT
    while len(daemon.of(wire.SnapshotTaken)) == taken and time.monotonic() < until:
        fit(net, optimizer, 4)  # none is taken in the half second after a promise
    assert len(daemon.of(wire.SnapshotTaken)) > taken
    assert list_sessions()[-1].unseen.texts == ()
    monitor.detach()


def test_no_signal_interrupts_a_restore(handler: None) -> None:
    order: list[str] = []
    with pytest.raises(TimeUp), defer_signals():  # noqa: PT012, it is raised at its end
        signal.raise_signal(signal.SIGUSR1)
        order.append("whole")
    assert order == ["whole"]
    assert signal.getsignal(signal.SIGUSR1) is time_up


class Saved:
    """An object of the user's with state, as `Rollback(state=)` takes it."""

    def __init__(self, save: Callable[[], None]) -> None:
        self.save = save

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Scaled(torch.nn.Module):
    """A layer with extra state."""

    def __init__(self, save: Callable[[], None]) -> None:
        super().__init__()
        self.save = save

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> dict[str, Any]:
        self.save()
        return {}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "whose"), [(Saved, "state['ema']: its state_dict()"), (Scaled, "Scaled 1: its get_extra_state()")]
)
def test_what_user_code_raises_when_we_call_it_does_not_reach_the_loop(
    kind: Any, whose: str, daemon: FakeDaemon
) -> None:
    failing = False

    def save() -> None:
        if failing:
            raise KeyError("shadow")

    held = kind(save)
    net = torch.nn.Sequential(loops.model(), *([held] if kind is Scaled else []))
    optimizer = sgd(net)
    terms = sentinel.Rollback(every=1, margin=0, state={"ema": held} if kind is Saved else {})
    monitor = sentinel.attach(net, optimizer, rollback=terms)
    fit(net, optimizer, 3)
    failing = True
    fit(net, optimizer, 3)
    text = f"rollback (disarmed: {whose} raised KeyError('shadow'))"
    daemon.wait(lambda: any(text in hello.unseen for hello in daemon.of(wire.Hello)))
    monitor.detach()
    daemon.ended()
    assert len(daemon.series("loss")) == 6


def test_a_signal_in_the_users_state_dict_reaches_the_loop(handler: None, daemon: FakeDaemon) -> None:
    calls = 0

    def save() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            signal.raise_signal(signal.SIGUSR1)

    net = loops.model()
    optimizer = sgd(net)
    terms = sentinel.Rollback(every=1, margin=0, state={"ema": Saved(save)})
    sentinel.attach(net, optimizer, rollback=terms)
    with pytest.raises(TimeUp):
        fit(net, optimizer, 6)
    fit(net, optimizer, 6)
    session = list_sessions()[-1]
    assert session.unseen.texts == (), "rollback is still armed"
    assert session.restorer is not None
    assert session.restorer.held


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (OSError(24, "files"), "OSError: [Errno 24] files"),
    ],
)
def test_a_probe_that_fails_for_a_while_is_tried_again(
    error: Exception, words: str, daemon: FakeDaemon, fast: None, impatient: None, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = [True]

    class Counts(Probe):
        tier = 1
        signals = {"counted": "rank"}

        def after(self, step: Step) -> None:
            if failing[0]:
                raise error
            step.values["counted"] = 1.0

    net = loops.model()
    optimizer = sgd(net)
    optimizer.probes = [Counts()]  # type: ignore[attr-defined]
    monitor = sentinel.attach(net, optimizer)
    fit(net, optimizer, 40)
    text = f"what the probe Counts measures, for now: {words}"
    daemon.wait(lambda: any(text in hello.unseen for hello in daemon.of(wire.Hello)))
    failing[0] = False
    fit(net, optimizer, 40)
    daemon.wait(lambda: daemon.of(wire.Hello)[-1].unseen == ())
    monitor.detach()
    daemon.ended()
    assert len(daemon.series("loss")) == 80
    assert daemon.series("counted")
    assert daemon.of(wire.Batch)[-1].skipped >= 2
    assert capsys.readouterr().err.count("not seen for now: what the probe Counts measures") == 1


def test_no_memory_for_the_statistics_of_gradients_costs_those_alone(
    daemon: FakeDaemon, fast: None, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer)
    with monkeypatch.context() as full:
        full.setattr(Gradients, "__init__", no_memory)
        fit(net, optimizer, 20)
    before = list_sessions()[-1].accumulator.unseen.texts
    fit(net, optimizer, 20)
    monitor.detach()
    daemon.ended()
    assert before == (
        f"{optimizer_monitor.GRADIENTS}, for now: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB.",
    )
    assert sorted(daemon.series("loss")) == list(range(40))
    assert not any(seq < 20 for seq in daemon.series("grad_norm"))
    assert any(seq < 20 for seq in daemon.series("rss_bytes")), "memory is what matters most then"
    assert any(seq >= 20 for seq in daemon.series("grad_norm"))
    assert any(seq >= 20 for seq in daemon.layers("layer_grad_norm"))


def test_what_failed_for_long_is_tried_again_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed for long must be seen again within 30 s of the end of the trouble."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(faults, "time", clock)
    kept, tries = faults.Unseen(), [0.0]
    while clock.now < 600:
        if not kept.is_paused("a test"):
            tries.append(clock.now)
            try:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            except OSError:
                assert not kept.record_failure("a test", "a test", "without it")
        clock.now += 0.1
    assert max(later - earlier for earlier, later in pairwise([*tries, 600.0])) < 10
    assert len(tries) < 100, "and not at every step"


class Lacking:
    """Replaces a function, and raises an out-of-memory error while `lacking` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.lacking, function = True, getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.lacking:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (patches, "plain_loss", ""),  # the other way to it is tried at once
        (patches, "loss_of", "losses"),
        (EventRouter, "backward_ended", "backward ended"),
        (EventRouter, "gradients_clipped", "gradients clipped"),
        (monitor_module, "_number", "what is logged"),
        (StepAccumulator, "batch_fetched", "waits for data"),
        (records, "Record", "steps of SGD"),
    ],
)
def test_an_error_that_passes_is_counted_wherever_it_hits(
    owner: Any, name: str, what: str, daemon: FakeDaemon, fast: None, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A passing error is not logged as a fault of ours; what was not seen is named until it is seen again."""
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=4, margin=0))
    unseen = list_sessions()[-1].accumulator.unseen

    def train() -> None:
        for batch in monitor.batches(list(loops.batches(10))):
            optimizer.zero_grad()
            loss = loops.loss_of(net, batch) * torch.ones((), requires_grad=True)
            torch.autograd.backward([loss])
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            monitor.log(mine=1.0)

    lacking = Lacking(monkeypatch, owner, name)
    train()
    error = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB."
    assert unseen.texts == ((f"{what}, for now: {error}",) if what else ())
    assert unseen.skipped >= 9 if what else not unseen.skipped
    lacking.lacking = False
    train()
    assert unseen.texts == ()
    monitor.detach()
    daemon.ended()
    assert set(range(10, 20)) <= daemon.series("loss").keys()


def test_a_snapshot_whose_checksum_failed_is_counted(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=2, margin=0))
    lacking = Lacking(monkeypatch, HostBuffer, "checksum")
    unseen = list_sessions()[-1].accumulator.unseen
    fit(net, optimizer, 6)
    restorer = list_sessions()[-1].restorer
    assert restorer is not None
    held = [restorer.ring.find(seq) for seq in restorer.held]
    assert ["making it failed" in one.flaw() for one in held if one is not None] == [True, True]
    assert unseen.skipped == 3
    assert [text.partition(",")[0] for text in unseen.texts] == ["checksums of snapshots"]
    lacking.lacking = False
    fit(net, optimizer, 6)
    held = [restorer.ring.find(seq) for seq in restorer.held]
    assert [one.flaw() for one in held if one is not None] == ["", ""]
    assert unseen.texts == ()
    monitor.detach()


@pytest.mark.faults
def test_a_fault_of_ours_is_named_in_the_hello(daemon: FakeDaemon, swallowed: list[str]) -> None:
    class Broken(Probe):
        signals = {"broken": "rank"}

        def after(self, step: Step) -> None:
            raise ValueError("no such layer")

    net = loops.model()
    optimizer = sgd(net)
    optimizer.probes = [Broken()]  # type: ignore[attr-defined]
    monitor = sentinel.attach(net, optimizer)
    fit(net, optimizer, 5)
    text = "what the probe Broken measures (internal fault: ValueError: no such layer)"
    daemon.wait(lambda: any(text in hello.unseen for hello in daemon.of(wire.Hello)))
    monitor.detach()
    assert len(swallowed) == 1


def test_without_descriptors_memory_is_measured_again_once_there_are_some(
    daemon: FakeDaemon, fast: None, impatient: None
) -> None:
    net = loops.model()
    optimizer = sgd(net)
    monitor = sentinel.attach(net, optimizer)
    fit(net, optimizer, 9)
    daemon.wait(lambda: daemon.series("rss_bytes"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        fit(net, optimizer, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    missed = set(range(9, 29))
    fit(net, optimizer, 20)
    monitor.detach()
    daemon.ended()
    assert not missed & daemon.series("rss_bytes").keys()
    assert any(seq > 29 for seq in daemon.series("rss_bytes"))
    assert len(daemon.series("loss")) == 49
