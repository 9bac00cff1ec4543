"""The door to the Hugging Face Trainer: one callback.

    from sentinel.hooks.transformers import SentinelCallback
    Trainer(..., callbacks=[SentinelCallback()])

The loss is taken at the backward pass and not from the Trainer's logs, which hide what is not finite
(`logging_nan_inf_filter` is on by default) and come every 500 steps.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sentinel.hooks.attachment import attach
from sentinel.hooks.monitor import Monitor


class SentinelCallback(TrainerCallback):
    """Watches what the Trainer trains. `options` are those of `sentinel.attach`.

    Raises what `attach` raises, when training begins. `monitor` is there from then on.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._options = options
        self._phase = contextlib.ExitStack()
        self._evaluating = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **known: Any
    ) -> None:
        """Attach: model and optimizer are prepared."""
        options: dict[str, Any] = {
            "run": args.run_name or None,
            "step": state.global_step,
            "scheduler": known.get("lr_scheduler"),
            "loader": known.get("train_dataloader"),
        }
        self.monitor = attach(known["model"], known["optimizer"], **(options | self._options))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The first one begins an evaluation: the Trainer does not say so by itself."""
        if self.monitor is not None and not self._evaluating:
            self._evaluating = True
            self._phase.enter_context(self.monitor.phase("evaluation"))

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Training again."""
        self._end_evaluation()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Training again, also where an evaluation was broken off."""
        self._end_evaluation()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Detach."""
        self._end_evaluation()
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.detach()

    def _end_evaluation(self) -> None:
        if self._evaluating:
            self._evaluating = False
            self._phase.close()
