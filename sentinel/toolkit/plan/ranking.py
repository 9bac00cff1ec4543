"""Ranks strategies: which fit, the fastest first."""

from __future__ import annotations

import msgspec

from sentinel.text import format_bytes
from sentinel.toolkit.plan.recipe import OPTIMIZERS, Setup
from sentinel.toolkit.plan.strategies import ALONE, KINDS, Candidate, StrategyKind, work_out
from sentinel.toolkit.plan.subject import Subject

_QLORA = (
    "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, "
    "bnb_4bit_compute_dtype=torch.bfloat16), and LoraConfig(target_modules='all-linear')"
)


def rank_strategies(
    subject: Subject, setup: Setup, *, checkpointing: bool | None = None, micro_batch: int = 0
) -> list[Candidate]:
    """Return one candidate per strategy, those that fit first, the fastest of them first.

    `checkpointing` None and `micro_batch` 0: the plan chooses.
    """
    found = [
        _best(subject, setup, kind, change, checkpointing, micro_batch)
        for subject, setup, kind, change in _offers(subject, setup)
    ]
    order = {candidate.strategy: place for place, candidate in enumerate(found)}
    return sorted(
        found,
        key=lambda c: (
            not c.fits,
            c.fits and c.changes_training,
            c.seconds if c.fits else c.per_gpu.total,
            order[c.strategy],
        ),
    )


def _offers(subject: Subject, setup: Setup) -> list[tuple[Subject, Setup, StrategyKind, str]]:
    """Return the strategies to try, the simplest first: of equally fast ones the simplest ranks first."""
    kinds = KINDS if setup.gpus > 1 else ALONE
    offers = [(subject, setup, kind, "") for kind in kinds]
    whole = [kind for kind in kinds if not kind.offloads and len(kind.shards) in (0, 3)]
    if setup.optimizer.name == "adamw":
        lighter = msgspec.structs.replace(setup, optimizer=OPTIMIZERS["adam8bit"])
        offers += [(subject, lighter, kind, "8-bit Adam") for kind in whole]
    if setup.lora is not None and subject.trainable == subject.parameters:
        adapters = round(subject.parameters * setup.lora)
        adapted = msgspec.structs.replace(subject, parameters=subject.parameters + adapters, trainable=adapters)
        offers += [(adapted, setup, kind, "LoRA") for kind in whole]
        if subject.linear:
            quantised = msgspec.structs.replace(adapted, quantised=subject.linear)
            copied = [msgspec.structs.replace(kind, line=_QLORA) for kind in whole if not kind.shards]
            offers += [(quantised, setup, kind, "QLoRA") for kind in copied]
    return offers


def _best(
    subject: Subject, setup: Setup, kind: StrategyKind, change: str, checkpointing: bool | None, micro_batch: int
) -> Candidate:
    """Return the fastest candidate that fits; if none does, the smallest."""
    known = subject.plain is not None and subject.checkpointed is not None
    ways = [False, True] if checkpointing is None and known else [bool(checkpointing) and known]
    sizes = [micro_batch] if micro_batch else _halvings(setup.batch) if known else [setup.batch]
    tried = [
        work_out(subject, setup, kind, micro_batch=size, checkpointing=way, change=change)
        for way in ways
        for size in sizes
    ]
    fitting = [candidate for candidate in tried if candidate.fits]
    if fitting:
        return min(fitting, key=lambda c: (c.seconds, c.accumulation))
    return min(tried, key=lambda c: c.per_gpu.total)


def _halvings(batch: int) -> list[int]:
    sizes = [batch]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


def advice(subject: Subject, setup: Setup, candidates: list[Candidate]) -> list[str]:
    """Return advice that no row of the table shows."""
    said = list(subject.notes)
    best = candidates[0]
    states = best.per_gpu.parameters + best.per_gpu.gradients + best.per_gpu.optimizer
    rest = best.per_gpu.activations + best.per_gpu.gathered
    if not best.fits or best.per_gpu.gathered > setup.memory / 4:
        ways = min(8, setup.gpus) if setup.gpus > 1 else 8
        said.append(
            f"tensor parallel over the {ways} GPUs of a node cuts weights, states and what is gathered in {ways}, and "
            f"activations nearly so (arXiv 2205.05198, equation 4: s b h (10 + 24/{ways}) a layer, (34/{ways}) with "
            f"sequence parallel): of {format_bytes(states + rest)} about {format_bytes((states + rest) / ways)} stay"
        )
    if not best.fits:
        said.append(f"the nearest, {best.strategy}, is {format_bytes(-best.headroom)} too large for each GPU")
    if best.strategy.endswith("QLoRA"):
        said.append(
            "a paged optimizer (paged_adamw_8bit of bitsandbytes) keeps its state in memory that moves to the host "
            "while the GPU's is used up: a run survives a short peak. The plan counts the state on the GPU "
            "(arXiv 2305.14314, section 3)"
        )
    if subject.plain is None:
        said.append(
            "activations are counted neither in what fits nor in the order: give --sequence with a config.json or "
            "--layers and --hidden, or a module"
        )
    if not subject.unit and setup.gpus > 1:
        said.append("what FSDP gathers of a layer is left out: give --layers")
    if setup.target == "cuda" and setup.optimizer.name in ("adamw", "momentum", "lion"):
        said.append(
            "optimizers with fused=True are meant; torch's default on CUDA (foreach) holds temporaries as large as "
            "its parameters during the step (torch.optim documentation)"
        )
    return said
