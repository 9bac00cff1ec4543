"""Plans against the peaks of real steps, as the CPU allocator recorded them."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from sentinel.toolkit.plan import configfile, tracing
from sentinel.toolkit.plan.recipe import OPTIMIZERS, PRECISIONS, Setup
from sentinel.toolkit.plan.strategies import ALONE, KINDS, work_out
from sentinel.toolkit.plan.subject import Subject
from tests.planning import zoo

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "adam8bit": zoo.Adam8bit,
}


COPY = 2048 * 2048 * 2
"""Bytes of a 16-bit copy of the largest weight of `zoo.wide_mlp`."""


@functools.cache
def trace(build: Callable[[], Any]) -> Subject:
    return tracing.subject(build, build.__name__, PRECISIONS["fp32"])


def setup(optimizer: str, batch: int, gpus: int = 1) -> Setup:
    return Setup(
        gpus=gpus,
        memory=10**10,
        precision=PRECISIONS["fp32"],
        optimizer=OPTIMIZERS[optimizer],
        batch=batch,
        target="cpu",
    )


def planned(subject: Subject, optimizer: str, batch: int, *, checkpointing: bool, micro_batch: int = 0) -> float:
    return work_out(
        subject, setup(optimizer, batch), ALONE[0], micro_batch=micro_batch or batch, checkpointing=checkpointing
    ).per_gpu.total


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adam8bit"])
@pytest.mark.parametrize(
    "build", [zoo.mlp, zoo.wide_mlp, zoo.cnn, zoo.gpt, zoo.bert, zoo.lora], ids=lambda build: build.__name__
)
def test_a_traced_module_needs_what_its_real_step_needs(
    build: Callable[[], Any], optimizer: str, checkpointing: bool
) -> None:
    subject = trace(build)
    if checkpointing and subject.checkpointed is None:
        return  # an MLP has no repeated blocks
    model, inputs = build()
    if checkpointing:
        zoo.checkpointed(tracing.list_repeated(model))
    real = zoo.measured(model, inputs, MAKERS[optimizer])
    plan = planned(subject, optimizer, inputs[0].shape[0], checkpointing=checkpointing)
    assert plan == pytest.approx(real, rel=0.1)


@pytest.mark.slow
def test_accumulated_gradients_lie_beside_the_activations() -> None:
    subject = trace(zoo.bert)
    model, inputs = zoo.bert()
    real = zoo.measured(model, inputs, MAKERS["momentum"], accumulation=3)
    batch = inputs[0].shape[0]
    plan = planned(subject, "momentum", 3 * batch, checkpointing=False, micro_batch=batch)
    assert plan == pytest.approx(real, rel=0.02)
    assert planned(subject, "momentum", batch, checkpointing=False) < 0.9 * real


class Autocast(nn.Module):
    """A model whose forward pass runs under autocast, as the Trainer's `bf16` has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = self.model(*inputs)
        return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("batch", [8, 64])
def test_what_no_sample_adds_to_is_planned_for_any_batch(batch: int, precision: str) -> None:
    """Copies of weights that autocast makes, and a gradient before it is accumulated: 25 MB of 64."""
    subject = tracing.subject(zoo.wide_mlp, "wide_mlp", PRECISIONS[precision])  # with a batch of 32
    model, _ = zoo.wide_mlp()
    inputs = torch.randn(batch, 256), torch.zeros(batch, dtype=torch.long)
    real = zoo.measured(Autocast(model) if precision == "amp" else model, inputs, MAKERS["sgd"], accumulation=2)
    loop = msgspec.structs.replace(setup("sgd", 2 * batch), precision=PRECISIONS[precision])
    plan = work_out(subject, loop, ALONE[0], micro_batch=batch, checkpointing=False).per_gpu.total
    # Without instructions for bfloat16 (AVX512-BF16, AMX) a CPU's kernels hold one more copy, of 8 MB, at the peak.
    copies = (0, COPY) if precision == "amp" else (0,)
    assert any(real - copy == pytest.approx(plan, rel=0.01) for copy in copies), (plan, real)


class Trained(nn.Module):
    """A Hugging Face model that returns its loss, with the tokens as labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


FEW_KEYS = {"num_key_value_heads": 2, "use_cache": False}
EXPERTS = {"intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
SIZES = {"num_hidden_layers": 6, "hidden_size": 192, "num_attention_heads": 6, "vocab_size": 2000}


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    ("config", "model", "sizes"),
    [
        ("GPT2Config", "GPT2LMHeadModel", {}),
        ("BertConfig", "BertForMaskedLM", {"intermediate_size": 768}),
        ("LlamaConfig", "LlamaForCausalLM", {**FEW_KEYS, "intermediate_size": 512}),
        ("Qwen2Config", "Qwen2ForCausalLM", {**FEW_KEYS, "intermediate_size": 512}),
        ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"intermediate_size": 768, "use_cache": False}),
        ("MixtralConfig", "MixtralForCausalLM", {**FEW_KEYS, "intermediate_size": 384, "num_local_experts": 4}),
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**FEW_KEYS, **EXPERTS, "head_dim": 32}),
        ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**FEW_KEYS, **EXPERTS, "shared_expert_intermediate_size": 256}),
    ],
    ids=["gpt2", "bert", "llama", "qwen2", "gpt_neox", "mixtral", "qwen3_moe", "qwen2_moe"],
)
def test_a_config_needs_what_its_real_step_needs(
    config: str, model: str, sizes: dict[str, Any], checkpointing: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    settings = getattr(transformers, config)(**SIZES, **sizes)
    settings.save_pretrained(tmp_path)
    name, known = configfile.read(tmp_path / "config.json")
    real_model = getattr(transformers, model)(settings)
    assert known.parameters == pytest.approx(sum(p.numel() for p in real_model.parameters()), rel=0.001)
    if checkpointing:
        real_model.gradient_checkpointing_enable({"use_reentrant": False})
    real = zoo.measured(Trained(real_model).train(), (torch.zeros(4, 128, dtype=torch.long),), MAKERS["adamw"])
    subject = msgspec.structs.replace(known, on_cpu=True).subject(name, 128, PRECISIONS["fp32"])
    assert planned(subject, "adamw", 4, checkpointing=checkpointing) == pytest.approx(real, rel=0.1)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("width", "layers", "batch"), [(256, 4, 2)])
def test_fsdp2_needs_what_its_real_step_needs(width: int, layers: int, batch: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.planning.sharded", str(width), str(layers), str(batch)],
            env={**os.environ, "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    said = [rank.communicate(timeout=90)[0] for rank in ranks]
    real = int(said[0].split("peak ")[1].split()[0])

    def build() -> Any:
        return zoo.Transformer(causal=True, width=width, layers=layers), (torch.zeros(batch, 64, dtype=torch.long),)

    subject = tracing.subject(build, "gpt", PRECISIONS["fp32"])
    sharded = next(kind for kind in KINDS if kind.name == "ZeRO-3 / FSDP")
    plan = work_out(subject, setup("adamw", batch, gpus=2), sharded, micro_batch=batch, checkpointing=False)
    assert plan.per_gpu.total == pytest.approx(real, rel=0.1)
    assert plan.per_gpu.gathered > 0.04 * real
