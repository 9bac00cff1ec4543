"""Names parameters: the layer table of one optimizer, kept up to date as layers are unfrozen or added."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from sentinel import wire
from sentinel.hooks.torch_interop import sharding

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of a qualified name that torch.compile, FSDP1 and activation checkpointing insert."""
LOOK_EVERY = 16
"""Steps between two checks of what is trainable. For 200 parameters one takes 20 us, 100 us beside other work."""


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the user's module inside torch.compile's, DDP's, FSDP1's, DataParallel's and checkpointing's wrappers."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif (inner := _inner_module(model)) is not None:
            model = inner
        elif sharding.is_flattened(model):
            model = getattr(model, "_fsdp_wrapped_module", model)
        else:
            return model


def _inner_module(model: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile, or activation checkpointing, has wrapped as a whole; else None."""
    found = (getattr(model, name, None) for name in ("_orig_mod", "_checkpoint_wrapped_module"))
    return next((inner for inner in found if isinstance(inner, nn.Module)), None)


def class_name(model: nn.Module) -> str:
    """Return the class name of the user's module. `fully_shard` gives it an FSDP class, with the user's as a base."""
    kind = type(unwrap_model(model))
    return next(base.__name__ for base in kind.__mro__ if not _is_fsdp(base))


def wrappers(model: nn.Module) -> list[str]:
    """Return the names of wrappers around the user's module, or in it without changing its names."""
    outer = [type(model).__name__.replace(sharding.WRAPPER, "FSDP1")] if unwrap_model(model) is not model else []
    return [*outer, "FSDP"] if _is_fsdp(type(unwrap_model(model))) else outer


def _is_fsdp(kind: type) -> bool:
    # By name: torch.distributed.fsdp takes long to import, and is not available everywhere.
    return kind.__name__ == "FSDPModule" or any(base.__name__ == "FSDPModule" for base in kind.__bases__)


def named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (model, name, parameter) of all models, names as the user wrote them, a tied parameter under each name."""
    for model, label in zip(models, labels(models), strict=True):
        for name, parameter in unwrap_model(model).named_parameters(remove_duplicate=False):
            yield label, plain_name(name), parameter


def labels(models: Sequence[nn.Module]) -> list[str]:
    """Return a label per model: empty for a single one, else its class and its place."""
    if len(models) == 1:
        return [""]
    return [f"{class_name(model)}[{index}]" for index, model in enumerate(models)]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, the same storage, without a collective; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def is_wrapper_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor's class holds other tensors instead of its own memory, as masked or quantised ones do. A
    tensor that a pending collective will fill is not one of these: its first use waits for the collective."""
    kind = type(tensor)
    own = kind in (torch.Tensor, nn.Parameter) or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return not own and not hasattr(tensor, "trigger_wait")


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements; for a sparse tensor, of its values and indices (its own `nbytes` raises)."""
    layout = tensor.layout
    if layout is torch.strided:
        return tensor.nbytes
    if layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.values().nbytes + tensor.crow_indices().nbytes + tensor.col_indices().nbytes
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.values().nbytes + tensor.ccol_indices().nbytes + tensor.row_indices().nbytes
    return tensor.numel() * tensor.element_size()


class Layers:
    """The layer table of one optimizer: its parameters and, for the first one, all others of the models."""

    def __init__(self, stream: int, models: Sequence[nn.Module], optimizer: Any) -> None:
        self.stream = stream
        self.stray: list[str] = []
        """Names of the optimizer's parameters that no model has."""
        # Weak: the optimizer's hooks hold this, and a model must be freed when its user releases it.
        self._models = [weakref.ref(model) for model in models]
        self._layout: tuple[Any, ...] = ()
        self._sizes: list[tuple[int, int]] = []
        self._looked = 0
        self.table = wire.LayerTable(digest="", layers=())
        self.measured: list[tuple[int, torch.Tensor, bool]] = []
        """(row, parameter, whether it is a plain tensor) of parameters whose gradient can be measured."""
        self.frozen: list[tuple[int, torch.Tensor]] = []
        """(place in `measured`, parameter) of the models' parameters that did not train when last looked at. Copies of
        an optimizer's own train without requires_grad."""
        self.rows: list[int] = []
        self.plain: list[Any] = []
        """Parts of `measured`: all rows; all parameters if every one is a plain tensor, else an empty list."""
        self.left_out: dict[str, str] = {}
        """Layer -> reason why its gradient cannot be measured."""
        self.sharded: dict[int, bool] = {}
        """Row of which this rank holds a part -> whether it counts here, not on another rank that has the same part."""
        self.ids: frozenset[int] = frozenset()
        self.trained_ids: frozenset[int] = frozenset()
        """Ids of the optimizer's parameters, and of those among them that train."""
        self.refresh(optimizer)

    def refresh(self, optimizer: Any, seq: int | None = None) -> None:
        """Follow changes of the optimizer's groups and of what is trainable. With a step's number `seq`, parameters
        frozen, unfrozen or exchanged behind a group's first one are searched only every LOOK_EVERY steps."""
        groups = optimizer.param_groups
        sizes = [(len(params), id(params[0]) if params else 0) for group in groups for params in (group["params"],)]
        if seq is not None and sizes == self._sizes and seq - self._looked < LOOK_EVERY:
            return
        self._sizes, self._looked = sizes, seq if seq is not None else self._looked
        # Code that splits or prunes the model replaces parameters by others, of the same number.
        layout = tuple((id(p), p.requires_grad) for group in groups for p in group["params"])
        if layout == self._layout:
            return
        self._layout = layout
        own = {id(p): p for group in groups for p in group["params"]}
        layers, rows = self._rows(own)
        named = len(layers)
        self.stray = []
        for number, group in enumerate(groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in rows:
                    name = f"param_groups[{number}].params[{place}]"
                    rows[id(parameter)] = len(layers)
                    layers.append(_layer("", name, parameter))
                    self.stray.append(name)
        parameters = [(rows[key], parameter) for key, parameter in own.items()]
        self.ids = frozenset(own)
        self.trained_ids = frozenset(key for key, parameter in own.items() if parameter.requires_grad)
        self.sharded = {row: layer.replica == 0 for row, layer in enumerate(layers) if layer.sharded}
        self.left_out = {layers[row].name: why for row, p in parameters if (why := _explain_unmeasured(p))}
        self.measured = [
            (row, p, local(p) is p) for row, p in parameters if local(p).numel() and not _explain_unmeasured(p)
        ]
        self.frozen = [
            (place, p) for place, (row, p, _) in enumerate(self.measured) if row < named and not p.requires_grad
        ]
        self.rows = [row for row, _, _ in self.measured]
        self.plain = [p for _, p, _ in self.measured] if all(whole for *_, whole in self.measured) else []
        self.table = wire.LayerTable(digest=_digest(layers), stream=self.stream, layers=tuple(layers))

    @property
    def models(self) -> list[nn.Module]:
        """The models that still exist."""
        return [model for ref in self._models if (model := ref()) is not None]

    def find_shards(self, rows: Sequence[int]) -> list[int] | None:
        """Return the places in `rows` of the shards that count on this rank; None where it holds no shard at all."""
        return [place for place, row in enumerate(rows) if self.sharded.get(row)] if self.sharded else None

    def list_frozen(self) -> list[tuple[int, torch.Tensor, bool]]:
        """Return (row, this rank's part, whether the optimizer has it) of the models' frozen parameters whose part is
        not empty. For a second optimizer none: the first one covers them."""
        models = self.models if not self.stream else []
        found: dict[int, tuple[int, torch.Tensor, bool]] = {}
        for row, (_, _, parameter) in enumerate(named_parameters(models)):
            if not parameter.requires_grad and not _explain_unmeasured(parameter) and local(parameter).numel():
                found.setdefault(id(parameter), (row, local(parameter), id(parameter) in self.ids))
        return list(found.values())

    def list_outside(self) -> tuple[dict[int, tuple[torch.Tensor, torch.Tensor]], int]:
        """Return id -> (this rank's part, its gradient) of the models' trainable parameters that have a dense gradient
        and are not in this optimizer; and the number of trainable elements of all models."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        sizes: dict[int, int] = {}
        for _, _, parameter in named_parameters(self.models):
            part = local(parameter)
            if parameter.requires_grad and not _explain_unmeasured(parameter) and part.numel():
                sizes[id(parameter)] = part.numel()
                gradient = local(parameter.grad) if parameter.grad is not None else None
                dense = gradient is not None and gradient.layout is torch.strided and gradient.numel()
                if gradient is not None and dense and id(parameter) not in self.ids:
                    found[id(parameter)] = part, gradient
        return found, sum(sizes.values())

    @property
    def replicated(self) -> bool:
        """Whether all ranks hold the same parameters: true under DDP only, as other wrappers do not guarantee it. Ranks
        of a pipeline, and experts, have plain parameters of their own."""
        return bool(self.models) and all(
            isinstance(model, nn.parallel.DistributedDataParallel) and not getattr(model, "parameters_to_ignore", None)
            for model in self.models
        )

    @property
    def lockstep(self) -> bool:
        """Whether ranks must take equally many steps: under DDP, outside of `with Join`, and with shards."""
        models = self.models
        if any(getattr(getattr(model, "_join_config", None), "enable", False) for model in models):
            return False
        return bool(self.sharded) or any(isinstance(each, nn.parallel.DistributedDataParallel) for each in models)

    def reduction(self) -> Mapping[str, Any]:
        """Return DDP's log of the first model: numbers of the last iteration that it timed. Empty without DDP."""
        if self.stream or not self._models:
            return {}
        logged = getattr(self._models[0](), "_get_ddp_logging_data", None)  # a private name, which may disappear
        return logged() if logged is not None else {}

    @property
    def scattered(self) -> int | None:
        """Number of devices that `nn.DataParallel` splits batches over (0 on the CPU); None where it is not in use."""
        return next((len(model.device_ids) for model in self.models if isinstance(model, nn.DataParallel)), None)

    def _rows(self, own: dict[int, torch.Tensor]) -> tuple[list[wire.Layer], dict[int, int]]:
        layers: list[wire.Layer] = []
        rows: dict[int, int] = {}
        spreads = sharding.spreads(self.models)
        for model, name, parameter in named_parameters(self.models):
            if self.stream and id(parameter) not in own:
                continue
            first = rows.setdefault(id(parameter), len(layers))
            layer = _layer(model, name, parameter, layers[first].name if first < len(layers) else "")
            if id(parameter) not in own:
                layer = msgspec.structs.replace(layer, held=False)
            if (spread := spreads.get(id(parameter))) is not None:
                layer = msgspec.structs.replace(layer, **spread._asdict())
            layers.append(layer)
        return layers, rows


def _explain_unmeasured(parameter: torch.Tensor) -> str:
    """Return why a parameter's elements and gradient are not measured; empty where they are."""
    if parameter.is_complex():
        return "complex"
    if parameter.layout is not torch.strided:
        return "sparse"
    return "meta" if local(parameter).is_meta else ""  # e.g. of another rank's stage: it has no elements here


def _layer(model: str, name: str, parameter: torch.Tensor, tied_to: str = "") -> wire.Layer:
    mesh = getattr(parameter, "device_mesh", None)
    return wire.Layer(
        name=name,
        model=model,
        shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        trainable=parameter.requires_grad,
        tied_to=tied_to,
        placement=tuple(_placement(one) for one in getattr(parameter, "placements", ())),
        mesh=tuple(mesh.shape) if mesh is not None else (),
        coordinates=tuple(mesh.get_coordinate() or ()) if mesh is not None else (),
    )


def _placement(placement: Any) -> str:
    dim = getattr(placement, "dim", None)  # not is_shard(), which is False for FSDP2 over tensor parallelism
    if dim is not None:
        return f"shard({dim})"
    return "replicate" if placement.is_replicate() else "partial"


def plain_name(name: str) -> str:
    """Return a qualified name inside `unwrap_model(model)` as the user wrote it, without inner wrappers' parts."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _digest(layers: list[wire.Layer]) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(layers), digest_size=8).hexdigest()
