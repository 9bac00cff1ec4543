"""Judges the calls of a training loop, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sentinel.toolkit.doctor.finding import DoctorFinding, describe_finding

_WAIT = 0.3
"""Share of the time above which waiting for data is reported: more workers give back about a third."""
_WAIT_SECONDS = 0.005
_LARGE_INPUT = 64
"""Root mean square above which an input counts as not normalised. Raw images (0 to 255) have 85 (MNIST), 116
(Fashion-MNIST), 136 (CIFAR-10), by their published means and deviations; normalised inputs have 1. Spectrograms in dB
and ages have less than 64."""
_SORTED, _CHANGES = 0.1, 20
"""Share of the label changes by chance below which labels count as sorted, and least number of the latter. In random
order the variance of their number is at most half of it (Wald and Wolfowitz, 1940): 2 instead of 20 is five deviations
away."""
_WARM = 1e-4
"""Learning rate from which a Post-LN transformer needs a warm-up; fine-tuning uses a lower one."""


def findings(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Yield findings from the facts that `sentinel.hooks.examine.recorder` saw."""
    steps: list[list[str]] = facts["steps"]
    if not steps:
        return
    yield from _scaling(facts, steps)
    yield from _clipping([*steps, facts["after"]])
    yield from _gradients(facts, steps)
    yield from _losses(facts)
    yield from _schedule(facts, steps)
    yield from _data(facts)
    if facts["anomaly"]:
        yield describe_finding("anomaly-mode")


def _scaling(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    every = [event for step in steps for event in step]
    autocast = (facts["forward"] or {}).get("autocast", "")
    scaled = "scale" in every
    if autocast == "float16" and not scaled:
        yield describe_finding("fp16-without-scaler")
    if scaled and autocast == "bfloat16":
        yield describe_finding("scaler-with-bf16")
    if scaled and "step" in every:
        yield describe_finding("scaled-step")


def _clipping(steps: list[list[str]]) -> Iterator[DoctorFinding]:
    for step in steps[1:]:
        if "clip" not in step:
            continue
        clip = step.index("clip")
        if "scale" in step and "unscale_" not in step[:clip]:
            yield describe_finding("clip-before-unscale")
        if "backward" in step[clip:] and "backward" not in step[:clip]:
            yield describe_finding("clip-after-step")


def _gradients(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    if facts["uncleared"]:
        yield describe_finding("gradients-not-cleared", steps=facts["uncleared"])
    counts = facts["no_gradient"]
    if counts and not any(moved for _, _, moved in counts):
        emptied = any(_is_between(step, "backward", "zero_grad", "step") for step in steps)
        yield describe_finding("no-gradient/cleared" if emptied else "no-gradient", steps=len(counts))
    yield from _accumulation(facts, steps)
    if all("forward in eval" in step and "forward" not in step for step in steps):
        yield describe_finding("training-in-eval-mode")


def _accumulation(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    counts = [step.count("backward") for step in steps]
    if (
        len(facts["optimizers"]) == 1
        and not facts["closure"]
        and min(counts) > 1
        and facts["undivided"] > facts["divided"]
    ):
        yield describe_finding("accumulation-not-normalised", passes=counts[0])


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
        yield describe_finding("loss-not-finite", loss=losses[bad[0]], number=bad[0] + 1)
    if facts["softmax_before_loss"]:
        yield describe_finding("softmax-before-cross-entropy")
    if facts["held"]:
        yield describe_finding("loss-graph-kept", **facts["held"])


def _schedule(facts: dict[str, Any], steps: list[list[str]]) -> Iterator[DoctorFinding]:
    every = [event for step in steps for event in step]
    rates = [max(rates) for rates in facts["rates"] if rates]
    every += facts["after"]
    if facts["schedulers"] and "scheduler" not in every and (facts["ended"] or "epoch" in every):
        until = "before the script ended" if facts["ended"] else "in the first epoch"
        yield describe_finding("scheduler-never-stepped", schedulers=facts["schedulers"], until=until)
    if "scheduler" in steps[0]:
        yield describe_finding("scheduler-before-optimizer")
    if len(rates) > 1 and not any(rates):
        yield describe_finding("rate-zero", steps=len(rates))
    layers = max([*facts["post_norm"].values(), *(model["post_norm_layers"] for model in facts["models"])], default=0)
    if layers > 1 and len(rates) > 1 and rates[-1] <= rates[0] and rates[0] >= _WARM:
        yield describe_finding("post-norm-without-warmup", layers=layers, rate=rates[0])


def _data(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    waits = facts["waits"]
    share = sum(waits) / facts["seconds"] if facts["seconds"] else 0.0
    alone = [loader for loader in facts["loaders"].values() if loader["workers"] == 0]
    if waits and alone and share > _WAIT and sum(waits) / len(waits) > _WAIT_SECONDS:
        yield describe_finding("input-bound", share=share)
    for layer, values in facts["inputs"].items():
        if values["rms"] > _LARGE_INPUT:
            yield describe_finding("input-not-normalised", layer=layer, **values)
    for loader in facts["loaders"].values():
        changes, by_chance = loader["label_changes"], loader["label_changes_by_chance"]
        if loader["trains"] and loader["batches"] > 1 and by_chance >= _CHANGES and changes < _SORTED * by_chance:
            yield describe_finding(
                "sorted-not-shuffled", changes=changes, samples=loader["samples"], by_chance=by_chance
            )
