"""Tier 3 against computations by hand: weights, updates, small gradients, checksums, the optimizer's state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel import wire
from sentinel.engine import RUN, Observation
from sentinel.engine.backtest import backtest
from sentinel.hooks.core import governor
from sentinel.hooks.measure import kernels
from sentinel.hooks.torch_interop.tensors import BUDGET, Sample, checksum, row_length, short
from sentinel.rulebook import loader
from sentinel.signals import EXPONENTS, SIGNALS, below
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import Loop, batches, loss_of, model


@pytest.fixture(autouse=True)
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "FIRST", {0: 1, 1: 1, 2: 1, 3: 1})


def sgd(net: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=rate)


class Recorded(Loop):
    """Keeps copies of weights and gradients at each step."""

    def run(self, steps: int, before_step: Callable[[int], None] = lambda _: None) -> list[float]:
        self.before: list[dict[str, torch.Tensor]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

        def keep(step: int) -> None:
            before_step(step)
            self.before.append({n: p.detach().clone() for n, p in self.net.named_parameters()})
            self.gradients.append({n: p.grad.clone() for n, p in self.net.named_parameters() if p.grad is not None})

        losses = super().run(steps, keep)
        self.after = [*self.before[1:], {n: p.detach().clone() for n, p in self.net.named_parameters()}]
        return losses


def norm(tensors: Any) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "torch"])
def test_a_small_model_is_measured_exactly(compiled: bool, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "kernel_missing", "not wanted")
    net = model()
    loop = Recorded(net, sgd(net))
    with sentinel.attach(net, loop.optimizer):
        loop.run(3)
    daemon.ended()
    for seq in range(3):
        before, after, gradients = loop.before[seq], loop.after[seq], loop.gradients[seq]
        for name, gradient in gradients.items():
            moved = norm([after[name] - before[name]])

            def got(signal: str, of: str = name, at: int = seq) -> float:
                return daemon.layers(signal)[at][of]

            assert got("layer_weight_norm") == pytest.approx(norm([after[name]]), rel=1e-5)
            assert got("layer_update_ratio") == pytest.approx(moved / norm([after[name]]), rel=1e-4)
            assert got("layer_grad_zero_share") == pytest.approx(float((gradient == 0).float().mean()))
            assert got("layer_grad_smallest") == pytest.approx(float(gradient[gradient != 0].abs().min()))
            tiny = ((gradient != 0) & (gradient.abs() < 2.0**-14)).float().mean()
            assert got("layer_grad_tiny_share") == pytest.approx(float(tiny))
            same = (gradient != 0) & (after[name] == before[name])
            assert got("layer_lost_share") == pytest.approx(float(same.sum() / (gradient != 0).sum()))
        moved = norm(after[name] - before[name] for name in after)
        assert daemon.series("weight_norm")[seq] == pytest.approx(norm(after.values()), rel=1e-5)
        assert daemon.series("update_ratio")[seq] == pytest.approx(moved / norm(after.values()), rel=1e-4)
        every = torch.cat([gradient.flatten() for gradient in gradients.values()])
        for exponent in EXPONENTS:
            share = ((every != 0) & (every.abs() < 2.0**exponent)).double().mean()
            assert daemon.series(below(exponent))[seq] == pytest.approx(float(share), abs=1e-6)


def test_a_layer_larger_than_its_sample_counts_with_its_whole_size(daemon: FakeDaemon) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 512), nn.Linear(512, 1))
    assert net[1].weight.numel() > 4 * row_length(6)
    loop = Recorded(net, sgd(net))
    with sentinel.attach(net, loop.optimizer):
        loop.run(1)
    daemon.ended()
    (before,), after = loop.before, loop.after[0]
    for name in ("0.weight", "1.weight"):
        moved = norm([after[name] - before[name]])
        assert daemon.layers("layer_weight_norm")[0][name] == pytest.approx(norm([after[name]]), rel=0.05)
        assert daemon.layers("layer_update_ratio")[0][name] == pytest.approx(moved / norm([after[name]]), rel=0.1)
    moved = norm(after[name] - before[name] for name in after)
    assert daemon.series("update_ratio")[0] == pytest.approx(moved / norm(after.values()), rel=0.1)


def test_every_rare_signal_of_the_vocabulary_is_measured(daemon: FakeDaemon) -> None:
    net = model()
    net[2].requires_grad_(False)
    loop = Loop(net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]))
    with sentinel.attach(net, loop.optimizer):
        loop.run(2)
    daemon.ended()
    # Signals of DDP, shards, nn.DataParallel, transformers, adapters, schedulers and frozen batch norms alone.
    wrapped = {"replica_checksum", "layer_checksum", "data_parallel_devices", "post_norm_layers", "adapter_ratio"}
    wrapped |= {"adapter_rank_used", "scheduler_first", "scheduler_steps"}
    wrapped |= {"frozen_statistics", "frozen_statistics_row", "weight_norm_sharded"}
    rare = {signal.name for signal in SIGNALS.values() if signal.tier == 3} - wrapped
    streamed = {name for batch in daemon.of(wire.Batch) for name in batch.columns}
    layered = {name for batch in daemon.of(wire.Batch) for block in batch.layers for name in block.stats}
    assert rare <= streamed | layered
    moments = 2 * sum(p.numel() for p in net.parameters() if p.requires_grad)
    steps = sum(p.requires_grad for p in net.parameters())
    assert daemon.series("optimizer_state_bytes")[1] == 4 * (moments + steps)


def test_a_weight_at_its_minimum_is_no_optimizer_without_effect(daemon: FakeDaemon) -> None:
    """Close to a minimum an update is less than half of the weight's last digit while the gradient is not 0 yet."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = sgd(net, 0.2)
    with sentinel.attach(net, optimizer):
        for _ in range(60):
            optimizer.zero_grad()
            (net(torch.ones(1, 1)) - 1.3).square().sum().backward()
            optimizer.step()
    daemon.ended()
    series = {name: daemon.series(name) for name in ("learning_rate", "grad_norm", "update_ratio")}
    last = [seq for seq, ratio in series["update_ratio"].items() if ratio == 0 < series["grad_norm"][seq]]
    assert len(last) >= 3
    steps = [
        Observation(seq, float(seq), {RUN: {name: values[seq] for name, values in series.items() if seq in values}})
        for seq in range(60)
    ]
    alerts = [alert.alert for alert in backtest(loader.stock_rules(), steps, run="t").alerts]
    assert "ParametersNotUpdated" not in alerts


def test_updates_that_are_rounded_away(daemon: FakeDaemon) -> None:
    """bfloat16 has 8 binary digits: |update| < |weight| 2^-9 leaves no trace. A share of 61.7 % was measured."""
    torch.manual_seed(0)
    net = nn.Linear(64, 64).to(torch.bfloat16)
    with torch.no_grad():
        net.weight.normal_()
    loop = Recorded(net, torch.optim.SGD(net.parameters(), lr=2e-3))
    data = torch.randn(16, 64, dtype=torch.bfloat16)
    with sentinel.attach(net, loop.optimizer):
        loop.before, loop.gradients = [], []
        loss = net(data).square().mean()
        loss.backward()
        before = net.weight.detach().clone()
        gradient = net.weight.grad.clone()  # type: ignore[union-attr]
        loop.optimizer.step()
    daemon.ended()
    lost = float(((net.weight == before) & (gradient != 0)).sum() / (gradient != 0).sum())
    assert 0.3 < lost < 0.99
    assert daemon.layers("layer_lost_share")[0]["weight"] == pytest.approx(lost)
    assert 0.3 < daemon.series("lost_update_share")[0] < 0.99
    # The estimate from the sizes alone is close to what was measured.
    estimate = float(((2e-3 * gradient.float()).abs() < before.float().abs() * 2.0**-9).float().mean())
    assert estimate == pytest.approx(lost, abs=0.1)


def test_the_scale_is_taken_off_and_counts_for_what_fp16_can_hold(daemon: FakeDaemon) -> None:
    net = model()
    fused = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    loop = Loop(net, fused, torch.amp.GradScaler("cpu", 2.0**20), half=False)
    bare = model()
    loss_of(bare, next(batches(1))).backward()
    with sentinel.attach(net, fused):
        loop.run(1)
    daemon.ended()
    gradient = bare[0].weight.grad
    assert gradient is not None
    assert daemon.layers("layer_grad_smallest")[0]["0.weight"] == pytest.approx(
        float(gradient[gradient != 0].abs().min()), rel=1e-3
    )
    assert daemon.layers("layer_grad_tiny_share")[0]["0.weight"] == 0.0  # times 2^20 all of it is in fp16's range


def test_a_withheld_step_has_no_update(daemon: FakeDaemon) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    loop = Loop(net, optimizer, torch.amp.GradScaler("cpu", 1024.0), overflow=frozenset({1}))
    with sentinel.attach(net, optimizer):
        loop.run(3)
    daemon.ended()
    assert list(daemon.series("update_ratio")) == [0, 2]
    assert list(daemon.series("parameter_checksum")) == [0, 1, 2]


def test_weights_are_measured_before_and_after_a_closure(daemon: FakeDaemon) -> None:
    """With Lightning's optimizers and LBFGS the backward pass runs inside the step."""
    net, data = model(), next(batches(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, data)
        loss.backward()
        return loss

    before = [p.detach().clone() for p in net.parameters()]
    with sentinel.attach(net, optimizer):
        optimizer.step(closure)
        after = [p.detach().clone() for p in net.parameters()]
    daemon.ended()
    moved = norm(new - old for new, old in zip(after, before, strict=True))
    assert daemon.series("update_ratio")[0] == pytest.approx(moved / norm(after), rel=1e-4)


def test_checksums_tell_replicas_that_drift_and_frozen_layers_that_move(daemon: FakeDaemon) -> None:
    net = model()
    net[0].requires_grad_(False)
    loop = Loop(net, sgd(net))

    def drift(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                net[0].weight[0, 0] += 1e-6

    with sentinel.attach(net, loop.optimizer):
        loop.run(6, drift)
    daemon.ended()
    frozen = daemon.series("frozen_checksum")
    assert frozen[0] == frozen[1] == frozen[2] != frozen[3] == frozen[5]
    # What the optimizer has is read before the first step, too.
    assert daemon.series("frozen_changed") == {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 0.0}
    assert daemon.series("frozen_changed_row") == {0: -1.0, 1: -1.0, 2: -1.0, 3: 0.0, 4: -1.0, 5: -1.0}
    assert set(daemon.series("frozen_moved").values()) == {0.0}
    trained = daemon.series("parameter_checksum")
    assert len(set(trained.values())) == 6
    assert all(value == int(value) < 1 << 24 for value in trained.values())


def test_what_is_frozen_in_mid_run_and_still_moves_is_found_at_the_first_look(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))

    def freeze(step: int) -> None:
        if step == 3:
            net[0].requires_grad_(False)
            for parameter in net[0].parameters():
                parameter.grad = torch.zeros_like(parameter)

    with sentinel.attach(net, loop.optimizer):
        loop.run(5, freeze)
    daemon.ended()
    assert daemon.series("frozen_changed")[3] == 2.0
    sampled = [{"0.weight", "0.bias"} <= layers.keys() for layers in daemon.layers("layer_grad_norm").values()]
    assert sampled == [True, True, True, False, False], "a gradient that was left is not the layer's"


def test_a_copy_of_the_optimizers_own_trains_without_requires_grad(daemon: FakeDaemon) -> None:
    net, copied = model(), torch.zeros(3)
    loop = Loop(net, torch.optim.SGD([*net.parameters(), copied], lr=0.1))

    def reduce(_: int) -> None:
        copied.grad = torch.full((3,), 2.0)

    with sentinel.attach(net, loop.optimizer):
        loop.run(3, reduce)
    daemon.ended()
    (name,) = daemon.layers("layer_grad_norm")[2].keys() - dict(net.named_parameters()).keys()
    assert daemon.layers("layer_grad_norm")[2][name] == pytest.approx(12**0.5)


def test_a_teacher_that_follows_is_told_from_what_the_optimizer_moves(daemon: FakeDaemon) -> None:
    net = nn.ModuleDict({"student": model(), "teacher": model()})
    net["teacher"].requires_grad_(False)
    loop = Loop(net["student"], torch.optim.SGD(net["student"].parameters(), lr=0.1))

    def follow(step: int) -> None:
        for mean, parameter in zip(net["teacher"].parameters(), net["student"].parameters(), strict=True):
            mean.data.lerp_(parameter.data, 0.1)
        if step == 3:  # what is frozen changes: nothing to compare with
            next(net["teacher"].parameters()).requires_grad_(True)

    with sentinel.attach(net, loop.optimizer):
        loop.run(5, follow)
    daemon.ended()
    assert daemon.series("frozen_moved") == {1: 6.0, 2: 6.0, 4: 5.0}
    assert set(daemon.series("frozen_changed").values()) == {0.0}
    assert daemon.series("frozen_changed_row") == {1: 6.0, 2: 6.0, 4: 7.0}


def checksums(tensors: list[torch.Tensor], each: int = 64, turn: int = 0) -> list[int]:
    """Return the checksum of all tensors, and that of each."""
    sums = Sample(tensors, each, turn).checksums()
    return [int(checksum(sums)), *map(int, short(sums).tolist())]


def test_equal_replicas_have_equal_checksums() -> None:
    one = [torch.randn(300, 7), torch.randn(5, dtype=torch.bfloat16)]
    other = copy.deepcopy(one)
    assert checksums(one) == checksums(other)
    other[1][4] += 1
    same = [a == b for a, b in zip(checksums(one), checksums(other), strict=True)]
    assert same == [False, True, False], "of all and of the second"
    other[1][4], other[0][0, 0], other[0][1, 0] = one[1][4], one[0][1, 0], one[0][0, 0]
    assert checksums([one[0][:2]])[0] != checksums([other[0][:2]])[0]  # places count


def test_one_element_that_differs_is_found_in_turn() -> None:
    one = [torch.randn(1000)]
    other = [one[0].clone()]
    other[0][777] += 1e-3
    turns = [turn for turn in range(0, 256 * 300, 256) if checksums(one, 64, turn) != checksums(other, 64, turn)]
    assert 0 < len(turns) < 300 / 4  # of each 16 elements one is read
    assert all(checksums(one, 2000, turn) != checksums(other, 2000, turn) for turn in turns[:3])


def test_a_large_tensor_is_estimated_within_what_is_promised() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(1000, 1000) * torch.rand(1000, 1000).square()
    found = Sample([tensor], 1000)
    assert int(found.counts) == 1000
    assert float(found.norms()[0]) == pytest.approx(float(tensor.norm()), rel=0.06)
    share = float((tensor.abs() < 0.1).float().mean())
    under = (found.values.abs() < 0.1).count_nonzero(1)
    assert float(found.estimate_total(under)) / found.size == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, :3],
        lambda t: t[::2],
        lambda t: t.reshape(4, 5, 2, 3).to(memory_format=torch.channels_last),
        lambda t: t[0, 0],
        lambda t: t[:1].expand(6, 6),
    ],
    ids=["whole", "transposed", "columns", "rows", "channels-last", "scalar", "expanded"],
)
def test_any_layout_gives_its_elements(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = make(torch.arange(1.0, 121.0).reshape(20, 6))
    found = Sample([tensor], 200)
    taken = found.values[0, : int(found.counts)]
    assert sorted(taken.tolist()) == sorted(tensor.flatten().tolist())
    assert int(Sample([tensor], 7).counts) <= 7


def test_a_sample_stays_in_its_budget() -> None:
    tensors = [torch.ones(n) for n in (1, 10, 1000, 100_000, 3_000_000)] * 50
    assert Sample(tensors, row_length(len(tensors))).values.numel() <= BUDGET
    assert row_length(10 * BUDGET) == 1


def test_replicas_are_those_of_ddp(daemon: FakeDaemon) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(model())
        loop = Loop(net, sgd(net))
        with sentinel.attach(net, loop.optimizer):
            loop.run(2)
    finally:
        torch.distributed.destroy_process_group()
    daemon.ended()
    assert daemon.series("replica_checksum") == daemon.series("parameter_checksum")
    assert len(daemon.series("replica_checksum")) == 2
    assert set(daemon.layers("layer_checksum")[1]) == {name for name, _ in net.module.named_parameters()}


SECOND_MOMENTS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2),
    "AdamW, which forgets fast": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, betas=(0.9, 0.7)),
    "Adam with amsgrad": lambda net: torch.optim.Adam(net.parameters(), lr=1e-2, amsgrad=True),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters(), lr=1e-2),
    "RAdam": lambda net: torch.optim.RAdam(net.parameters(), lr=1e-2),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=1e-3, alpha=0.95),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SECOND_MOMENTS)
def test_second_moments_keep_what_updates_leave_of_them_unless_they_are_overwritten(
    name: str, daemon: FakeDaemon
) -> None:
    net = model()
    loop = Loop(net, SECOND_MOMENTS[name](net))

    def disturb(step: int) -> None:
        if step == 20:
            for state in loop.optimizer.state.values():
                for moment in ("exp_avg_sq", "square_avg"):
                    if moment in state:
                        state[moment].mul_(1e-6)

    with sentinel.attach(net, loop.optimizer):
        loop.run(40, disturb)
    daemon.ended()
    kept = daemon.series("second_moment_kept")
    assert kept.keys() == set(range(2, 40)), "the first step makes the state"
    assert kept.pop(20) < 0.5
    assert min(kept.values()) >= 0.999


def test_second_moments_that_are_zeroed_are_seen_although_the_next_gradient_fills_them(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)
    factor = 1.0

    def disturb(step: int) -> None:
        nonlocal factor
        factor = 1e4 if step == 20 else 1.0
        for state in loop.optimizer.state.values() if step == 20 else ():
            state["exp_avg_sq"].zero_()

    with sentinel.attach(net, loop.optimizer):
        loop.run(40, disturb)
    daemon.ended()
    kept = daemon.series("second_moment_kept")
    assert kept.pop(20) < 1e-3
    assert min(kept.values()) >= 0.999


def test_second_moments_of_optimizers_that_step_inside_the_backward_pass_are_compared_too(daemon: FakeDaemon) -> None:
    net = model()
    optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in net.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    with sentinel.attach(net, list(optimizers.values())):
        for number, batch in enumerate(batches(40)):
            for optimizer in optimizers.values() if number == 20 else ():
                for state in optimizer.state.values():
                    state["exp_avg_sq"].mul_(1e-6)
            loss_of(net, batch).backward()
    for handle in handles:
        handle.remove()
    daemon.ended()
    kept = daemon.series("second_moment_kept")
    assert kept.keys() == set(range(1, 40)), "the first step makes the state"
    assert kept.pop(20) < 0.5
    assert min(kept.values()) >= 0.999


@pytest.mark.parametrize("adam", [True, False], ids=["adam", "momentum"])
def test_the_size_of_the_last_update_is_read_from_the_optimizers_state(adam: bool, daemon: FakeDaemon) -> None:
    net, rate = model(), 0.01
    made = torch.optim.Adam(net.parameters(), rate) if adam else torch.optim.SGD(net.parameters(), rate, momentum=0.9)
    loop = Recorded(net, made)
    with sentinel.attach(net, loop.optimizer):
        loop.run(12)
    daemon.ended()
    sizes = daemon.series("last_update_size")
    assert sizes.keys() == set(range(1, 12)), "the first step makes the state"
    for step, size in sizes.items():
        before, after = list(loop.before[step - 1].values())[:4], list(loop.before[step].values())[:4]
        moved = torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)]) / rate
        assert size == pytest.approx(float(moved.square().mean().sqrt()), rel=1e-3)


def test_a_parameter_that_never_had_a_gradient_does_not_hide_the_updates_of_the_others(daemon: FakeDaemon) -> None:
    net = model()
    net[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
    loop = Loop(net, torch.optim.Adam(net.parameters(), lr=0.01))
    with sentinel.attach(net, loop.optimizer):
        loop.run(4)
    daemon.ended()
    assert daemon.series("last_update_size").keys() == {1, 2, 3}


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_that_keeps_no_update_has_no_size_of_one(make: Any, daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, make(net.parameters(), lr=0.01))
    with sentinel.attach(net, loop.optimizer):
        loop.run(4)
    daemon.ended()
    assert daemon.series("last_update_size") == {}


def test_a_huge_gradient_multiplies_the_second_moments(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    handles = [parameter.register_hook(lambda grad: grad * factor) for parameter in net.parameters()]
    factor = 1.0

    def disturb(step: int) -> None:
        nonlocal factor
        factor = 1e4 if step == 20 else 1.0

    with sentinel.attach(net, loop.optimizer):
        loop.run(40, disturb)
    daemon.ended()
    growth = daemon.series("second_moment_growth")
    (after,) = [seq for seq, value in growth.items() if value > 100]
    assert 20 <= after <= 24, "the next sample of the opening"
    assert len(handles) == len([*net.parameters()])


def test_second_moments_that_were_loaded_or_begin_a_stage_are_not_compared_with_those_before(
    daemon: FakeDaemon,
) -> None:
    net = model()
    loop = Loop(net, torch.optim.Adam(net.parameters(), lr=1e-2))

    def disturb(step: int) -> None:
        if step == 10:
            fresh = copy.deepcopy(loop.optimizer.state_dict())
            for state in fresh["state"].values():
                state["exp_avg_sq"].zero_()
            loop.optimizer.load_state_dict(fresh)
        if step == 20:
            monitor.stage("fine-tuning")
            for state in loop.optimizer.state.values():
                state["exp_avg_sq"].zero_()

    with sentinel.attach(net, loop.optimizer) as monitor:
        loop.run(30, disturb)
    daemon.ended()
    kept = daemon.series("second_moment_kept")
    assert kept.keys() == set(range(2, 30)) - {10, 20}
    assert min(kept.values()) >= 0.999


def test_without_second_moments_there_is_no_sample_of_them(daemon: FakeDaemon) -> None:
    net = model()
    loop = Loop(net, sgd(net))
    with sentinel.attach(net, loop.optimizer):
        loop.run(5)
    daemon.ended()
    assert daemon.series("second_moment_kept") == {}
