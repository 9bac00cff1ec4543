"""Writes snapshots to disk and reads them, as torch.distributed.checkpoint's files, and without a collective.

    rank r    its skeleton (the state with a reference in the place of each tensor), the parts of DTensors that it
              holds, and of the other tensors those that rank 0 has not got, bit by bit     -> __<r>_0.distcp
    rank 0    once all have written: the index, the manifest, and the snapshot's name  (hooks/snapshot/directory.py)

So what replicas share is kept once, however it is replicated, and what they do not share is not lost: BatchNorm's
statistics, generators, a sampler of each rank. Ranks wait only for rank 0's checksums, and rank 0 for files: a rank
that dies leaves a folder that never gets its name.

DTensors are under the same key on all ranks and are put together again over any number of them; the rest is a rank's
own, and rank 0's for a rank that did not exist then.

Over several nodes each node's ranks do so among themselves, in a place of their own, with the first of them as rank 0.
Each rank finds all that it needs there, and is what it was: it writes its part of a DTensor even if others have the
same.
"""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot import directory
from sentinel.hooks.snapshot.capture import Cell, MemorySpan, spread
from sentinel.hooks.torch_interop.layer_table import local

PATIENCE_SECONDS = 600.0
"""How long ranks wait for each other's files."""
POLL_SECONDS = 0.05
_SKELETON = "skeleton"
_DIGESTS = "digests.json"
_MOVED = {"sentinel.hooks.snapshot_disk": __name__}
"""The module that `Reference` was in when earlier versions wrote their snapshots."""


@dataclass(frozen=True)
class Reference:
    """Stands in a skeleton for a tensor."""

    key: str
    """Key of the tensor in the files, without the prefix of the rank if the tensor is a rank's own."""
    name: str
    judged: bool
    placements: tuple[Any, ...] | None
    """How it is laid out over the ranks, if it is part of a DTensor."""
    dtype: torch.dtype | None = None
    shape: torch.Size | None = None
    """Shape of the whole DTensor: it may be that no rank of a node has a non-empty part of it."""
    device: torch.device | None = None
    """Device of the live tensor; None: written without this field."""


class Gone(Exception):
    """What is being written is not wanted any more: the run is over, or the snapshot is void."""


def write(
    folder: Path, named: Mapping[str, Any], *, rank: int, ranks: Sequence[int], world: int, wanted: Callable[[], bool]
) -> int:
    """Write this rank's part of a snapshot, from the state by names. Returns the number of bytes.

    `ranks`, in rising order, are those that write to `folder`, of `world` ranks in all. Raises Gone as soon as the
    snapshot is not `wanted`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import SavePlan

    folder.mkdir(mode=0o700, exist_ok=True)
    cells: dict[str, Cell] = {}
    skeleton = _take_apart(dict(named), "", cells)
    own = {key: cell for key, cell in cells.items() if cell.spread is None}
    if len(ranks) > 1:
        shared = _list_shared(folder, own, rank == ranks[0], wanted)
        own = {key: cell for key, cell in own.items() if key not in shared}
    apart = len(ranks) < world
    parts = {
        key: cell for key, cell in cells.items() if cell.spread is not None and (apart or cell.spread.written_here)
    }
    planner = _Saving(rank, skeleton, own, parts, wanted)
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(False)
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [SavePlan(planner.items)])[rank]
    results = writer.write_data(plan, cast(Any, planner)).wait()
    files = {path.name: directory.fingerprint(path) for path in folder.glob(f"__{rank}_*")}
    directory.write_synced(folder / f"part-{rank}", pickle.dumps((plan, results, files)))
    return sum(file.bytes for file in files.values())


def assemble(folder: Path, ranks: Sequence[int], wanted: Callable[[], bool]) -> dict[str, directory.File]:
    """Write the index, once the other ranks' parts are there; return the snapshot's files. Raises Gone.

    Called on the first of `ranks`.
    """
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    parts = [folder / f"part-{rank}" for rank in ranks]
    _await(parts, wanted)
    plans, results, files = [], [], {}
    for part in parts:
        plan, written, own = pickle.loads(part.read_bytes())  # written a moment ago by ranks of this run
        plans.append(plan)
        results.append(written)
        files.update(own)
    _, metadata = create_default_global_save_plan(plans)
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, results)
    for path in (*parts, folder / _DIGESTS):
        path.unlink(missing_ok=True)
    files[".metadata"] = directory.fingerprint(folder / ".metadata")
    return files


def load(path: Path, rank: int, parameters: Mapping[str, Tensor], ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Read the state by names, as `write` got it, for the rank that asks.

    `parameters` are the live ones, by name: DTensors of the snapshot get their layout. `ranks`: the snapshot is the
    part of these, and each of them gets the state that it wrote. Raises RollbackError.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, False)
    loading = _Loading(metadata.state_dict_metadata, rank, parameters, ranks)
    loading.want_skeleton()
    loading.read(reader)
    state = _put_together(loading.skeleton, loading.cell)
    loading.read(reader)
    assert isinstance(state, dict)
    return state


def digest_state(state: Any) -> str:
    """Return a digest of what `load` returned: of the names and the bits of all tensors."""
    cells: dict[str, Cell] = {}
    _take_apart(state, "", cells)
    listed = "".join(f"{key} {_digest(cell.kept)}\n" for key, cell in sorted(cells.items()))
    return hashlib.sha256(listed.encode(), usedforsecurity=False).hexdigest()


def _take_apart(value: Any, path: str, cells: dict[str, Cell]) -> Any:
    if isinstance(value, Cell):
        key = path
        while key in cells:  # "a/b" in one dictionary, and "b" in its "a"
            key += "'"
        cells[key] = value
        if (lies := value.spread) is None:
            return Reference(key, value.name, value.judged, None, device=value.device)
        return Reference(key, value.name, value.judged, lies.placements, value.kept.dtype, lies.shape, value.device)
    if isinstance(value, dict):
        kept = _like(value)
        for key, item in value.items():
            kept[key] = _take_apart(item, f"{path}/{key}" if path else str(key), cells)
        return kept
    if type(value) in (list, tuple):
        return type(value)(_take_apart(item, f"{path}/{index}", cells) for index, item in enumerate(value))
    return value


def _put_together(value: Any, cell_of: Callable[[Reference], Cell]) -> Any:
    if isinstance(value, Reference):
        return cell_of(value)
    if isinstance(value, dict):
        kept = _like(value)
        for key, item in value.items():  # `update` of a Counter would count
            kept[key] = _put_together(item, cell_of)
        return kept
    if type(value) in (list, tuple):
        return type(value)(_put_together(item, cell_of) for item in value)
    return value


def _like(value: dict[Any, Any]) -> dict[Any, Any]:
    """Return an empty dictionary of the same kind; that of a module's state_dict keeps its attributes."""
    empty = copy.copy(value)
    empty.clear()
    return empty


def _list_shared(folder: Path, own: Mapping[str, Cell], leads: bool, wanted: Callable[[], bool]) -> set[str]:
    """List the keys of the tensors that the first rank has with the same bits. That rank writes down what it has."""
    digests = {key: _digest(cell.kept) for key, cell in own.items()}
    path = folder / _DIGESTS
    if leads:
        directory.write_synced(path, msgspec.json.encode(digests))
        return set()
    _await([path], wanted)
    theirs = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    return {key for key, digest in digests.items() if theirs.get(key) == digest}


def _digest(tensor: Tensor) -> str:
    """Return a digest of the bytes, with type and shape."""
    bits: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return hashlib.sha256(bits, usedforsecurity=False).hexdigest() + f" {tensor.dtype} {tuple(tensor.shape)}"


def _await(paths: Sequence[Path], wanted: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(path.exists() for path in paths):
        if not wanted():
            raise Gone
        if time.monotonic() > deadline:
            missing = ", ".join(path.name for path in paths if not path.exists())
            raise RollbackError(f"{paths[0].parent}: {missing} did not come within {PATIENCE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


class _Saving:
    """What torch.distributed.checkpoint asks while it writes (its SavePlanner)."""

    def __init__(
        self, rank: int, skeleton: Any, own: Mapping[str, Cell], parts: Mapping[str, Cell], wanted: Callable[[], bool]
    ) -> None:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self._wanted, self._skeleton = wanted, skeleton
        self._tensors: dict[str, Tensor] = {}
        self.items = [WriteItem(MetadataIndex(f"rank{rank}/{_SKELETON}"), WriteItemType.BYTE_IO)]
        for key, cell in [(f"rank{rank}/{key}", cell) for key, cell in own.items()] + list(parts.items()):
            spread, tensor = cell.spread, cell.kept
            if spread is not None and not tensor.numel():
                continue
            offsets = spread.offsets if spread is not None else torch.Size([0] * tensor.dim())
            data = TensorWriteData(
                chunk=ChunkStorageMetadata(offsets, tensor.shape),
                properties=TensorProperties.create_from_tensor(tensor),
                size=spread.shape if spread is not None else tensor.shape,
            )
            kind = WriteItemType.TENSOR if spread is None else WriteItemType.SHARD
            self.items.append(WriteItem(MetadataIndex(key, offsets), kind, tensor_data=data))
            self._tensors[key] = tensor

    def resolve_data(self, item: Any) -> Tensor | io.BytesIO:
        if not self._wanted():
            raise Gone
        if item.tensor_data is not None:
            return self._tensors[item.index.fqn]
        content = io.BytesIO()
        torch.save(self._skeleton, content)
        return content


class _Unpickler(pickle.Unpickler):
    """Finds classes that have moved since the file was written."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(_MOVED.get(module, module), name)


class _Loading:
    """What torch.distributed.checkpoint asks while it reads (its LoadPlanner)."""

    def __init__(
        self, known: Mapping[str, Any], rank: int, parameters: Mapping[str, Tensor], ranks: Sequence[int]
    ) -> None:
        self._known, self._parameters, self._apart = known, parameters, bool(ranks)
        self._first = ranks[0] if ranks else 0
        self._owner = rank if f"rank{rank}/{_SKELETON}" in known else self._first
        self._items: list[Any] = []
        self._targets: dict[str, Tensor] = {}
        self._cells: dict[str, Cell] = {}
        self._devices: dict[str, tuple[torch.device | None, torch.device]] = {}
        """Device of each parameter when the snapshot was written (None: not known), and now."""
        self.skeleton: Any = None

    def want_skeleton(self) -> None:
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

        index, nothing = MetadataIndex(f"rank{self._owner}/{_SKELETON}"), torch.Size((0,))
        self._items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))

    def cell(self, reference: Reference) -> Cell:
        """Return the cell of a reference. Its content arrives with the next `read`."""
        if reference.key not in self._cells:
            self._cells[reference.key] = self._make_cell(reference)
        return self._cells[reference.key]

    def _make_cell(self, reference: Reference) -> Cell:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        key = reference.key
        if reference.placements is None:
            mine = f"rank{self._owner}/{key}"
            key = mine if mine in self._known else f"rank{self._first}/{key}"
        if (known := self._known.get(key)) is None:
            return self._make_empty(reference)
        lies = None if reference.placements is None else self._spread(reference, known.size)
        offsets, shape = (
            (lies.offsets, lies.sizes) if lies is not None else (torch.Size([0] * len(known.size)), known.size)
        )
        target = torch.empty(shape, dtype=known.properties.dtype, device="cpu")
        chunk = ChunkStorageMetadata(offsets, shape)
        if target.numel() and self._apart and lies is not None and chunk not in known.chunks:
            raise RollbackError(
                f"{reference.name} is sharded otherwise than when several nodes wrote the snapshot: resume it with the "
                "same sharding"
            )
        if target.numel():
            self._items += create_read_items_for_chunk_list(key, known, [chunk])
        self._targets[key] = target
        cell = Cell(reference.name, target, judged=reference.judged)
        cell.spread, cell.device = lies, self._find_device(reference)
        return cell

    def _make_empty(self, reference: Reference) -> Cell:
        """Make the cell of a DTensor of which no rank of this node has a part. Raises RollbackError if this rank needs
        one."""
        lies = self._spread(reference, reference.shape) if self._apart and reference.shape is not None else None
        if lies is None or lies.sizes.numel():
            raise RollbackError(f"the snapshot has no {reference.name}")
        cell = Cell(reference.name, torch.empty(lies.sizes, dtype=reference.dtype), judged=reference.judged)
        cell.spread, cell.device = lies, self._find_device(reference)
        return cell

    def _find_device(self, reference: Reference) -> torch.device:
        """Return the device that the tensor goes to: its parameter's if it was there, as this rank may have another GPU
        than then."""
        name = next((part for part in reference.key.split("/") if part in self._devices), "")
        then, now = self._devices.get(name, (None, torch.device("cpu")))
        if reference.device is None or reference.device == then:
            return now
        if reference.device.type == "cpu":  # a counter of steps, the state of a generator
            return reference.device
        return dict(self._devices.values()).get(reference.device, reference.device)

    def _spread(self, reference: Reference, shape: torch.Size) -> MemorySpan:
        """Return how the tensor is to be laid out here: as its parameter, or as it was then, over the present ranks."""
        from torch.distributed.tensor import zeros

        lies = [own for name, p in self._parameters.items() if name in reference.key.split("/") and (own := spread(p))]
        if lies and lies[0].shape == shape:
            return lies[0]
        assert reference.placements is not None
        meshes = [one.mesh for one in (*lies, *filter(None, map(spread, self._parameters.values())))]
        for mesh in meshes:
            if mesh.ndim == len(reference.placements):
                made = spread(zeros(shape, device_mesh=mesh, placements=reference.placements))
                assert made is not None
                return made
        raise RollbackError(f"{reference.name} was sharded when the snapshot was written, and nothing is sharded here")

    def read(self, reader: Any) -> None:
        from torch.distributed.checkpoint.planner import LoadPlan

        items, self._items = self._items, []
        reader.read_data(LoadPlan(items), self).wait()

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        finding = SimpleNamespace(__name__="pickle", Unpickler=_Unpickler)
        # It may hold any class: the directory is ours alone, and the manifest has the file's checksum.
        self.skeleton = torch.load(value, weights_only=False, pickle_module=finding)
        weights = self.skeleton["weights"]
        self._devices = {
            name: (weights[name].device, local(parameter).device)
            for name, parameter in self._parameters.items()
            if name in weights
        }

    def resolve_tensor(self, item: Any) -> Tensor:
        target = self._targets[item.dest_index.fqn]
        for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dimension, offset, length)
        return target

    def commit_tensor(self, item: Any, tensor: Tensor) -> None:
        pass


def load_torch() -> None:
    """Import what writing needs: it takes most of a second, which a thread would take from the loop later."""
    import torch.distributed.checkpoint.default_planner
    import torch.distributed.checkpoint.filesystem  # noqa: F401


def lower_priority() -> None:
    """Lower the priority of the calling thread: training goes first."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    except (OSError, AttributeError):
        pass
