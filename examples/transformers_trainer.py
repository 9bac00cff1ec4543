"""Trains a small GPT-2 with the Hugging Face Trainer; Sentinel is added as one callback.

pip install transformers accelerate
python examples/transformers_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from sentinel.hooks.transformers import SentinelCallback

LENGTH, VOCABULARY = 32, 16


def sequences(count: int = 512) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count upwards from random starts, so that there is a rule to learn."""
    starts = torch.randint(0, VOCABULARY, (count,))
    rows = (starts[:, None] + torch.arange(LENGTH)) % VOCABULARY
    return [{"input_ids": row, "labels": row} for row in rows]


if __name__ == "__main__":
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=100, per_device_train_batch_size=16, learning_rate=3e-3, report_to=[],
            save_strategy="no", logging_steps=20,
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sequences(), callbacks=[SentinelCallback()])
        trainer.train()
