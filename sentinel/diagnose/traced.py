"""Add what a second run of the batch found to a diagnosis of non-finite values."""

from __future__ import annotations

import msgspec

from sentinel.diagnose.evidence import Confidence, Evidence, Finding
from sentinel.text import join_names
from sentinel.wire.evidence import Provenance

_TELLING = ("data", "weights", "operation", "loss", "nothing", "not known")
_SHOWN = 5


def add_origin(evidence: Evidence, found: Finding) -> Finding:
    """Return the finding with the origin, where one was found. An earlier divergence stays the cause, unless the origin
    is the data: no divergence puts a NaN there."""
    if not evidence.provenance:
        return found
    rank, made = min(evidence.provenance.items(), key=lambda pair: _TELLING.index(pair[1].origin))
    step = evidence.step(made.seq)
    whose = f" of rank {rank}" if evidence.world_size > 1 else ""
    how = "run once more" if made.rerun else "looked at"
    fact = f"the batch of step {step}{whose}, {how}: {_describe_origin(made)}"
    missing = tuple(one for one in found.missing if "re-run" not in one and "made it" not in one) + made.missing
    found = msgspec.structs.replace(found, evidence=(*found.evidence, fact), missing=missing)
    if made.origin in ("nothing", "not known"):
        return found
    if found.cause.startswith("divergence") and made.origin != "data":
        return found
    if made.origin == "weights" and made.seq > evidence.since:
        late = f"the function that made it: a batch could be run again at step {step} only, and its weights were broken"
        return msgspec.structs.replace(found, missing=(*found.missing, late))
    cause, confidence, remedy = _cause(made, f"step {step}{whose}")
    if found.leads:
        return msgspec.structs.replace(found, cause=f"{found.cause}; {cause}")
    if made.origin == "weights":
        missing += ("the update that put it there",)
    problem = "data" if made.origin == "data" else found.problem
    return Finding(cause, confidence, remedy, missing, found.evidence, problem=problem)


def _cause(made: Provenance, step: str) -> tuple[str, Confidence, str]:
    where = f"{made.module} ({made.kind})" if made.module else "the model itself"
    line = f" at {made.line}" if made.line else ""
    sure: Confidence = "high" if made.exact and not made.missing else "medium"
    if made.origin == "data":
        return (
            f"bad data: NaN or infinite values in {join_names(made.tensors, _SHOWN)} of the batch of {step}",
            sure,
            f"look at the batch of {step}, and at what reads it: drop such samples with torch.isfinite, or fix them; "
            "if the loss stays NaN, the weights are NaN, too: go on from a checkpoint of before that step",
        )
    if made.origin == "weights":
        broke = ""
        if made.between:
            broke = "; it was a backward pass that broke, between {1} and {0}, and its update was applied".format(
                *made.between
            )
        return (
            f"bad weights: {join_names(made.bad_weights or made.tensors, _SHOWN)} were not finite before {step}{broke}",
            "medium",
            "roll back, or restore a checkpoint from before: a weight that is not finite stays so; then clip the "
            "gradients, or look for the step whose gradient was not finite",
        )
    if made.origin == "loss":
        what = "gradient" if made.phase == "backward" else "loss"
        return (
            f"the loss function: the model's outputs at {step} are finite, and the {what} made of them is not",
            sure,
            "look at the targets, and at log, sqrt, norm or a division in the loss; in fp16 compute it in fp32",
        )
    if made.inputs_finite is False:
        return (
            f"{where} met it in the {made.phase} pass of {step}: {made.operation}{line} got a value that was not "
            "finite, and is neither a weight nor a tensor that the model was called with",
            "medium",
            f"look at what {made.line or where} reads: a constant, a module's attribute, a batch in an object of yours",
        )
    return (
        f"{where} made it in the {made.phase} pass of {step}: {made.operation}{line}, from finite inputs and weights",
        sure,
        f"look at {made.line or where}: {_hint(made)}",
    )


def _hint(made: Provenance) -> str:
    name = made.operation.lower()
    if made.phase == "backward" and any(part in name for part in ("sqrt", "pow", "norm")):
        return "the derivative is infinite at 0: add an epsilon inside, x.add(1e-12).sqrt()"
    if "log" in name and "softmax" not in name:
        return "clamp its argument, x.clamp(min=1e-12).log()"
    if "softmax" in name:
        return "a row that is masked whole has no softmax: leave one element unmasked"
    if "div" in name or "sqrt" in name or "rsqrt" in name:
        return "keep its argument away from 0 and from negative numbers with an epsilon"
    return "its values outgrow the format: keep what goes in small, and where it is fp16 run it in fp32"


def _describe_origin(made: Provenance) -> str:
    if made.origin == "nothing":
        return (
            "it makes only finite values, in both passes; what came after them (hooks, scaling, other ranks) does not"
        )
    if made.origin == "not known":
        return "no origin was found"
    named = f": {made.operation}" if made.operation else ""
    place = f"{made.module}{named}" if made.module else made.operation
    held = f", {join_names(made.tensors, _SHOWN)}" if made.tensors else ""
    within = f", {made.phase} pass" if made.phase else ""
    return f"{made.origin}{within}{f', {place}' if place else ''}{held}"
