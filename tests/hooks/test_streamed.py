"""Streamed signals are what one would compute by hand."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import sentinel
from sentinel import wire
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.transport.sender import Sender
from sentinel.signals import SIGNALS
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model
from tests.hooks.sessions import find_session

EXACT = {"rel": 1e-6, "abs": 1e-12}


def norm(net: nn.Module) -> float:
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters() if p.grad is not None))


def adamw(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def test_what_is_logged_after_the_last_step_is_sent_with_it(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, adamw(net), scheduler=None)
    with sentinel.attach(net, loop.optimizer) as monitor:
        loop.run(4)
        monitor.log(val=1.0)
        loop.run(4)
        monitor.log(val=torch.tensor(2.0))
    goodbye = daemon.ended()
    assert daemon.series("val") == {4: 1.0, 7: 2.0}
    assert goodbye.next_seq == 8
    assert sorted(daemon.series("loss")) == list(range(8))


@pytest.mark.usefixtures("every_step")
def test_a_signal_of_any_tier_can_be_compared_at_every_step(daemon: FakeDaemon) -> None:
    net = model()
    loop, norms = Loop(net, adamw(net), scheduler=None), []

    @torch.no_grad()
    def look(*_: object) -> None:
        norms.append(math.sqrt(sum(float(p.double().square().sum()) for p in net.parameters())))

    loop.optimizer.register_step_post_hook(look)
    with sentinel.attach(net, loop.optimizer):
        loop.run(5)
    daemon.ended()
    assert daemon.series("weight_norm") == pytest.approx(dict(enumerate(norms)), rel=1e-5)


@pytest.mark.usefixtures("every_step")
def test_plain_loop(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, adamw(net), scheduler=None)
    loop.scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 4, 0.5)
    norms, rates, layers = [], [], []

    def look(_: int) -> None:
        norms.append(norm(net))
        rates.append(loop.optimizer.param_groups[0]["lr"])
        layers.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})

    with sentinel.attach(net, loop.optimizer):
        losses = loop.run(10, look)
    daemon.ended()
    assert daemon.seqs() == list(range(10))
    assert daemon.series("loss") == dict(enumerate(losses))
    assert daemon.series("learning_rate") == dict(enumerate(rates))
    assert daemon.series("micro_batches") == dict.fromkeys(range(10), 1.0)
    assert daemon.series("step_skipped") == {}, "there is no scaler"
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), **EXACT)
    assert daemon.series("grad_norm_applied") == pytest.approx(dict(enumerate(norms)), **EXACT)
    for signal, by_hand in {
        "layer_grad_norm": lambda g: float(torch.linalg.vector_norm(g)),
        "layer_grad_min": lambda g: float(g.min()),
        "layer_grad_max": lambda g: float(g.max()),
        "layer_nonfinite": lambda g: 0.0,
    }.items():
        streamed = daemon.layers(signal)
        assert len(streamed) == 10
        for seq, gradients in enumerate(layers):
            assert streamed[seq] == pytest.approx({name: by_hand(g) for name, g in gradients.items()}, **EXACT)


def test_every_signal_is_in_the_vocabulary(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, adamw(net), GradScaler("cpu"), half=True, unscale=True, clip=1.0)
    with sentinel.attach(net, loop.optimizer):
        loop.run(3)
    daemon.ended()
    streamed = {name for batch in daemon.of(wire.Batch) for name in batch.columns}
    layered = {name for batch in daemon.of(wire.Batch) for block in batch.layers for name in block.stats}
    assert {name: SIGNALS[name].scope for name in streamed} == dict.fromkeys(streamed, "rank")
    assert {name: SIGNALS[name].scope for name in layered} == dict.fromkeys(layered, "layer")
    assert {"loss", "grad_norm", "loss_scale", "clip_limit", "rss_bytes", "forward_seconds"} <= streamed
    assert {"layer_grad_norm", "layer_grad_min", "layer_grad_max", "layer_nonfinite"} <= layered


def test_accumulated_losses_add_up(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, adamw(net), accumulate=3)
    with sentinel.attach(net, loop.optimizer):
        losses = loop.run(5)
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))
    assert daemon.series("micro_batches") == dict.fromkeys(range(5), 3.0)


@pytest.mark.usefixtures("every_step")
def test_norms_before_and_after_clipping(daemon: FakeDaemon) -> None:
    net = model()
    loop, applied = Loop(net, adamw(net), clip=0.25), []
    before = []

    def look(_: int) -> None:
        applied.append(norm(net))

    with sentinel.attach(net, loop.optimizer):
        loop.run(6, look)
    daemon.ended()
    # The same run again, unwatched, gives the norm that clipping returns.
    net = model()
    optimizer = adamw(net)
    for batch in batches(6):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        before.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.25)))
        optimizer.step()
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(before)), **EXACT)
    assert daemon.series("grad_norm_applied") == pytest.approx(dict(enumerate(applied)), **EXACT)
    assert daemon.series("clip_limit") == dict.fromkeys(range(6), 0.25)
    assert max(applied) < 0.2501 < min(before)


def test_the_norm_of_the_loops_own_clipping_comes_at_every_step(daemon: FakeDaemon, monkeypatch: Any) -> None:
    monkeypatch.setattr(Governor, "due", lambda self, tier, seq, first=True: False)
    monkeypatch.setattr(Governor, "take_rare_turn", lambda self, seq, first=True: False)
    net = model()
    loop = Loop(net, adamw(net), clip=0.25)
    with sentinel.attach(net, loop.optimizer):
        loop.run(6)
    daemon.ended()
    assert list(daemon.series("grad_norm")) == list(range(6))
    assert daemon.series("grad_norm_applied") == {}


def test_the_norm_of_clipping_is_the_total_where_the_optimizer_has_frozen_parameters(daemon: FakeDaemon) -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer, norms = adamw(net), []
    with sentinel.attach(net, optimizer):
        for batch in batches(4):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            norms.append(float(nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.25)))
            optimizer.step()
    daemon.ended()
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), **EXACT)


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("clipping", ["a part", "twice, in the maximum norm", "in the maximum norm", "in two parts"])
def test_the_norm_before_clipping_is_the_total_or_absent(clipping: str, daemon: FakeDaemon) -> None:
    net = model()
    parameters = list(net.parameters())
    optimizer, total, applied = adamw(net), [], []
    with sentinel.attach(net, optimizer):
        for batch in batches(4):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            total.append(norm(net))
            if clipping == "a part":
                nn.utils.clip_grad_norm_(parameters[:2], 0.1)
            elif clipping == "in two parts":
                nn.utils.clip_grad_norm_(parameters[:2], 0.1)
                nn.utils.clip_grad_norm_(parameters[2:], 0.1)
            else:
                for limit in (0.1,) if clipping == "in the maximum norm" else (0.1, 0.05):
                    nn.utils.clip_grad_norm_(parameters, limit, norm_type=math.inf)
            applied.append(norm(net))
            optimizer.step()
    daemon.ended()
    assert daemon.series("grad_norm_applied") == pytest.approx(dict(enumerate(applied)), **EXACT)
    if clipping.startswith("in "):
        assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(total)), **EXACT)
    else:
        assert daemon.series("grad_norm") == {}


@pytest.mark.usefixtures("every_step")
def test_elements_that_are_clipped_are_not_seen_as_clipping(daemon: FakeDaemon) -> None:
    net = model()
    optimizer, norms = adamw(net), []
    with sentinel.attach(net, optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            nn.utils.clip_grad_value_(net.parameters(), 0.01)
            norms.append(norm(net))
            optimizer.step()
    daemon.ended()
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), **EXACT)
    assert daemon.series("clip_limit") == {}


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("closure", [False, True])
def test_where_each_pass_of_a_step_is_clipped_the_last_clipping_counts(closure: bool, daemon: FakeDaemon) -> None:
    net, data = model(), batches(9)
    optimizer = torch.optim.LBFGS(net.parameters(), 0.01, max_iter=3) if closure else adamw(net)
    before: list[float] = []
    applied: list[float] = []

    def take_pass() -> torch.Tensor:
        if closure:
            optimizer.zero_grad()
        loss = loss_of(net, next(data))
        loss.backward()
        before.append(norm(net))
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        applied.append(norm(net))
        return loss

    with sentinel.attach(net, optimizer):
        for _ in range(3):
            if closure:
                optimizer.step(take_pass)
            else:
                for _ in range(3):
                    take_pass()
                optimizer.step()
                optimizer.zero_grad()
    daemon.ended()
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(before[2::3])), **EXACT)
    assert daemon.series("grad_norm_applied") == pytest.approx(dict(enumerate(applied[2::3])), **EXACT)


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("scaled", ["", "clipped", "unscaled"])
def test_each_of_two_optimizers_has_its_norm_before_they_are_clipped_together(
    scaled: Literal["", "clipped", "unscaled"], daemon: FakeDaemon
) -> None:
    net, scaler = model(), GradScaler("cpu", init_scale=512.0, enabled=bool(scaled))
    matrices, vectors = net[0], nn.ModuleList([net[2], net[3]])
    optimizers = torch.optim.SGD(matrices.parameters(), 0.01), torch.optim.AdamW(vectors.parameters(), 0.01)
    norms, limits = [], (0.1, 0.3, 1e9)
    with sentinel.attach(net, optimizers):
        for batch, limit in zip(batches(3), limits, strict=True):
            net.zero_grad()
            scaler.scale(loss_of(net, batch)).backward()
            if scaled == "unscaled":
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            left = 512.0 if scaled == "clipped" else 1.0
            norms.append((norm(matrices) / left, norm(vectors) / left))
            nn.utils.clip_grad_norm_(net.parameters(), limit)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    daemon.ended()
    for stream, column in enumerate(zip(*norms, strict=True)):
        assert daemon.series("grad_norm", stream) == pytest.approx(dict(enumerate(column)), rel=1e-5)
        assert daemon.series("clip_limit", stream) == dict(enumerate(limits))


@pytest.mark.parametrize("clipping", ["together", "a part", "in the maximum norm"])
def test_a_norm_that_is_not_finite_comes_at_its_step_however_it_was_clipped(
    clipping: str, daemon: FakeDaemon, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Governor, "due", lambda self, tier, seq, first=True: False)
    net = model()
    clipped = list(net[0].parameters() if clipping == "a part" else net.parameters())
    parts = [net[0], nn.ModuleList([net[2], net[3]])] if clipping == "together" else [net]
    optimizers = [torch.optim.SGD(part.parameters(), 0.01) for part in parts]
    with sentinel.attach(net, optimizers):
        for seq, batch in enumerate(batches(6)):
            net.zero_grad()
            loss_of(net, batch).backward()
            if seq == 5:
                clipped[0].grad[0] = math.nan  # type: ignore[index]
            nn.utils.clip_grad_norm_(clipped, 0.1, norm_type=math.inf if clipping == "in the maximum norm" else 2.0)
            for optimizer in optimizers:
                optimizer.step()
    daemon.ended()
    for stream in range(len(parts)):
        assert [seq for seq, found in daemon.series("grad_norm", stream).items() if not math.isfinite(found)] == [5]


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaled_run_is_streamed_unscaled(fused: bool, unscale: bool, daemon: FakeDaemon) -> None:
    """Loss and gradients are those of the run without a scaler, whatever divides by the scale, and when."""
    plain, norms = model(), []
    losses = Loop(plain, adamw(plain), half=True).run(6, lambda _: norms.append(norm(plain)))
    net = model()
    scaler = GradScaler("cpu", 256.0, growth_interval=2)
    loop = Loop(net, adamw(net, fused=fused), scaler, half=True, unscale=unscale)
    with sentinel.attach(net, loop.optimizer):
        loop.run(6)
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)), rel=1e-3)
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), rel=2e-2)
    assert daemon.series("loss_scale") == {0: 256.0, 1: 256.0, 2: 512.0, 3: 512.0, 4: 1024.0, 5: 1024.0}
    assert list(daemon.layers("layer_grad_norm")) == list(range(6))
    squares = sum(value**2 for value in daemon.layers("layer_grad_norm")[5].values())
    assert math.sqrt(squares) == pytest.approx(daemon.series("grad_norm")[5], rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_steps_that_the_scaler_withholds(fused: bool, unscale: bool, daemon: FakeDaemon) -> None:
    net = model()
    scaler = GradScaler("cpu", 256.0)
    loop = Loop(net, adamw(net, fused=fused), scaler, half=True, unscale=unscale, overflow=frozenset({1, 4, 5}))
    with sentinel.attach(net, loop.optimizer):
        loop.run(8)
    daemon.ended()
    assert daemon.seqs() == list(range(8))
    assert daemon.series("step_skipped") == {seq: float(seq in (1, 4, 5)) for seq in range(8)}
    assert daemon.series("loss_scale") == dict(enumerate([256.0, 256.0, 128.0, 128.0, 128.0, 64.0, 32.0, 32.0]))
    # Withheld steps are examined in full, to see which layer overflowed.
    nonfinite = daemon.layers("layer_nonfinite")
    for seq in (1, 4, 5):
        assert nonfinite[seq]["0.weight"] == 6  # one row of six was made infinite
        assert sum(nonfinite[seq].values()) == 6
        assert daemon.series("grad_norm")[seq] == math.inf


def test_a_scaled_loss_that_is_divided_afterwards(daemon: FakeDaemon) -> None:
    net, scaler = model(), GradScaler("cpu", 1024.0)
    optimizer = adamw(net)
    losses = []
    with sentinel.attach(net, optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            losses.append(float(loss.detach()) / 2)
            (scaler.scale(loss) / 2).backward()  # type: ignore[operator]
            scaler.step(optimizer)
            scaler.update()
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))


def test_clipping_gradients_that_are_still_scaled(daemon: FakeDaemon) -> None:
    """This is a fault of the loop, but no reason to report a norm that is 1024 times too high."""
    net, scaler = model(), GradScaler("cpu", 1024.0)
    optimizer, norms = adamw(net), []
    with sentinel.attach(net, optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, batch)).backward()  # type: ignore[union-attr]
            norms.append(norm(net) / 1024)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    daemon.ended()
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), rel=1e-5)


def test_a_loss_that_is_not_finite_is_looked_at_in_the_same_step(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for step, batch in enumerate(batches(12)):
            optimizer.zero_grad()
            (loss_of(net, batch) * (math.nan if step == 9 else 1.0)).backward()
            optimizer.step()
    daemon.ended()
    assert math.isnan(daemon.series("loss")[9])
    assert list(daemon.layers("layer_nonfinite")) == [0, 8, 9, 10, 11]
    assert daemon.layers("layer_nonfinite")[9] == {name: p.numel() for name, p in net.named_parameters()}
    assert daemon.layers("layer_nonfinite")[8] == {name: 0 for name, _ in net.named_parameters()}


def test_a_nonfinite_sample_is_sent_without_waiting(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.hooks.transport.sender.INTERVAL_SECONDS", 1000.0)
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        (loss_of(net, next(batches(1))) * math.inf).backward()
        optimizer.step()
        daemon.wait(lambda: 0 in daemon.series("loss"))
    assert daemon.series("loss") == {0: math.inf}


@pytest.mark.usefixtures("every_step")
def test_a_dead_run_wakes_the_sender_once(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = []
    monkeypatch.setattr(Sender, "wake", lambda self: wakes.append(1))
    monkeypatch.setattr("sentinel.hooks.session.session.EARLY_STEPS", range(0))
    net = model()
    optimizer = adamw(net)
    monitor = sentinel.attach(net, optimizer, provenance=False)
    for step, batch in enumerate(batches(9)):
        optimizer.zero_grad()
        (loss_of(net, batch) * (1.0 if step < 3 else math.nan)).backward()
        monitor.log(validation=math.nan)
        optimizer.step()
    assert len(wakes) == 1


def test_half_precision_gradients_do_not_overflow_their_norm(daemon: FakeDaemon) -> None:
    net = nn.Linear(64, 64, bias=False, dtype=torch.float16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with sentinel.attach(net, optimizer):
        net.weight.grad = torch.full((64, 64), 3000.0, dtype=torch.float16)
        optimizer.step()
    daemon.ended()
    assert daemon.series("grad_norm") == {0: pytest.approx(192000.0, rel=1e-5)}
    assert daemon.layers("layer_grad_max") == {0: {"weight": 3000.0}}


@pytest.mark.usefixtures("every_step")
def test_sparse_complex_empty_and_missing_gradients_are_left_out(daemon: FakeDaemon) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.empty(0, 4))
            self.unused = nn.Parameter(torch.ones(2))
            self.plain = nn.Linear(4, 1)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.plain(self.table(index)).sum() + self.phase.abs().sum() + self.empty.sum()

    net = Odd()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with sentinel.attach(net, optimizer) as monitor:
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.tensor([1, 2])).backward()
            optimizer.step()
        left_out = dict(find_session(monitor).monitors[0].left_out)
    daemon.ended()
    assert left_out == {"table.weight": "sparse", "phase": "complex"}
    assert set(daemon.layers("layer_grad_norm")[1]) == {"plain.weight", "plain.bias"}
    assert daemon.series("grad_norm")[1] > 0


def test_times_and_data_wait(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=8)
    with sentinel.attach(net, optimizer):
        for _ in range(2):
            for (batch,) in loader:
                optimizer.zero_grad()
                loss_of(net, batch).backward()
                optimizer.step()
    daemon.ended()
    parts = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "other_seconds")
    assert list(daemon.series("step_seconds")) == [1, 2, 3, 4, 5]
    for seq, whole in daemon.series("step_seconds").items():
        seconds = [daemon.series(part)[seq] for part in parts]
        assert all(value >= 0 for value in seconds)
        assert sum(seconds) == pytest.approx(whole)


def test_monitor_batches_measures_the_wait_once(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=8)
    with sentinel.attach(net, optimizer) as monitor:
        watched = monitor.batches(loader)
        assert len(watched) == 3  # type: ignore[arg-type]
        for (batch,) in watched:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            assert find_session(monitor).accumulator.totals.batches == 1
            optimizer.step()
    daemon.ended()
    assert list(daemon.series("data_seconds")) == [0, 1, 2]


def test_log_adds_and_overrides(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer) as monitor:
        for step, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            monitor.log(loss=step * 10, accuracy=torch.tensor(0.5), name="text")  # type: ignore[arg-type]
            optimizer.step()
        daemon.wait(lambda: any("accuracy" in hello.signals for hello in daemon.of(wire.Hello)))
    daemon.ended()
    assert daemon.series("loss") == {0: 0.0, 1: 10.0, 2: 20.0, 3: 30.0}
    assert daemon.series("accuracy") == dict.fromkeys(range(4), 0.5)
    assert daemon.of(wire.Hello)[-1].signals == {"accuracy": "rank"}
    assert capsys.readouterr().err.count("log(name=...)") == 1


def test_several_optimizers_are_streams_of_their_own(daemon: FakeDaemon) -> None:
    generator, critic = model(0), model(1)
    optimizers = [adamw(generator), torch.optim.SGD(critic.parameters(), lr=1e-3)]
    with sentinel.attach([generator, critic], optimizers):
        for step, batch in enumerate(batches(6)):
            which = step % 2
            optimizers[which].zero_grad()
            (loss_of([generator, critic][which], batch) + which * 100).backward()
            optimizers[which].step()
    daemon.ended()
    assert daemon.of(wire.Hello)[0].streams == ("AdamW", "SGD")
    assert daemon.seqs(0) == daemon.seqs(1) == [0, 1, 2]
    assert max(daemon.series("loss", 0).values()) < 100 < min(daemon.series("loss", 1).values())
    assert daemon.series("rival_loss", 0) == {1: 1.0, 2: 1.0}  # the first step is before the other's
    tables = {table.stream: table for table in daemon.of(wire.LayerTable)}
    assert {layer.model for layer in tables[1].layers} == {"Sequential[1]"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_optimizers_that_share_a_loss_are_no_rivals(daemon: FakeDaemon, order: tuple[int, int]) -> None:
    net = model()
    weights, rest = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() < 2]
    optimizers = [torch.optim.SGD(weights, lr=1e-3), torch.optim.AdamW(rest)]
    with sentinel.attach(net, optimizers):
        for batch in batches(4):
            net.zero_grad()
            loss_of(net, batch).backward()
            for which in order:
                optimizers[which].step()
    daemon.ended()
    assert len(daemon.series("loss", order[0])) == 4
    assert daemon.series("rival_loss", 0) == {} == daemon.series("rival_loss", 1)


def test_reentrant_checkpointing_is_one_backward_pass(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for batch in batches(3):
            optimizer.zero_grad()
            output = checkpoint(net, batch.requires_grad_(), use_reentrant=True)
            output.sum().backward()
            optimizer.step()
    daemon.ended()
    assert daemon.series("micro_batches") == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_loss_that_is_no_scalar_is_not_made_one(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        output = net(next(batches(1)))
        output.backward(torch.ones_like(output))
        optimizer.step()
    daemon.ended()
    assert daemon.series("loss") == {}
    assert daemon.series("micro_batches") == {0: 1.0}


def test_a_lack_of_losses_is_reported(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = adamw(net)
    with sentinel.attach(net, optimizer):
        for batch in batches(25):
            parameters = list(net.parameters())
            for p, g in zip(parameters, torch.autograd.grad(loss_of(net, batch), parameters), strict=True):
                p.grad = g
            optimizer.step()
    said = capsys.readouterr().err
    assert said.count("no loss was seen in 20 steps") == 1
    assert "monitor.log(loss=...)" in said


def test_a_closure_is_measured_after_it_ran(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    losses, norms = [], []
    with sentinel.attach(net, optimizer):
        for batch in batches(4):

            def closure(batch: torch.Tensor = batch) -> float:
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                losses.append(float(loss.detach()))
                norms.append(norm(net))
                return losses[-1]

            optimizer.step(closure)  # type: ignore[arg-type]
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))
    assert daemon.series("grad_norm") == pytest.approx(dict(enumerate(norms)), **EXACT)
