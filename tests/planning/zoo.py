"""Small real models, and the peak memory of their real steps from the CPU allocator's own records."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint


class MLP(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), y)


def mlp() -> Any:
    return MLP(), (torch.randn(1024, 256), torch.zeros(1024, dtype=torch.long))


def wide_mlp() -> Any:
    return MLP(2048), (torch.randn(32, 256), torch.zeros(32, dtype=torch.long))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(x).mean((2, 3))), y)


def cnn() -> Any:
    return CNN(), (torch.randn(16, 3, 64, 64), torch.zeros(16, dtype=torch.long))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(b, s, h)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), self.dropout, self.training)


class Transformer(nn.Module):
    def __init__(self, *, causal: bool, vocabulary: int = 1000, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, 4, 0.1, causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


def gpt() -> Any:
    return Transformer(causal=True), (torch.zeros(8, 128, dtype=torch.long),)


def bert() -> Any:
    return Transformer(causal=False, width=256, layers=4), (torch.zeros(4, 64, dtype=torch.long),)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


def lora() -> Any:
    model, inputs = gpt()
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
    return model, inputs


class Adam8bit(torch.optim.Optimizer):
    """Adam whose moments have a byte per element, and a float32 scale per block of 256, as bitsandbytes keeps them.

    It works on a few blocks at a time, as a kernel would, and so needs no copy of a whole tensor.
    """

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    blocks = -(-p.numel() // 256)
                    for name in "mv":
                        state[name] = torch.zeros(blocks * 256, dtype=torch.int8)
                        state[name + " scale"] = torch.zeros(blocks)
                for at in range(0, p.numel(), 16384):
                    self._stretch(p.view(-1)[at : at + 16384], p.grad.view(-1)[at : at + 16384], state, at, group["lr"])

    def _stretch(self, p: Tensor, grad: Tensor, state: dict[str, Tensor], at: int, lr: float) -> None:
        moments = []
        for name, beta, new in (("m", 0.9, grad), ("v", 0.999, grad * grad)):
            blocks = slice(at // 256, -(-(at + p.numel()) // 256))
            scale = state[name + " scale"][blocks]
            codes = state[name].view(-1, 256)[blocks]
            moment = (codes * (scale / 127)[:, None]).view(-1)
            moment[: p.numel()].lerp_(new, 1 - beta)
            scale.copy_(moment.view(-1, 256).abs().amax(1).clamp_(min=1e-12))
            codes.copy_((moment.view(-1, 256) / scale[:, None] * 127).round_())
            moments.append(moment[: p.numel()])
        p.sub_(lr * moments[0] / (moments[1].clamp(min=0).sqrt() + 1e-8))


def checkpointed(blocks: list[nn.Module]) -> None:
    """Recompute each block in the backward pass, as users write it."""
    for block in blocks:
        forward = block.forward
        block.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=False)  # type: ignore[method-assign]


def measured(
    model: nn.Module, inputs: tuple[Tensor, ...], make: Callable[[Any], torch.optim.Optimizer], accumulation: int = 1
) -> int:
    """Return the peak of a real step in bytes, without inputs: what exists before it, plus the allocator's records."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        for _ in range(accumulation):
            model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    gc.collect()
    kept = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        for value in state.values():
            kept += [value] if isinstance(value, Tensor) else []
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in kept]
    before = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        step()
    now = peak = 0
    for event in records.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return before + peak
