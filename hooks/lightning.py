"""The integration with Lightning: one callback.

    from sentinel.hooks.lightning import SentinelCallback
    Trainer(callbacks=[SentinelCallback()])

A script that `sentinel run` starts again goes on from Lightning's own checkpoint, the newest good one:

    trainer.fit(model, loader, ckpt_path=checkpoint("checkpoints"))

The callback attaches when training starts and detaches when it ends. Validation is a phase without alerts. Lightning
runs forward, backward and clipping inside `optimizer.step(closure)`: gradients are measured when the closure is done.
What the module logs (`self.log`) is taken every `log_every_n_steps`; values of a validation or an epoch are taken once,
when they are there. `callback_metrics` keeps the last value of each name: one that is logged again has other memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sentinel.errors import RollbackError
from sentinel.hooks.core import faults
from sentinel.hooks.rollback import framework_checkpoints
from sentinel.hooks.session.attach import attach
from sentinel.hooks.session.monitor import Monitor, TrainerNumbers
from sentinel.text import join_names

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback  # its Trainer takes no callback of the other distribution
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


_STEP = re.compile(r"step=(\d+)")
_WRITTEN_LAST = "meta.pt"
"""The file that Lightning writes last into the folder of a checkpoint whose weights are spread over ranks."""


def checkpoint(directory: str | os.PathLike[str], *, before: int | None = None) -> str | None:
    """Return the newest of Lightning's checkpoints that is whole, finite, and older than what ended the job.

    None: start from the beginning. For `ckpt_path`, on every rank. `directory` is what `ModelCheckpoint(dirpath=...)`
    names; its checkpoints, files or the folders of FSDP, have `step=` in their names, as they do by default. `before`
    names a step as `SENTINEL_RESUME_BEFORE` does: only a checkpoint saved before it is used. Newer ones that cannot be
    used are renamed to `.ckpt.void`. Have it keep several: `save_top_k=-1`. Raises RollbackError where there are
    checkpoints and none can be used, or one cannot be read for 60 s.
    """
    chosen = framework_checkpoints.choose(directory, _LightningCheckpoints(), before)
    if chosen is None:
        _refuse_unnamed(Path(directory))
    return chosen


def _refuse_unnamed(directory: Path) -> None:
    """Raise RollbackError where checkpoints are passed over for their names. Beside ones that were set aside, a
    `last.ckpt` may be as bad."""
    names = sorted(path.name for path in directory.glob("*.ckpt"))
    if names and not any(directory.glob("*.ckpt.void")):
        raise RollbackError(
            f"{directory} holds checkpoints without `step=` in their names ({join_names(names, 3)}): name them by "
            'ModelCheckpoint(filename="{epoch}-{step}"). To begin at step 0, move them away'
        )


class _LightningCheckpoints:
    """Reads Lightning's checkpoints, of one file or one folder each. See `CheckpointFormat`."""

    damage = framework_checkpoints.DAMAGE

    def read_steps(self, path: Path) -> int | None:
        named = _STEP.search(path.name) if path.suffix == ".ckpt" else None
        return int(named[1]) if named and path.exists() else None

    def find_flaw(self, path: Path, steps: int) -> str:
        file = path / _WRITTEN_LAST if path.is_dir() else path
        framework_checkpoints.read_through(file)
        content = _read(file)
        if content["global_step"] != steps:
            return f"it is of step {content['global_step']}"
        weights = framework_checkpoints.read_shards(path) if path.is_dir() else content["state_dict"].items()
        return framework_checkpoints.find_nonfinite(weights)

    def name_void(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.void")


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # objects of the user's own, which the Trainer is about to load, too
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)


def _count_steps(trainer: Any) -> int | None:
    """Return the steps of the whole run; None if it has no end, or if Lightning counts those of each optimizer
    apart."""
    total = trainer.estimated_stepping_batches if len(trainer.optimizers) == 1 else -1
    return int(total) if 0 < total < float("inf") else None


class SentinelCallback(Callback):
    """Watches what the Trainer fits. `options` are those of `sentinel.attach`: `run`, `rollback`, `overhead` and so on.

    Raises what `attach` raises, when training starts. `monitor` is set from then on.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._options = options
        self._phase = contextlib.ExitStack()
        self._numbers = TrainerNumbers()
        self._logged_step = 0
        self._known: dict[str, Any] = {}
        """Values that were passed on, by name."""
        self._begins = False
        """Whether the next batch is the first after a validation or an epoch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: the optimizers exist, and are on their devices."""
        known = {
            "loader": trainer.train_dataloader,
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "scheduler": [config.scheduler for config in trainer.lr_scheduler_configs] or None,
            "step": trainer.global_step,
            "total_steps": _count_steps(trainer),
        }
        self.monitor = attach(trainer.model or pl_module, trainer.optimizers, **(known | self._options))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Pass on what the module logged in its own `on_train_epoch_end`, which comes after this callback's."""
        if self._begins:
            self._begins = False
            self._hand_on(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Pass on what the module logged, as often as Lightning itself logs."""
        step, every = trainer.global_step, trainer.log_every_n_steps
        if self.monitor is not None and every and step != self._logged_step and step % every == 0:
            self._logged_step = step  # the first of several batches of one step
            self._hand_on(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a phase that is not training, until `on_validation_end`."""
        if self.monitor is not None:
            self._known = dict(trainer.callback_metrics)
            self._phase.enter_context(self.monitor.phase("validation"))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End the phase, and pass on what the validation logged."""
        self._phase.close()
        self._hand_on(trainer)
        self._begins = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Pass on what was logged for the epoch."""
        self._hand_on(trainer)
        self._begins = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach, and report that the run failed."""
        self._leave(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Detach, and pass on what the module logged in its last `on_train_epoch_end`."""
        self._hand_on(trainer)
        self._leave(None)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach, however training ended."""
        self._leave(None)

    def _hand_on(self, trainer: Any) -> None:
        """Pass on what was logged since the last time."""
        if self.monitor is not None:
            logged = dict(trainer.callback_metrics)
            self._numbers.log(self.monitor, {k: v for k, v in logged.items() if not _is_same(v, self._known.get(k))})
            self._known = logged

    def _leave(self, exception: BaseException | None) -> None:
        self._phase.close()
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            with faults.swallow_faults("leaving Lightning", "some of it may still be in place"):
                monitor.__exit__(type(exception) if exception else None, exception, None)


def _is_same(one: Any, other: Any) -> bool:
    """Whether nothing was logged in between. Compares memory, as Lightning detaches at each access; no value is
    read."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one._version == other._version
    return one is other
