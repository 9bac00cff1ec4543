"""Judges the order of calls of a loop, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sentinel.toolkit.doctor.finding import DoctorFinding

_AMP = "pytorch.org/docs/stable/notes/amp_examples.html"
_WAIT = 0.3
"""Share of the time from which waiting for data is told: a third is what more workers give back."""
_WAIT_SECONDS = 0.005
_WARM = 1e-4
"""Learning rate from which a Post-LN transformer needs a warm-up; fine-tuning goes below it."""


def findings(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Of what `sentinel.hooks.examine.recorder` saw."""
    steps: list[list[str]] = facts["steps"]
    if not steps:
        return
    yield from _scaling(facts, steps)
    yield from _clipping(steps)
    yield from _gradients(facts, steps)
    yield from _losses(facts)
    yield from _schedule(facts, steps)
    yield from _data(facts)
    if facts["anomaly"]:
        yield DoctorFinding(
            name="anomaly-mode",
            severity="warning",
            what="autograd's anomaly mode is on",
            why="every operation records a stack and checks its gradient: several times slower",
            line="torch.autograd.set_detect_anomaly(False)",
            source="torch.autograd.detect_anomaly documentation",
        )


def _scaling(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    every = [event for step in steps for event in step]
    autocast = (facts["forward"] or {}).get("autocast", "")
    scaled = "scale" in every
    if autocast == "float16" and not scaled:
        yield DoctorFinding(
            name="fp16-without-scaler",
            severity="critical",
            what="autocast to float16, and no loss is scaled",
            why="gradients under 6e-8 become zero, and layers stop learning without a word",
            line="scaler = GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
            source=_AMP,
        )
    if scaled and autocast == "bfloat16":
        yield DoctorFinding(
            name="scaler-with-bf16",
            severity="info",
            what="a GradScaler with bfloat16",
            why="bfloat16 has float32's range: scaling does nothing but skip steps now and then",
            line="loss.backward(); optimizer.step()",
            source=_AMP,
        )
    if scaled and "step" in every:
        yield DoctorFinding(
            name="scaled-step",
            severity="critical",
            what="the loss is scaled, and optimizer.step() is called itself",
            why="the optimizer gets gradients that are 65536 times too large, and steps on infinite ones",
            line="scaler.step(optimizer); scaler.update()",
            source=_AMP,
        )


def _clipping(steps: list[list[str]]) -> Iterator[DoctorFinding]:
    for step in steps[1:] or steps:
        if "clip" not in step:
            continue
        clip = step.index("clip")
        if "scale" in step and "unscale_" not in step[:clip]:
            yield DoctorFinding(
                name="clip-before-unscale",
                severity="critical",
                what="gradients are clipped before they are unscaled",
                why="the norm is that of scaled gradients: clipping makes them as tiny as the scale is large",
                line="scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(...); scaler.step(optimizer)",
                source=_AMP,
            )
        if "backward" in step[clip:] and "backward" not in step[:clip]:
            yield DoctorFinding(
                name="clip-after-step",
                severity="critical",
                what="gradients are clipped after the optimizer's step",
                why="what is clipped there was applied already: nothing is clipped",
                line="loss.backward(); torch.nn.utils.clip_grad_norm_(...); optimizer.step()",
                source="torch.nn.utils.clip_grad_norm_ documentation",
            )


def _gradients(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    if facts["uncleared"]:
        yield DoctorFinding(
            name="gradients-not-cleared",
            severity="critical",
            what=f"{facts['uncleared']} steps applied gradients that were added to ones applied before",
            why="each step applies the sum of all gradients so far",
            line="optimizer.step(); optimizer.zero_grad()",
            source="stackoverflow.com/questions/60335387",
        )
    counts = facts["no_gradient"]
    if counts and not any(moved for _, _, moved in counts):
        emptied = any(_is_between(step, "backward", "zero_grad", "step") for step in steps)
        yield DoctorFinding(
            name="no-gradient",
            severity="critical",
            what=f"at {len(counts)} steps no parameter of the optimizer had a gradient other than zero",
            why="zero_grad() stands between backward() and step()" if emptied else "nothing is learned",
            line="optimizer.zero_grad(); loss.backward(); optimizer.step()",
            source="torch.optim documentation, 'Taking an optimization step'",
        )
    yield from _accumulation(facts, steps)
    if all("forward in eval" in step and "forward" not in step for step in steps):
        yield DoctorFinding(
            name="training-in-eval-mode",
            severity="critical",
            what="the model is in evaluation mode in training",
            why="dropout is off and batch normalisation does not learn its statistics",
            line="model.train()",
            source="pytorch.org/docs/stable/notes/autograd.html, 'Evaluation Mode'",
        )


def _accumulation(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    counts = [step.count("backward") for step in steps]
    if (
        len(facts["optimizers"]) == 1
        and not facts["closure"]
        and min(counts) > 1
        and facts["undivided"] > facts["divided"]
    ):
        yield DoctorFinding(
            name="accumulation-not-normalised",
            severity="warning",
            what=f"{counts[0]} backward passes a step, and the loss is not divided",
            why="gradients are a sum, as if the rate were so many times as large (low confidence: it may be divided "
            "where it is made)",
            line=f"(loss / {counts[0]}).backward()",
            source=f"{_AMP}, 'Gradient accumulation'",
        )


def _is_between(step: list[str], first: str, inner: str, last: str) -> bool:
    """Whether the last `inner` before the last event that begins with `last` comes after the last `first`."""
    ends = [at for at, event in enumerate(step) if event.startswith(last)]
    before = step[: ends[-1]] if ends else step
    places = {
        name: max((at for at, event in enumerate(before) if event == name), default=-1) for name in (first, inner)
    }
    return places[inner] > places[first] >= 0


def _losses(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    losses = facts["losses"]
    bad = [at for at, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        yield DoctorFinding(
            name="loss-not-finite",
            severity="critical",
            what=f"loss {losses[bad[0]]} at backward pass {bad[0] + 1}",
            why="it is in the data, the initialisation or the loss itself: nothing has been learned yet",
            line="torch.autograd.set_detect_anomaly(True) for one step names the operation",
            source="torch.autograd.detect_anomaly documentation",
        )
    if facts["softmax_before_loss"]:
        yield DoctorFinding(
            name="softmax-before-cross-entropy",
            severity="critical",
            what="softmax of a softmax in the loss's graph",
            why="cross_entropy takes logits: with probabilities its gradients are small and the loss stays high",
            line="F.cross_entropy(logits, target)",
            source="torch.nn.CrossEntropyLoss documentation",
        )


def _schedule(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    every = [event for step in steps for event in step]
    rates = [max(rates) for rates in facts["rates"] if rates]
    if facts["schedulers"] and facts["ended"] and "scheduler" not in [*every, *facts["after"]]:
        yield DoctorFinding(
            name="scheduler-never-stepped",
            severity="warning",
            what=f"{facts['schedulers']} scheduler made, and not stepped to the script's end",
            why="the rate stays what it was",
            line="optimizer.step(); scheduler.step()",
            source="torch.optim documentation, 'How to adjust learning rate'",
        )
    if "scheduler" in steps[0]:
        yield DoctorFinding(
            name="scheduler-before-optimizer",
            severity="warning",
            what="scheduler.step() comes before the first optimizer.step()",
            why="the first value of the schedule is skipped",
            line="optimizer.step(); scheduler.step()",
            source="torch.optim documentation, 'How to adjust learning rate'",
        )
    if len(rates) > 1 and not any(rates):
        yield DoctorFinding(
            name="rate-zero",
            severity="critical",
            what=f"the learning rate was 0 at all {len(rates)} steps",
            why="nothing is learned",
            line="look at the schedule: a warm-up that counts epochs, or one that never begins",
            source="torch.optim documentation, 'How to adjust learning rate'",
        )
    layers = max([*facts["post_norm"].values(), *(model["post_norm_layers"] for model in facts["models"])], default=0)
    if layers > 1 and len(rates) > 1 and rates[-1] <= rates[0] and rates[0] >= _WARM:
        yield DoctorFinding(
            name="post-norm-without-warmup",
            severity="warning",
            what=f"{layers} Post-LN layers (norm after the sum), and the full rate {rates[0]:.2g} from the first step",
            why="gradients near the output are large at first: such models diverge without a warm-up",
            line="norm_first=True, or LinearLR(optimizer, start_factor=0.01, total_iters=1000)",
            source="arXiv 2002.04745, section 3",
        )


def _data(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    waits = facts["waits"]
    share = sum(waits) / facts["seconds"] if facts["seconds"] else 0.0
    alone = [loader for loader in facts["loaders"].values() if loader["workers"] == 0]
    if waits and alone and share > _WAIT and sum(waits) / len(waits) > _WAIT_SECONDS:
        yield DoctorFinding(
            name="input-bound",
            severity="warning",
            what=f"{share:.0%} of the time is spent in the DataLoader, which has no workers",
            why="the model waits while each batch is made",
            line="DataLoader(..., num_workers=4, persistent_workers=True)",
            source="torch.utils.data documentation, 'Multi-process data loading'",
        )
