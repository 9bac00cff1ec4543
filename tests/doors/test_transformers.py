"""The Hugging Face Trainer, at its current release, on a small real model, with the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel import wire
from tests.hooks.conftest import FakeDaemon

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 10

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def trained(tmp_path: Path, *callbacks: Any, **options: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (80, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0.5, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks)
    )
    trainer.train()
    return trainer


def callback(**options: Any) -> Any:
    from sentinel.hooks.transformers import SentinelCallback

    return SentinelCallback(**options)


def logged(trainer: Any, name: str) -> dict[int, float]:
    return {entry["step"] - 1: float(entry[name]) for entry in trainer.state.log_history if name in entry}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_and_the_norm_are_the_trainers_own(daemon: FakeDaemon, tmp_path: Path, accumulation: int) -> None:
    trainer = trained(tmp_path, callback(run="hf"), gradient_accumulation_steps=accumulation)
    assert daemon.ended().reason == "detach"
    assert daemon.of(wire.Hello)[0].identity.run == "hf"
    # The Trainer rounds what it logs: to 4 decimals, or to 4 digits.
    assert daemon.series("loss") == pytest.approx(logged(trainer, "loss"), rel=1e-3)
    assert daemon.series("grad_norm") == pytest.approx(logged(trainer, "grad_norm"), rel=1e-3)
    assert len(daemon.series("learning_rate")) == STEPS
    assert "transformer.h.0.attn.c_attn.weight" in daemon.layers("layer_grad_norm")[0]


def test_an_evaluation_is_a_phase(daemon: FakeDaemon, tmp_path: Path) -> None:
    trained(tmp_path, callback(), eval_strategy="steps", eval_steps=5)
    daemon.ended()
    assert [phase.name for phase in daemon.of(wire.PhaseChanged)] == ["evaluation", ""] * 2


def test_weights_are_the_same_to_the_last_bit(daemon: FakeDaemon, tmp_path: Path) -> None:
    with_it, without = trained(tmp_path, callback()).model, trained(tmp_path).model
    daemon.ended()
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))


def test_the_users_step_goes_on_where_a_checkpoint_left_off(daemon: FakeDaemon, tmp_path: Path) -> None:
    trainer = trained(tmp_path, callback())
    trainer.save_model(str(tmp_path))
    daemon.ended()
    watch = callback()
    trainer.state.global_step = 7
    watch.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer)
    watch.on_train_end(trainer.args, trainer.state, trainer.control)
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 2)
    assert daemon.of(wire.Hello)[-1].step_offset == 7
