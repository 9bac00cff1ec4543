"""The bytes per parameter, by precision and optimizer, and the memory and speed of GPUs."""

from __future__ import annotations

import msgspec


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """How weights, gradients and activations are stored, in bytes per element."""

    name: str
    weight: int
    gradient: int
    master: int
    """Bytes of the float32 copy of a trained weight; 0: there is none."""
    activation: int
    state: int
    """Bytes per element of the optimizer's state."""
    source: str


PRECISIONS = {
    "mixed": Precision(
        name="mixed", weight=2, gradient=2, master=4, activation=2, state=4,
        source="16-bit weights and gradients, float32 master copy: ZeRO (arXiv 1910.02054), section 3.1",
    ),
    "amp": Precision(
        name="amp", weight=4, gradient=4, master=0, activation=2, state=4,
        source="torch.autocast: weights and gradients stay float32, activations are 16-bit (torch.amp documentation)",
    ),
    "fp32": Precision(
        name="fp32", weight=4, gradient=4, master=0, activation=4, state=4, source="everything in float32",
    ),
    "bf16": Precision(
        name="bf16", weight=2, gradient=2, master=0, activation=2, state=2,
        source="everything in bfloat16, the optimizer's state too: small updates are rounded away",
    ),
}  # fmt: skip
"""Precisions by name. In PyTorch's FSDP2 with MixedPrecisionPolicy(param_dtype=bfloat16) the shards are float32:
`amp`'s bytes, in all 16 bytes per parameter, as with `mixed`."""


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer keeps for each trained parameter."""

    name: str
    states: int
    """Number of state tensors of the parameter's shape."""
    eight_bit: bool = False
    temporaries: int = 0
    """Copies of the largest tensor that a step holds if it updates one tensor after the other, as on a CPU."""
    source: str

    def bytes_per_parameter(self, precision: Precision) -> float:
        """Return the bytes of state per parameter, without the master copy."""
        if self.eight_bit:
            return self.states * (1 + 4 / _BLOCK)
        return float(self.states * precision.state)


_BLOCK = 256
"""Elements that share one float32 scale in bitsandbytes' block-wise optimizers."""

OPTIMIZERS = {
    "adamw": Optimizer(name="adamw", states=2, temporaries=2, source="exp_avg and exp_avg_sq of each"),
    "adam8bit": Optimizer(
        name="adam8bit", states=2, eight_bit=True,
        source="two bytes and a float32 scale for each block of 256 (arXiv 2110.02861, section 2)",
    ),
    "sgd": Optimizer(name="sgd", states=0, source="no state without momentum"),
    "momentum": Optimizer(name="momentum", states=1, source="SGD's momentum_buffer, of the parameter's shape"),
    "lion": Optimizer(name="lion", states=1, temporaries=2, source="exp_avg, of the parameter's shape"),
    "adafactor": Optimizer(name="adafactor", states=0, source="a row and a column of each matrix: next to nothing"),
}  # fmt: skip


NF4_BYTES = 0.5 + (8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a parameter in 4-bit NormalFloat: 4 bits, and the quantisation constants: 8 bits per block of 64, and 32
bits per 256 of these (QLoRA, arXiv 2305.14314, section 3, 'Double Quantization': 0.127 bits)."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU according to its data sheet."""

    memory: int
    """Bytes of memory."""
    flops: float
    """Operations per second in dense 16-bit matrix products."""


CARDS = {
    "a10": Card(memory=24 * 10**9, flops=125e12),
    "a100": Card(memory=80 * 10**9, flops=312e12),
    "a100-40": Card(memory=40 * 10**9, flops=312e12),
    "b200": Card(memory=180 * 10**9, flops=2250e12),
    "h100": Card(memory=80 * 10**9, flops=989e12),
    "h200": Card(memory=141 * 10**9, flops=989e12),
    "l4": Card(memory=24 * 10**9, flops=121e12),
    "mi300x": Card(memory=192 * 10**9, flops=1307e12),
    "rtx4090": Card(memory=24 * 10**9, flops=165e12),
    "t4": Card(memory=16 * 10**9, flops=65e12),
    "v100": Card(memory=32 * 10**9, flops=125e12),
}
"""GPUs by name, from the vendors' data sheets, without sparsity."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and the loop that a plan is for."""

    gpus: int
    memory: int
    """Bytes of one GPU."""
    precision: Precision
    optimizer: Optimizer
    batch: int = 1
    """Samples per GPU in one optimizer step."""
    flops: float = CARDS["h100"].flops
    link: float = 50e9
    """Bytes per second between GPUs, each way, per GPU: 400 Gbit/s InfiniBand."""
    host_link: float = 25e9
    """Bytes per second between a GPU and its host: what PCIe 4.0 x16 reaches."""
    share: float = 0.9
    """Share of the memory that a plan may use: CUDA context, NCCL's buffers, workspaces and fragments need the rest."""
    target: str = "cuda"
    """`cpu`: the optimizer updates one tensor after the other, and holds temporaries of the largest."""
    lora: float | None = None
    """Share of the parameters that adapters would add; None: not offered."""
