"""Trains with the Hugging Face Trainer, and after a failure resumes from the checkpoint that Sentinel chooses.

pip install transformers accelerate
sentinel run -- python examples/transformers_restarted.py --break-at 250

Without `--break-at` nothing breaks. With `--nan-at 250` a weight becomes NaN, once: later checkpoints are not used.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from sentinel.hooks.transformers import SentinelCallback, checkpoint

LENGTH, VOCABULARY, STEPS = 32, 16, 600


def sequences(count: int = 512) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count upwards from random starts, so that there is a rule to learn."""
    starts = torch.randint(0, VOCABULARY, (count,))
    rows = (starts[:, None] + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


class Breaks(TrainerCallback):
    """Makes the run fail once, for the example's sake."""

    def __init__(self, done: Path, *, die_at: int, nan_at: int) -> None:
        self._done, self._die_at, self._nan_at = done, die_at, nan_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Fail, if it is due, before the step after `state.global_step`."""
        if state.global_step in (self._die_at, self._nan_at) and not self._done.exists():
            self._done.touch()
            if state.global_step == self._die_at:
                os._exit(1)  # as if killed: no `finally`, no goodbye
            with torch.no_grad():
                known["model"].transformer.h[0].attn.c_attn.weight[0, 0] = float("nan")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("transformers-restarted"))
    parser.add_argument("--break-at", type=int, default=-1, metavar="STEP")
    parser.add_argument("--nan-at", type=int, default=-1, metavar="STEP")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=str(options.folder), max_steps=STEPS, per_device_train_batch_size=16, learning_rate=3e-3,
        save_strategy="steps", save_steps=60, save_total_limit=4, logging_steps=60, report_to=[],
    )  # fmt: skip
    breaks = Breaks(options.folder / "broken", die_at=options.break_at, nan_at=options.nan_at)
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=sequences(), callbacks=[SentinelCallback(), breaks]
    )
    trainer.train(resume_from_checkpoint=checkpoint(options.folder))
