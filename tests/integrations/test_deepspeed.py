"""DeepSpeed, in its current release, under torchrun on gloo, at each stage of ZeRO."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel.errors import AttachError
from tests.hooks.conftest import FakeDaemon
from tests.programs import ranks
from tests.programs.combined import WORLD, combined, hellos, layers_of, reference, torchrun

WAYS = ("0", "0-clip", "1", "2-clip-twice", "3-clip", "3-bf16")
UNASKED = "2-unasked"

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    """Load DeepSpeed, which takes seconds, once the first of these tests is run."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the library
        pytest.importorskip("deepspeed", reason="deepspeed is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("zero")
    torchrun("tests.programs.zero", made, [*WAYS, UNASKED])
    return made


@pytest.mark.parametrize("way", [way for way in WAYS if "bf16" not in way])
def test_norms_are_those_of_the_whole_model(way: str, folder: Path) -> None:
    clip = "clip" in way
    steps, expected = combined(folder, way), reference(clip=clip)
    assert [step.seq for step in steps] == list(range(ranks.STEPS))
    for step, whole in zip(steps, expected, strict=True):
        assert step.run["loss"] == pytest.approx(whole.loss, rel=1e-6)
        assert step.run["micro_batches"] == WORLD * (2 if "twice" in way else 1)
        assert step.run["learning_rate"] == ranks.LEARNING_RATE
        assert step.run.get("clip_limit") == (ranks.CLIP if clip else None)
        assert step.run["grad_norm_applied"] == pytest.approx(whole.after, rel=1e-5)
        # Without ZeRO DeepSpeed clips before it steps, and keeps the norm to itself.
        assert step.run.get("grad_norm") == (None if way == "0-clip" else pytest.approx(whole.before, rel=1e-6))
        found, wanted = layers_of(step), whole.layers if way == "0-clip" else whole.unclipped
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert found[name] == pytest.approx(values, rel=2e-6, abs=2e-6 * values[0]), name


def test_in_bf16_the_parts_make_deepspeeds_own_norm(folder: Path) -> None:
    for step in combined(folder, "3-bf16"):
        parts = math.sqrt(sum(norm * norm for norm, _, _ in layers_of(step).values()))
        assert parts == pytest.approx(step.run["grad_norm"], rel=1e-6)
        assert "loss_scale" not in step.run


@pytest.mark.parametrize("way", [*WAYS, UNASKED])
def test_weights_are_the_same_to_the_bit_no_collective_is_added_and_detach_restores(way: str, folder: Path) -> None:
    for rank in range(WORLD):
        said = json.loads((folder / f"{way}.{rank}.json").read_text())
        assert said["same"]
        assert said["watched"] == said["bare"] > 0
        assert said["restored"]


@pytest.mark.parametrize("way", WAYS)
def test_the_hello_describes_the_users_own_model(way: str, folder: Path) -> None:
    for hello in hellos(folder, way):
        assert hello.facts["model"] == "Sequential"
        assert hello.facts["parameters"] == sum(p.numel() for p in ranks.model().parameters())


def test_an_engine_is_found_at_its_first_step(folder: Path) -> None:
    """An engine is watched from its second step on: the first, in which it is found, is over by then."""
    steps = combined(folder, UNASKED)
    assert [step.seq for step in steps] == list(range(ranks.STEPS - 1))
    for step, whole in zip(steps, reference(clip=False)[1:], strict=True):
        assert step.run["loss"] == pytest.approx(whole.loss, rel=1e-6)
        assert step.run["grad_norm"] == pytest.approx(whole.before, rel=1e-6)


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    made = tmp_path_factory.mktemp("trainers")
    torchrun("tests.programs.zero_trainers", made, ["loop-2", "trainer-3"])
    return made


@pytest.mark.parametrize("way", ["loop-2", "trainer-3"])
def test_the_engine_of_a_trainer_is_watched(way: str, trainers: Path) -> None:
    """That of Accelerate is the model it returns; that of the Trainer is found by the optimizer."""
    of_ranks = [json.loads((trainers / f"{way}.{rank}.json").read_text()) for rank in range(WORLD)]
    steps = combined(trainers, way)
    assert [step.seq for step in steps] == list(range(len(of_ranks[0])))
    for step, *found in zip(steps, *of_ranks, strict=True):
        assert step.run["loss"] == pytest.approx(sum(loss for loss, _ in found) / WORLD, rel=1e-5)
        assert step.run["grad_norm"] == pytest.approx(found[0][1], rel=1e-5)


class Engine:
    """The part of an engine that the integration uses, in fp16, which DeepSpeed does not support on CPUs."""

    def __init__(self, optimizer: Any) -> None:
        self.module, self.optimizer, self.global_steps = ranks.model(), optimizer, 0

    def fp16_enabled(self) -> bool:
        return True

    def zero_optimization(self) -> bool:
        return False

    def gradient_clipping(self) -> float:
        return 0.0


class Scaling:
    """An optimizer that scales the loss, and withholds steps."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.param_groups = self.optimizer.param_groups
        self.cur_scale, self.overflow, self._global_grad_norm = 64.0, False, 0.0

    def scale_if_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.cur_scale

    def step(self) -> None:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        norm = torch.stack(norms).norm() / self.cur_scale
        self.overflow = not norm.isfinite()
        if self.overflow:
            self.cur_scale /= 2
        else:
            self._global_grad_norm = norm.item()
        self.optimizer.zero_grad()


def test_losses_and_gradients_that_deepspeed_scaled_are_unscaled(daemon: FakeDaemon) -> None:
    from sentinel.hooks.deepspeed import attach

    engine = Engine(None)
    engine.optimizer = Scaling(engine.module)
    losses = []
    with attach(engine):
        with pytest.raises(AttachError, match="watched already"):
            attach(engine)
        for seq, batch in enumerate(ranks.batches()):
            loss = ranks.loss_of(engine.module, batch)
            engine.optimizer.scale_if_loss(loss).backward()
            if seq == 1:
                engine.module[0].weight.grad[0, 0] = torch.inf
            engine.optimizer.step()
            losses.append(loss.item())
    daemon.ended()
    assert daemon.series("loss") == pytest.approx(dict(enumerate(losses)))
    assert daemon.series("loss_scale") == {0: 64.0, 1: 64.0, 2: 32.0, 3: 32.0}
    assert daemon.series("step_skipped") == {0: 0.0, 1: 1.0, 2: 0.0, 3: 0.0}
    layers = daemon.layers("layer_grad_norm")[0]
    assert math.hypot(*layers.values()) == pytest.approx(daemon.series("grad_norm")[0], rel=1e-5)
    assert not {"step", "scale_if_loss"} & set(vars(engine.optimizer))


def test_an_engine_that_cannot_be_watched_is_refused() -> None:
    from sentinel import Rollback
    from sentinel.hooks.deepspeed import attach

    with pytest.raises(AttachError, match="the Engine has no optimizer: give one to initialize"):
        attach(Engine(None))
    optimizer = torch.optim.AdamW(ranks.model().parameters())
    with pytest.raises(AttachError, match="DeepSpeed keeps state that Sentinel cannot restore"):
        attach(Engine(optimizer), rollback=Rollback())
