"""The loops that the checks train on either device; on the CPU they are toys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bench.gpu_checks import Line


class Transformer(nn.Module):
    """Pre-LN blocks with torch's own attention, and a head over a vocabulary; `forward` returns the loss."""

    def __init__(self, width: int, layers: int, vocabulary: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        block = nn.TransformerEncoderLayer(
            width, max(1, width // 128), 4 * width, dropout, "gelu", batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Loop:
    """A plain loop over random tokens on the device. `half`: autocast to this type. `scale`: use a GradScaler."""

    def __init__(
        self,
        device: str,
        *,
        width: int = 256,
        layers: int = 4,
        vocabulary: int = 1024,
        tokens: tuple[int, int] = (8, 128),
        half: torch.dtype | None = None,
        weights: torch.dtype = torch.float32,
        dropout: float = 0.0,
        clip: float | None = None,
        accumulate: int = 1,
        scale: float | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    ) -> None:
        torch.manual_seed(0)
        self.device, self.half, self.clip, self.accumulate = device, half, clip, accumulate
        self.model = Transformer(width, layers, vocabulary, dropout).to(device, weights)
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler(device, scale, growth_interval=4) if scale is not None else None
        generator = torch.Generator().manual_seed(1)
        self.data = [torch.randint(vocabulary, tokens, generator=generator).to(device) for _ in range(4)]
        self.losses: list[torch.Tensor] = []
        self.steps = 0

    def step(self) -> None:
        """Make one step, which waits for the device only where GradScaler does."""
        self.optimizer.zero_grad()
        for micro in range(self.accumulate):
            batch = self.data[(self.steps + micro) % len(self.data)]
            with torch.autocast(self.device, self.half or torch.bfloat16, enabled=self.half is not None):
                loss = self.model(batch) / self.accumulate
            (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.losses.append(loss.detach() * self.accumulate)
        self.steps += 1

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def state(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that training changes: weights, buffers and the optimizer's state."""
        yield from self.model.state_dict().values()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def generators(device: str) -> list[torch.Tensor]:
    """Return the states of torch's random number generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def toy(device: str) -> dict[str, Any]:
    """Return the options of a small loop; on the CPU, of a tiny one."""
    return {} if device == "cuda" else {"width": 16, "layers": 1, "vocabulary": 32, "tokens": (2, 8)}


def deterministic() -> None:
    """Make torch deterministic from here on: if two runs differ then, the loop itself is not the reason."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def same(one: Loop, other: Loop) -> bool:
    """Return whether two loops have the same state to the bit; NaN equals itself here."""
    pairs = zip(one.state(), other.state(), strict=True)
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def compare_states(what: str, bare: Loop, again: Loop, watched: Loop) -> Line:
    """Return a line on whether a watched run ends in the same state as a bare one, if two bare runs do."""
    if not same(bare, again):
        return Line(what, "two bare runs differ: nothing can be said")
    alike = same(bare, watched)
    return Line(what, "the same to the bit" if alike else "different", alike, "bits")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def settle(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()
