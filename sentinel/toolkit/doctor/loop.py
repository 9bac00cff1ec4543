"""Judges the calls of a training loop, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from sentinel.text import format_count
from sentinel.toolkit.doctor.finding import DoctorFinding, describe_finding
from sentinel.wire.examination import ExaminedLoop

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
_GROWN = 2
"""A loss of so many times the first has grown: of 148 healthy runs two reach that within 20 steps
(rules/stability.yaml: Divergence)."""
_WARM = 1e-4
"""Learning rate from which a Post-LN transformer needs a warm-up; fine-tuning uses a lower one."""


def findings(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Yield findings from the facts that `sentinel.hooks.examine.recorder` saw."""
    loop = msgspec.convert(facts, ExaminedLoop)
    steps = loop.steps
    if not steps:
        return
    yield from _scaling(loop, steps)
    yield from _clipping([*steps, loop.after])
    yield from _gradients(loop, steps, optimizers=len(facts["optimizers"]))
    yield from _losses(loop)
    yield from _schedule(loop, steps, [model["post_norm_layers"] for model in facts["models"]])
    yield from _data(loop)
    if loop.anomaly:
        yield describe_finding("anomaly-mode")


def _scaling(loop: ExaminedLoop, steps: list[list[str]]) -> Iterator[DoctorFinding]:
    every = [event for step in steps for event in step]
    autocast = (loop.forward or {}).get("autocast", "")
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


def _gradients(loop: ExaminedLoop, steps: list[list[str]], *, optimizers: int) -> Iterator[DoctorFinding]:
    if loop.uncleared:
        yield describe_finding("gradients-not-cleared", steps=loop.uncleared)
    counts = loop.no_gradient
    if counts and not any(moved for _, _, moved in counts):
        emptied = any(_is_between(step, "backward", "zero_grad", "step") for step in steps)
        yield describe_finding("no-gradient/cleared" if emptied else "no-gradient", steps=len(counts))
    if optimizers == 1:
        yield from _accumulation(loop, steps)
    if all("forward in eval" in step and "forward" not in step for step in steps):
        yield describe_finding("training-in-eval-mode")


def _accumulation(loop: ExaminedLoop, steps: list[list[str]]) -> Iterator[DoctorFinding]:
    counts = [step.count("backward") for step in steps]
    if not loop.closure and min(counts) > 1 and loop.undivided > loop.divided:
        yield describe_finding("accumulation-not-normalised", passes=counts[0])


def _is_between(step: list[str], first: str, inner: str, last: str) -> bool:
    """Whether the last `inner` before the last event that begins with `last` comes after the last `first`."""
    ends = [at for at, event in enumerate(step) if event.startswith(last)]
    before = step[: ends[-1]] if ends else step
    places = {
        name: max((at for at, event in enumerate(before) if event == name), default=-1) for name in (first, inner)
    }
    return places[inner] > places[first] >= 0


def _losses(loop: ExaminedLoop) -> Iterator[DoctorFinding]:
    if loop.not_finite:
        yield _loss_not_finite(loop.not_finite, loop.rates)
    if loop.softmax_before_loss:
        yield describe_finding("softmax-before-cross-entropy")
    if loop.held:
        yield describe_finding("loss-graph-kept", **loop.held)


def _loss_not_finite(seen: dict[str, Any], rates: list[list[float]]) -> DoctorFinding:
    """Return the finding with the reason that was seen, if one was."""
    step, updates, bad_input = seen["step"], seen["updates"], seen["input"]
    facts = {"loss": seen["loss"], "step": step, "updates": format_count(updates, "optimizer step")}
    if not updates and bad_input is None:
        return describe_finding("loss-not-finite/at-first", **facts)
    rate = max((rate for group in rates[:updates] for rate in group), default=0.0)
    (began, first), (until, last) = seen["course"] if len(seen["course"]) == 2 else ((0, 0.0), (0, 0.0))
    grown = rate > 0 and first > 0 and last >= _GROWN * first
    # A batch may have NaN at each step, in places that the loss leaves out.
    if bad_input is not None and (bad_input["step"] >= step - 1 or not grown):
        return describe_finding("loss-not-finite/input", **facts, place=bad_input["place"], since=bad_input["step"])
    if grown:
        facts |= {"began": began, "first": first, "until": until, "last": last, "rate": rate, "lower": rate / 10}
        return describe_finding("loss-not-finite/grown", **facts)
    return describe_finding("loss-not-finite", **facts, rate=rate)


def _schedule(loop: ExaminedLoop, steps: list[list[str]], post_norm_layers: Sequence[int]) -> Iterator[DoctorFinding]:
    every = [event for step in steps for event in step]
    rates = [max(rates) for rates in loop.rates if rates]
    every += loop.after
    if loop.schedulers and "scheduler" not in every and (loop.ended or "epoch" in every):
        until = "before the script ended" if loop.ended else "in the first epoch"
        yield describe_finding("scheduler-never-stepped", schedulers=loop.schedulers, until=until)
    if "scheduler" in steps[0]:
        yield describe_finding("scheduler-before-optimizer")
    if len(rates) > 1 and not any(rates):
        yield describe_finding("rate-zero", steps=len(rates))
    layers = max([*loop.post_norm.values(), *post_norm_layers], default=0)
    if layers > 1 and len(rates) > 1 and rates[-1] <= rates[0] and rates[0] >= _WARM:
        yield describe_finding("post-norm-without-warmup", layers=layers, rate=rates[0])


def _data(loop: ExaminedLoop) -> Iterator[DoctorFinding]:
    waits = loop.waits
    share = sum(waits) / loop.seconds if loop.seconds else 0.0
    alone = [loader for loader in loop.loaders.values() if loader["workers"] == 0]
    if waits and alone and share > _WAIT and sum(waits) / len(waits) > _WAIT_SECONDS:
        yield describe_finding("input-bound", share=share)
    for layer, values in loop.inputs.items():
        if values["rms"] > _LARGE_INPUT:
            yield describe_finding("input-not-normalised", layer=layer, **values)
    for loader in loop.loaders.values():
        changes, by_chance = loader["label_changes"], loader["label_changes_by_chance"]
        if loader["trains"] and loader["batches"] > 1 and by_chance >= _CHANGES and changes < _SORTED * by_chance:
            yield describe_finding(
                "sorted-not-shuffled", changes=changes, samples=loader["samples"], by_chance=by_chance
            )
