"""Sentinel in the user's process: it never raises, never blocks, never grows, and leaves no trace."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import DataLoader, TensorDataset, dataloader

import sentinel
from sentinel import wire
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.loop.patches import Listeners
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.measure import probes
from sentinel.hooks.session import registry
from sentinel.hooks.session.session import EARLY_STEPS
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.transport import connection, records, sender
from sentinel.hooks.transport.daemon_launcher import DaemonLocator
from sentinel.runs.step_alignment import BATCH_SECONDS
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model
from tests.hooks.sessions import find_session, list_patches, list_sessions
from tests.waiting import until


def loop(**options: Any) -> Loop:
    net = model()
    return Loop(net, torch.optim.AdamW(net.parameters(), lr=1e-2), **options)


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a fault of ours")


def senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, sender.Sender)]


# Faults of ours.

MOMENTS = [
    (type(probe), moment)
    for probe in probes.stock()
    for moment in ("enter", "before", "after")
    if moment in vars(type(probe))
]


@pytest.mark.faults
@pytest.mark.parametrize(("probe", "moment"), MOMENTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_probe_that_fails_is_switched_off(
    probe: type, moment: str, daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(probe, moment, lambda *_: (calls.append(1), fail()))
    bare, watched = loop(), loop()
    with sentinel.attach(watched.net, watched.optimizer):
        assert watched.run(9) == bare.run(9)
    daemon.ended()
    assert calls == [1]
    assert daemon.seqs() == list(range(9))
    assert len(swallowed) == 1
    assert f"{probe.__name__}.{moment}" in swallowed[0]
    assert "ZeroDivisionError" in swallowed[0]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OptimizerMonitor, "_enter_full_step"),
        (OptimizerMonitor, "_measure_and_queue"),
        (OptimizerMonitor, "gradients_clipped"),
        (OptimizerMonitor, "scaler_enters"),
        (StepAccumulator, "batch_fetched"),
        (sentinel.hooks.session.event_router.EventRouter, "backward_ended"),
        (sentinel.hooks.session.session.RunSession, "greet"),
        (sentinel.hooks.session.command_handler.CommandHandler, "receive"),
        (sender, "make_batch"),
        (sender.Sender, "submit"),
    ],
)
def test_a_fault_anywhere_does_not_reach_the_loop(
    owner: Any, name: str, daemon: FakeDaemon, swallowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, fail)
    scaler = GradScaler("cpu", 64.0)
    bare, watched = loop(clip=1.0, scaler=GradScaler("cpu", 64.0)), loop(clip=1.0, scaler=scaler)
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        assert watched.run(6) == bare.run(6)
        for _ in monitor.batches(DataLoader(TensorDataset(torch.zeros(2, 1)))):
            pass
    assert len(swallowed) == 1
    assert "a fault of ours" in swallowed[0]


@pytest.mark.faults
def test_a_fault_in_attach_leaves_nothing_behind(swallowed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.hooks.loop.forward_passes.watch", fail)
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    watched.run(2)
    assert "unmonitored" in monitor.state
    assert list_patches() == ()
    assert not watched.net._forward_hooks
    assert not senders()
    assert len(swallowed) == 1


class Hookless(nn.Linear):
    """A layer that accepts no hook after its forward pass."""

    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise TypeError("no hooks")


@pytest.mark.faults
def test_a_model_that_refuses_a_hook_keeps_none(swallowed: list[str]) -> None:
    net = Hookless(6, 1)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = sentinel.attach(net, optimizer)
    assert monitor.state == "unmonitored after an internal fault"
    assert not net._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert "no hooks" in swallowed[0]


@pytest.mark.faults
def test_callbacks_of_the_user_may_fail(daemon: FakeDaemon, swallowed: list[str]) -> None:
    watched, seen = loop(), threading.Event()

    def note(alert: dict[str, Any]) -> None:
        seen.set()
        fail()

    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        monitor.on_alert(note)
        watched.run(1)
        daemon.wait(lambda: daemon.of(wire.Batch))
        daemon.send(wire.Notice(text="", alert={"alert": "LossSpike"}))
        assert seen.wait(20)
        watched.run(1)
    assert daemon.ended().reason == "detach"


# A daemon that misbehaves.


@pytest.mark.parametrize(
    ("ranks", "here", "together"),
    [
        ("1", "1", False),
        ("2", "2", True),
        ("2", "1", False),  # this node's daemon waits for no other
    ],
)
def test_ranks_that_are_waited_for_send_more_often(
    ranks: str, here: str, together: bool, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here, "SENTINEL_RUN_ID": "r"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert min(BATCH_SECONDS, sender.INTERVAL_SECONDS) > sender.TOGETHER_SECONDS
    monkeypatch.setattr(sender, "INTERVAL_SECONDS", 1000.0)
    monkeypatch.setattr(sender, "TOGETHER_SECONDS", 0.01)
    monkeypatch.setattr(sender, "BEAT_SECONDS", 0.01)
    rounds = [0]

    def count_round(*_: Any) -> None:
        rounds[0] += 1

    def wait_for_rounds() -> None:
        enough = rounds[0] + 3
        until(lambda: rounds[0] >= enough, "three rounds of the sender")

    monkeypatch.setattr(Governor, "record_sender_time", count_round)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(len(EARLY_STEPS))
        daemon.wait(lambda: EARLY_STEPS[-1] in daemon.seqs())
        wait_for_rounds()
        watched.run(1)
        if together:
            daemon.wait(lambda: len(EARLY_STEPS) in daemon.seqs())
        wait_for_rounds()
        assert (len(EARLY_STEPS) in daemon.seqs()) == together
    daemon.ended()
    assert len(EARLY_STEPS) in daemon.seqs()


@pytest.mark.slow
def test_a_daemon_that_never_reads(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded, the oldest steps are dropped and counted; the newest arrive when the daemon reads again."""
    monkeypatch.setattr(records, "QUEUE_STEPS", 40)
    monkeypatch.setattr(sender, "BACKLOG_BYTES", 2000)
    monkeypatch.setattr(sender, "INTERVAL_SECONDS", 0.001)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        watched.run(1)
        daemon.wait(lambda: daemon.of(wire.Batch))
        daemon.reading.clear()
        queue = find_session(monitor).sender.queue
        while not queue.dropped:
            watched.run(50)
            assert len(queue.records) <= 40
        daemon.reading.set()
    daemon.ended()
    seqs = daemon.seqs()
    assert seqs == sorted(set(seqs))
    assert seqs[-1] == watched.optimizer.state[watched.net[0].weight]["step"] - 1  # type: ignore[index]
    assert daemon.of(wire.Batch)[-1].dropped == seqs[-1] + 1 - len(seqs) > 0


@pytest.mark.faults
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ZeroDivisionError, MemoryError, SystemExit])
def test_a_sender_that_dies(error: type[BaseException], daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing piles up behind a sender that died, nothing is measured any more, and the loop goes on."""
    bare, watched = loop(), loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    thread = find_session(monitor).sender
    losses = watched.run(1)
    daemon.wait(lambda: daemon.of(wire.Batch))

    def die(*_: Any) -> None:
        raise error

    monkeypatch.setattr(thread, "_turn", die)
    thread.wake()
    thread.join(20)
    assert not thread.is_alive()
    losses = [*losses, *watched.run(50)]
    assert list_patches() == ()
    assert not thread.queue.records
    monitor.log(loss=1.0)
    monitor.detach()
    assert losses == [*bare.run(1), *bare.run(50)]


def test_layer_statistics_are_left_out_before_the_queue_grows(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "QUEUE_BYTES", 500)
    monkeypatch.setattr(sender, "INTERVAL_SECONDS", 1000.0)
    monkeypatch.setattr("sentinel.hooks.core.governor.FIRST", {0: 1, 1: 1, 2: 1, 3: 1})
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        daemon.wait(lambda: daemon.of(wire.Hello))
        watched.run(30)
        del monitor
    daemon.ended()
    assert daemon.seqs() == list(range(30))
    assert 1 < len(daemon.layers("layer_grad_norm")) < 30


@pytest.mark.parametrize(
    "answer", [b"\x00\x00\x00\x04junk", b"\xff\xff\xff\xff", wire.frame(wire.Query(what="status"))]
)
def test_a_daemon_that_talks_nonsense(answer: bytes, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = lambda _: answer
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    find_session(monitor).sender.join(20)
    watched.run(3)
    assert monitor.state.startswith("unmonitored")
    assert list_patches() == (), "nobody will read it: nothing is measured"
    assert capsys.readouterr().err.count("training goes on unmonitored") == 1
    daemon.wait(lambda: daemon.hung_up)
    assert len(daemon.of(wire.Hello)) == 1


def test_a_socket_of_another_user(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stranger:
        size = 12

        def unpack(self, credentials: bytes) -> tuple[int, int, int]:
            return 1, os.getuid() + 4242, 1

    monkeypatch.setattr(connection, "_CREDENTIALS", Stranger())
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    find_session(monitor).sender.join(20)
    assert "who is neither you nor root" in capsys.readouterr().err
    assert daemon.of(wire.Hello) == []


def test_a_daemon_that_refuses(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer = lambda _: wire.frame(wire.Refused(reason="protocol 7 is wanted"))
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    find_session(monitor).sender.join(20)
    watched.run(3)
    assert monitor.state == "refused: protocol 7 is wanted"
    assert list_patches() == ()
    assert capsys.readouterr().err.count("protocol 7 is wanted") == 1
    assert len(daemon.of(wire.Hello)) == 1


@pytest.mark.slow
def test_a_connection_that_breaks_is_made_again(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(9)
        daemon.wait(lambda: 8 in daemon.seqs())
        daemon.hang_up()
        watched.run(9)
        daemon.wait(lambda: 17 in daemon.seqs())
    daemon.ended()
    first, second = daemon.of(wire.Hello)
    assert (first.next_seq, first.identity) == (0, second.identity)
    assert 9 <= second.next_seq <= 18
    assert len(daemon.of(wire.LayerTable)) == 2
    assert len(daemon.of(wire.Goodbye)) == 1


def test_a_daemon_that_comes_late_gets_what_was_queued(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    path = daemon.path.with_name("late.sock")
    monkeypatch.setenv("SENTINEL_ADDRESS", str(path))
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(5)
        late = FakeDaemon(path)
        late.wait(lambda: 4 in late.seqs())
    late.ended()
    assert late.of(wire.Hello)[0].next_seq == 0
    assert late.seqs() == list(range(5))
    late.close()


# Copies, forks, other patchers.


def test_a_pickled_model_needs_no_sentinel(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        buffer = io.BytesIO()
        torch.save(watched.net, buffer)
        optimizer = pickle.dumps(watched.optimizer)
        ema = pickle.dumps(copy.deepcopy(watched.net))
    for content in (buffer.getvalue(), optimizer, ema):
        assert b"sentinel.hooks" not in content
    loaded = pickle.loads(ema)
    assert torch.equal(loaded(torch.ones(1, 6)), watched.net(torch.ones(1, 6)))


def test_copies_are_not_watched(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        accumulator, watching = find_session(monitor).accumulator, find_session(monitor).monitors[0]
        ema, optimizer = copy.deepcopy(watched.net), copy.deepcopy(watched.optimizer)
        ema(torch.ones(1, 6))
        assert accumulator.totals.forwards == 0
        watched.net(torch.ones(1, 6))
        assert accumulator.totals.forwards == 1
        optimizer.step()
        assert watching.seq == 0


class SelfKeeping(torch.optim.SGD):
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)  # the hooks too


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_an_optimizer_that_copies_all_it_has_is_copied_without_us(copied: Any, daemon: FakeDaemon) -> None:
    net = model()
    watched = Loop(net, SelfKeeping(net.parameters(), lr=1e-2))
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(2)
        other = copied(watched.optimizer)
        other.step()
        watched.run(1)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]


@pytest.mark.parametrize("convert", [lambda net: net.double(), lambda net: net.load_state_dict(net.state_dict())])
def test_torch_may_swap_the_parameters(convert: Any, daemon: FakeDaemon) -> None:
    """It does for FSDP2 and quantised tensors in `model.cpu()`, and refuses a tensor that has a weak reference."""
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(20)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            convert(watched.net)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
    daemon.ended()


def test_a_forked_child_holds_no_batch(daemon: FakeDaemon) -> None:
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(1)
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                batch = torch.ones(2, 6)
                loss_of(watched.net, batch).backward()
                watched.optimizer.step()
                ref = weakref.ref(batch)
                del batch
                watched.optimizer.zero_grad()
                gc.collect()
                failed = int(ref() is not None)
            finally:
                os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    daemon.ended()


def test_a_forked_child_is_not_the_run(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, dial = list[connection.DaemonConnection](), DaemonLocator.dial

    def dial_and_note(locator: DaemonLocator, *arguments: Any, **more: Any) -> connection.DaemonConnection | None:
        line = dial(locator, *arguments, **more)
        lines.extend([line] if line is not None else [])
        return line

    monkeypatch.setattr(DaemonLocator, "dial", dial_and_note)
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        watched.run(1)
        daemon.wait(lambda: daemon.of(wire.Batch))
        (line,) = lines
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                watched.run(3)
                failed = int(monitor.state != "forked" or line.socket.fileno() != -1)
                monitor.detach()
                registry.leave()
            finally:
                os._exit(failed)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        watched.run(2)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert len(daemon.of(wire.Goodbye)) == 1


def test_loader_workers_do_not_hold_the_connection_open(daemon: FakeDaemon) -> None:
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    daemon.wait(lambda: daemon.of(wire.Hello))
    data = DataLoader(TensorDataset(torch.zeros(4, 6)), num_workers=1, persistent_workers=True)
    iterator = iter(data)
    next(iterator)
    monitor.detach()
    daemon.wait(lambda: daemon.hung_up)
    del iterator, data


Place = tuple[Any, str]
PLACES: list[Place] = [
    (torch.autograd, "backward"),
    (GradScaler, "scale"),
    (GradScaler, "step"),
    (dataloader._BaseDataLoaderIter, "__next__"),
    (nn.utils.clip_grad, "_get_total_norm"),
    (nn.utils.clip_grad, "_clip_grads_with_norm_"),
    (nn.utils, "get_total_norm"),
    (nn.utils, "clip_grads_with_norm_"),
    (torch.cuda, "make_graphed_callables"),
    (torch.cuda.graphs, "make_graphed_callables"),
    (torch.cuda.CUDAGraph, "capture_begin"),
]


def test_detach_removes_everything(daemon: FakeDaemon) -> None:
    before = [getattr(owner, name) for owner, name in PLACES]
    one, other = loop(), loop()
    first = sentinel.attach(one.net, one.optimizer)
    second = sentinel.attach(other.net, other.optimizer)
    assert not any(getattr(owner, name) is was for (owner, name), was in zip(PLACES, before, strict=True))
    first.detach()
    assert len(PLACES) <= len(list_patches()) == len(set(list_patches()))
    second.detach()
    second.detach()
    assert [getattr(owner, name) for owner, name in PLACES] == before
    for hooked in (one, other):
        assert not hooked.net._forward_hooks
        assert not hooked.net._forward_pre_hooks
        assert not vars(hooked.net._forward_pre_hooks)
        assert not hooked.optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
        assert not hooked.optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    assert first.state == second.state == "detached"


def test_another_patcher_that_came_after(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our patch cannot be removed from under another: it stays, does nothing, and a later attach counts once."""
    watched = loop()
    monitor = sentinel.attach(watched.net, watched.optimizer)
    inner, calls = torch.autograd.backward, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", theirs)
    monitor.detach()
    assert torch.autograd.backward is theirs
    watched.run(1)
    with sentinel.attach(watched.net, watched.optimizer):
        watched.run(3)
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 2)
    assert daemon.series("micro_batches") == {0: 1.0, 1: 1.0, 2: 1.0}
    assert torch.autograd.backward is theirs
    assert len(calls) == 4


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
def test_another_patcher_that_came_after_in_any_place(
    owner: Any, name: str, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other patch stays, the rest is removed, and what of ours is left under it reports nothing."""
    before = {place: getattr(*place) for place in PLACES}
    watched = loop(clip=1.0, scaler=GradScaler("cpu", 64.0))
    monitor = sentinel.attach(watched.net, watched.optimizer)
    inner = getattr(owner, name)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    monkeypatch.setattr(owner, name, theirs)
    monitor.detach()
    daemon.ended()
    assert {place: getattr(*place) for place in PLACES} == {**before, (owner, name): theirs}
    monkeypatch.setattr(Listeners, "tell", fail)
    monkeypatch.setattr(Listeners, "tell_of_pass", fail)
    watched.run(2)
    assert len(list(DataLoader(TensorDataset(torch.zeros(2, 1))))) == 2
    nn.utils.clip_grads_with_norm_(watched.net.parameters(), 1.0, nn.utils.get_total_norm([torch.ones(1)]))


def test_model_and_optimizer_are_not_kept_alive(daemon: FakeDaemon) -> None:
    """When the user lets go of model and optimizer the session ends by itself."""
    watched = loop()
    sentinel.attach(watched.net, watched.optimizer, rollback=sentinel.Rollback(every=2, margin=1))
    watched.run(3)
    alive = [weakref.ref(watched.net), weakref.ref(watched.optimizer)]
    del watched
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert daemon.ended_as(reason="detach", next_seq=3)
    session = list_sessions()[0]
    session.sender.join(20)
    assert list_patches() == ()


def test_disabled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SENTINEL_DISABLED", "1")
    watched = loop()
    with sentinel.attach(watched.net, watched.optimizer) as monitor:
        monitor.log(loss=1.0)
        monitor.on_alert(print)
        monitor.on_rollback(print)
        with monitor.phase("eval"):
            assert list(monitor.batches([1, 2])) == [1, 2]
        watched.run(2)
    assert monitor.state == "disabled by SENTINEL_DISABLED"
    assert list_patches() == ()
    assert not senders()
    assert capsys.readouterr().err == ""


def test_nothing_is_reported_of_models_that_are_not_watched(daemon: FakeDaemon) -> None:
    watched, other = loop(), loop(clip=0.1, scaler=GradScaler("cpu"))
    with sentinel.attach(watched.net, watched.optimizer):
        for batch in batches(2):
            watched.optimizer.zero_grad()
            loss_of(watched.net, batch).backward()
            watched.optimizer.step()
            other.run(1)
    daemon.ended()
    assert daemon.seqs() == [0, 1]
    assert daemon.series("clip_limit") == {}
    assert daemon.series("loss_scale") == {}
