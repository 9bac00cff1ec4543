"""The Hugging Face Trainer, in its current release, on a small real model, with the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sentinel import wire
from tests.hooks.conftest import FakeDaemon

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

STEPS = 10

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the library


def trained(tmp_path: Path, *callbacks: Any, trainer: Any = None, **options: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 64, (80, 16), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, max_grad_norm=0.5, **({"logging_steps": 1} | options),
    )  # fmt: skip
    made = (trainer or transformers.Trainer)(
        model, arguments, train_dataset=rows, eval_dataset=rows[:8], callbacks=list(callbacks)
    )
    made.train()
    return made


def callback(**options: Any) -> Any:
    from sentinel.hooks.transformers import SentinelCallback

    return SentinelCallback(**options)


def logged(trainer: Any, name: str) -> dict[int, float]:
    return {entry["step"] - 1: float(entry[name]) for entry in trainer.state.log_history if name in entry}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_and_the_norm_are_the_trainers_own(daemon: FakeDaemon, tmp_path: Path, accumulation: int) -> None:
    trainer = trained(tmp_path, callback(run="hf"), gradient_accumulation_steps=accumulation)
    assert daemon.ended().reason == "detach"
    hello = daemon.of(wire.Hello)[0]
    assert (hello.identity.run, hello.facts["total_steps"]) == ("hf", STEPS)
    # The Trainer rounds what it logs: to 4 decimals, or to 4 digits.
    assert daemon.series("loss") == pytest.approx(logged(trainer, "loss"), rel=1e-3)
    assert daemon.series("grad_norm") == pytest.approx(logged(trainer, "grad_norm"), rel=1e-3)
    assert len(daemon.series("learning_rate")) == STEPS
    assert "transformer.h.0.attn.c_attn.weight" in daemon.layers("layer_grad_norm")[0]


def test_an_evaluation_is_a_phase(daemon: FakeDaemon, tmp_path: Path) -> None:
    trained(tmp_path, callback(), eval_strategy="steps", eval_steps=5)
    daemon.ended()
    assert [phase.name for phase in daemon.of(wire.PhaseChanged)] == ["evaluation", ""] * 2


def test_the_trainers_own_numbers_are_handed_on(daemon: FakeDaemon, tmp_path: Path) -> None:
    class Rewarded(transformers.Trainer):  # type: ignore[misc,name-defined]
        """Logs as trainers of reinforcement learning do."""

        def log(self, logs: dict[str, float], *rest: Any, **more: Any) -> None:
            step = self.state.global_step
            super().log({**logs, "reward": step / 2, "clip_ratio/region_mean": 0.1, "bad": float("nan")}, *rest, **more)

    trainer = trained(tmp_path, callback(), trainer=Rewarded, eval_strategy="steps", eval_steps=5, logging_steps=2)
    daemon.ended()
    # The Trainer's step counts the steps done; what it logs after the last one belongs to that one.
    assert daemon.series("reward") == {2: 1.0, 4: 2.0, 5: 2.5, 6: 3.0, 8: 4.0, 9: 5.0}
    evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert daemon.series("eval_loss") == {5: evaluated[5], 9: evaluated[10]}
    assert not daemon.series("bad")
    assert len(daemon.series("loss")) == STEPS, "what is measured is not replaced"
    assert daemon.of(wire.Hello)[-1].facts["judged_as"] == "reinforcement learning, by reward, clip_fraction"


def test_weights_are_the_same_to_the_last_bit(daemon: FakeDaemon, tmp_path: Path) -> None:
    with_it, without = trained(tmp_path, callback()).model, trained(tmp_path).model
    daemon.ended()
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))


def test_a_run_that_the_trainer_begins_again_is_watched_again(daemon: FakeDaemon, tmp_path: Path) -> None:
    """With `auto_find_batch_size` it does so after an error for lack of memory, and does not end the first try."""
    trainer = trained(tmp_path, callback())
    daemon.ended()
    watch = callback()
    for _ in range(2):
        watch.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer
        )
    watch.on_train_end(trainer.args, trainer.state, trainer.control)
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 3)


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
