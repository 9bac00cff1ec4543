"""The integration with the Hugging Face Trainer: one callback.

    from sentinel.hooks.transformers import SentinelCallback
    Trainer(..., callbacks=[SentinelCallback()])

A script that `sentinel run` starts again goes on from the Trainer's own checkpoint, the newest good one:

    trainer.train(resume_from_checkpoint=checkpoint(arguments.output_dir))

The loss is taken at the backward pass and not from the Trainer's logs, which hide values that are not finite
(`logging_nan_inf_filter` is on by default) and come every 500 steps. Other numbers that the Trainer logs (rewards,
accuracies, evaluations) are taken from there, under its step; those after the last step are added to it, not judged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sentinel.hooks import attach
from sentinel.hooks.rollback import framework_checkpoints
from sentinel.hooks.session.monitor import Monitor, TrainerNumbers

_FOLDER = re.compile(r"checkpoint-(\d+)")


def checkpoint(output_dir: str | os.PathLike[str], *, before: int | None = None) -> str | None:
    """Return the newest of the Trainer's checkpoints that is whole, finite, and older than what ended the job.

    None: start from the beginning. For `resume_from_checkpoint`, on every rank. `before` names a step as
    `SENTINEL_RESUME_BEFORE` does: only a checkpoint saved before it is used. Newer ones that cannot be used are renamed
    to `void-checkpoint-N`. Have the Trainer keep several: `save_total_limit=3`. Raises RollbackError where there are
    checkpoints and none can be used, or one cannot be read for 60 s. DeepSpeed's own files in them are not read.
    """
    return framework_checkpoints.choose(output_dir, _TrainerCheckpoints(), before)


class _TrainerCheckpoints:
    """Reads the Trainer's checkpoints, of one folder each. See `CheckpointFormat`."""

    @property
    def damage(self) -> tuple[type[Exception], ...]:
        from safetensors import SafetensorError

        return (*framework_checkpoints.DAMAGE, SafetensorError)

    def read_steps(self, path: Path) -> int | None:
        named = _FOLDER.fullmatch(path.name)
        return int(named[1]) if named and path.is_dir() else None

    def find_flaw(self, path: Path, steps: int) -> str:
        for file in (path / "trainer_state.json", *path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.pt")):
            framework_checkpoints.read_through(file)
        # The Trainer writes this file last: if it exists, so do the others.
        if json.loads((path / "trainer_state.json").read_text())["global_step"] != steps:
            return "its trainer_state.json is of another step"
        for archive in (path / "optimizer.pt", path / "pytorch_model.bin"):
            if archive.exists() and not zipfile.is_zipfile(archive):
                raise framework_checkpoints.Incomplete(f"{archive.name} is cut short")
        return framework_checkpoints.find_nonfinite(_weights(path))

    def name_void(self, path: Path) -> Path:
        return path.with_name(f"void-{path.name}")


def _weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118, it is no dict
                yield name, opened.get_tensor(name)
    for folder in sorted(path.glob("pytorch_model_fsdp_*/")):
        yield from framework_checkpoints.read_shards(folder)
    for file in sorted(path.glob("pytorch_model*.bin")):
        yield from torch.load(file, map_location="cpu", weights_only=True).items()


class SentinelCallback(TrainerCallback):
    """Watches what the Trainer trains. `options` are those of `sentinel.attach`.

    Raises what `attach` raises, when training begins. `monitor` is set from then on.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._options = options
        self._phase = contextlib.ExitStack()
        self._evaluating = False
        self._numbers = TrainerNumbers()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        """Attach: model and optimizer are prepared.

        The Trainer calls this again, without an end, if a run out of memory is tried again (`auto_find_batch_size`).
        """
        self._detach()
        options: dict[str, Any] = {
            "run": args.run_name or None,
            "step": state.global_step,
            "total_steps": state.max_steps if state.max_steps > 0 else None,
            "scheduler": known.get("lr_scheduler"),
            "loader": known.get("train_dataloader"),
        }
        self.monitor = attach(known["model"], known["optimizer"], **(options | self._options))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin the evaluation phase at the first prediction step: the Trainer does not announce an evaluation."""
        if self.monitor is not None and not self._evaluating:
            self._evaluating = True
            self._phase.enter_context(self.monitor.phase("evaluation"))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """End the evaluation phase, and pass on what was found."""
        self._end_evaluation()
        self._hand_on(known.get("metrics"))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any) -> None:
        """Pass on the numbers that the Trainer logs."""
        self._hand_on(known.get("logs"))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the evaluation phase, also if the evaluation was broken off."""
        self._end_evaluation()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Detach."""
        self._detach()

    def _hand_on(self, columns: dict[str, Any] | None) -> None:
        if self.monitor is not None and columns:
            self._numbers.log(self.monitor, columns)

    def _detach(self) -> None:
        self._end_evaluation()
        monitor, self.monitor, self._numbers = self.monitor, None, TrainerNumbers()
        if monitor is not None:
            monitor.detach()

    def _end_evaluation(self) -> None:
        if self._evaluating:
            self._evaluating = False
            self._phase.close()
