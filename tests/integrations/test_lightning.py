"""Lightning's own Trainer, at its current release, with the callback."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel import wire
from sentinel.errors import AttachError
from tests.hooks.conftest import FakeDaemon

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

STEPS = 12

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of few workers and short epochs


class Net(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A regression, with clipping and a schedule."""

    def __init__(self, fail_at: int = -1) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.losses: list[float] = []
        self.fail_at = fail_at

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        if len(self.losses) == self.fail_at:
            raise ValueError("the user's own mistake")
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


class Logging(Net):
    """Logs as a policy's module may."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        self.log("train/reward", float(self.global_step))
        self.log("train/entropy", loss.detach(), on_step=True, on_epoch=True)
        self.log("train_loss", 1e9)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("val_accuracy", 0.5)


def fitted(tmp_path: Path, *callbacks: Any, fail_at: int = -1, net: type[Net] = Net, **options: Any) -> Net:
    torch.manual_seed(0)
    model = net(fail_at)
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


def test_every_step_is_seen_with_its_loss_and_the_validation_is_a_phase(daemon: FakeDaemon, tmp_path: Path) -> None:
    watch = callback(run="fit")
    model = fitted(tmp_path, watch, val_check_interval=6)
    assert daemon.ended().reason == "detach"
    assert watch.monitor is None
    assert daemon.series("loss") == pytest.approx(dict(enumerate(model.losses)))
    assert daemon.of(wire.Hello)[0].identity.run == "fit"
    assert {phase.name for phase in daemon.of(wire.PhaseChanged)} == {"validation", ""}
    assert set(daemon.series("clip_limit").values()) == {0.1}
    norms, applied = daemon.series("grad_norm"), daemon.series("grad_norm_applied")
    assert max(norms.values()) > 0.1
    assert max(applied.values()) == pytest.approx(0.1, rel=1e-3)
    assert "net.0.weight" in daemon.layers("layer_grad_norm")[0]


def test_accumulated_micro_batches_are_one_step(daemon: FakeDaemon, tmp_path: Path) -> None:
    model = fitted(tmp_path, callback(), accumulate_grad_batches=2, limit_train_batches=12, max_epochs=1)
    daemon.ended()
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


def test_a_wrong_option_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="overhead"):
        fitted(tmp_path, callback(overhead=7))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_the_module_logs_is_handed_on(daemon: FakeDaemon, tmp_path: Path, accumulation: int) -> None:
    model = fitted(
        tmp_path,
        callback(),
        net=Logging,
        log_every_n_steps=4,
        val_check_interval=6,
        accumulate_grad_batches=accumulation,
    )
    daemon.ended()
    rewards = daemon.series("reward")
    assert {4, 8} <= set(rewards), "under Lightning's own step"
    assert set(rewards) <= {3, 4, 6, 8, 9}, "and after a validation; at other steps nothing is asked for"
    assert set(daemon.series("val_accuracy").values()) == {0.5}
    assert max(daemon.series("loss").values()) < 1e6, "what is measured is not replaced"
    assert daemon.of(wire.Hello)[-1].facts["judged_as"].startswith("reinforcement learning, by reward, entropy")
    assert model.losses
