"""Explain what does not learn: weights that stand still, rates of 0, layers without a gradient, the wrong mode."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec

from sentinel.diagnose.causes import finding
from sentinel.diagnose.evidence import ALL_STEPS, SAMPLE_MORE, Evidence, Finding, report_unknown
from sentinel.diagnose.explanations import explains
from sentinel.text import join_names

SMALL_RATIO, LARGE_RATIO = 1e-6, 0.1
"""Updates over weights between which a run may learn: 1e-3 is usual (CS231n), a thousandth of it next to nothing."""
_ADAPTER_RATE = 3e-5
"""A third of the lowest usual learning rate of adapters."""
LEAST_DIGIT = 2.0**-24
"""Half of float32's last digit, relative to the weight."""
_ONE_BATCH = "train on one batch alone, which any working model learns by heart"
_WITHOUT_GRADIENT = "[n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]"
_OUTSIDE = (
    "held = {id(p) for g in optimizer.param_groups for p in g['params']}; "
    "[n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]"
)
_TRAINING_MODE = "[n for n, m in model.named_modules() if m.training]"


@explains("ParametersNotUpdated")
def parameters_not_updated(evidence: Evidence) -> Finding:
    """Find whether gradients reach what the optimizer holds, and what becomes of its updates."""
    if evidence.latest("no_gradient"):
        passes = sum(value for _, value in evidence.series("micro_batches"))
        outside = _list_outside(evidence)
        if not outside:  # the optimizer holds the model's own parameters
            return finding(evidence.alert, "no-gradient-left", passes=int(passes))
        optimizers = evidence.facts.get("optimizers", ())
        count = sum(group.get("parameters", 0) for one in optimizers for group in one.get("groups", ()))
        return finding(evidence.alert, "other-tensors", count=count, passes=int(passes), outside=_name(outside))
    still = [name for name, ratio in evidence.column("layer_update_ratio").items() if ratio == 0]
    rate = evidence.latest("learning_rate")
    if not still or rate is None:
        return report_unknown("which layers: a sample of the weights before and after a step", command=SAMPLE_MORE)
    names, weights = join_names(still, 5), evidence.latest("weight_norm") or 1.0
    if _adaptive(evidence) and rate < LEAST_DIGIT * weights / max(_elements(evidence), 1.0) ** 0.5:
        return finding(evidence.alert, "rate-too-small", rate=rate, names=names)
    return finding(evidence.alert, "undone", names=names)


@explains("SchedulerMisused")
def scheduler_misused(evidence: Evidence) -> Finding:
    """Find whether the rate was ever above 0, and how it came to 0."""
    rates = evidence.series("learning_rate")
    planned, now = evidence.latest("scheduler_first"), rates[0][1] if rates else 0.0
    if planned is not None:
        return finding(evidence.alert, "before-the-optimizer", planned=planned, now=now)
    peak = max((rate for _, rate in rates), default=0.0)
    if not rates or (rates[0][0] > 0 and peak == 0):
        return report_unknown("the rates of the first steps: they are not in memory any more", command=ALL_STEPS)
    if peak == 0:
        return _never(evidence)
    (last, before), (first, _) = next(
        (a, b) for a, b in reversed(list(itertools.pairwise(rates))) if a[1] > 0 and b[1] <= 0
    )
    fact = (f"the rate was {before:.2g} at step {evidence.step(last)}",)
    name = "one-step" if before > 0.1 * peak else "ended"
    return finding(evidence.alert, name, fact, peak=peak, step=evidence.step(first))


def _never(evidence: Evidence) -> Finding:
    """Explain a rate that has always been 0, by what the hooks saw of the scheduler."""
    looked = [(seq, value) for seq, value in evidence.series("scheduler_steps") if math.isfinite(value)]
    if not looked:
        return finding(evidence.alert, "always-zero")
    seq, count = looked[-1]
    name = "no-scheduler" if count < 0 else "never-stepped" if count == 0 else "held-at-zero"
    return finding(evidence.alert, name, count=f"{count:.0f}", step=evidence.step(seq))


@explains("LossNotDecreasing")
def loss_not_decreasing(evidence: Evidence) -> Finding:
    """Judge the rate, the size of updates, and the share of parameters that move."""
    rate, ratio = evidence.latest("learning_rate"), evidence.usual("update_ratio")
    moves = evidence.column("layer_update_ratio")
    if rate is None or ratio is None or not moves:
        return report_unknown("the size of the updates: it is sampled rarely", command=SAMPLE_MORE)
    moved, norm = sum(value > 0 for value in moves.values()), evidence.usual("grad_norm")
    trained = [layer.name for layer in evidence.table if layer.trainable and not layer.tied_to] or list(moves)
    gradients = f"gradient norm {norm:.3g}; " if norm is not None else ""
    facts = (
        f"learning rate {rate:.2g}; updates are {ratio:.1g} of the weights; {gradients}"
        f"{moved} of {len(trained)} parameter tensors move",
    )
    known: dict[str, Any] = {"rate": rate, "ratio": ratio, "steps": evidence.until + 1}
    if 2 * moved < len(trained):
        return finding(evidence.alert, "few-move", facts, moved=moved, count=len(trained))
    if ratio < SMALL_RATIO:
        return finding(evidence.alert, "rate-too-small", facts, factor=1e-3 / max(ratio, 1e-12), **known)
    if ratio > LARGE_RATIO:
        return finding(evidence.alert, "rate-too-high", facts, **known)
    missing = ("whether the labels belong to their inputs", "a run at another rate")
    return report_unknown(*missing, command=_ONE_BATCH, evidence=facts)


@explains("DeadLayer")
def dead_layer(evidence: Evidence) -> Finding:
    """Find whether all layers before it are dead too: then something between it and the first live layer passes nothing
    on."""
    norms = evidence.column("layer_grad_norm")
    order = [layer.name for layer in evidence.table if layer.name in norms] or list(norms)
    dead = [name for name in order if norms[name] <= 0]
    mine = [name for name in order if name in evidence.members] or dead
    if not mine:
        return report_unknown("the gradient norm of each layer", command=SAMPLE_MORE)
    facts = (f"{len(dead)} of {len(order)} parameter tensors have a gradient of exact zeros: {join_names(dead, 5)}",)
    alive = [name for name in order if norms[name] > 0]
    if not alive:
        return finding(evidence.alert, "everywhere", facts)
    last = max(order.index(name) for name in mine)
    if order.index(alive[0]) > last:
        behind = [name for name in order[:last] if _module(name) != _module(order[last])]
        if _module(alive[0]) == _module(order[last]) and behind:
            names: dict[str, Any] = {"module": _module(alive[0]), "before": _module(behind[-1])}
            return finding(evidence.alert, "input-zero", facts, **names)
        return finding(evidence.alert, "cut", facts, live=_module(alive[0]), dead=_module(order[last]))
    return finding(evidence.alert, "alone", facts, dead=join_names(mine, 5))


@explains("FrozenStatistics")
def frozen_statistics(evidence: Evidence) -> Finding:
    """Count the modules, and name the first one."""
    count, row = evidence.latest("frozen_statistics"), evidence.latest("frozen_statistics_row")
    if not count:
        return report_unknown("which modules: they are looked at rarely", command=_TRAINING_MODE)
    known = row is not None and 0 <= row < len(evidence.table)
    name = _module(evidence.table[int(row)].name) if known and row is not None else "one whose name is not known"
    return finding(evidence.alert, "training-mode", count=count, module=name)


@explains("UnusedParameters")
def unused_parameters(evidence: Evidence) -> Finding:
    """Name the parameters that the layer statistics do not have."""
    there = evidence.column("layer_grad_norm")
    # A tied parameter has its statistics under its first name.
    idle = [layer for layer in evidence.table if layer.trainable and not layer.tied_to and layer.name not in there]
    several = len(evidence.facts.get("optimizers", ())) > 1  # the table is only of the first one
    names = [layer.name for layer in idle if layer.held or several]
    foreign = sum(map(_is_foreign, names))
    if there and foreign and (outside := _list_outside(evidence)):
        return finding(evidence.alert, "copies", count=foreign, outside=_name(outside))
    if not there or not names:
        return report_unknown("which parameters", command=_WITHOUT_GRADIENT)
    wrapped = "DistributedDataParallel" in evidence.facts.get("wrappers", ())
    ddp = "; DDP needs find_unused_parameters=True as long as they are there"
    share = evidence.latest("without_gradient_share")
    facts = () if share is None else (f"{share:.0%} of the numbers that the optimizer is to train",)
    found = finding(evidence.alert, "no-gradient", facts,
                    count=len(names), names=join_names(names, 5), ddp=ddp if wrapped else
                    "; under DDP find_unused_parameters=True, or it waits for them")  # fmt: skip
    return msgspec.structs.replace(found, layers=tuple(names))


@explains("ParametersNotInOptimizer")
def parameters_not_in_optimizer(evidence: Evidence) -> Finding:
    """Name the parameters, count them, and give their share of all that train."""
    count, names = evidence.latest("parameters_outside"), _list_outside(evidence)
    if not count or len(names) != count:  # the table also has those without a gradient, and those of another optimizer
        return report_unknown("the names of the parameters that train and are in no optimizer", command=_OUTSIDE)
    measured = evidence.column("layer_grad_norm")
    copies = [layer for layer in evidence.table if _is_foreign(layer.name) and layer.name not in measured]
    if measured and copies:
        return finding(evidence.alert, "copies", count=len(copies), outside=_name(names))
    share = evidence.latest("outside_share") or 0.0
    found = finding(evidence.alert, "left-out", count=f"{count:.0f}", share=share, names=join_names(names, 5))
    return msgspec.structs.replace(found, layers=tuple(names))


def _is_foreign(name: str) -> bool:
    """Return whether a tensor of the optimizer is not a parameter of the model: it is named by its place in the
    optimizer."""
    return name.startswith("param_groups[")


def _list_outside(evidence: Evidence) -> list[str]:
    """Return parameters that train and are in no optimizer of the run; those with statistics are in another
    optimizer."""
    measured = evidence.column("layer_grad_norm")
    outside = [layer for layer in evidence.table if layer.trainable and not layer.held and not layer.tied_to]
    return [layer.name for layer in outside if layer.name not in measured]


def _name(outside: list[str]) -> str:
    return f"{len(outside)} parameters that train and are in no optimizer ({join_names(outside, 3)})"


@explains("TrainingInEvalMode")
def training_in_eval_mode(evidence: Evidence) -> Finding:
    """Find since when, and which modules behave differently."""
    kinds = evidence.facts.get("mode_dependent")
    if kinds is not None and not kinds:
        return finding(evidence.alert, "harmless")
    told = join_names([f"{count} x {name}" for name, count in (kinds or {}).items()], 5)
    parts = f": {told} behave differently in it" if told else ""
    missing = () if told else ("which modules behave differently in it",)
    since = evidence.series("eval_mode")[0][0] if evidence.series("eval_mode") else evidence.since
    if since == 0:
        return finding(evidence.alert, "from-the-start", (), missing, parts=parts)
    return finding(evidence.alert, "never-back", (), missing, step=evidence.step(since), parts=parts)


@explains("AdapterStarved")
def adapter_starved(evidence: Evidence) -> Finding:
    """Quote the rate; the adapters, their rank and their targets."""
    ratio, rate = evidence.latest("adapter_ratio"), evidence.latest("learning_rate")
    lower = [layer for layer in evidence.table if "lora_A" in layer.name and layer.trainable]
    if ratio is None or rate is None or not lower:
        return report_unknown("the adapters, and the rate", command=SAMPLE_MORE)
    ranks = sorted({min(layer.shape) for layer in lower if layer.shape})
    targets = join_names(sorted({layer.name.split(".lora_A")[0].rpartition(".")[2] for layer in lower}), 5)
    facts = (
        f"{len(lower)} adapters of rank {', '.join(map(str, ranks))} in {targets}; learning rate {rate:.2g}",
        *_spectrum(evidence),
    )
    unread = () if len(facts) > 1 else ("the spectrum of B A, which says whether the rank would do",)
    if rate > _ADAPTER_RATE:
        missing = ("whether gradients reach the adapters", *unread)
        return report_unknown(*missing, command=_WITHOUT_GRADIENT, evidence=facts)
    return finding(
        evidence.alert, "rate-too-small", facts, unread, rate=rate, ratio=ratio, count=len(lower), targets=targets,
        rank=", ".join(map(str, ranks)), steps=evidence.until + 1,
    )  # fmt: skip


def _spectrum(evidence: Evidence) -> tuple[str, ...]:
    """Return words for how many of the directions that the rank allows are in use."""
    used = evidence.latest("adapter_rank_used")
    if used is None:
        return ()
    return (
        f"spectrum of B A (squared singular values; participation ratio, by median): {used:.1f} directions of the rank",
    )


def _adaptive(evidence: Evidence) -> bool:
    """Return whether an update is about as large as the rate, whatever the gradient is."""
    return "Adam" in str(evidence.facts.get("optimizer", "")) or "Lion" in str(evidence.facts.get("optimizer", ""))


def _elements(evidence: Evidence) -> float:
    return float(evidence.facts.get("parameters_trainable", 1))


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter
