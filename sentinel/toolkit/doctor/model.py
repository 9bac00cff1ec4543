"""Judges the model, the optimizer and the data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sentinel.text import join_names
from sentinel.toolkit.doctor.finding import DoctorFinding, describe_finding

_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "AMSGrad")
_HIGH_RATE = 0.03
"""Learning rate that is high for an Adam: each weight moves by about as much at each step."""
_NAMES = 4
"""Most names of layers or parameters in a finding."""
_UNUSED_DDP = "; under DDP find_unused_parameters=True"
_MOST = 0.5
"""Share of the trainable parameters from which on the rule UnusedParameters does not downgrade."""
_TARGETS = 0.5
"""Share of the linear layers below which adapters count as few."""
_DECAY = 0.05
"""Weight decay from which on it matters that it applies to norms; AdamW's default is 0.01."""


def findings(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Yield findings from the facts that `sentinel.hooks.examine.model_facts` saw."""
    for model in facts["models"]:
        yield from _parallel(model)
        yield from _parameters(model)
        yield from _types(model)
        yield from _batch_norms(model, facts)
        yield from _adapters(model)
    for optimizer in facts["optimizers"]:
        yield from _optimizer(optimizer, facts)
    yield from _loaders(facts)
    if facts["cuda"]:
        yield from _cuda(facts)


def _parallel(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    if model["data_parallel"]:
        yield describe_finding("data-parallel")
    if model["find_unused_parameters"] and not model["without_gradient"]:
        yield describe_finding("unused-search-for-nothing")


def _parameters(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    if model["not_in_optimizer"]:
        yield describe_finding("not-in-optimizer", names=join_names(model["not_in_optimizer"], _NAMES))
    if model["unregistered"]:
        yield describe_finding("layers-in-list", names=join_names(model["unregistered"], _NAMES))
    if model["without_gradient"]:
        names, share = join_names(model["without_gradient"], _NAMES), model["without_gradient_share"]
        key = "unused-parameters" if share >= _MOST else "unused-parameters/few"
        yield describe_finding(key, names=names, share=share, ddp=_UNUSED_DDP)
    if model["ties_broken"]:
        yield describe_finding("tie-broken")


def _types(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    if "float16" in model["dtypes"]:
        yield describe_finding("fp16-weights")
    if model["dtypes"] == ["bfloat16"]:
        yield describe_finding("pure-bf16")


def _batch_norms(model: dict[str, Any], facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    if not model["batch_norms"]:
        return
    batch = (facts["forward"] or {}).get("batch", 0)
    if 0 < batch <= 2:
        yield describe_finding("batch-norm-small-batch", layers=model["batch_norms"], batch=batch)
    for loader in facts["loaders"].values():
        size = loader["batch_size"]
        if size > 1 and loader["samples"] % size == 1 and not loader["drop_last"]:
            yield describe_finding("last-batch-of-one", samples=loader["samples"], size=size)
    if model["batch_norms_frozen_in_training"]:
        yield describe_finding("frozen-batch-norm-learns", layers=model["batch_norms_frozen_in_training"])


def _adapters(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    adapters = model["adapters"]
    if adapters is None:
        return
    heads = ("norm", "bias", "embed", "head", "classifier", "score", "modules_to_save")
    base = [name for name in adapters["trainable_base"] if not any(word in name.lower() for word in heads)]
    if base:
        yield describe_finding("lora-base-not-frozen", names=join_names(base, _NAMES))
    if adapters["ranks"][0] <= 2:
        yield describe_finding(
            "lora-rank", rank=adapters["ranks"][0], targets=adapters["targets"], linear=adapters["linear"]
        )

    few = adapters["targets"] < _TARGETS * adapters["linear"]
    if few and not base:
        yield describe_finding("lora-targets", targets=adapters["targets"], linear=adapters["linear"])


def _optimizer(optimizer: dict[str, Any], facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    name, groups = optimizer["class"], optimizer["groups"]
    if optimizer["stale"] and (facts["models"] or facts["forward"]):
        # If it trains nothing, attach refuses the run: no rule sees it.
        stale, parameters = optimizer["stale"], optimizer["parameters"]
        key = "optimizer-holds-others/all" if stale == parameters else "optimizer-holds-others"
        yield describe_finding(key, stale=stale, parameters=parameters, optimizer=name)
    if name == "Adam" and any(group.get("weight_decay", 0) > 0 for group in groups):
        yield describe_finding("adam-weight-decay")
    if optimizer["frozen"]:
        yield describe_finding("frozen-in-optimizer", optimizer=name, names=join_names(optimizer["frozen"], _NAMES))
    yield from _groups(name, groups)


def _groups(name: str, groups: list[dict[str, Any]]) -> Iterator[DoctorFinding]:
    for group in groups:
        betas, decay = group["betas"], group.get("weight_decay", 0)
        if len(betas) == 2 and betas[0] > betas[1]:
            yield describe_finding("betas-swapped", optimizer=name, first=betas[0], second=betas[1])
        if name == "AdamW" and decay >= _DECAY and 0 < group["flat"] < group["all"]:
            yield describe_finding("decay-on-norms", decay=decay, flat=group["flat"])
        if name in _ADAMS and (rate := group.get("lr", 0.0)) >= _HIGH_RATE:
            yield describe_finding("rate-high", optimizer=name, rate=rate)


def _loaders(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(facts.get("ranks_here", 1))
    workers = max((loader["workers"] for loader in facts["loaders"].values()), default=0)
    if workers * ranks > cores:
        yield describe_finding(
            "more-workers-than-cores", workers=workers * ranks, cores=cores, wanted=max(1, cores // ranks - 1)
        )


def across(ranks: list[dict[str, Any]]) -> Iterator[DoctorFinding]:
    """Yield findings from a comparison of the facts of all ranks."""
    batches = [max((loader["batches"] for loader in facts["loaders"].values()), default=0) for facts in ranks]
    if batches and 0 < min(batches) < max(batches):
        few, many = min(batches), max(batches)
        yield describe_finding("uneven-shards", rank=batches.index(few), few=few, other=batches.index(many), many=many)


def _cuda(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    if facts["models"] and all(model["devices"] == ["cpu"] for model in facts["models"]):
        yield describe_finding("on-cpu")
        return
    if facts["loaders"] and not any(loader["pin_memory"] for loader in facts["loaders"].values()):
        yield describe_finding("memory-not-pinned")
    plain = not (facts["forward"] or {}).get("autocast") and any("float32" in m["dtypes"] for m in facts["models"])
    if plain and facts["matmul_precision"] == "highest":
        yield describe_finding("tf32-off")
