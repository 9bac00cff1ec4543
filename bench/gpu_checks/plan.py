"""Compares `sentinel plan` with `torch.cuda.max_memory_allocated` of real steps, on six configurations."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu_checks import Line
from sentinel.toolkit.plan import tracing
from sentinel.toolkit.plan.recipe import OPTIMIZERS, PRECISIONS, Setup
from sentinel.toolkit.plan.strategies import ALONE, work_out
from tests.planning import zoo

BAR = 0.10
Build = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


def mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return zoo.MLP(8192), (torch.randn(4096, 256), torch.zeros(4096, dtype=torch.long))


def cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return zoo.CNN(), (torch.randn(256, 3, 224, 224), torch.zeros(256, dtype=torch.long))


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = zoo.Transformer(causal=True, vocabulary=32_000, width=1024, layers=12)
    return model, (torch.zeros(8, 512, dtype=torch.long),)


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model = zoo.Transformer(causal=False, vocabulary=30_000, width=768, layers=12)
    return model, (torch.zeros(16, 256, dtype=torch.long),)


def lora() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, inputs = gpt()
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.qkv, block.out = zoo.Adapted(block.qkv, 16), zoo.Adapted(block.out, 16)
    return model, inputs


CONFIGURATIONS: tuple[tuple[str, Build, str, bool], ...] = (
    ("MLP, AdamW", mlp, "adamw", False),
    ("CNN, SGD with momentum", cnn, "momentum", False),
    ("GPT, AdamW", gpt, "adamw", False),
    ("GPT, AdamW, checkpointed", gpt, "adamw", True),
    ("BERT-like, SGD", bert, "sgd", False),
    ("GPT with LoRA, AdamW", lora, "adamw", False),
)


def plan_bytes(build: Build, optimizer: str, checkpointed: bool) -> float:
    """Return the bytes per GPU that `sentinel plan` estimates."""
    subject = tracing.subject(build, build.__name__, PRECISIONS["fp32"])
    batch = build()[1][0].shape[0]
    setup = Setup(
        gpus=1, memory=10**12, precision=PRECISIONS["fp32"], optimizer=OPTIMIZERS[optimizer], batch=batch, target="cuda"
    )
    return work_out(subject, setup, ALONE[0], micro_batch=batch, checkpointing=checkpointed).per_gpu.total


def measure_bytes(build: Build, optimizer: str, checkpointed: bool) -> float:
    """Return the bytes at the peak of the second step, without the inputs."""
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, fused=True),
    }
    model, inputs = build()
    model, inputs = model.cuda(), tuple(value.cuda() for value in inputs)
    if checkpointed:
        zoo.checkpointed(tracing.list_repeated(model))
    made = makers[optimizer]([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(*inputs).backward()
        made.step()
        made.zero_grad()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - sum(value.nbytes for value in inputs)
    del model, inputs, made
    gc.collect()
    torch.cuda.empty_cache()
    return float(peak)


def check(device: str) -> Iterator[Line]:
    for name, build, optimizer, checkpointed in CONFIGURATIONS[: None if device == "cuda" else 1]:
        plan = plan_bytes(build, optimizer, checkpointed)
        if device == "cpu":
            yield Line(name, f"planned {plan / 1e9:.2f} GB")
            continue
        real = measure_bytes(build, optimizer, checkpointed)
        off = plan / real - 1
        figure = f"planned {plan / 1e9:.2f} GB, measured {real / 1e9:.2f} GB, {off:+.1%}"
        yield Line(name, figure, abs(off) <= BAR, f"{BAR:.0%}")
