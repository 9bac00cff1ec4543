"""Buffers that a module makes again in its forward pass: a queue that fills up, an average, a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sentinel import wire
from sentinel.errors import RollbackError
from tests.rollback.test_disk import again, armed, write
from tests.rollback.training import Training, assert_same, batches, of_type, roll_back

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


BEGINNINGS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "empty": lambda: torch.empty(0, 3),
    "expanded": lambda: torch.zeros(()).expand(4),
    "filled": lambda: torch.ones(4),
}


@pytest.mark.parametrize(
    "fault",
    [lambda: torch.full((4,), torch.nan), lambda: None, lambda: torch.zeros(1).expand(4)],
    ids=["poisoned", "gone", "spread out"],
)
@pytest.mark.parametrize("kind", BEGINNINGS)
def test_a_buffer_that_another_one_has_replaced_comes_back(kind: str, fault: Callable[[], Tensor | None]) -> None:
    training = Training()
    training.model.register_buffer("made", BEGINNINGS[kind]())
    restorer, sent = training.arm()
    for seq in range(8):
        if seq == 7:
            training.model.made = fault()
            roll_back(restorer, at=7, to=5)
        training.step(DATA[seq])
    assert [(answer.ok, answer.reason) for answer in of_type(sent, wire.RolledBack)] == [(True, "")]
    assert_same(training.model.made, BEGINNINGS[kind]())


def test_an_empty_buffer_that_was_resized_is_empty_again() -> None:
    """As observers of quantisation do, on the tensor itself."""
    training = Training()
    training.model.register_buffer("made", torch.empty(0))
    restorer, _ = training.arm()
    for seq in range(8):
        if seq == 7:
            training.model.made.resize_(3).fill_(torch.nan)
            roll_back(restorer, at=7, to=5)
        training.step(DATA[seq])
    assert training.model.made.shape == (0,)


def sharing() -> Training:
    training = Training()
    training.model.register_buffer("shared", torch.arange(3.0))
    training.model[0].register_buffer("shared", training.model.shared)
    return training


def test_a_buffer_that_two_modules_share_and_make_again_is_still_shared(tmp_path: Path) -> None:
    training = sharing()
    restorer, sent = armed(training, tmp_path)
    for seq in range(9):
        if seq == 8:
            assert write(restorer, sent, 5).ok
            training.model.shared = training.model[0].shared = torch.full((9,), torch.nan)
            roll_back(restorer, at=8, to=5)
        training.step(DATA[seq])
    restorer.close()
    second = sharing()
    second.model.shared = second.model[0].shared = torch.zeros(4)
    with pytest.raises(RollbackError, match=r"buffer shared of the model is \(4,\), and \(3,\) in the snapshot"):
        again(second, tmp_path)
    second.model.shared = second.model[0].shared = torch.zeros(1)
    assert again(second, tmp_path) == 6
    for one in (training, second):
        assert one.model.shared is one.model[0].shared
        assert torch.equal(one.model.shared, torch.arange(3.0))


def test_a_buffer_that_is_younger_than_the_snapshot_is_named() -> None:
    training = Training()
    restorer, sent = training.arm()
    for seq in range(8):
        if seq == 7:
            training.model[0].register_buffer("late", torch.ones(3))
            roll_back(restorer, at=7, to=5)
        training.step(DATA[seq])
    (answer,) = of_type(sent, wire.RolledBack)
    assert (answer.ok, answer.reason) == (True, "buffer 0.late was made after the snapshot: left as it is")
    assert torch.equal(training.model[0].late, torch.ones(3))


@pytest.mark.parametrize(
    ("then", "now", "persistent", "fits"),
    [
        ((3, 3), (8, 8), False, False),
        ((3, 3), (8, 8), True, False),
        ((8, 8), (3, 3), True, True),
        ((8, 8), (3, 3), False, True),
        ((8, 8), (1,), True, True),
    ],
    ids=["longer context", "longer, persistent", "a queue that grew", "a cache that grew", "a placeholder"],
)
def test_a_model_that_was_made_with_another_shape(
    then: tuple[int, ...], now: tuple[int, ...], persistent: bool, fits: bool, tmp_path: Path
) -> None:
    first, second = Training(), Training()
    first.model.register_buffer("table", torch.ones(then), persistent=persistent)
    second.model.register_buffer("table", torch.zeros(now), persistent=persistent)
    restorer, sent = armed(first, tmp_path)
    for seq in range(7):
        first.step(DATA[seq])
    assert write(restorer, sent, 5).ok
    restorer.close()
    if fits:
        assert again(second, tmp_path) == 6
        assert torch.equal(second.model.table, torch.ones(then))
        return
    before = second.state()
    with pytest.raises(RollbackError, match=r"buffer table of the model is .*, and .* in the snapshot"):
        again(second, tmp_path)
    assert_same(second.state(), before)
