"""Generated models with one fault each, and the module that must be named for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Step(nn.Module):
    """A module whose forward pass is a given function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Block(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = middle
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.counts = False
        self.calls = 0
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
            self.outputs.append(x.detach())
        return self.last(self.drop(self.middle(self.norm(self.first(x)))))


class Net(nn.Module):
    """Blocks in a row, one of them with the given middle. `checkpointed`: whether reentrant; None: not checkpointed."""

    def __init__(self, middle: nn.Module, depth: int = 3, at: int = 1, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(middle if place == at else nn.GELU()) for place in range(depth))
        self.head = nn.Linear(WIDTH, 1)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return self.head(x)


def _masked(x: Tensor) -> Tensor:
    """Return attention with some scores masked by minus infinity, which is healthy."""
    scores = x.unsqueeze(-1) * x.unsqueeze(-2)
    later = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return (weights * x.unsqueeze(-2)).sum(-1)


def _all_masked(x: Tensor) -> Tensor:
    scores = x.unsqueeze(-1) * x.unsqueeze(-2)
    every = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device=x.device)
    return scores.masked_fill(every, float("-inf")).softmax(-1).sum(-1)


def _left_out(x: Tensor) -> Tensor:
    """Return values without the non-finite ones: healthy in the forward pass, but not in the backward pass."""
    kept = x * (x > 0)
    return torch.where(kept > 0, torch.log(kept), 0.0)


FORWARD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log": (lambda x: torch.log(x), "aten.log"),
    "sqrt": (lambda x: torch.sqrt(x - 10), "aten.sqrt"),
    "exp": (lambda x: torch.exp(x.abs() * 1e4), "aten.exp"),
    "division": (lambda x: x / (x - x), "aten.div"),
    "log of 0": (lambda x: torch.log(torch.relu(x)), "aten.log"),
    "all masked": (_all_masked, "aten._softmax"),
}
BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sqrt of 0": (lambda x: torch.sqrt(x * (x > 0)), "SqrtBackward0"),
    "norm of 0": (lambda x: x + torch.linalg.vector_norm(x - x, dim=-1, keepdim=True).pow(0.5), "PowBackward0"),
    "where": (_left_out, "LogBackward0"),
    "root of 0": (lambda x: torch.pow(x * (x > 0), 0.25), "PowBackward0"),
}


class Case(NamedTuple):
    """A model and batch to run, and what must be said of it."""

    name: str
    model: Net
    batch: Tensor
    origin: str
    phase: str
    module: str
    operation: str = ""
    tensors: tuple[str, ...] = ()
    loss: Callable[[Tensor], Tensor] = lambda output: output.square().mean()


def cases() -> Iterator[Case]:
    """Yield faults in the forward and backward pass, plain and checkpointed, bad data, bad weights and bad losses."""
    batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(3))
    for number, (name, (function, operation)) in enumerate(FORWARD.items()):
        for checkpointed in (None, bool(number % 2)):
            model = Net(Step(function), at=number % 3, checkpointed=checkpointed)
            where = f"blocks.{number % 3}.middle"
            yield Case(f"{name}, {checkpointed}", model, batch, "operation", "forward", where, operation)
    for number, (name, (function, operation)) in enumerate(BACKWARD.items()):
        for checkpointed in (None, bool(number % 2)):
            model = Net(Step(function), at=1 + number % 2, checkpointed=checkpointed)
            where = f"blocks.{1 + number % 2}.middle"
            yield Case(f"{name}, {checkpointed}", model, batch, "operation", "backward", where, operation)
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = batch.clone()
        bad[3, 2] = value
        yield Case(f"data {value}", Net(nn.GELU()), bad, "data", "forward", "stem", tensors=("args[0]",))
    yield from _weights(batch)
    yield from _losses(batch)


def _weights(batch: Tensor) -> Iterator[Case]:
    for place, name in ((0, "first.weight"), (0, "norm.bias"), (1, "last.bias"), (2, "norm.weight")):
        model = Net(nn.GELU())
        full = f"blocks.{place}.{name}"
        with torch.no_grad():
            model.get_parameter(full).view(-1)[0] = torch.nan
        module = full.rpartition(".")[0]
        yield Case(full, model, batch, "weights", "forward", module, tensors=(full,))
    model = Net(nn.GELU())
    model.eval().blocks[1].norm.running_var[2] = torch.nan
    name = "blocks.1.norm"
    yield Case("a buffer", model, batch, "weights", "forward", name, tensors=(f"{name}.running_var",))


def _losses(batch: Tensor) -> Iterator[Case]:
    def log(output: Tensor) -> Tensor:
        return torch.log(output - output).mean()

    def root(output: Tensor) -> Tensor:
        return torch.sqrt((output - output).square().sum())

    yield Case("loss, forward", Net(nn.GELU()), batch, "loss", "forward", "", loss=log)
    yield Case("loss, backward", Net(nn.GELU()), batch, "loss", "backward", "", loss=root)
    yield Case("healthy", Net(nn.GELU()), batch, "nothing", "", "")
    yield Case("healthy masks", Net(Step(_masked)), batch, "nothing", "", "")
