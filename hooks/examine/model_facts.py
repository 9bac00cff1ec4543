"""Facts about models, optimizers and loaders, as plain values, for `sentinel doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import data

from sentinel.hooks.torch_interop import discovery
from sentinel.hooks.torch_interop.internals import BatchNorm, NormWithStatistics
from sentinel.hooks.torch_interop.layer_table import wrappers

_NAMES = 8
"""Most names of parameters in a list for people."""
_LABELS = ("targets", "labels")
"""Attributes in which datasets keep the labels of all samples: torchvision's name, and the other usual one."""
NORMS = (nn.LayerNorm, nn.RMSNorm, NormWithStatistics, nn.GroupNorm)


def describe_models(optimizers: list[Optimizer], modules: list[nn.Module], reached: set[int]) -> dict[str, Any]:
    """Return facts about all optimizers that train something, and about the models that own what they train.

    `reached`: ids of parameters that had a gradient at a step.
    """
    owners = {id(owner): owner for optimizer in optimizers for owner in discovery.owners(optimizer, modules)}
    models = list(owners.values())
    named = {id(p): name for model in models for name, p in model.named_parameters()}
    norms = {id(p) for model in models for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(False)}
    steered = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        "models": [_model(model, steered, reached) for model in models],
        "optimizers": [_optimizer(optimizer, named, norms) for optimizer in optimizers],
    }


def _model(model: nn.Module, steered: set[int], reached: set[int]) -> dict[str, Any]:
    parameters = list(model.named_parameters())
    missing = [name for name, p in parameters if p.requires_grad and id(p) not in steered]
    trained = [(name, p) for name, p in parameters if p.requires_grad and id(p) in steered]
    idle = [(name, p) for name, p in trained if id(p) not in reached]
    batch_norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    frozen = [
        m for m in batch_norms
        if m.training and m.track_running_stats and m.affine and not any(p.requires_grad for p in m.parameters(False))
    ]  # fmt: skip
    distributed = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    return {
        "class": type(model).__name__,
        "wrappers": wrappers(model),
        "data_parallel": any(isinstance(m, nn.DataParallel) for m in model.modules()),
        "find_unused_parameters": bool(distributed and distributed.find_unused_parameters),
        "parameters": sum(p.numel() for _, p in parameters),
        "trainable": sum(p.numel() for _, p in parameters if p.requires_grad),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for _, p in parameters if p.requires_grad}),
        "devices": sorted({p.device.type for _, p in parameters}),
        "not_in_optimizer": missing[:_NAMES],
        "unregistered": _list_unregistered(model, steered),
        "without_gradient": [name for name, _ in idle][:_NAMES],
        "without_gradient_share": sum(p.numel() for _, p in idle) / max(sum(p.numel() for _, p in trained), 1),
        "batch_norms": len(batch_norms),
        "batch_norms_frozen_in_training": len(frozen),
        "eval_modules": sorted({type(m).__name__ for m in model.modules() if not m.training} - {type(model).__name__}),
        "training": model.training,
        "post_norm_layers": sum(map(_post_norm, model.modules())),
        "transformer": any("attention" in type(m).__name__.lower() for m in model.modules()),
        "adapters": _adapters(model),
        "ties_broken": any(map(_tie_broken, model.modules())),
    }


def _list_unregistered(model: nn.Module, steered: set[int]) -> list[str]:
    """List attributes that hold layers in a plain list or dict, which have gradients and are in no optimizer."""
    owned = steered.union(map(id, model.parameters()))
    found = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
            parameters = [p for one in inside for p in _parameters_of(one) if id(p) not in owned]
            if not name.startswith("_") and any(p.grad is not None for p in parameters):
                found.append(f"{path}.{name}".removeprefix("."))
    return found[:_NAMES]


def _parameters_of(thing: Any) -> list[nn.Parameter]:
    if isinstance(thing, nn.Module):
        return list(thing.parameters())
    return [thing] if isinstance(thing, nn.Parameter) else []


def _tie_broken(module: nn.Module) -> bool:
    """Whether tied embeddings have become two tensors, by the config and the two methods of transformers."""
    if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
        return False
    ends = [getattr(module, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    return all(isinstance(weight, Tensor) for weight in weights) and weights[0] is not weights[1]


def _post_norm(module: nn.Module) -> bool:
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return isinstance(module, kinds) and not module.norm_first


def _adapters(model: nn.Module) -> dict[str, Any] | None:
    """Return facts about LoRA, by the names that peft gives to pairs: `lora_A`, `lora_B`."""
    pairs = [(name, p) for name, p in model.named_parameters() if "lora_A" in name or "lora_a" in name]
    if not pairs:
        return None
    base = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    linear = sum(isinstance(m, nn.Linear) for name, m in model.named_modules() if "lora_" not in name)
    return {
        "ranks": sorted({min(p.shape) for _, p in pairs}),
        "narrowest": min(max(p.shape) for _, p in pairs),
        "targets": len(pairs),
        "linear": linear,
        "trainable_base": base[:_NAMES],
        "trainable_base_count": len(base),
    }


def _optimizer(optimizer: Optimizer, named: dict[int, str], norms: set[int]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [p for p in parameters if id(p) not in named]
    return {
        "class": type(optimizer).__name__,
        "parameters": len(parameters),
        "twice": len(parameters) - len({id(p) for p in parameters}),
        "stale": len(stale),
        "frozen": [named.get(id(p), "") for p in parameters if not p.requires_grad][:_NAMES],
        "groups": [_group(group, norms) for group in optimizer.param_groups],
    }


def _group(group: dict[str, Any], norms: set[int]) -> dict[str, Any]:
    plain = {k: v for k, v in group.items() if isinstance(v, bool | int | float | str)}
    tensors = {k: float(v) for k, v in group.items() if isinstance(v, Tensor) and v.numel() == 1}
    betas = [float(beta) for beta in group.get("betas", ())]
    own = [p for p in group["params"]]
    flat = sum(p.dim() < 2 for p in own)
    return {
        **plain,
        **tensors,
        "betas": betas,
        "flat": flat,
        "norms": sum(id(p) in norms for p in own),
        "all": len(own),
    }


def describe_forward(module: nn.Module, args: Any) -> dict[str, Any]:
    """Return facts about the first forward pass: autocast and the batch's size."""
    types = sorted({p.device.type for p in module.parameters()} | {"cpu"}, reverse=True)
    on = next((kind for kind in types if torch.is_autocast_enabled(kind)), None)
    first = next((t for t in _tensors(args) if t.dim() > 0), None)
    return {
        "autocast": str(torch.get_autocast_dtype(on)).removeprefix("torch.") if on else "",
        "batch": first.shape[0] if first is not None else 0,
    }


def data_range(layer: nn.Module, args: Any) -> dict[str, float]:
    """Return root mean square, least and largest value of the data that a trained layer gets.

    Empty if its input comes from another trained layer, or has no such values.
    """
    x = args[0] if args and isinstance(args[0], Tensor) else None
    learns = any(p.requires_grad for p in layer.parameters(False))
    if x is None or not learns or x.requires_grad or not x.is_floating_point():
        return {}
    if not x.numel() or x.is_meta or x.layout is not torch.strided:
        return {}
    values = x.detach().float()
    return {
        "rms": float(values.square().mean().sqrt()),
        "least": float(values.min()),
        "most": float(values.max()),
    }


def name_layers(ranges: dict[nn.Module, dict[str, float]], modules: list[nn.Module]) -> dict[str, dict[str, float]]:
    """Return the ranges that are not empty, by the name of the layer."""
    names = {id(inner): name for module in modules for name, inner in module.named_modules()}
    return {names.get(id(layer)) or type(layer).__name__: held for layer, held in ranges.items() if held}


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value


def describe_loader(loader: data.DataLoader[Any]) -> dict[str, Any]:
    """Return a DataLoader's settings, and how often its labels change."""
    try:
        samples, batches = len(loader.dataset), len(loader)  # type: ignore[arg-type]
    except TypeError:  # a stream
        samples = batches = 0
    changes, by_chance = _label_changes(loader, samples)
    return {
        "label_changes": changes,
        "label_changes_by_chance": by_chance,
        "samples": samples,
        "batches": batches,
        "batch_size": loader.batch_size or 0,
        "drop_last": loader.drop_last,
        "workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "persistent": loader.persistent_workers,
        "sampler": type(loader.sampler).__name__,
    }


def _label_changes(loader: data.DataLoader[Any], samples: int) -> tuple[int, float]:
    """Return how often the label changes from a sample to the next, and how often it would in a random order.

    Of a loader that takes the samples in the order of the dataset; (0, 0.0) for others, or if the labels are not known.
    """
    if type(loader.sampler) is not data.SequentialSampler or not loader.batch_size:  # without: a batch sampler
        return 0, 0.0
    labels = _labels(loader.dataset)
    if labels is None or labels.dim() != 1 or labels.is_floating_point() or len(labels) != samples:
        return 0, 0.0
    counts = torch.unique(labels, return_counts=True)[1].double()
    # Wald and Wolfowitz, 1940: neighbours in a random order have the same label with probability sum c (c-1) / n (n-1).
    return int((labels[1:] != labels[:-1]).sum()), samples - float(counts.square().sum()) / max(samples, 1)


def _labels(dataset: Any) -> Tensor | None:
    """Return a dataset's labels from its attributes: asking for samples would run the user's code once more."""
    if isinstance(dataset, data.Subset):
        inner = _labels(dataset.dataset)
        return None if inner is None else inner[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, data.TensorDataset):  # if there are three, the last may be lengths or groups
        return dataset.tensors[1] if len(dataset.tensors) == 2 else None
    held = getattr(dataset, "__dict__", {})
    found = next((held[name] for name in _LABELS if name in held), None)
    try:
        return None if found is None else torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):  # strings, or lists of several lengths
        return None
