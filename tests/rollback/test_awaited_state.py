"""State of a snapshot that waits, after `resume`, for what it belongs to: a scheduler that is made later."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.rollback.test_disk import DATA, again, write_two
from tests.rollback.training import Ema, Training


def resume_without_schedule(training: Training, place: Path) -> None:
    """Resume before the schedule is made, so that its state waits for it."""
    training.schedule = None
    gc.collect()
    assert again(training, place) == 11


def make_schedule(training: Training) -> None:
    training.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, T_max=40)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo loads parts of torch that warn of their own
def test_its_hook_is_in_no_copy_and_breaks_no_graph(tmp_path: Path) -> None:
    write_two(tmp_path)
    training = Training()
    resume_without_schedule(training, tmp_path)
    for copied in (pickle.loads(pickle.dumps(training.model)), copy.deepcopy(training.model)):
        assert not copied._forward_pre_hooks
    torch.compile(training.model, backend="eager", fullgraph=True)(DATA[0])
    make_schedule(training)
    training.model(DATA[0])
    assert training.schedule.last_epoch == 11


class Encoding(Training):
    """Trains an encoder layer, which torch evaluates with its fused kernel only while the layer has no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ema = Ema(self.model)
        make_schedule(self)
        self.optimizer.register_step_pre_hook(lambda *_: self.on_enter(self.seq))
        self.optimizer.register_step_post_hook(lambda *_: self.exit(skipped=False))


def test_an_encoder_layer_evaluates_with_its_fused_kernel(tmp_path: Path) -> None:
    write_two(tmp_path, Encoding())
    training, other = Encoding(), Encoding().model.eval()
    resume_without_schedule(training, tmp_path)
    other.load_state_dict(training.model.state_dict())
    training.model.eval()
    batch = torch.randn(2, 6, 8)
    padding = torch.arange(6).expand(2, 6) > 3
    with torch.no_grad():
        evaluated, expected = (layer(batch, src_key_padding_mask=padding) for layer in (training.model, other))
    assert torch.equal(evaluated, expected)
    training.model.train()
    make_schedule(training)
    training.step(DATA[11])
    assert training.schedule.last_epoch == 12
