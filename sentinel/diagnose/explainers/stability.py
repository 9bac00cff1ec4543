"""Explain spikes of the loss and of the gradient norm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import ALL_STEPS, NOT_KNOWN, SAMPLE_MORE, Evidence, Finding, report_unknown, times_usual
from sentinel.diagnose.explainers.drift import huge_gradient, rate_jump
from sentinel.diagnose.explanations import explains
from sentinel.diagnose.signs import GrownLayer

_GROWN = 5.0
"""Growth of a layer that counts, unless the root of the largest growth is more: a step in the new direction moves the
other layers, too."""
_ALONE = 3.0
"""Factor of a rank's usual loss above which the loss has jumped."""
_LARGE_UPDATE = 2.0
"""Times the usual size from which an update may have hurt the weights: it is what twice the learning rate makes."""
_FEWEST_UPDATES = 4
"""Fewest earlier samples that tell which size of an update is usual."""
_USUAL = 50
"""Number of earlier steps whose median is the usual loss."""
_CARRIED = 50
"""Steps after which momentum no longer moves the weights by a gradient: at Adam's beta1 of 0.9 it has 0.5 % of it then,
at 0.95 8 %. The second moments keep it longer, but make updates smaller."""
_LOOSE = 2.0
"""Factor of the usual norm above which a limit leaves room for a spike."""


@explains("LossSpike")
def loss_spike(evidence: Evidence) -> Finding:
    """Decide whether the gradient moved before the loss, or with it: a broken update, or the batch."""
    gradient, loss = evidence.sign("grad_norm"), evidence.sign("loss")
    moved = min((sign.seq for sign in evidence.signs), default=evidence.since)
    batches = _batches(evidence.step(moved), evidence.step(evidence.until))
    if (jump := rate_jump(evidence, moved)) is not None:
        return finding(evidence.alert, "rate", since=evidence.step(moved), **jump)
    if loss is None:
        missing = "the step at which the loss became unusual"
        return report_unknown(missing, command=ALL_STEPS, remedy=f"look at {batches} (Rollback(skip_batches=...))")
    if gradient is not None and gradient.seq < loss.seq:
        return finding(
            evidence.alert, "update", times=times_usual(gradient), steps=loss.seq - gradient.seq,
            at=evidence.step(gradient.seq), clip=_clip(evidence, gradient.usual), batches=batches,
        )  # fmt: skip
    if (outlier := huge_gradient(evidence, loss.seq, within=_CARRIED)) is not None:
        return finding(evidence.alert, "moments", since=evidence.step(loss.seq), **outlier)
    cause, update = "batch", _find_last_update(evidence, loss.seq)
    if evidence.is_unsampled("grad_norm", loss.seq - 1):
        if update is None or update > _LARGE_UPDATE:
            return _report_batch_or_update(evidence, loss.seq, batches)
        cause = "usual-update"
    facts, whose = tuple[str, ...](), ""
    if (one := _find_rank_with_the_loss(evidence, loss.seq)) is not None:
        rank, own, usual = one
        alone = f"of the ranks, the loss of rank {rank} alone left its usual {usual:.4g}: it is {own:.4g} at that step"
        facts, whose = (alone,), f" on rank {rank}"
    at = evidence.step(loss.seq)
    return finding(evidence.alert, cause, facts, at=at, batches=batches, whose=whose, update=update)


def _find_last_update(evidence: Evidence, seq: int) -> float | None:
    """Return how many times as large as usual the update before a step was; None where that is not known."""
    sizes = dict(evidence.series("last_update_size"))
    usual = evidence.usual("last_update_size", before=seq)
    return sizes[seq] / usual if usual and seq in sizes and len(sizes) > _FEWEST_UPDATES else None


def _report_batch_or_update(evidence: Evidence, seq: int, batches: str) -> Finding:
    """Report that a bad batch and an outsized update are as likely, and what would tell."""
    at = evidence.step(seq)
    return report_unknown(
        evidence.missing_norm(seq - 1), command=SAMPLE_MORE,
        cause=f"{NOT_KNOWN}: the batch of step {at}, at which the loss jumped, or the update of step {at - 1}",
        remedy=f"look at {batches} (Rollback(skip_batches=...))",
    )  # fmt: skip


@explains("GradientSpike")
def gradient_spike(evidence: Evidence) -> Finding:
    """Find where the spike comes in: one layer, or all layers up to one."""
    gradient = evidence.sign("grad_norm")
    moved = gradient.seq if gradient else evidence.since
    if (jump := rate_jump(evidence, moved)) is not None:
        return finding(evidence.alert, "rate", since=evidence.step(moved), **jump)
    at, clip = evidence.step(moved), _clip(evidence, gradient.usual if gradient else math.nan)
    if _share_of_top(evidence.layers) > 0.9:
        return finding(evidence.alert, "one-layer", layer=evidence.layers[0].name, at=at, clip=clip)
    if (layer := _last_that_grew(evidence)) is not None:
        return finding(evidence.alert, "comes-in", layer=layer, clip=clip)
    missing = ("the batch of that step", "the update norm")
    return report_unknown(*missing, command=SAMPLE_MORE, remedy=f"{clip}; lower the rate")


def _find_rank_with_the_loss(evidence: Evidence, seq: int) -> tuple[int, float, float] | None:
    """Return the only rank whose loss jumped at a step, that loss, and its usual one; None where it was not a single
    rank, or the losses of some ranks are not known."""
    step = next((step for step in evidence.steps if step.seq == seq), None)
    if step is None or not 1 < len(step.ranks) == evidence.world_size:
        return None
    before, jumped = [one for one in evidence.steps if one.seq < seq][-_USUAL:], []
    for rank, values in step.ranks.items():
        past = [one.ranks[rank]["loss"] for one in before if "loss" in one.ranks.get(rank, {})]
        own, usual = values.get("loss", math.nan), statistics.median(past) if past else math.nan
        if not own <= _ALONE * abs(usual):  # a loss that is missing or not finite does not clear a rank
            jumped.append((rank, own, usual))
    return jumped[0] if len(jumped) == 1 and all(map(math.isfinite, jumped[0])) else None


def _batches(first: int, last: int) -> str:
    """Return words for which batches to look at, and what to do with them."""
    return (
        f"the batches of steps {first} to {last}; skip them" if last > first else f"the batch of step {first}; skip it"
    )


def _clip(evidence: Evidence, usual: float) -> str:
    """Return words for what to do about clipping, where the norm is normally `usual`."""
    limit, usual = evidence.latest("clip_limit"), usual if math.isfinite(usual) and usual > 0 else 1.0
    if limit is None:
        return f"clip: torch.nn.utils.clip_grad_norm_(model.parameters(), {usual:.2g}) before optimizer.step()"
    if limit > _LOOSE * usual:
        return f"clip harder: the limit is {limit:.3g}, and the usual norm {usual:.2g}"
    return f"the limit of {limit:.3g} has clipped it already"


def _last_that_grew(evidence: Evidence) -> str | None:
    """Return the module up to which all layers grew, and after which none did; None where there is no such module."""
    there = evidence.column("layer_grad_norm")
    order = [layer.name for layer in evidence.table if layer.name in there]
    growth = {layer.name: layer.ratio for layer in evidence.layers}
    bound = max(_GROWN, math.sqrt(max(growth.values(), default=1.0)))
    grew = [growth.get(name, 1.0) >= bound for name in order]
    count = sum(grew)
    if not 0 < count < len(order) or not all(grew[:count]):
        return None
    return order[count - 1].rpartition(".")[0] or order[count - 1]


def _share_of_top(layers: Sequence[GrownLayer]) -> float:
    squares = [layer.norm**2 for layer in layers if math.isfinite(layer.norm)]
    return max(squares) / sum(squares) if squares and sum(squares) > 0 else 0.0
