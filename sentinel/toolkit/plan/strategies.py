"""What a strategy of spreading a model stores on each GPU, and what it sends."""

from __future__ import annotations

import msgspec

from sentinel.text import format_bytes
from sentinel.toolkit.plan.quantity import readable_count
from sentinel.toolkit.plan.recipe import NF4_BYTES, Setup
from sentinel.toolkit.plan.subject import Subject

_ZERO = "ZeRO, arXiv 1910.02054, sections 3.1 and 5"
_QLORA = "QLoRA, arXiv 2305.14314, section 3"
_TRAFFIC = "ZeRO, arXiv 1910.02054, section 7"


class StrategyKind(msgspec.Struct, frozen=True, kw_only=True):
    """A way to spread a model over GPUs."""

    name: str
    shards: frozenset[str] = frozenset()
    """Which of `parameters`, `gradients`, `optimizer` are sharded: each GPU holds only its part."""
    offloads: frozenset[str] = frozenset()
    """Which of `parameters`, `gradients`, `optimizer` are in the host's memory."""
    source: str = _ZERO
    line: str
    """The line of code or configuration to write."""

    def parts(self, what: str, gpus: int) -> int:
        """Return into how many parts this is sharded."""
        return gpus if what in self.shards else 1


_ALL = frozenset({"parameters", "gradients", "optimizer"})
_ALONE = StrategyKind(name="one GPU", source="no copies", line="torch.optim.AdamW(..., fused=True)")
_DDP = StrategyKind(
    name="DDP",
    line="DistributedDataParallel(model, gradient_as_bucket_view=True); without it, the gradients once more in buckets",
)
_ZERO3 = StrategyKind(
    name="ZeRO-3 / FSDP", shards=_ALL, line="for block in model.layers: fully_shard(block); fully_shard(model)"
)
KINDS = (
    _DDP,
    StrategyKind(name="ZeRO-1", shards=frozenset({"optimizer"}), line='DeepSpeed {"zero_optimization": {"stage": 1}}'),
    StrategyKind(
        name="ZeRO-2",
        shards=frozenset({"optimizer", "gradients"}),
        line='DeepSpeed {"zero_optimization": {"stage": 2}}',
    ),
    _ZERO3,
    StrategyKind(
        name="ZeRO-2 + optimizer offload",
        shards=frozenset({"optimizer", "gradients"}),
        offloads=frozenset({"optimizer"}),
        source="ZeRO-Offload, arXiv 2101.06840, section 3",
        line='DeepSpeed {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}',
    ),
    StrategyKind(
        name="ZeRO-3 / FSDP + CPU offload",
        shards=_ALL,
        offloads=_ALL,
        source="ZeRO-Infinity, arXiv 2104.07857, section 5; torch's CPUOffloadPolicy",
        line="fully_shard(block, offload_policy=CPUOffloadPolicy())",
    ),
)
ALONE = (
    _ALONE,
    StrategyKind(
        name="one GPU + optimizer offload",
        offloads=frozenset({"optimizer"}),
        source="ZeRO-Offload, arXiv 2101.06840, section 3",
        line='DeepSpeed {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}',
    ),
)


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one GPU at the peak of a step, and their sum."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Everything at the peak beyond the others; gradients that do not exist yet at the peak are subtracted."""
    gathered: float
    total: float


class MemoryLine(msgspec.Struct, frozen=True):
    """A figure with its formula and source."""

    what: str
    bytes: float
    formula: str
    source: str


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy and its costs."""

    strategy: str
    changes_training: bool = False
    """Whether it has another optimizer or fewer trained parameters: ranked after those that do not change training."""
    per_gpu: MemoryEstimate
    host: float
    """Bytes in the host's memory for each GPU."""
    communication: float
    """Bytes that a GPU sends in a step."""
    headroom: float
    """Bytes left of the share of the GPU's memory that a plan may use; negative: it does not fit."""
    fits: bool
    micro_batch: int
    accumulation: int
    checkpointing: bool
    seconds: float
    """Estimated seconds of a step, for the ranking; unknown parts are left out."""
    formulas: tuple[MemoryLine, ...]
    line: str


def work_out(
    subject: Subject, setup: Setup, kind: StrategyKind, *, micro_batch: int, checkpointing: bool, change: str = ""
) -> Candidate:
    """Return the costs of one strategy with one micro-batch size. `change`: what it changes in the training."""
    accumulation = -(-setup.batch // micro_batch)
    lines = [*_states(subject, setup, kind)]
    lines.append(_count_gathered(subject, setup, kind))
    gradients = lines[1].bytes
    lines.append(_activations(subject, setup, kind, gradients, micro_batch, accumulation > 1, checkpointing))
    lines.append(_communication(subject, setup, kind, accumulation))
    sizes = {line.what: line.bytes for line in lines}
    sent = sizes.pop("communication")
    total = sum(sizes.values())
    headroom = setup.memory * setup.share - total
    return Candidate(
        strategy=f"{kind.name} + {change}" if change else kind.name,
        changes_training=bool(change),
        per_gpu=MemoryEstimate(**sizes, total=total),
        host=_host(subject, setup, kind),
        communication=sent,
        headroom=headroom,
        fits=headroom >= 0,
        micro_batch=micro_batch,
        accumulation=accumulation,
        checkpointing=checkpointing,
        seconds=_seconds(subject, setup, kind, sent, accumulation, checkpointing),
        formulas=tuple(lines),
        line=kind.line,
    )


def _states(subject: Subject, setup: Setup, kind: StrategyKind) -> list[MemoryLine]:
    precision = setup.precision
    state = precision.master + setup.optimizer.bytes_per_parameter(precision)
    master = f"{precision.master} master + " if precision.master else ""
    per_state = f"({master}{state - precision.master:.3g} {setup.optimizer.name}) bytes"
    rows = (
        ("parameters", subject.parameters - subject.quantised, float(precision.weight), f"{precision.weight} bytes"),
        ("gradients", subject.trainable, float(precision.gradient), f"{precision.gradient} bytes"),
        ("optimizer", subject.trainable, state, per_state),
    )  # fmt: skip
    weights, *rest = [_state(what, count, size, words, subject, setup, kind) for what, count, size, words in rows]
    return [_add_quantised(weights, subject.quantised) if subject.quantised else weights, *rest]


def _add_quantised(weights: MemoryLine, count: int) -> MemoryLine:
    formula = f"{NF4_BYTES:.3f} bytes x {readable_count(count)} in NF4 + {weights.formula}"
    return MemoryLine(weights.what, weights.bytes + count * NF4_BYTES, formula, _QLORA)


def _state(
    what: str, count: int, size: float, words: str, subject: Subject, setup: Setup, kind: StrategyKind
) -> MemoryLine:
    parts = kind.parts(what, setup.gpus)
    buffers = subject.buffers if what == "parameters" else 0
    if what in kind.offloads:
        return MemoryLine(what, float(buffers), "in the host's memory", kind.source)
    formula = f"{words} x {readable_count(count)}" + (f" / {parts} GPUs" if parts > 1 else "")
    formula += f" + {format_bytes(buffers)} of buffers" if buffers else ""
    source = kind.source if parts > 1 else setup.optimizer.source if what == "optimizer" else setup.precision.source
    return MemoryLine(what, count * size / parts + buffers, formula, source)


def _count_gathered(subject: Subject, setup: Setup, kind: StrategyKind) -> MemoryLine:
    """Return the bytes of gathered parameters.

    FSDP2 holds the root's parameters from forward to backward, and those of the present and the next unit. Parameters
    in NF4 are converted to 16 bits for each product, one matrix at a time.
    """
    if subject.quantised:
        words = "the matrices are not known"
        if subject.largest_linear:
            words = f"2 bytes x {readable_count(subject.largest_linear)} of the largest matrix, while it is multiplied"
        return MemoryLine("gathered", 2.0 * subject.largest_linear, words, _QLORA)
    if "parameters" not in kind.shards or not subject.unit:
        why = "nothing is gathered" if "parameters" not in kind.shards else "the layers are not known"
        return MemoryLine("gathered", 0.0, why, kind.source)
    weight, gradient = setup.precision.activation, setup.precision.gradient
    trained = subject.trainable / max(1, subject.parameters)
    size = weight * (subject.rest + 2 * subject.unit) + gradient * subject.unit * trained
    formula = (
        f"{weight} bytes x ({readable_count(subject.rest)} of the root + 2 x {readable_count(subject.unit)} of the "
        f"largest unit, this and the next) + its gradients"
    )
    return MemoryLine(
        "gathered", size, formula, "torch FSDP2: prefetching all-gathers; pytorch/torchtitan docs/fsdp.md"
    )


def _activations(
    subject: Subject,
    setup: Setup,
    kind: StrategyKind,
    gradients: float,
    micro_batch: int,
    kept: bool,
    checkpointing: bool,
) -> MemoryLine:
    profile = subject.checkpointed if checkpointing else subject.plain
    held = setup.optimizer.temporaries if setup.target == "cpu" else 0
    temporary = float(held * subject.largest * max(setup.precision.weight, setup.precision.master))
    temporary /= kind.parts("optimizer", setup.gpus)
    if profile is None:
        return MemoryLine("activations", temporary, "not known: no batch and sequence, or no module", "")
    # What FSDP gathers is counted with it, and matrices in NF4 are converted one at a time.
    whole = "parameters" not in kind.shards and not subject.quantised
    peak = profile.surplus(micro_batch, gradients, kept=kept, whole=whole)
    formula = f"{micro_batch} x ({profile.formula})"
    if whole and any(point.fixed for point in profile.points):
        formula += ", and what no sample adds to: 16-bit copies of weights, a gradient in the making"
    formula += "" if kept else ", less gradients that are not there yet"
    if peak < temporary:
        formula = f"the optimizer's temporaries: {held} of the largest tensor"
    return MemoryLine("activations", max(peak, temporary), formula, profile.source)


def _communication(subject: Subject, setup: Setup, kind: StrategyKind, accumulation: int) -> MemoryLine:
    precision, n = setup.precision, setup.gpus
    ring = (n - 1) / n
    trained, all_of_it = subject.trainable * precision.gradient, subject.parameters * precision.activation
    if n == 1:
        return MemoryLine("communication", 0.0, "one GPU", "")
    if not kind.shards:
        return MemoryLine("communication", 2 * trained * ring, "all-reduce: 2 x gradients x (N-1)/N", _TRAFFIC)
    if "parameters" in kind.shards:
        sent = (2 * all_of_it + trained) * accumulation * ring
        return MemoryLine(
            "communication",
            sent,
            f"{accumulation} x (2 gathers of the parameters + 1 reduce-scatter of the gradients) x (N-1)/N",
            _TRAFFIC,
        )
    scatters = accumulation if "gradients" in kind.shards else 1
    sent = (trained * scatters + subject.trainable * precision.weight) * ring
    return MemoryLine(
        "communication", sent, f"({scatters} reduce-scatter of the gradients + 1 gather) x (N-1)/N", _TRAFFIC
    )


def _host(subject: Subject, setup: Setup, kind: StrategyKind) -> float:
    precision = setup.precision
    state = precision.master + setup.optimizer.bytes_per_parameter(precision)
    sizes = {
        "parameters": subject.parameters * precision.weight,
        "gradients": subject.trainable * precision.gradient,
        "optimizer": subject.trainable * state,
    }
    # DeepSpeed moves the gradients of offloaded optimizers to the host, too, whether configured or not.
    moved = kind.offloads | ({"gradients"} if kind.offloads else set())
    return sum(sizes[what] / kind.parts(what, setup.gpus) for what in moved)


_EFFICIENCY = 0.4
"""Share of the data sheet's operations that large models reach in training (PaLM, arXiv 2204.02311, table 3: 46 %)."""
_HOST_ADAM = 10e9
"""Bytes per second at which an optimizer on the CPU updates one GPU's share of a host's memory."""
_SMALLER_BATCH = 0.02
"""Share of the time added for each halving of the micro-batch: each kernel gets less work. Assumed, to break ties."""


def _seconds(
    subject: Subject, setup: Setup, kind: StrategyKind, sent: float, accumulation: int, checkpointing: bool
) -> float:
    """Return the seconds of a step. Compute and communication overlap; the host's link and its Adam do not."""
    forward = 2.0 * subject.parameters * subject.active_share * subject.tokens * setup.batch
    backward = forward * (1 + subject.trainable / max(1, subject.parameters))
    again = forward if checkpointing else 0.0
    compute = (forward + backward + again) / (setup.flops * _EFFICIENCY)
    compute *= 1 + _SMALLER_BATCH * (accumulation.bit_length() - 1)
    seconds = max(compute, sent / setup.link if setup.gpus > 1 else 0.0)
    if not kind.offloads:
        return seconds
    own = subject.trainable / kind.parts("optimizer", setup.gpus)
    crossing = own * (setup.precision.gradient + setup.precision.weight)
    if "parameters" in kind.offloads:
        crossing += 2 * subject.parameters / setup.gpus * setup.precision.activation * accumulation
    state = setup.optimizer.bytes_per_parameter(setup.precision) + setup.precision.master
    return seconds + crossing / setup.host_link + 2 * own * state / _HOST_ADAM
