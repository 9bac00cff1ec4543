"""Lightning's own Trainer, in its current release, with the callback."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel import wire
from sentinel.errors import AttachError
from tests.hooks.conftest import FakeDaemon

STEPS = 12

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore"),  # Lightning warns of few workers and short epochs
]


def fitted(tmp_path: Path, *callbacks: Any, fail_at: int = -1, logs: bool = False, **options: Any) -> Any:
    """Return the module after at most `STEPS` training steps."""
    import lightning.pytorch as lightning

    from tests.integrations.lightning_modules import Logging, Net

    torch.manual_seed(0)
    model = (Logging if logs else Net)(fail_at)
    data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, gradient_clip_val=0.1,
        callbacks=list(callbacks), **options,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=48))
    return model


def callback(**options: Any) -> Any:
    from sentinel.hooks.lightning import SentinelCallback

    return SentinelCallback(**options)


@pytest.mark.slow
def test_every_step_is_seen_with_its_loss_and_the_validation_is_a_phase(daemon: FakeDaemon, tmp_path: Path) -> None:
    watch = callback(run="fit")
    model = fitted(tmp_path, watch, val_check_interval=6)
    assert daemon.ended().reason == "detach"
    assert watch.monitor is None
    assert daemon.series("loss") == pytest.approx(dict(enumerate(model.losses)))
    hello = daemon.of(wire.Hello)[0]
    assert (hello.identity.run, hello.facts["total_steps"]) == ("fit", STEPS)
    assert {phase.name for phase in daemon.of(wire.PhaseChanged)} == {"validation", ""}
    assert set(daemon.series("clip_limit").values()) == {0.1}
    norms, applied = daemon.series("grad_norm"), daemon.series("grad_norm_applied")
    assert max(norms.values()) > 0.1
    assert max(applied.values()) == pytest.approx(0.1, rel=1e-3)
    assert "net.0.weight" in daemon.layers("layer_grad_norm")[0]


@pytest.mark.slow
def test_accumulated_micro_batches_are_one_step(daemon: FakeDaemon, tmp_path: Path) -> None:
    model = fitted(tmp_path, callback(), accumulate_grad_batches=2, limit_train_batches=12, max_epochs=1)
    daemon.ended()
    assert daemon.of(wire.Hello)[0].facts["total_steps"] == len(model.losses) // 2 == 6
    pairs = zip(model.losses[::2], model.losses[1::2], strict=True)
    assert daemon.series("loss") == pytest.approx({i: (a + b) / 2 for i, (a, b) in enumerate(pairs)})
    assert set(daemon.series("micro_batches").values()) == {2.0}


def test_weights_are_the_same_to_the_last_bit(daemon: FakeDaemon, tmp_path: Path) -> None:
    with_it, without = fitted(tmp_path, callback()), fitted(tmp_path)
    daemon.ended()
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))


def test_a_run_that_fails_says_so_and_leaves_nothing_behind(daemon: FakeDaemon, tmp_path: Path) -> None:
    watch = callback()
    with pytest.raises(ValueError, match="own mistake"):
        fitted(tmp_path, watch, fail_at=5)
    goodbye = daemon.ended()
    assert (goodbye.reason, goodbye.detail) == ("exception", "ValueError")
    assert watch.monitor is None


def test_a_wrong_option_is_reported_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="overhead"):
        fitted(tmp_path, callback(overhead=7))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_the_module_logs_is_handed_on(daemon: FakeDaemon, tmp_path: Path, accumulation: int) -> None:
    model = fitted(
        tmp_path,
        callback(),
        logs=True,
        log_every_n_steps=4,
        val_check_interval=6,
        accumulate_grad_batches=accumulation,
    )
    daemon.ended()
    rewards = daemon.series("reward")
    assert set(rewards) == {4, 8, STEPS - 1}, "under Lightning's own step; at others nothing is asked for"
    assert set(daemon.series("val_accuracy").values()) == {0.5}
    assert max(daemon.series("loss").values()) < 1e6, "what is measured is not replaced"
    assert daemon.of(wire.Hello)[-1].facts["judged_as"].startswith("reinforcement learning, by reward, entropy")
    assert model.losses


@pytest.mark.parametrize("every", [4, 12])
def test_an_evaluation_is_one_point_and_the_last_is_among_them(daemon: FakeDaemon, tmp_path: Path, every: int) -> None:
    fitted(tmp_path, callback(), logs=True, log_every_n_steps=2, val_check_interval=every)
    daemon.ended()
    assert daemon.series("val_step") == {min(done, STEPS - 1): done for done in range(every, STEPS + 1, every)}
    epochs = daemon.series("train_entropy_epoch")
    assert set(epochs) == {STEPS - 1}
