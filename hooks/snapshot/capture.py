"""How a part of a run's state is taken and put back: as a tree whose tensors are cells.

A part takes its state with `Capture.later` (tensors that change only inside a step of the first optimizer, at whose
exit snapshots are taken: they may be copied while the next forward pass runs) or `Capture.now` (all else), and puts
back what it took.

State comes as dictionaries, lists and tuples of tensors, numbers and whatever else an optimizer's author chose (LBFGS
keeps lists of tensors). `freeze_tree` takes a tree apart: tensors become cells, to be copied together; the rest is
deep-copied. `thaw_tree` puts it back *into* what is live now, so that a tensor which still exists keeps its storage:
what was captured in a CUDA graph or compiled for that address stays valid.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sentinel.errors import StateError
from sentinel.hooks.core.host_memory import list_read_only_memory
from sentinel.hooks.torch_interop.layer_table import is_wrapper_tensor, local
from sentinel.hooks.torch_interop.tensors import is_expanded, read_bits


class Stateful(Protocol):
    """Any object that saves itself as torch's do, by `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Capture:
    """Gathers the cells of one snapshot."""

    def __init__(self) -> None:
        self.stable: list[Cell] = []
        self.volatile: list[Cell] = []

    def later(self, value: Any, name: str) -> Any:
        """Freeze what changes only inside a step."""
        return freeze_tree(value, name, lambda path, tensor: self._cell(self.stable, path, tensor, judged=True))

    def now(self, value: Any, name: str, *, judged: bool = False) -> Any:
        """Freeze what may change as soon as the step is over."""
        return freeze_tree(value, name, lambda path, tensor: self._cell(self.volatile, path, tensor, judged=judged))

    def _cell(self, cells: list[Cell], name: str, tensor: Tensor, *, judged: bool) -> Cell:
        cells.append(Cell(name, tensor, judged=judged))
        return cells[-1]


class Immediate(Capture):
    """Copies each tensor into host memory at once, for state that is put back a moment later, or never."""

    def _cell(self, cells: list[Cell], name: str, tensor: Tensor, *, judged: bool) -> Cell:
        cell = Cell(name, tensor, judged=judged)
        assert cell.source is not None
        cell.kept, cell.source = cell.source.to("cpu", copy=True), None
        return cell


class Part(ABC):
    """One part of the state: the base class of all. Override `take` and `give`, and of the others what must differ."""

    name: str
    """Unique in the run, and the same when the run is started again."""
    late = False
    """Whether the loop still changes it after the step: schedulers, the scaler, an EMA.

    A rollback puts it back as it was at the exit of the step, since the loop will do to it what it did then; a run that
    is started again begins with the next iteration, and needs it as it was at the end of this one.
    """
    foreign = False
    """Whether putting it back runs code that is not ours, and may raise."""

    @abstractmethod
    def take(self, capture: Capture) -> Any:
        """Return what is to be kept, with cells for the tensors."""

    def check(self, kept: Any) -> None:  # noqa: B027 (most parts can always be put back)
        """Raise RollbackError if the part cannot be put back. Changes nothing."""

    def list_younger(self, kept: Any) -> list[str]:
        """Return the names of what was made since, and stays as it is."""
        return []

    @abstractmethod
    def give(self, kept: Any, copies: Copies) -> None:
        """Put the part back, in a way that can be undone.

        Tensors that keep their storage are only planned in `copies`, and dictionaries are rewritten by them.
        """

    def export_named(self, kept: Any) -> Any:
        """Return what was taken, by names: nothing in it belongs to this process."""
        return kept

    def import_named(self, named: Any) -> Any:
        """Reverse `export_named` in the process that goes on. Raises RollbackError if a name does not exist here."""
        return named


class MemorySpan(NamedTuple):
    """How a DTensor is laid out over the ranks, and which part of it is here."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    """Shape of the whole tensor."""
    stride: tuple[int, ...]
    offsets: torch.Size
    """Where this rank's part begins in the whole."""
    sizes: torch.Size
    """Shape of this rank's part."""

    @property
    def written_here(self) -> bool:
        """Whether this rank, of the ranks that hold the same part, writes it to disk."""
        at = self.mesh.get_coordinate() or ()
        return all(place == 0 for place, p in zip(at, self.placements, strict=False) if not p.is_shard())


class Cell:
    """One tensor of a snapshot."""

    __slots__ = ("device", "judged", "kept", "name", "source", "spread")

    def __init__(self, name: str, source: Tensor, *, judged: bool) -> None:
        """Raises StateError for a tensor whose memory cannot be copied as it is."""
        check_plain(name, source)
        self.name = name
        self.source: Tensor | None = local(source).detach()
        """The live tensor, until the copy is complete."""
        self.kept: Tensor = self.source
        """The copy in host memory, once there is one."""
        self.device = self.source.device
        self.spread = spread(source)
        """The layout, if it is part of a DTensor."""
        self.judged = judged
        """Whether a NaN or an infinity in it makes the snapshot unfit to go back to."""

    def make_live_tensor(self) -> Tensor:
        """Return a new tensor with the copy's values, on the device and in the layout of the live one."""
        part = self.kept.to(self.device, copy=True)
        if self.spread is None:
            return part
        from torch.distributed.tensor import DTensor  # imported only once there is one

        whole = DTensor.from_local(
            part, self.spread.mesh, self.spread.placements, run_check=False, shape=self.spread.shape,
            stride=self.spread.stride,
        )  # fmt: skip
        assert isinstance(whole, Tensor)
        return whole


class Copies:
    """Copies into live tensors, gathered to be made at once; and the dictionaries that were rewritten meanwhile."""

    def __init__(self) -> None:
        self._former: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._live: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._planned: dict[tuple[Any, ...], Tensor] = {}
        self._read_only: list[tuple[int, int]] | None = None

    def add(self, live: Tensor, kept: Tensor) -> bool:
        """Plan to copy `kept` into `live`. Returns False if other values are to be copied into it, or it is in memory
        that cannot be written to and has other values."""
        # A parameter and a view of its first rows begin at the same address, but are not the same.
        place = live.data_ptr(), live.dtype, live.shape, live.stride()
        if place in self._planned:  # one tensor in two entries, as the rate that torch gives to all groups
            return torch.equal(self._planned[place], kept)
        if self._is_read_only(live):  # a file that is mapped, as by np.load: a write would end the process
            return torch.equal(read_bits(live), read_bits(kept))
        self._planned[place] = kept
        self._live.append(live)
        self._kept.append(kept)
        return True

    def _is_read_only(self, live: Tensor) -> bool:
        if not live.is_cpu or not live.numel():
            return False
        if self._read_only is None:
            self._read_only = list_read_only_memory()
        first = live.data_ptr()
        span = 1 + sum((size - 1) * stride for size, stride in zip(live.shape, live.stride(), strict=True))
        at = bisect_right(self._read_only, first, key=itemgetter(1))
        return at < len(self._read_only) and self._read_only[at][0] < first + span * live.element_size()

    def rewrite(self, live: dict[Any, Any], content: dict[Any, Any]) -> None:
        """Give a live dictionary this content, until `take_back`."""
        self._former.append((live, dict(live)))
        live.clear()
        live.update(content)

    def take_back(self) -> None:
        """Restore the content of the dictionaries. For copies that are not made."""
        for live, content in reversed(self._former):
            live.clear()
            live.update(content)

    def make(self) -> None:
        """Make all copies."""
        with torch.no_grad():
            for live, kept in zip(self._live, self._kept, strict=True):
                live.copy_(kept, non_blocking=True)
            for device in {live.device for live in self._live if live.is_cuda}:  # once, and not for each tensor
                torch.cuda.current_stream(device).synchronize()


def check_plain(name: str, tensor: Tensor) -> None:
    """Raise StateError unless this rank's part of the tensor has strided memory of its own."""
    part = local(tensor)
    if is_wrapper_tensor(part):
        kind = type(part).__name__
    elif part.is_meta:
        kind = "meta tensor"
    elif part.is_quantized:
        kind = "quantized tensor"
    elif part.layout is not torch.strided:
        kind = str(part.layout)
    else:
        return
    raise StateError(f"{name} is a {kind}, which cannot be kept in a snapshot: leave rollback out")


def spread(tensor: Tensor) -> MemorySpan | None:
    """Return how the tensor is laid out over the ranks; None: it is a plain tensor. No collective."""
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "device_mesh"):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined] # as torch.distributed.checkpoint does
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    return MemorySpan(tensor.device_mesh, placements, tensor.shape, tensor.stride(), chunk.offsets, chunk.sizes)


def freeze_tree(value: Any, name: str, take: Callable[[str, Tensor], Cell]) -> Any:
    """Return a copy of `value` in which each tensor is replaced by the cell that `take(path, tensor)` makes of it."""
    if isinstance(value, Tensor):
        return take(name, value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        kept = copy.copy(value)  # keeps the type and its attributes: a module's state_dict carries `_metadata`
        for key in value:
            kept[key] = freeze_tree(value[key], f"{name}.{key}" if isinstance(key, str | int) else name, take)
        return kept
    if type(value) in (list, tuple):
        return type(value)(freeze_tree(item, f"{name}.{index}", take) for index, item in enumerate(value))
    return copy.deepcopy(value)


def thaw_tree(kept: Any, live: Any, copies: Copies) -> Any:
    """Return what `kept` was made from, in the place of `live`.

    A live tensor or dictionary that fits is reused; nothing is written into the tensor before `copies` are made. Where
    nothing fits, or two entries of different values have come to share one tensor, the value is new.
    """
    if isinstance(kept, Cell):
        if isinstance(live, Tensor) and fits(kept, live) and copies.add(local(live).detach(), kept.kept):
            return live
        return kept.make_live_tensor()
    if isinstance(kept, dict):
        known = live if isinstance(live, dict) else {}
        renewed = {key: thaw_tree(item, known.get(key), copies) for key, item in kept.items()}
        if isinstance(live, dict):
            copies.rewrite(live, renewed)
            return live
        into = copy.copy(kept)
        into.clear()
        into.update(renewed)
        return into
    if type(kept) in (list, tuple):
        lives = live if type(live) is type(kept) and len(live) == len(kept) else [None] * len(kept)
        return type(kept)(thaw_tree(item, old, copies) for item, old in zip(kept, lives, strict=True))
    return copy.deepcopy(kept)


def fits(cell: Cell, live: Tensor) -> bool:
    """Whether the cell can be copied into `live` as it is."""
    part = local(live)
    alike = part.shape == cell.kept.shape and part.dtype == cell.kept.dtype and part.device == cell.device
    return alike and not is_expanded(part)
