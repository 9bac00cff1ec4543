"""Buffers that a module makes again in its forward pass: a queue that fills up, an average, a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sentinel import wire
from tests.rollback.test_disk import again, armed, write
from tests.rollback.training import Training, batches, of_type, roll_back

DATA = batches(12)
MADE: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "a queue": (lambda: torch.empty(0, 16), lambda queue, output: torch.cat((queue, output[:1]))[-6:]),
    "an average": (lambda: torch.zeros(()).expand(16), lambda average, output: average * 0.9 + output.mean(0) * 0.1),
}
"""How a buffer begins, and what the forward pass makes of it."""


class Making(nn.Module):
    """Makes a new buffer at each forward pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        begin, self.make = MADE[kind]
        self.register_buffer("made", begin())

    def forward(self, x: Tensor) -> Tensor:
        self.made = self.make(self.made, x.detach())
        return x


def making(kind: str) -> Training:
    training = Training()
    training.model.append(Making(kind))
    return training


@pytest.mark.parametrize("kind", MADE)
def test_a_buffer_that_begins_empty_or_expanded_is_resumed(kind: str, tmp_path: Path) -> None:
    first = making(kind)
    restorer, sent = armed(first, tmp_path)
    for seq in range(8):
        if seq == 6:
            kept = first.model[-1].made.clone()
        first.step(DATA[seq])
    assert write(restorer, sent, 5).ok
    restorer.close()

    second = making(kind)
    assert again(second, tmp_path) == 6
    assert torch.equal(second.model[-1].made, kept)
    for seq in range(6, 8):
        second.step(DATA[seq])
    assert torch.equal(second.model[-1].made, first.model[-1].made)


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_a_buffer_that_is_computed_when_it_is_read(kind: str, persistent: bool, tmp_path: Path) -> None:
    def start() -> Training:
        training = Training()
        made = torch.tensor([[1 + 2j, 3 + 4j], [5 + 6j, 7 + 8j]])
        view = made.mH if kind == "conjugate" else made.conj().imag
        training.model.register_buffer("view", view, persistent=persistent)
        return training

    first, second, expected = start(), start(), start().model.view.clone()
    restorer, sent = armed(first, tmp_path)
    for seq in range(9):
        if seq == 6:
            first.model.view.mul_(2)
        if seq == 8:
            assert write(restorer, sent, 5).ok
            roll_back(restorer, at=8, to=5)
        first.step(DATA[seq])
    assert [answer.ok for answer in of_type(sent, wire.RolledBack)] == [True]
    assert torch.equal(first.model.view, expected)
    restorer.close()

    second.model.view.mul_(3)
    assert again(second, tmp_path) == 6
    assert torch.equal(second.model.view, expected)
