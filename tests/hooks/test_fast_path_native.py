"""What is called at every step of a fast loop, in C: the same as in Python, whatever happens between."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import wire
from sentinel.hooks import contents, fast_path_native, forward, kept, losses, pacing, probe, suspicion
from sentinel.hooks.backward_patch import BackwardPatch
from sentinel.hooks.batches import Batches
from sentinel.hooks.contents import Contents
from sentinel.hooks.kept import Slot
from sentinel.hooks.listening import Listening
from sentinel.hooks.pacing import Pacing
from sentinel.hooks.sender import Sender
from sentinel.hooks.step_queue import QUEUE_STEPS
from sentinel.hooks.stream import Stream
from sentinel.hooks.tally import Ledger, Work
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

pytestmark = pytest.mark.skipif(fast_path_native.missing(), reason="the compiled part was not built")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every fourth step is looked at whole, whatever it costs, and a model is soon known."""
    monkeypatch.setattr(pacing, "FIRST", {0: 4, 1: 8, 2: 8, 3: 256})
    monkeypatch.setattr(pacing, "WHOLE", 4)
    monkeypatch.setattr(probe, "EARLY", 4)
    monkeypatch.setattr(Pacing, "_decide", lambda self: None)
    monkeypatch.setattr(kept, "FIRST_CALLS", 6)
    monkeypatch.setattr(suspicion, "NONFINITE_STEPS", 4)
    monkeypatch.setattr(kept, "LOOKS", 2)
    yield
    fast_path_native.use()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each was left to Python."""
    counts: Counter[str] = Counter()
    for name, (owner, method) in LEFT_TO.items():
        monkeypatch.setattr(owner, method, counting(counts, name, getattr(owner, method)))
    return counts


LEFT_TO = {
    "forward begins": (forward.Stopwatch, "start"),
    "forward ends": (forward.Stopwatch, "stop"),
    "backward begins": (Listening, "backward_begins"),
    "backward ends": (BackwardPatch, "_ended"),
    "fetch begins": (Listening, "to_skip"),
    "fetch ends": (Batches, "batch_fetched"),
    "step begins": (Stream, "begins"),
    "step ends": (Stream, "ends"),
}
"""What is called in Python where the compiled part does not do all."""


def counting(counts: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        counts[name] += 1
        return function(*arguments, **named)

    return call


TALLIED = "loss", "backwards", "batches", "forwards", "steps", "logged", "fp16", "evaluating", "batch"


class Trainer:
    """A loop in whose steps all kinds of things happen."""

    def __init__(self, monitor: sentinel.Monitor, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.monitor, self.net, self.optimizer = monitor, net, optimizer
        self.states: list[dict[str, Any]] = []
        """Of the ledger and of the call that is kept, before each step."""
        self.told: list[str] = []
        """Losses that were not taken on the fast path."""
        session = monitor._session
        assert session is not None
        assert session._listening is not None
        assert session.inquest is not None
        self._ledger, (self._slot,), listening = session.ledger, session.inquest._slots, session._listening
        backward_ended = listening.backward_ended

        def told(loss: Any, seconds: float) -> None:
            self.told.append(str(loss))
            backward_ended(loss, seconds)

        listening.backward_ended = told  # type: ignore[method-assign]
        self.loader, self.words = iter(DataLoader(range(10_000))), iter(DataLoader(["word"] * 10_000))

    def step(self, what: str, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        if happens := getattr(self, f"_{what}", None):
            happens(batch)
        elif what != "no pass":
            loss_of(self.net, batch).backward()
        self.states.append(self.state())
        self.optimizer.step(None) if what == "closure is None" else self.optimizer.step()

    def state(self) -> dict[str, Any]:
        tally, ledger, slot, kept = self._ledger.tally, self._ledger, self._slot, self._slot.kept
        found: dict[str, Any] = {name: str(getattr(tally, name)) for name in TALLIED}
        found |= {name: str(getattr(ledger, name)) for name in ("progress", "steps", "work", "calm_to", "captured")}
        if kept is not None:
            found["kept"] = float(kept.args[0].sum()), kept.kwargs, kept.unchanged, kept.autocast, kept.rng is None
        return found | {"slot": (slot.frozen, slot.draws, slot.known), "batches": ledger.feeds.batches}

    def _micro_batches(self, batch: torch.Tensor) -> None:
        for part in batch.chunk(2):
            (loss_of(self.net, part) / 2).backward()

    def _several_roots(self, batch: torch.Tensor) -> None:
        loss = loss_of(self.net, batch)
        torch.autograd.backward([loss, loss.double() * 0.5])

    def _vector(self, batch: torch.Tensor) -> None:
        (self.net(batch) - 1.0).square().backward(torch.ones(8, 1))

    def _clipped(self, batch: torch.Tensor) -> None:
        loss_of(self.net, batch).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)

    def _logged(self, batch: torch.Tensor) -> None:
        self.monitor.log(reward=float(batch.sum()))
        loss_of(self.net, batch).backward()

    def _surprise(self, batch: torch.Tensor) -> None:
        (loss_of(self.net, batch) * 1e4).backward()
        self.optimizer.zero_grad()

    def _infinite(self, batch: torch.Tensor) -> None:
        (loss_of(self.net, batch) * float("-inf")).backward()
        self.optimizer.zero_grad()

    def _infinite_part(self, batch: torch.Tensor) -> None:
        """The batch that is at fault is held, and not the one after it."""
        for part, factor in zip(batch.chunk(2), (float("inf"), 0.0), strict=True):
            (loss_of(self.net, part) * factor).backward()
        self.optimizer.zero_grad()

    def _deferred(self, batch: torch.Tensor) -> None:
        """As a snapshot is that waits for the loop."""
        self._ledger.defer(self._deferred_told)
        loss_of(self.net, batch).backward()

    def _deferred_told(self) -> None:
        self.told.append("deferred")

    def _captured(self, batch: torch.Tensor) -> None:
        self._ledger.captured = True
        loss_of(self.net, batch).backward()

    def _evaluation(self, batch: torch.Tensor) -> None:
        self.net.eval()
        with torch.no_grad():
            self.net(batch)
        loss_of(self.net, batch).backward()
        self.net.train()

    def _evaluation_after_it(self, batch: torch.Tensor) -> None:
        loss_of(self.net, batch).backward()
        with torch.no_grad():
            self.net(-batch)

    def _autocast(self, batch: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(self.net, batch).backward()

    def _batch(self, batch: torch.Tensor) -> None:
        next(self.loader)
        loss_of(self.net, batch).backward()

    def _words(self, batch: torch.Tensor) -> None:
        """Of which there is nothing to tell."""
        next(self.words)
        loss_of(self.net, batch).backward()

    def _double(self, batch: torch.Tensor) -> None:
        loss_of(self.net, batch).double().backward()

    def _beside(self, batch: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: self.net(batch))
        thread.start()
        thread.join()
        loss_of(self.net, batch).backward()


EVENTS = (
    "no pass", "closure is None", "micro_batches", "several_roots", "vector", "clipped", "logged", "surprise",
    "infinite", "infinite_part", "deferred", "captured", "evaluation", "evaluation_after_it", "autocast", "batch",
    "words", "double", "beside",
)  # fmt: skip


def watched(program: list[str], daemon: FakeDaemon) -> tuple[dict[str, dict[int, float]], dict[str, Any]]:
    """Values of all signals by name and seq, and what the ledger came to."""
    daemon.messages.clear()
    losses.scaled.ever = False
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with sentinel.attach(net, optimizer) as monitor:
        assert monitor._session is not None
        trainer = Trainer(monitor, net, optimizer)
        for what, batch in zip(program, batches(len(program)), strict=True):
            trainer.step(what, batch)
        came_to = {"next": monitor._session.next_seq, "weights": [p.tolist() for p in net.parameters()]}
        came_to |= {"states": [*trainer.states, trainer.state()], "told": trainer.told}
    daemon.ended()
    names = {name for batch in daemon.of(wire.Batch) for name in batch.columns}
    return {name: daemon.series(name) for name in names}, came_to


def is_time(name: str) -> bool:
    return name.endswith(("_seconds", "_bytes", "per_second")) or "memory" in name


@pytest.mark.parametrize("seed", range(10))
def test_it_is_the_same_as_in_python(seed: int, daemon: FakeDaemon, left: Counter[str]) -> None:
    chance = random.Random(seed)
    program = ["plain"] * 12 + [chance.choice(EVENTS) if chance.random() < 0.2 else "plain" for _ in range(80)]
    compiled = watched(program, daemon)
    assert max(left.values()) < len(program) - 10, left
    left.clear()
    fast_path_native.use(False)
    python = watched(program, daemon)
    assert left["step begins"] == left["step ends"] == len(program)
    for (name, ours), theirs in zip(sorted(compiled[0].items()), sorted(python[0].items()), strict=True):
        assert theirs[0] == name
        if is_time(name):
            assert ours.keys() == theirs[1].keys()
        else:
            assert ours == pytest.approx(theirs[1], nan_ok=True, rel=0.0, abs=0.0), name
    assert compiled[1] == python[1]


def test_it_is_what_most_steps_of_a_fast_loop_take(daemon: FakeDaemon, left: Counter[str]) -> None:
    watched(["plain"] * 64, daemon)
    assert left["forward begins"] < 16
    assert left["forward ends"] < 24
    assert left["backward begins"] == left["step begins"] == left["step ends"] == 16 + 3 + 1, "the whole ones"
    assert left["backward ends"] == 0


class Fed:
    """A loop that is fed by a DataLoader, and in which all kinds of things happen before a batch is fetched."""

    def __init__(self, monitor: sentinel.Monitor, net: nn.Module, loader: DataLoader[Any]) -> None:
        self._monitor, self._net, self._loader = monitor, net, loader
        self._batches: Iterator[Any] = iter(loader)
        self._other = DataLoader(TensorDataset(torch.randn(80, 6)), 8)
        self._others = iter(self._other)
        self.told: list[str] = []
        assert monitor._session is not None
        self._session = monitor._session
        self.states: list[dict[str, Any]] = []

    def step(self, what: str, optimizer: torch.optim.Optimizer) -> None:
        getattr(self, f"_{what}", lambda: None)()
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        self.states.append(self._state(batch[0]))
        optimizer.zero_grad()
        loss_of(self._net, batch[0]).backward()
        optimizer.step()

    def _state(self, batch: torch.Tensor) -> dict[str, Any]:
        ledger, batches = self._session.ledger, self._session.batches
        feeds, looked = ledger.feeds, batches._contents
        assert looked is not None
        found: dict[str, Any] = {"sum": float(batch.sum()), "looked": looked._count, "to skip": batches._to_skip}
        found |= {name: getattr(ledger.tally, name) for name in ("batch", "batches", "forwards")}
        found |= {name: getattr(feeds, name) for name in ("batches", "exhausted", "length")}
        found |= {"told": len(self.told), "waited": ledger.tally.data_seconds > 0.0}
        return found | {"progress": ledger.progress, "work": ledger.work}

    def _another(self) -> None:
        next(self._others)

    def _broken_off(self) -> None:
        self._batches = iter(self._loader)

    def _evaluation(self) -> None:
        with torch.no_grad():
            for (batch,) in self._other:
                self._net(batch)

    def _skipped(self) -> None:
        self._session.batches.skip(2)

    def _deferred(self) -> None:
        self._session.ledger.defer(self._deferred_told)

    def _deferred_told(self) -> None:
        self.told.append("deferred")

    def _beside(self) -> None:
        thread = threading.Thread(target=next, args=(self._batches,))
        thread.start()
        thread.join()

    def _watched(self) -> None:
        next(iter(self._monitor.batches(self._other)))

    def _watched_midway(self) -> None:
        next(iter(self._monitor.batches(self._batches)), None)

    def _due(self) -> None:
        """To be looked at again."""
        assert self._session.batches._contents is not None
        self._session.batches._contents._again_at = 0.0

    def _ahead(self) -> None:
        """As Accelerate fetches, from now on."""
        module: dict[str, Any] = {"__name__": "accelerate.data_loader"}
        exec("def fetched(batches): return next(batches)", module)
        self._batches = iter(self._loader)
        module["fetched"](self._batches)

    def _failed(self) -> None:
        """As where a batch could not be looked at."""
        self._session.batches._contents = Contents()


FETCHES = (
    "another", "beside", "broken_off", "deferred", "due", "evaluation", "failed", "skipped", "watched",
    "watched_midway",
)  # fmt: skip


def fed(program: list[str], daemon: FakeDaemon, workers: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
    """States after each fetch, and what was told."""
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(240, 6))
    net, loader = model(), DataLoader(rows, 8, num_workers=workers, persistent_workers=workers > 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with sentinel.attach(net, optimizer, loader=loader) as monitor:
        loop = Fed(monitor, net, loader)
        for what in program:
            loop.step(what, optimizer)
    daemon.ended()
    daemon.messages.clear()
    return loop.states, loop.told


@pytest.mark.parametrize("seed", range(6))
def test_batches_are_the_same_as_in_python(
    seed: int, daemon: FakeDaemon, left: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "SPACING_SECONDS", 1e9)
    chance = random.Random(seed)
    program = ["ahead" if seed == 1 else "plain"] + ["plain"] * 20
    program += [chance.choice(FETCHES) if chance.random() < 0.2 else "plain" for _ in range(80)]
    compiled = fed(program, daemon, workers=int(seed == 0))
    assert seed == 1 or left["fetch ends"] < 100
    fast_path_native.use(False)
    assert fed(program, daemon, workers=int(seed == 0)) == compiled


def test_a_batch_that_is_not_looked_at_is_left_to_nobody(
    daemon: FakeDaemon, left: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "SPACING_SECONDS", 1e9)
    fed(["plain"] * 60, daemon)
    assert left["fetch begins"] == 0
    assert left["fetch ends"] == contents.BURST + 1, "and the first of another epoch"


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("running", True), ("frozen", True), ("draws", None), ("draws", True), ("thread", 0), ("when_next", print)],
)
def test_a_forward_pass_out_of_the_ordinary_is_left_to_python(
    attribute: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, ledger = model(), Ledger()
    slot = Slot(net)
    slot.draws, slot.known, slot.returned_at = False, True, math.inf
    stopwatch, batch = forward.Stopwatch(ledger, "cpu", slot), torch.ones(2, 6)
    left: list[str] = []
    for name in ("start", "stop"):
        monkeypatch.setattr(forward.Stopwatch, name, lambda *_, name=name: left.append(name))

    def is_left(hook: forward.ForwardHook, *called: object) -> bool:
        left.clear()
        hook(*called)  # type: ignore[operator]
        return bool(left)

    begin, end = forward._Begin(stopwatch), forward._End(stopwatch)
    owner = slot if hasattr(slot, attribute) else ledger
    usual = getattr(owner, attribute)
    setattr(owner, attribute, value)
    assert is_left(begin, net, (batch,), {})
    setattr(owner, attribute, usual)
    assert is_left(begin, net, (batch, batch), {})
    assert is_left(begin, net, (batch,), {"mask": batch})
    assert is_left(begin, net, (nn.Parameter(batch),), {})
    assert is_left(begin, object(), (batch,), {})
    assert is_left(begin, net, (torch.zeros(1).expand(kept.BATCH_BYTES // 4 + 1),), {})
    with torch.inference_mode(), torch.enable_grad():
        assert is_left(begin, net, (torch.ones(2, 6),), {})
    assert slot.kept is None
    slot.kept = kept.keep((torch.zeros(2, 6),), {}, draws=False, autocast=False)
    assert not is_left(begin, net, (batch,), {})
    assert slot._kept is None, "nor any more of the batch before it"
    assert slot.kept is not None
    assert slot.kept.inputs == (batch,)
    assert slot.kept.unchanged
    batch += 1.0
    assert not slot.kept.unchanged
    slot.running = True
    assert is_left(end, net, (batch,), batch)
    slot.running = False
    assert not is_left(end, net, (batch,), batch)
    assert is_left(end, net, (batch,), batch), "it has not begun again"
    assert ledger.tally.forwards == 1


def test_a_full_queue_loses_its_oldest_and_counts_them(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    with sentinel.attach(net, optimizer) as monitor:
        assert monitor._session is not None
        sender = monitor._session.sender
        with monkeypatch.context() as held:
            held.setattr(Sender, "_encode", lambda self, connection: None)
            for batch in batches(QUEUE_STEPS + 100):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
            assert QUEUE_STEPS - 10 < len(sender.queue.records) <= QUEUE_STEPS
            assert sender.queue.dropped >= 100 - 20
            assert sender.queue.next_seq == QUEUE_STEPS + 100
    assert daemon.ended().next_seq == QUEUE_STEPS + 100


def test_where_in_the_code_it_is_is_noted_once_a_second(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with sentinel.attach(net, optimizer) as monitor:
        assert monitor._session is not None
        (stream,) = monitor._session.streams
        for seq, batch in enumerate(batches(20)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            if seq == 18:
                stream._note_at = 0.0
            optimizer.step()
        assert stream._note_at > 0.0


def test_what_it_takes_itself_is_counted(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with sentinel.attach(net, optimizer) as monitor:
        assert monitor._session is not None
        (stream,) = monitor._session.streams
        for batch in batches(18):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
        loss_of(net, batch).backward()
        seconds, own = stream._stretch_seconds, [stream._stretch_own]
        assert fast_path_native.enter(stream)
        own.append(stream._stretch_own)
        assert fast_path_native.leave(stream)
        own.append(stream._stretch_own)
        assert own == sorted(set(own))
        assert stream._stretch_seconds > seconds + own[2] - own[0]
        assert (stream.seq, stream._stretch_steps) == (19, 2)


@pytest.fixture(params=["C", "Python"])
def language(request: pytest.FixtureRequest) -> None:
    fast_path_native.use(request.param == "C")


def of_pass(root: torch.Tensor, ledger: Ledger, *weights: torch.Tensor) -> list[str]:
    """What is told of a backward pass from `root` to those who listen."""
    told: list[str] = []
    patch = BackwardPatch(lambda event, *_, **__: told.append(event))
    patch.around(torch.autograd.backward, [True])
    patch.ledger = ledger
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.autograd, "backward", patch)
        patch(root, *weights)
    return told


def scalars() -> dict[str, torch.Tensor]:
    """Roots of a backward pass, of which each is 2."""
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


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("name", scalars())
def test_a_loss_is_what_it_says(name: str) -> None:
    ledger, root = Ledger(), scalars()[name]
    ledger.calm_to = 10.0
    assert of_pass(root, ledger) == []
    assert (ledger.tally.loss, ledger.tally.backwards) == (2.0, 1)


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("value", [11.0, -math.inf, math.inf, math.nan])
def test_of_any_other_loss_those_who_listen_are_told(value: float, device: str) -> None:
    ledger = Ledger()
    ledger.calm_to = 10.0
    assert of_pass(torch.ones((), device=device, requires_grad=True) * value, ledger) == ["backward_ended"]
    assert (ledger.tally.loss, ledger.tally.backwards) == (None, 0)


@pytest.mark.usefixtures("language")
def test_of_a_loss_that_is_weighted_or_scaled_those_who_listen_are_told() -> None:
    ledger, one = Ledger(), torch.ones((), requires_grad=True)
    ledger.calm_to = 10.0
    assert of_pass(one * 2.0, ledger, torch.tensor(0.5)) == ["backward_begins", "backward_ended"]
    losses.remember(scaled := one * 2.0 * 4.0, one * 2.0)
    assert of_pass(scaled, ledger) == ["backward_ended"]
    assert ledger.tally.backwards == 0
    assert of_pass(one * 2.0, ledger) == []
    losses.scaled.ever = False


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("calm_to", [10.0, -math.inf])
def test_a_pass_under_a_default_device_is_one(calm_to: float) -> None:
    """Which is a mode: torch asks it first, and it calls the function again."""
    ledger, root = Ledger(), torch.ones((), requires_grad=True) * 2.0
    ledger.calm_to = calm_to
    with torch.device("cpu"):
        told = of_pass(root, ledger)
    assert told == (["backward_ended"] if calm_to > 0.0 else ["backward_begins", "backward_ended"])
    assert ledger.tally.backwards == 0, "but by those who are told"


@pytest.mark.usefixtures("language")
def test_a_loss_that_a_hook_put_something_else_into_is_not_read() -> None:
    ledger, doubled = Ledger(), torch.ones((), requires_grad=True) * 2.0
    ledger.calm_to, root = 10.0, doubled * 1.0
    doubled.register_hook(lambda _: setattr(root, "data", torch.tensor([5.0, 7.0])))  # type: ignore[no-untyped-call]
    assert of_pass(root, ledger) == ["backward_ended"]
    assert ledger.tally.loss is None


class Nested(torch.autograd.Function):
    """Has a backward pass in its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (torch.ones((), requires_grad=True) * 5.0).backward()
        return gradient * 2.0


@pytest.mark.usefixtures("language")
def test_a_pass_within_a_pass_is_part_of_it() -> None:
    ledger = Ledger()
    ledger.calm_to = 10.0
    assert of_pass(Nested.apply(torch.ones((), requires_grad=True)), ledger) == []  # type: ignore[no-untyped-call]
    assert (ledger.tally.loss, ledger.tally.backwards) == (2.0, 1)


@pytest.mark.usefixtures("language")
def test_what_stands_around_it_is_copied_and_pickled_as_a_function_is(daemon: FakeDaemon) -> None:
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


@pytest.mark.usefixtures("language")
def test_a_pass_that_raises_raises_and_is_told_of() -> None:
    ledger, told = Ledger(), []
    ledger.calm_to = 10.0

    def fail(*_: object) -> None:
        raise ZeroDivisionError("of the loop's")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    patch = BackwardPatch(lambda event, error: told.append((event, repr(error), error.__traceback__ is not None)))
    patch.ledger = ledger
    patch.around(fail, [True])
    with pytest.raises(ZeroDivisionError, match="of the loop's") as raised:
        patch(torch.ones(()))
    assert raised.traceback[-1].name == "fail"
    assert told == [("backward_failed", 'ZeroDivisionError("of the loop\'s")', True)]
    patch.around(interrupt, [True])
    with pytest.raises(KeyboardInterrupt):
        patch(torch.ones(()))
    assert len(told) == 1
    assert ledger.tally.backwards == 0


@pytest.mark.usefixtures("language")
def test_ctrl_c_as_the_loss_is_read_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, loss = Ledger(), torch.ones(3, requires_grad=True).sum()
    ledger.calm_to = 10.0

    def interrupted(_: torch.Tensor) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        for name in ("item", "is_neg"):
            patched.setattr(torch.Tensor, name, interrupted, raising=False)
        with pytest.raises(KeyboardInterrupt):
            of_pass(loss, ledger)
    assert ledger.tally.backwards == 0
    assert of_pass(loss.clone().detach().requires_grad_(), ledger) == []


@pytest.mark.usefixtures("language")
def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of which torch knows nothing when it is built, as some accelerators."""
    ledger, loss, read = Ledger(), torch.ones(3, device="meta", requires_grad=True).sum(), []
    ledger.calm_to = 10.0
    monkeypatch.setattr(torch.Tensor, "item", read.append, raising=False)
    assert of_pass(loss, ledger) == ["backward_ended"]
    assert read == []


class Leaver:
    """In a cycle, as a trainer is: the collector comes to it at some allocation of ours."""

    def __init__(self, monitor: sentinel.Monitor) -> None:
        self.monitor, self.me = monitor, self

    def __del__(self) -> None:
        self.monitor.detach()


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("allocations", range(6))
def test_who_detaches_as_a_step_is_passed_leaves_no_batch_held(allocations: int, daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    thresholds = gc.get_threshold()
    last = False

    def leaving(*_: Any) -> None:
        if last:
            gc.collect()
            Leaver(monitor)
            gc.set_threshold(gc.get_count()[0] + allocations, *thresholds[1:])

    optimizer.register_step_post_hook(leaving)
    monitor = sentinel.attach(net, optimizer)
    assert monitor._session is not None
    assert monitor._session.inquest is not None
    (slot,) = monitor._session.inquest._slots
    try:
        for seq, batch in enumerate(batches(22)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            last = seq == 21
            optimizer.step()
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert monitor.state == "detached"
    net(torch.ones(2, 6))
    assert slot.kept is None


def test_nothing_is_held_for_longer_than_in_python(daemon: FakeDaemon) -> None:
    """Each object that it hands on is counted up once."""

    def counts() -> list[int]:
        return [*map(sys.getrefcount, watched_objects), sys.getallocatedblocks()]

    watched_objects: list[Any] = [None, True, False, Work.STEP, Work.BACKWARD, Work.FORWARD, kept.Kept]
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    batch = next(batches(1))
    with sentinel.attach(net, optimizer) as monitor:
        assert monitor._session is not None
        ledger, sender = monitor._session.ledger, monitor._session.sender
        watched_objects += [batch, ledger, monitor._session.streams[0].layers.table, sender]
        rounds = []
        for _ in range(4):
            for _ in range(1000):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
            sender.wake()
            daemon.wait(lambda: daemon.seqs() and daemon.seqs()[-1] == monitor._session.next_seq - 1)
            daemon.messages.clear()
            rounds.append(counts())
    for before, after in zip(rounds[1], rounds[-1], strict=True):
        assert abs(after - before) < 500, rounds


def test_a_class_without_slots_is_refused() -> None:
    class Tally:
        loss = None

    with pytest.raises(TypeError, match=r"Tally\.backward.* is no slot|Tally\.loss is no slot"):
        fast_path_native.learned(Tally)


class Steps:
    """In a cycle: as the collector comes to it, another thread steps the optimizer, and freed memory is used again."""

    def __init__(self, optimizer: torch.optim.Optimizer, pool: list[object]) -> None:
        self.optimizer, self.pool, self.me = optimizer, pool, self

    def __del__(self) -> None:
        thread = threading.Thread(target=lambda: [self.optimizer.step() for _ in range(12)])
        thread.start()
        thread.join()
        self.pool.extend(1e12 + number for number in range(1000))


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("allocations", range(6))
def test_another_thread_may_step_as_a_step_is_passed(
    allocations: int, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, seconds = model(), list[float]()
    monkeypatch.setattr(Pacing, "account", lambda self, steps, loop, own: seconds.append(loop))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
    thresholds = gc.get_threshold()
    last, pool = False, list[object]()

    def stepping(*_: Any) -> None:
        nonlocal last
        if last:
            last = False
            gc.collect()
            pool.extend({} for _ in range(300))  # the next one is none that was used before: the collector is asked
            Steps(optimizer, pool)
            gc.set_threshold(gc.get_count()[0] + allocations, *thresholds[1:])

    optimizer.register_step_post_hook(stepping)
    with sentinel.attach(net, optimizer) as monitor:
        assert monitor._session is not None
        (stream,) = monitor._session.streams
        try:
            for seq, batch in enumerate(batches(24)):
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                last = seq == 21
                optimizer.step()
        finally:
            gc.set_threshold(*thresholds)
        assert stream.seq >= 24
    assert max(map(abs, seconds)) < 1000.0, "and nothing was read that was gone"


@pytest.mark.usefixtures("language")
def test_a_batch_whose_end_detaches_leaves_none_held(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    monitor = sentinel.attach(net, optimizer)
    assert monitor._session is not None
    assert monitor._session.inquest is not None
    (slot,) = monitor._session.inquest._slots
    for batch in batches(22):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
    ending = torch.ones(2, 6)
    weakref.finalize(ending, monitor.detach)
    slot.kept = kept.keep((ending,), {}, draws=False, autocast=False)
    del ending
    net(torch.ones(2, 6))
    assert monitor.state == "detached"
    assert slot.kept is None


@pytest.mark.usefixtures("language")
def test_a_number_of_batches_beyond_all_counting_breaks_no_loop(daemon: FakeDaemon) -> None:
    net, loader = model(), DataLoader(range(4))
    with sentinel.attach(net, torch.optim.SGD(net.parameters(), lr=1e-3), loader=loader) as monitor:
        assert monitor._session is not None
        monitor._session.batches.skip(2**64)
        assert list(map(int, DataLoader(range(3)))) == [0, 1, 2]


def test_where_torch_has_a_device_it_is_never_used() -> None:
    program = (
        "import torch; torch.backends.cuda.is_built = lambda: True\n"
        "import sentinel; from sentinel.hooks import fast_path_native\n"
        "fast_path_native.use()\n"
        "net = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)\n"
        "with sentinel.attach(net, optimizer):\n"
        "    for _ in range(30): net(torch.ones(3, 2)).square().mean().backward(); optimizer.step()\n"
        "print('in Python')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "in Python\n", done.stderr


def test_one_that_was_built_of_other_sources_is_not_used() -> None:
    program = (
        "import sys, types; sys.modules['sentinel.hooks._fast_path'] = types.ModuleType('_fast_path')\n"
        "from sentinel.hooks import fast_path_native, stream\n"
        "assert fast_path_native.missing(); print('in Python')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "in Python\n", done.stderr


def test_without_it_all_is_done_in_python() -> None:
    program = (
        "import sys; sys.modules['sentinel.hooks._fast_path'] = None\n"
        "from sentinel.hooks import fast_path_native, stream\n"
        "assert fast_path_native.missing()\n"
        "assert not fast_path_native.enter(None) and not fast_path_native.leave(None)\n"
        "fast_path_native.use(); print('in Python')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "in Python\n", done.stderr
