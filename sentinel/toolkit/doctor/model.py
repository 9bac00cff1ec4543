"""Judges what is trained, by which optimizer, on which data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from sentinel.text import join_names
from sentinel.toolkit.doctor.finding import DoctorFinding

_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "AMSGrad")
_HIGH_RATE = 0.03
"""Of an Adam: each weight moves by about as much at each step."""
_NAMES = 4
"""Of layers or parameters, in a finding."""
_TARGETS = 0.5
"""Share of the linear layers under which adapters are few."""
_DECAY = 0.05
"""Weight decay from which it matters that norms have it; AdamW's default is 0.01."""


def findings(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    """Of what `sentinel.hooks.examine.model_facts` saw."""
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
        yield DoctorFinding(
            name="data-parallel",
            severity="warning",
            what="nn.DataParallel",
            why="one process drives all GPUs, the model is copied at each step, and the first GPU gathers everything",
            line="torchrun --nproc-per-node N train.py, with DistributedDataParallel(model)",
            source="torch.nn.DataParallel documentation recommends DistributedDataParallel",
        )
    if model["find_unused_parameters"] and not model["without_gradient"]:
        yield DoctorFinding(
            name="unused-search-for-nothing",
            severity="warning",
            what="find_unused_parameters=True, and every parameter is used",
            why="DDP walks the whole graph at each step for nothing",
            line="DistributedDataParallel(model)",
            source="torch.nn.parallel.DistributedDataParallel documentation",
        )


def _parameters(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    if model["not_in_optimizer"]:
        yield DoctorFinding(
            name="not-in-optimizer",
            severity="critical",
            what=f"trainable, and in no optimizer: {join_names(model['not_in_optimizer'], _NAMES)}",
            why="they get gradients and never change",
            line="optimizer.add_param_group({'params': ...}), or requires_grad_(False)",
            source="torch.optim documentation, 'Constructing it'",
        )
    if model["without_gradient"]:
        yield DoctorFinding(
            name="unused-parameters",
            severity="warning",
            what=f"never had a gradient: {join_names(model['without_gradient'], _NAMES)}",
            why="they are in the optimizer and take no part in the loss; under DDP this is an error",
            line="use them, or freeze them: requires_grad_(False); under DDP find_unused_parameters=True",
            source="torch.nn.parallel.DistributedDataParallel documentation, find_unused_parameters",
        )

    if model["ties_broken"]:
        yield DoctorFinding(
            name="tie-broken",
            severity="warning",
            what="the config ties input and output embeddings, and they are two tensors",
            why="each is trained for itself, and whoever loads the checkpoint ties them again: one of the two is lost",
            line="model.tie_weights(), after the last change of the embeddings and before the optimizer is made",
            source="transformers documentation, PreTrainedModel.tie_weights",
        )


def _types(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    if "float16" in model["dtypes"]:
        yield DoctorFinding(
            name="fp16-weights",
            severity="critical",
            what="weights are trained in float16",
            why="updates smaller than a 2048th of a weight are lost, and a GradScaler refuses such gradients",
            line="keep float32 weights: with torch.autocast('cuda', torch.float16), and a GradScaler",
            source="arXiv 1710.03740, section 3.1",
        )
    if model["dtypes"] == ["bfloat16"]:
        yield DoctorFinding(
            name="pure-bf16",
            severity="warning",
            what="all trained weights are bfloat16",
            why="updates smaller than a 512th of a weight are rounded away, as most are late in training",
            line="float32 weights under torch.autocast('cuda', torch.bfloat16), or float32 master weights",
            source="arXiv 2010.06192",
        )


def _batch_norms(model: dict[str, Any], facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    if not model["batch_norms"]:
        return
    batch = (facts["forward"] or {}).get("batch", 0)
    if 0 < batch <= 2:
        yield DoctorFinding(
            name="batch-norm-small-batch",
            severity="warning",
            what=f"{model['batch_norms']} BatchNorm layers, and batches of {batch}",
            why="statistics of so few samples are noise, and at evaluation others are used",
            line="GroupNorm, SyncBatchNorm.convert_sync_batchnorm(model), or a larger batch",
            source="arXiv 1803.08494, figure 1",
        )
    for loader in facts["loaders"].values():
        size = loader["batch_size"]
        if size > 1 and loader["samples"] % size == 1 and not loader["drop_last"]:
            yield DoctorFinding(
                name="last-batch-of-one",
                severity="critical",
                what=f"{loader['samples']} samples in batches of {size}: the last has one, and there is BatchNorm",
                why="it raises 'Expected more than 1 value per channel' at the end of the first epoch",
                line="DataLoader(..., drop_last=True)",
                source="torch/nn/functional.py: _verify_batch_size",
            )
    if model["batch_norms_frozen_in_training"]:
        yield DoctorFinding(
            name="frozen-batch-norm-learns",
            severity="warning",
            what=f"{model['batch_norms_frozen_in_training']} frozen BatchNorm layers are in training mode",
            why="their running statistics change all the same: the frozen part is not what it was",
            line="for m in backbone.modules(): m.eval() where it is a BatchNorm, after model.train()",
            source="torch.nn.BatchNorm2d documentation, track_running_stats",
        )


def _adapters(model: dict[str, Any]) -> Iterator[DoctorFinding]:
    adapters = model["adapters"]
    if adapters is None:
        return
    heads = ("norm", "bias", "embed", "head", "classifier", "score", "modules_to_save")
    base = [name for name in adapters["trainable_base"] if not any(word in name.lower() for word in heads)]
    if base:
        yield DoctorFinding(
            name="lora-base-not-frozen",
            severity="critical",
            what=f"LoRA adapters, and the weights under them are trained too: {join_names(base, _NAMES)}",
            why="all memory that LoRA would save is spent, and merging it means nothing",
            line="for name, p in model.named_parameters(): p.requires_grad_('lora_' in name)",
            source="arXiv 2106.09685, section 4.1",
        )
    if adapters["ranks"][0] <= 2:
        yield DoctorFinding(
            name="lora-rank",
            severity="warning",
            what=f"LoRA of rank {adapters['ranks'][0]} on {adapters['targets']} of {adapters['linear']} linear layers",
            why="so few directions learn little; quality comes from more layers before more rank",
            line="LoraConfig(r=16, target_modules='all-linear')",
            source="arXiv 2305.14314, section 4 and figure 2",
        )

    few = adapters["targets"] < _TARGETS * adapters["linear"]
    if few and not base:
        yield DoctorFinding(
            name="lora-targets",
            severity="info",
            what=f"LoRA on {adapters['targets']} of {adapters['linear']} linear layers",
            why="at the same number of parameters, low rank on all layers comes nearer to full fine-tuning than "
            "high rank on some",
            line="LoraConfig(target_modules='all-linear')",
            source="arXiv 2305.14314, figure 2",
        )


def _optimizer(optimizer: dict[str, Any], facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    name, groups = optimizer["class"], optimizer["groups"]
    if optimizer["stale"] and (facts["models"] or facts["forward"]):
        yield DoctorFinding(
            name="optimizer-holds-others",
            severity="critical",
            what=f"{optimizer['stale']} of {optimizer['parameters']} parameters of {name} are in no module",
            why="the model was replaced after the optimizer was made: what it steps is used nowhere",
            line="make the optimizer last: model = ...; optimizer = torch.optim.AdamW(model.parameters())",
            source="torch.optim documentation, 'Constructing it'",
        )
    if name == "Adam" and any(group.get("weight_decay", 0) > 0 for group in groups):
        yield DoctorFinding(
            name="adam-weight-decay",
            severity="warning",
            what="Adam with weight_decay, which is L2 regularisation and not weight decay",
            why="the penalty goes through the second moment: weights with large gradients are hardly decayed",
            line="torch.optim.AdamW(...)",
            source="arXiv 1711.05101, section 2",
        )
    if optimizer["frozen"]:
        yield DoctorFinding(
            name="frozen-in-optimizer",
            severity="info",
            what=f"{name} holds frozen parameters: {join_names(optimizer['frozen'], _NAMES)}",
            why="they cost nothing as long as they are frozen, and move with the old state once they are not",
            line="torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])",
            source="torch.optim.Optimizer.zero_grad documentation: gradients that are None",
        )
    yield from _groups(name, groups, facts)


def _groups(name: str, groups: list[dict[str, Any]], facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    for group in groups:
        betas, decay = group["betas"], group.get("weight_decay", 0)
        if len(betas) == 2 and betas[0] > betas[1]:
            yield DoctorFinding(
                name="betas-swapped",
                severity="critical",
                what=f"{name} with betas ({betas[0]:g}, {betas[1]:g})",
                why="the second moment has a shorter memory than the first: steps are of any size",
                line="betas=(0.9, 0.95) for transformers, (0.9, 0.999) else",
                source="arXiv 1412.6980, section 2",
            )
        if name == "AdamW" and decay >= _DECAY and 0 < group["flat"] < group["all"]:
            yield DoctorFinding(
                name="decay-on-norms",
                severity="warning",
                what=f"weight_decay {decay:g} on {group['flat']} biases and norm weights",
                why="decay pulls a norm's scale to zero, which no gradient asks for",
                line="two groups: weight_decay=0 where p.ndim < 2",
                source="github.com/karpathy/nanoGPT, model.py: configure_optimizers",
            )
        rates = [max(rates) for rates in facts["rates"] if rates]
        if name in _ADAMS and rates and max(rates) >= _HIGH_RATE:
            yield DoctorFinding(
                name="rate-high",
                severity="warning",
                what=f"{name} with a learning rate of {max(rates):g}",
                why="Adam moves each weight by about the rate at each step: by more than most weights are",
                line="lr=3e-4 to begin with",
                source="arXiv 1412.6980, section 2.1",
            )


def _loaders(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(facts.get("ranks_here", 1))
    workers = max((loader["workers"] for loader in facts["loaders"].values()), default=0)
    if workers * ranks > cores:
        yield DoctorFinding(
            name="more-workers-than-cores",
            severity="warning",
            what=f"{workers * ranks} DataLoader workers on {cores} cores",
            why="they fight each other and the training process for the cores",
            line=f"DataLoader(..., num_workers={max(1, cores // ranks - 1)})",
            source="torch/utils/data/dataloader.py: _check_worker_number_rationality",
        )


def across(ranks: list[dict[str, Any]]) -> Iterator[DoctorFinding]:
    """Of the facts of all ranks, held against each other."""
    batches = [max((loader["batches"] for loader in facts["loaders"].values()), default=0) for facts in ranks]
    if batches and 0 < min(batches) < max(batches):
        few, many = min(batches), max(batches)
        yield DoctorFinding(
            name="uneven-shards",
            severity="critical",
            what=f"rank {batches.index(few)} has {few} batches, rank {batches.index(many)} has {many}",
            why="at the end the ranks that have more wait in a collective that the others never enter",
            line="DataLoader(..., sampler=DistributedSampler(data, drop_last=True)), or with model.join():",
            source="torch.distributed.algorithms.Join documentation",
        )


def _cuda(facts: dict[str, Any]) -> Iterator[DoctorFinding]:
    if facts["models"] and all(model["devices"] == ["cpu"] for model in facts["models"]):
        yield DoctorFinding(
            name="on-cpu",
            severity="warning",
            what="the model is on the CPU, and there is a GPU",
            why="it was not moved",
            line="model.to('cuda')",
            source="torch.nn.Module.to documentation",
        )
        return
    if facts["loaders"] and not any(loader["pin_memory"] for loader in facts["loaders"].values()):
        yield DoctorFinding(
            name="memory-not-pinned",
            severity="info",
            what="batches are not in pinned memory",
            why="copies to the GPU cannot overlap with its work",
            line="DataLoader(..., pin_memory=True), batch.to('cuda', non_blocking=True)",
            source="torch.utils.data documentation, 'Memory Pinning'",
        )
    plain = not (facts["forward"] or {}).get("autocast") and any("float32" in m["dtypes"] for m in facts["models"])
    if plain and facts["matmul_precision"] == "highest":
        yield DoctorFinding(
            name="tf32-off",
            severity="info",
            what="float32 matrix products run without tensor cores",
            why="TF32 keeps float32's range with 10 bits of mantissa, at several times the speed (Ampere and later)",
            line="torch.set_float32_matmul_precision('high')",
            source="torch.set_float32_matmul_precision documentation",
        )
