"""Explain an allocation that failed: what memory was spent on, and the cheapest change that fits."""

from __future__ import annotations

from collections.abc import Iterator

from sentinel.diagnose.evidence import Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.text import format_bytes
from sentinel.wire.evidence import OutOfMemory

_MISSING = "the figures of that moment: the rank ended before it could say them; the exception's message has some"
_CHECKPOINTED = 0.6
"""Share of the activations that checkpointing each block of a transformer saves, at least: 1 - 1/sqrt(layers), of 8 or
more (Chen et al. 2016, arXiv:1604.06174)."""
_MARGIN = 1.05
"""Room over the failed request, as it is not the last of its size."""
_ADAM_STATES = 2
"""State tensors that Adam keeps of each parameter, of the size of its gradient."""
_SMALLER_STATES = ("8bit", "4bit", "Fp8")
"""Parts of the names of optimizers whose states are that small already."""


@explains("OutOfMemory")
def out_of_memory(evidence: Evidence) -> Finding:
    """List the parts, the largest of them, and the first change, by rising cost, that makes enough room."""
    rank = evidence.ranks[0] if evidence.ranks else None
    found = evidence.out_of_memory.get(rank) if rank is not None else None
    if found is None:
        return report_unknown(_MISSING, command="grep -i 'tried to allocate' LOG")
    states = _complete_states(found, evidence)
    wanted = max(found.requested - found.free, states - found.optimizer - found.free, 0) * _MARGIN
    changes = [(text, saved) for text, saved in _changes(found, evidence, states) if saved > 0]
    chosen = next((text for text, saved in changes if saved >= wanted), None)
    parts = sorted(_parts(found).items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    at = f" at {found.line}" if found.line else ""
    cause = (
        f"{parts[0][0]} are the largest part ({format_bytes(parts[0][1])}) of what rank {rank} held when it asked for "
        f"{format_bytes(found.requested) if found.requested else 'more'} in the {found.phase} pass{at}"
    ).replace("optimizer pass", "optimizer's step")
    if found.requested > found.limit > 0:
        cause = (
            f"one tensor of {format_bytes(found.requested)} was asked for{at}, and the {found.device} has "
            f"{format_bytes(found.limit)} in all: a size or a shape is wrong there, or far too large"
        )
        return Finding(cause, "high", f"look at the shapes{at}", (), (listed,))
    facts = (listed, *_facts(found))
    every = " and ".join(text for text, _ in changes[:3])
    remedy = chosen or f"no single change makes room for {format_bytes(wanted)}: {every}; sentinel plan lists what fits"
    return Finding(cause, "high" if found.device != "cpu" else "medium", remedy, _gaps(found), facts)


def _parts(found: OutOfMemory) -> dict[str, int]:
    return {
        "parameters": found.parameters + found.buffers,
        "gradients": found.gradients,
        "optimizer states": found.optimizer,
        "activations and the rest": found.activations,
        "idle pieces of the allocator": found.idle,
    }


def _is_adam(evidence: Evidence) -> bool:
    """Return whether the optimizer's states are Adam's, of the parameters' own type; True where it is not known."""
    optimizer = str(evidence.facts.get("optimizer", "Adam"))
    return "Adam" in optimizer and not any(name in optimizer for name in _SMALLER_STATES)


def _complete_states(found: OutOfMemory, evidence: Evidence) -> float:
    """Return the bytes of the optimizer's states once all are made: Adam makes them in its first step, in which this
    may have happened."""
    if found.phase == "optimizer" and _is_adam(evidence):
        return max(found.optimizer, _ADAM_STATES * found.gradients)
    return found.optimizer


def _changes(found: OutOfMemory, evidence: Evidence, states: float) -> Iterator[tuple[str, float]]:
    """Yield (what to do, bytes that it saves), the cheapest first: settings, then time, then precision, then
    machines. `states`: bytes of the optimizer's states."""
    if found.device == "cuda":
        setting = "set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before torch 2.10)"
        yield f"{setting}: {format_bytes(found.idle)} lie idle in pieces", found.idle
    if found.phase != "optimizer":  # there, activations are gone
        yield from _save_activations(found, evidence)
    if states and _is_adam(evidence):
        yield "an 8-bit optimizer (bitsandbytes: AdamW8bit)", states * 0.75
    world = evidence.world_size
    if world > 1 and not found.gathered:
        yield f"fully_shard over the {world} ranks", (found.parameters + found.gradients + states) * (1 - 1 / world)


def _save_activations(found: OutOfMemory, evidence: Evidence) -> Iterator[tuple[str, float]]:
    size = evidence.latest("batch_size", evidence.ranks[0])  # the run's is the sum over the ranks
    for part in (2, 4):
        if size is None or size >= part:
            batch = f" ({size:.0f} to {size / part:.0f})" if size is not None else ""
            share = "half" if part == 2 else "a quarter"
            text = f"{share} of the micro-batch{batch} with {part} times the accumulation"
            yield text, found.activations * (1 - 1 / part)
    yield "activation checkpointing of each block (torch.utils.checkpoint)", found.activations * _CHECKPOINTED


def _facts(found: OutOfMemory) -> Iterator[str]:
    if found.limit:
        held = f"{format_bytes(found.reserved)} of {format_bytes(found.limit)} were held"
        yield f"{held}, {format_bytes(found.free)} free"
    if found.gathered and found.largest_layer:
        size = format_bytes(found.largest_layer_bytes)
        yield f"the largest layer that a gather holds whole is {found.largest_layer}, {size}"


def _gaps(found: OutOfMemory) -> tuple[str, ...]:
    if found.device == "cpu":
        return ("what the allocator held at that moment: on the CPU the resident set stands for it",)
    return () if found.allocated else ("the allocator's figures: the exception's message has none",)
