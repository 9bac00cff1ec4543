"""Small models and real data for faults: scikit-learn's digits, and the text of the standard library."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, PIXELS = 10, 64
BYTES, CONTEXT, WIDTH = 256, 32, 32


def device_type() -> str:
    """Return the type of the device that a family is trained on (`tests.faults.train --device`)."""
    return torch.get_default_device().type


@functools.cache
def digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of 8x8 pixels, from 0 to 1, and the digit that each shows."""
    from sklearn.datasets import load_digits  # takes a second, which most users of this module can save

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)


def images(seed: int, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of digits without end, in an order that depends on the seed."""
    generator = torch.Generator().manual_seed(seed)
    x, y = digits()
    while True:
        for chosen in torch.randperm(len(x), generator=generator, device="cpu").split(size):
            if len(chosen) == size:
                yield x[chosen], y[chosen]


@functools.cache
def text() -> Tensor:
    """Return the first 400 kB of the standard library's sources, as bytes."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    whole = b"".join(source.read_bytes() for source in sources)[:400_000]
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def passages(seed: int, size: int = 16, length: int = CONTEXT) -> Iterator[Tensor]:
    """Yield batches of `size` rows of length + 1 bytes, without end."""
    generator = torch.Generator().manual_seed(seed)
    source = text()
    while True:
        starts = torch.randint(len(source) - length - 1, (size,), generator=generator, device="cpu")
        rows = torch.stack([source[start : start + length + 1] for start in starts.tolist()]).long()
        yield rows.to(torch.get_default_device())


def classifier(width: int = 64, depth: int = 2) -> nn.Sequential:
    """Return an MLP for digits."""
    layers: list[nn.Module] = []
    inputs = PIXELS
    for _ in range(depth):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, CLASSES))


def deep(depth: int, gain: float, *, normed: bool) -> nn.Sequential:
    """Return layers of tanh whose weights have this gain; `normed`: of ReLU, with a normalisation before each."""
    layers: list[nn.Module] = [nn.Linear(PIXELS, 32)]
    for _ in range(depth):
        linear = nn.Linear(32, 32)
        nn.init.normal_(linear.weight, std=gain / 32**0.5)
        layers += [nn.LayerNorm(32), linear, nn.ReLU()] if normed else [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before it, or after it (`post_norm`)."""

    def __init__(self, width: int, post_norm: bool) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.post_norm:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    """A transformer that predicts the next byte."""

    def __init__(self, depth: int = 2, width: int = WIDTH, *, post_norm: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, post_norm) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def read_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the loss on bytes of shape (rows, length + 1), in nats per byte."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
