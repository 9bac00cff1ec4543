"""Explain numbers that leave their format: NaN and infinity."""

from __future__ import annotations

import math

from sentinel.diagnose.evidence import ALL_STEPS, NOT_KNOWN, SAMPLE_MORE, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.runs.steps import RunStep
from sentinel.text import format_count, join_names

_REACH = 50
"""Steps over which ScalerCollapse counts."""


@explains("NonFiniteLoss")
def nonfinite_loss(evidence: Evidence) -> Finding:
    """Decide between poisoned weights, divergence, and the forward pass of that very step."""
    loss, gradient = evidence.sign("loss"), evidence.sign("grad_norm")
    at = loss.seq if loss else evidence.since
    nonfinite_at = evidence.since
    if gradient and gradient.seq < nonfinite_at and not math.isfinite(gradient.value):
        elsewhere = "" if _sees_all_ranks(evidence) else "; they are averaged over ranks that are not seen here"
        return Finding(
            f"weights poisoned by step {evidence.step(gradient.seq)}: its backward made non-finite gradients, "
            f"and the optimizer applied them{elsewhere}",
            "medium" if elsewhere else "high",
            "roll back or restore a checkpoint from before that step: every weight that got a NaN keeps it; "
            "then find what made it: torch.autograd.set_detect_anomaly(True) on the batch of that step",
            ("the module that made it",),
        )
    if at < nonfinite_at or (gradient and gradient.seq < nonfinite_at):
        first = min(sign.seq for sign in (loss, gradient) if sign is not None)  # the loss scale falls for itself, too
        return Finding(
            f"divergence: loss or gradient norm were unusual from step {evidence.step(first)} on, "
            f"{format_count(nonfinite_at - first, 'step')} before the loss overflowed",
            "high",
            "go back to before the first sign; lower the rate or lengthen the warm-up; clip the gradients",
        )
    if evidence.is_unsampled("grad_norm", nonfinite_at - 1):
        return report_unknown(
            evidence.missing_norm(nonfinite_at - 1),
            command=SAMPLE_MORE,
            cause=f"{NOT_KNOWN}: the forward pass of step {evidence.step(nonfinite_at)}, or weights that an earlier "
            "backward pass had poisoned",
            remedy="roll back or restore a checkpoint from before that step; check its inputs with torch.isfinite",
        )
    return Finding(
        f"the forward pass of step {evidence.step(nonfinite_at)} made it, out of the blue: a non-finite or extreme "
        "value in the batch, or log, sqrt or a division at the edge of its domain",
        "medium",
        f"check the inputs of step {evidence.step(nonfinite_at)} with torch.isfinite; add an epsilon to log, sqrt "
        "and divisions; in fp16 keep the loss in fp32",
        ("the first module that made it: needs a re-run of the batch",),
    )


@explains("NonFiniteGradient")
def nonfinite_gradient(evidence: Evidence) -> Finding:
    """Decide between the backward pass, and a loss that was not finite before it."""
    loss = evidence.last.run.get("loss")
    if loss is None:
        return report_unknown(
            f"the loss of step {evidence.step(evidence.since)}, which is not known: it was not sampled, or the "
            "backward pass does not begin at one number",
            command="monitor.log(loss=...)",
            cause=f"{NOT_KNOWN}: the forward pass of step {evidence.step(evidence.since)}, or its backward pass",
            remedy="check the loss, and what the backward pass begins at, with torch.isfinite",
        )
    if math.isfinite(loss) and not _sees_all_ranks(evidence):
        return Finding(
            f"the backward pass of step {evidence.step(evidence.since)}, or a loss that is not finite on a rank that "
            f"is not seen here, as gradients are averaged over all; the losses here are finite ({loss:.4g})",
            "low",
            "look at the same step on the job's other nodes (`sentinel incidents` on any of them shows all); then, for "
            "the backward pass, at sqrt, norm, log or a division whose derivative is infinite at 0",
            ("the losses of the other ranks",),
        )
    if math.isfinite(loss):
        return Finding(
            f"the backward pass of step {evidence.step(evidence.since)} made it: the loss of that step is finite "
            f"({loss:.4g})",
            "high",
            "look for sqrt, norm, log or a division whose derivative is infinite at 0; "
            "torch.autograd.set_detect_anomaly(True) on that batch names the function; a GradScaler skips such steps",
            ("the function that made it: needs a re-run of the batch",),
        )
    return Finding(
        f"the loss of step {evidence.step(evidence.since)} is not finite, and its gradients with it",
        "high",
        "see NonFiniteLoss: the forward pass made it",
    )


@explains("ScalerCollapse")
def scaler_collapse(evidence: Evidence) -> Finding:
    """Find whether every batch overflows or only some, in the forward or in the backward pass, and where it begins."""
    withheld = [step for step in evidence.steps if _withheld(step) and step.seq <= evidence.until]
    if not withheld:
        return report_unknown("which steps overflowed: none that is in memory says so", command=ALL_STEPS)
    late = withheld[-1].seq - _REACH
    window = [step for step in evidence.steps if late < step.seq <= evidence.until]
    withheld = [step for step in withheld if step.seq > late]
    rate = (
        f"{len(withheld)} of the last {len(window)} steps were withheld, the first of them "
        f"step {evidence.step(withheld[0].seq)}"
    )
    lost = [step for step in withheld if not math.isfinite(step.run.get("loss", 0.0))]
    overflowing = [layer.name for layer in evidence.layers if layer.nonfinite]
    where = ""
    if overflowing:
        where = f"; of {len(overflowing)} layers that overflow, {overflowing[-1]} is nearest the output"
        where = where if len(overflowing) > 1 else f"; {overflowing[0]} alone overflows"
    if len(lost) > len(withheld) / 2:
        return Finding(
            f"the forward pass: the loss itself is not finite at {len(lost)} of these steps, which no loss scale fixes",
            "high",
            "see NonFiniteLoss; run what overflows in the forward pass in fp32 or bf16, and check the batches",
            evidence=(rate,),
            leads=True,
        )
    between = sum(not _withheld(step) for step in window if step.seq > withheld[0].seq)
    if between > len(withheld):
        steps = ", ".join(str(evidence.step(step.seq)) for step in withheld[-5:])
        return Finding(
            f"some batches: between the {len(withheld)} withheld steps {between} were applied at the same scale{where}",
            "medium",
            f"look at the batches of steps {steps} (long sequences, outliers, empty targets); clip or drop them",
            ("the batches themselves",),
            (rate,),
            leads=True,
        )
    return Finding(
        f"the model, whatever the batch: {len(withheld)} steps overflowed, {between} between them did not, though the "
        f"scale was halved each time{where}: its gradients have outgrown fp16, or are infinite at any scale",
        "medium",
        missing=("whether weights or activations of that layer had grown: needs their norms",),
        evidence=(rate,),
        leads=True,
    )


@explains("ScalerMissing")
def scaler_missing(evidence: Evidence) -> Finding:
    """Explain the missing scaler, and quote the share of the gradient that is lost."""
    scaler, shares, layers = (
        evidence.facts.get("scaler"),
        _describe_lost_shares(evidence),
        _describe_lost_layers(evidence),
    )
    given = f"; attach was given a {scaler}, but it scaled no loss (enabled=False?)" if scaler else ""
    return Finding(
        "the step runs in fp16, and neither a GradScaler nor an optimizer with a scale of its own scaled the loss: "
        f"gradients under 3e-8 become 0, and those under 6e-5 lose digits{given}",
        "high",
        "scaler = torch.amp.GradScaler(device); scaler.scale(loss).backward(); scaler.step(optimizer); "
        "scaler.update(); or use bf16, which needs none",
        () if layers else ("the shares by layer",) if shares else ("the share of gradient elements that become 0",),
        shares + layers,
    )


def _describe_lost_shares(evidence: Evidence) -> tuple[str, ...]:
    zero, tiny = evidence.series("grad_zero_share"), evidence.series("grad_tiny_share")
    if not zero or not tiny:
        return ()
    return (
        f"of the gradient elements sampled at step {evidence.step(zero[-1][0])}, {zero[-1][1]:.1%} are 0 (some for "
        f"other reasons) and {tiny[-1][1]:.1%} are under 6e-5",
    )


def _describe_lost_layers(evidence: Evidence) -> tuple[str, ...]:
    """Return words for the layers that lose most of their gradients to float16."""
    zero, tiny = evidence.column("layer_grad_zero_share"), evidence.column("layer_grad_tiny_share")
    lost = sorted((name for name in zero if name in tiny), key=lambda name: -zero[name] - tiny[name])
    told = join_names([f"{name} ({zero[name]:.0%} are 0, {tiny[name]:.0%} under 6e-5)" for name in lost], most=3)
    return (f"most of all in {told}",) if told else ()


def _sees_all_ranks(evidence: Evidence) -> bool:
    """Return whether the losses of all ranks are known, and so whether one of them made the others' gradients
    non-finite."""
    return len(evidence.last.ranks) >= evidence.world_size


def _withheld(step: RunStep) -> bool:
    return step.run.get("step_skipped") == 1.0
