"""Unusual but correct loops, models and optimizers: they train on, and the signals are true."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.testing._internal.two_tensor import TwoTensor

import sentinel
from sentinel import wire
from sentinel.errors import AttachError
from sentinel.hooks.loop import batches
from tests.hooks import loops
from tests.hooks.conftest import WAIT, FakeDaemon
from tests.hooks.loops import fit, sgd
from tests.hooks.sessions import list_sessions

# What the hello takes from the user.


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ({"lr": np.float64(0.1)}, 0.1),
        ({"lr": np.float32(0.5)}, 0.5),
        ({"seed": np.int64(3)}, 3),
        ({"seed": 2**70}, str(2**70)),
        ({"name": "broken \udcff name"}, "broken ? name"),
    ],
)
def test_hyperparameters_that_no_message_can_hold(option: dict[str, Any], shown: Any, daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net, **option)
    sentinel.attach(net, optimizer, run="a \udcff").detach()
    daemon.ended()
    (hello,) = daemon.of(wire.Hello)
    (key,) = option
    assert hello.facts["optimizers"][0]["groups"][0][key] == shown
    assert hello.identity.run == "a ?"


@pytest.mark.parametrize("missing", [True, False])
def test_an_optimizer_without_a_learning_rate(missing: bool, daemon: FakeDaemon) -> None:
    """Some Adafactors have None as their rate, and find their own."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {} if missing else {"lr": None})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.01 * parameter.grad

    net = loops.model()
    with sentinel.attach(net, optimizer := Own(net.parameters())):
        fit(net, optimizer)
    daemon.ended()
    assert daemon.series("micro_batches") == {0: 1.0, 1: 1.0, 2: 1.0}
    assert daemon.series("learning_rate") == {}


def test_names_that_never_end_do_not_grow_the_hello(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sentinel.hooks.session.logged_signals.NAMES", 3)
    monkeypatch.setattr("sentinel.hooks.session.session.LINES", 6)
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer) as monitor:
        for number in range(9):
            monitor.log(**{f"new {number}": 1.0, f"text {number}": "no number"})
            monitor.log(**{"\udcff": 1.0})
        fit(net, optimizer, 1)
    daemon.ended()
    assert set(daemon.of(wire.Hello)[-1].signals) == {"new 0", "new 1", "new 2"}
    assert daemon.series("new 2") == {0: 1.0}
    assert not daemon.series("new 3")
    assert capsys.readouterr().err.count("log") <= 6


def test_a_phase_of_any_name(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer) as monitor, monitor.phase(["\udcff"]):  # type: ignore[arg-type]
        pass
    daemon.ended()
    assert [phase.name for phase in daemon.of(wire.PhaseChanged)] == ["['\\udcff']", ""]


@pytest.mark.faults
def test_a_message_that_cannot_be_sent_costs_that_message(daemon: FakeDaemon, swallowed: list[str]) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        list_sessions()[-1].send(wire.Reply(id=1, ok=True, content={"what": object()}))
        fit(net, optimizer)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert "sending Reply" in swallowed[0]


# Optimizers.


def test_a_step_that_calls_its_parents_is_one_step(daemon: FakeDaemon) -> None:
    class Child(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = loops.model()
    sgd(net)  # torch puts its hooks' caller around SGD.step, and then around Child.step too
    optimizer = Child(net.parameters(), lr=0.01)
    norms = []
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            optimizer.zero_grad()
            loops.loss_of(net, batch).backward()
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
            optimizer.step()
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert list(daemon.series("grad_norm").values()) == pytest.approx(norms)
    assert list(daemon.series("grad_norm_applied").values()) == pytest.approx([0.1] * 3)


def test_steps_that_call_their_parents_inside_the_backward_pass(daemon: FakeDaemon) -> None:
    class Child(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    net = loops.model()
    sgd(net)
    optimizers = {parameter: Child([parameter], lr=0.01) for parameter in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with sentinel.attach(net, list(optimizers.values())):
        for batch in loops.batches(3):
            loops.loss_of(net, batch).backward()
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert set(daemon.layers("layer_grad_norm")[0]) == {name for name, _ in net.named_parameters()}


def test_an_argument_that_is_no_closure(daemon: FakeDaemon) -> None:
    class Clears(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        def step(self, clear: Any = False) -> None:  # type: ignore[override]
            if clear:
                self.zero_grad()

    net = loops.model()
    optimizer = Clears(net.parameters())
    norms = []
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            loops.loss_of(net, batch).backward()
            norms.append(float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])))
            optimizer.step(True)
    daemon.ended()
    assert list(daemon.series("grad_norm").values()) == pytest.approx(norms)
    assert not daemon.series("no_gradient")


def test_hooks_are_removed_after_a_step_that_raised(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)

    def closure() -> float:
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"), sentinel.attach(net, optimizer):
        optimizer.step(closure)
    assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    assert daemon.ended().reason == "exception"


@pytest.mark.parametrize("when", ["pre", "post"])
def test_detaching_from_a_hook_of_the_users_own(when: str, daemon: FakeDaemon) -> None:
    """torch is iterating over the hooks during the detach, ours among them."""
    net = loops.model()
    optimizer = sgd(net)
    monitors: list[sentinel.Monitor] = []

    def leave(*_: object) -> None:
        monitors[0].detach()

    (optimizer.register_step_pre_hook if when == "pre" else optimizer.register_step_post_hook)(leave)
    monitors.append(sentinel.attach(net, optimizer))
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    fit(net, optimizer)
    assert daemon.ended().reason == "detach"


@pytest.mark.parametrize("frozen", [True, False])
def test_parameters_that_are_on_the_meta_device(frozen: bool, daemon: FakeDaemon) -> None:
    """Parameters on the meta device are the stages of other ranks, where each rank makes the whole model."""
    net = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(6, 1)).requires_grad_(not frozen)
    net[1].requires_grad_()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        fit(net[1], optimizer)
    daemon.ended()
    assert daemon.layers("layer_grad_norm")[0].keys() == {"1.weight", "1.bias"}
    assert daemon.series("update_ratio").keys() == {0}
    assert daemon.seqs() == [0, 1, 2]


@pytest.mark.parametrize("several", [False, True])
def test_a_backward_pass_from_a_complex_number_has_no_loss(several: bool, daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        root = net(torch.ones(1, 6)).sum() * torch.tensor(1 + 1j)
        gradient = torch.ones_like(root)
        torch.autograd.backward([root] if several else root, [gradient] if several else gradient)
        optimizer.step()
        fit(net, optimizer, 2)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]
    assert daemon.series("loss").keys() == {1, 2}


def test_a_batch_that_was_made_in_inference_mode_is_not_held(daemon: FakeDaemon, swallowed: list[str]) -> None:
    """torch counts no writes into such a batch, so that it could not be judged; the next batch is held again."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(6))

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return (x + self.by) * scale

    with torch.inference_mode():
        batch = torch.ones(1, 6)
    net = Shift()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for scale in ({}, {"scale": 0.5}):
            net(batch, **scale).sum().backward()
            optimizer.step()
        net(torch.tensor([[1.0, 2.0, float("nan"), 4.0, 5.0, 6.0]])).sum().backward()
        optimizer.step()
    daemon.ended()
    assert not swallowed
    assert [one.content["tensors"] for one in daemon.of(wire.Collected) if one.what == "provenance"] == [["args[0]"]]


def test_a_loop_in_a_module_of_no_name(daemon: FakeDaemon) -> None:
    """Code that `exec` runs has the globals that it is given."""
    net = loops.model()
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        exec("fit(net, optimizer)", {"fit": fit, "net": net, "optimizer": optimizer, "__name__": 7})
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]


def test_a_first_group_without_parameters(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = torch.optim.AdamW([{"params": []}, {"params": list(net.parameters())}])
    with sentinel.attach(net, optimizer):
        fit(net, optimizer)
    daemon.ended()
    assert daemon.series("rss_bytes")


@pytest.mark.parametrize("wrapper", ["itself", "nothing but more", "no super"])
def test_an_object_that_is_no_optimizer(wrapper: str) -> None:
    class Itself:
        @property
        def optimizer(self) -> Any:
            return self if wrapper == "itself" else Itself()

    class NoSuper(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

    net = loops.model()
    given: Any = NoSuper(net.parameters()) if wrapper == "no super" else Itself()
    with pytest.raises(AttachError, match=r"super\(\)" if wrapper == "no super" else "not a torch.optim.Optimizer"):
        sentinel.attach(net, given)


def test_a_property_that_is_not_ready(daemon: FakeDaemon) -> None:
    class Late(torch.optim.SGD):
        @property
        def loss_scale(self) -> float:
            raise RuntimeError("not yet")

    net = loops.model()
    optimizer = Late(net.parameters(), lr=0.01)
    with sentinel.attach(net, optimizer):
        fit(net, optimizer)
    daemon.ended()
    assert daemon.seqs() == [0, 1, 2]


def test_the_loss_under_fsdps_scaler(daemon: FakeDaemon) -> None:
    """FSDP's scaler has a `scale` method of its own."""
    net = loops.model()
    optimizer = sgd(net)
    scaler = ShardedGradScaler("cpu", process_group=None)
    losses = []
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(3):
            loss = loops.loss_of(net, batch)
            losses.append(float(loss.detach()))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    assert ShardedGradScaler.scale is not torch.amp.GradScaler.scale
    daemon.ended()
    assert list(daemon.series("loss").values()) == pytest.approx(losses)


def test_a_step_of_the_scalers_that_raised_leaves_no_scale(daemon: FakeDaemon) -> None:
    net = loops.model()
    optimizer = sgd(net)
    scaler = torch.amp.GradScaler("cpu", 64.0)

    def refuse(*_: object) -> None:
        raise ValueError("the user's own")

    first, second = loops.batches(2)
    with sentinel.attach(net, optimizer):
        scaler.scale(loops.loss_of(net, first)).backward()
        hook = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ValueError, match="the user's own"):
            scaler.step(optimizer)
        hook.remove()
        optimizer.zero_grad()
        loops.loss_of(net, second).backward()
        optimizer.step()
    daemon.ended()
    assert daemon.seqs() == [0]
    assert not daemon.series("loss_scale")


def test_one_optimizer_of_two_is_scaled(daemon: FakeDaemon) -> None:
    """The gradient norms of the optimizer that is not scaled are those that its clipping returned."""
    one, other = loops.model(0), loops.model(1)
    optimizers = [sgd(one), sgd(other)]
    scaler = torch.amp.GradScaler("cpu", 1024.0)
    norms = []
    with sentinel.attach([one, other], optimizers):
        for batch in loops.batches(3):
            scaler.scale(loops.loss_of(one, batch)).backward()
            scaler.step(optimizers[0])
            scaler.update()
            loops.loss_of(other, batch).backward()
            norms.append(float(nn.utils.clip_grad_norm_(other.parameters(), 0.5)))
            optimizers[1].step()
    daemon.ended()
    assert list(daemon.series("grad_norm", 1).values()) == pytest.approx(norms)
    assert not daemon.series("clipped_scaled", 1)


# Several runs in one process.


def losses_streamed(daemon: FakeDaemon, runs: int) -> list[float]:
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == runs)
    return sorted(
        value
        for batch in daemon.of(wire.Batch)
        if "loss" in batch.columns
        for value in wire.unpack_column("d", batch.columns["loss"].values)
    )


def test_two_runs_that_take_turns_keep_their_losses_apart(daemon: FakeDaemon) -> None:
    runs = [(net, sgd(net)) for net in (loops.model(0), loops.model(1))]
    monitors = [sentinel.attach(*run, run=f"run {place}") for place, run in enumerate(runs)]
    losses = []
    for batch in loops.batches(4):
        for net, optimizer in runs:
            optimizer.zero_grad()
            loss = loops.loss_of(net, batch)
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
    for monitor in monitors:
        monitor.detach()
    assert losses_streamed(daemon, 2) == pytest.approx(sorted(losses))


def test_two_threads_that_train(daemon: FakeDaemon) -> None:
    losses: list[float] = []
    both = threading.Barrier(2)

    def train(seed: int) -> None:
        net = loops.model(seed)
        optimizer = sgd(net)
        with sentinel.attach(net, optimizer, run=f"run {seed}"):
            both.wait()
            losses.extend(fit(net, optimizer, 60))
            both.wait()

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses_streamed(daemon, 2) == pytest.approx(sorted(losses))


def test_a_loss_that_another_thread_scales_leaves_ours_as_it_is(daemon: FakeDaemon) -> None:
    net, other, losses = loops.model(), nn.Linear(6, 1), []
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu", 65536.0)
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(6):
            optimizer.zero_grad()
            loss = loops.loss_of(net, batch)
            run_on_a_thread(lambda other=other, batch=batch: scaler.scale(loops.loss_of(other, batch)))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))


class Waiting(torch.autograd.Function):
    """Waits within its backward pass, once it said that it is there."""

    entered, release = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Waiting.entered.set()
        Waiting.release.wait(WAIT)
        return gradient


def test_a_pass_of_another_model_that_another_thread_runs_meanwhile_is_not_ours(daemon: FakeDaemon) -> None:
    net, other, losses = loops.model(), nn.Linear(6, 1), []
    optimizer = sgd(net)
    beside = threading.Thread(
        target=lambda: (Waiting.apply(other(torch.ones(2, 6)).sum()) + 1e6).backward()  # type: ignore[no-untyped-call]
    )
    with sentinel.attach(net, optimizer):
        for seq, batch in enumerate(loops.batches(12)):
            optimizer.zero_grad()
            if seq == 8:
                beside.start()
                assert Waiting.entered.wait(WAIT)
            loss = loops.loss_of(net, batch)
            loss.backward()
            if seq == 8:
                Waiting.release.set()
                beside.join()
            optimizer.step()
            losses.append(float(loss.detach()))
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))


@pytest.mark.parametrize(
    ("moved", "steps"),
    [
        ({"backward"}, range(12)),
        ({"forward", "backward"}, range(3, 12)),
        ({"forward", "backward", "step"}, range(3, 12)),
        ({"forward", "backward", "step"}, range(3, 12, 2)),
    ],
)
def test_parts_of_a_step_on_a_thread_of_their_own_are_seen(moved: set[str], steps: range, daemon: FakeDaemon) -> None:
    net, losses = loops.model(), []
    optimizer, data = sgd(net), loops.batches(12)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    parts: dict[str, Callable[[], object]] = {
        "forward": lambda: losses.append(loops.loss_of(net, next(data))),
        "backward": lambda: losses[-1].backward(),
        "step": step,
    }
    with sentinel.attach(net, optimizer):
        for seq in range(12):
            with ThreadPoolExecutor(1) as pool:
                for name, part in parts.items():
                    if name in moved and seq in steps:
                        pool.submit(part).result()
                    else:
                        part()
    daemon.ended()
    assert daemon.series("loss") == pytest.approx({seq: loss.item() for seq, loss in enumerate(losses)})


def run_on_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_gradient_that_holds_other_tensors_is_left_out(daemon: FakeDaemon) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Parameter(TwoTensor(torch.randn(6, 3), torch.randn(6, 3)))
            self.plain = nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.plain(x @ self.odd)

    net = Net()
    with torch.no_grad():
        net.plain.weight = nn.Parameter(torch.randn(1, 3))
    optimizer = sgd(net)
    with sentinel.attach(net, optimizer):
        for batch in loops.batches(2):
            optimizer.zero_grad()
            net(batch).square().mean().sum().backward()
            optimizer.step()
    daemon.ended()
    assert daemon.seqs() == [0, 1]
    assert batches.identity_of([TwoTensor(torch.ones(9), torch.ones(9))]) is None


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Change the default device and type, which scripts set to `cuda` and bfloat16."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_defaults_of_the_user_do_not_change_our_tensors(daemon: FakeDaemon, request: pytest.FixtureRequest) -> None:
    streamed = []
    for default in ("", "elsewhere"):
        net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(12)), nn.Linear(6, 1))
        nn.Module.load_state_dict(net, {k: torch.full_like(v, 0.1) for k, v in net.state_dict().items()})
        net[0].weight.requires_grad_(False)
        optimizer = sgd(net)
        data = list(loops.batches(4))
        if default:
            request.getfixturevalue(default)
        with sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=1, margin=0)):
            for batch in data:
                loops.loss_of(net, batch).backward()
                optimizer.step()
        daemon.ended()
        names = ("loss", "grad_norm", "update_ratio", "parameter_checksum", "frozen_checksum", "gradient_depth_ratio")
        streamed.append([daemon.series(name) for name in names])
        assert all(streamed[-1])
        assert daemon.of(wire.SnapshotTaken)
        daemon.messages.clear()
    assert streamed[0] == streamed[1]
