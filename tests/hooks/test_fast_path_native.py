"""What is called at every step of a fast loop, in C: the same as in Python, whatever happens between."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sentinel
from sentinel import wire
from sentinel.hooks import fast_path_native, forward, kept, losses
from sentinel.hooks.kept import Slot
from sentinel.hooks.pacing import Pacing
from sentinel.hooks.sender import Sender
from sentinel.hooks.step_queue import QUEUE_STEPS
from sentinel.hooks.tally import Ledger, Work
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import batches, loss_of, model

pytestmark = [
    pytest.mark.skipif(fast_path_native.missing(), reason="the compiled part was not built"),
    pytest.mark.usefixtures("fast"),
]


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


PROGRAMS = {
    "where torch has a device": (
        "import torch; torch.backends.cuda.is_built = lambda: True\n"
        "import sentinel; from sentinel.hooks import fast_path_native\n"
        "fast_path_native.use()\n"
        "net = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)\n"
        "with sentinel.attach(net, optimizer):\n"
        "    for _ in range(30): net(torch.ones(3, 2)).square().mean().backward(); optimizer.step()\n"
    ),
    "where it was built of other sources": (
        "import sys, types; sys.modules['sentinel.hooks._fast_path'] = types.ModuleType('_fast_path')\n"
        "from sentinel.hooks import fast_path_native, stream\n"
        "assert fast_path_native.missing()\n"
    ),
    "where it was not built": (
        "import sys; sys.modules['sentinel.hooks._fast_path'] = None\n"
        "from sentinel.hooks import fast_path_native, stream\n"
        "assert fast_path_native.missing()\n"
        "assert not fast_path_native.enter(None) and not fast_path_native.leave(None)\n"
        "fast_path_native.use()\n"
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_is_done_in_python(name: str) -> None:
    program = PROGRAMS[name] + "print('in Python')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "in Python\n", done.stderr
