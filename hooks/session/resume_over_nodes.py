"""`resume` over several nodes: where parts of a snapshot are, and whether fewer ranks can go on than wrote one.

A rank that does not find its part asks where the nodes see it. Fewer ranks can go on only if each rank that wrote had
all of the state. Nothing tells replicas from tensors that a script sharded by hand. So the remaining ranks compare what
they read, and what they see of the parts of others: the weights and the state of the optimizers must be the same, to
the bit. What is on the disk of a lost node cannot be compared, and `state` is not: it may differ between ranks.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from sentinel.errors import RollbackError
from sentinel.hooks.core.identity import leads_node, members
from sentinel.hooks.rollback import framework_checkpoints
from sentinel.hooks.rollback.framework_checkpoints import RankExchange
from sentinel.hooks.snapshot import directory, node_parts
from sentinel.hooks.snapshot.capture import spread
from sentinel.hooks.snapshot.checkpoint_files import digest_state, load
from sentinel.hooks.snapshot.choice import Seen
from sentinel.hooks.snapshot.directory import DiskSnapshot, Manifest
from sentinel.hooks.snapshot.node_parts import Looker
from sentinel.hooks.snapshot.parts import RunState
from sentinel.text import name_nodes

_NAMED = 4
_OWN_DISKS = "a disk of each node's own"
_sharing = ""


class _Part(msgspec.Struct):
    """A part that a node sees."""

    path: str
    manifest: Manifest


class _Found(msgspec.Struct):
    """What one rank's node sees of a snapshot."""

    host: str
    directory: str
    looker: Looker
    parts: list[_Part] = []


def search_parts(
    folder: Path, step: int, ranks: Sequence[int], looker: Looker, exchange: RankExchange, *, older: bool
) -> str:
    """Return why the snapshot of `step`, of which `ranks` have no part, is passed over. All ranks call it.

    Raises RollbackError where there is no older one, or where the parts are on the disks of other nodes: they can be
    copied.
    """
    mine = _Found(socket.gethostname(), str(folder), looker, _list_seen_parts(folder, step) if leads_node() else [])
    found = [msgspec.json.decode(view, type=_Found) for view in exchange.gather(msgspec.json.encode(mine))]
    parts = [(one.host, part) for one in found for part in one.parts]
    where = {
        rank: (host, part.path)
        for rank in ranks
        for host, part in parts
        if found[rank].looker.find_own(part.manifest) is not None
    }
    elsewhere = [rank for rank in ranks if rank in where]
    if elsewhere and (len(elsewhere) == len(ranks) or not older):
        rank = elsewhere[0]
        host, path = where[rank]
        raise RollbackError(
            f"resume: rank {rank}'s snapshot of step {step} is on host {host}: {path}. Copy it to the same path on "
            f"{found[rank].host}, where rank {rank} is now, or use a directory that all nodes share"
            f"{_name_more(elsewhere)}. Nothing was changed"
        )
    if ranks:
        why = f"no node here has rank {ranks[0]}'s part of the snapshot of step {step}{_name_more(ranks)}"
    else:
        why = f"the parts of the snapshot of step {step} were written after different restarts or rollbacks"
    if older:
        return f"{why}: it is passed over, on all ranks"
    here = found[ranks[0] if ranks else 0]
    raise RollbackError(
        f"resume: {why}, and no older one is there whole. Bring back the disk that has it, or copy node-of-rank-... "
        f"from there to {here.directory} on {here.host}. To begin at step 0, name another directory. "
        "Nothing was changed"
    )


def _list_seen_parts(folder: Path, step: int) -> list[_Part]:
    """List the parts of a snapshot that are seen here."""
    try:
        paths = [directory.path_of(own, step) for _, own in node_parts.list_places(folder)]
    except OSError:
        return []
    read = [(path, directory.read_manifest(path)) for path in paths]
    return [_Part(str(path), msgspec.structs.replace(one, files={})) for path, one in read if isinstance(one, Manifest)]


def _name_more(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return ""
    listed = ", ".join(map(str, ranks[1 : 1 + _NAMED]))
    more = f" and {len(ranks) - 1 - _NAMED} more" if len(ranks) > 1 + _NAMED else ""
    return f" (the same of rank{'s' if len(ranks) > 2 else ''} {listed}{more})"


def check_sharing(folder: Path, name: str, exchange: RankExchange) -> None:
    """Find out whether all nodes see the same directory, by a file that rank 0 makes. All ranks call it.

    A file that cannot be looked for counts as not seen: the result is only for people to read.
    """
    global _sharing
    marker = folder / f".shared-{name}"
    if exchange.rank == 0:
        with contextlib.suppress(OSError):
            marker.touch()
    exchange.gather(b"")
    seen = not leads_node()
    with contextlib.suppress(OSError):
        seen = seen or marker.exists()
    _sharing = "a directory that all nodes share" if all(map(bool, exchange.gather(b"1" * seen))) else _OWN_DISKS
    if exchange.rank == 0:
        with contextlib.suppress(OSError):
            marker.unlink()


def describe_sharing() -> str:
    """Return where nodes write, as far as `resume` found out."""
    return _sharing or "not known whether all nodes share it"


def refuse_sharded(path: Path, run: RunState, world_then: int) -> None:
    """Raise RollbackError if a parameter is sharded, so that parts of tensors are missing."""
    sharded = next((name for name, one in run.weights.by_name().items() if spread(one) is not None), "")
    if sharded:
        raise RollbackError(_explain(path, world_then, f"{sharded} is sharded over them"))


class Compared(msgspec.Struct, frozen=True):
    """The result of comparing ranks."""

    is_alone: bool
    """Whether no other rank goes on as the same former rank: then this one may take its random generators."""
    unseen: tuple[int, ...]
    """Former ranks whose part no rank sees."""


class _Read(msgspec.Struct, frozen=True):
    """What one rank read."""

    rank: int
    """Its rank when the snapshot was written."""
    digests: dict[int, str]
    """Digest of the state, by former rank."""
    seen: tuple[int, ...] = ()
    """The former ranks whose part this one sees."""


def compare_replicas(
    folder: Path,
    path: Path,
    named: Mapping[str, Any],
    rank: int,
    parameters: Mapping[str, Tensor],
    exchange: RankExchange,
) -> Compared:
    """Check that the former ranks all had the same weights and optimizer state. All ranks call it.

    `named`: what was read from `path`, as it was on `rank`. Raises RollbackError where they differ.
    """
    parts = exchange.run_on_all(lambda: _find_parts(folder, path))
    world_then = next(iter(parts.values())).manifest.world_size
    mine = _Read(rank, {rank: _digest(named)}, tuple(parts))
    said = _gather(mine, exchange)
    taken = [one.rank for one in said]
    seers = {then: [number for number, one in enumerate(said) if then in one.seen] for then in range(world_then)}
    left = [
        then
        for then, ranks in seers.items()
        if ranks and then not in taken and ranks[then % len(ranks)] == exchange.rank
    ]
    more = exchange.run_on_all(lambda: _digest_others(parts, left, parameters))
    said += _gather(_Read(rank, more), exchange)
    digests = {then: digest for one in said for then, digest in one.digests.items()}
    first = min(digests)
    other = next((then for then in sorted(digests) if digests[then] != digests[first]), None)
    if other is not None:
        raise RollbackError(
            _explain(path, world_then, f"ranks {first} and {other} had other weights, or other state of the optimizer")
        )
    unseen = tuple(then for then in range(world_then) if then not in digests)
    return Compared(taken.count(rank) == 1, unseen)


def _gather(mine: _Read, exchange: RankExchange) -> list[_Read]:
    return [msgspec.json.decode(one, type=_Read) for one in exchange.gather(msgspec.json.encode(mine))]


def _digest(named: Mapping[str, Any]) -> str:
    return digest_state(
        {name: part for name, part in named.items() if name == "weights" or name.startswith("optimizers[")}
    )


def _find_parts(folder: Path, path: Path) -> dict[int, DiskSnapshot]:
    """Map each former rank to its part, among the parts that are seen here and belong to the snapshot at `path`.

    Raises RollbackError if that snapshot cannot be read.
    """
    mine = directory.read_manifest(path)
    if isinstance(mine, Seen):
        raise RollbackError(f"resume: {mine.why}. Nothing was changed")
    parts = dict.fromkeys(mine.ranks, DiskSnapshot(path, mine))
    with contextlib.suppress(OSError):  # the others are not seen
        for _, place in node_parts.list_places(folder):
            one = directory.read_manifest(other := directory.path_of(place, mine.step))
            if isinstance(one, Manifest) and (one.lineage, one.world_size) == (mine.lineage, mine.world_size):
                parts = dict.fromkeys(one.ranks, DiskSnapshot(other, one)) | parts
    return parts


def _digest_others(
    parts: Mapping[int, DiskSnapshot], ranks: Sequence[int], parameters: Mapping[str, Tensor]
) -> dict[int, str]:
    """Return the digest of each rank's part. Raises RollbackError.

    Parts whose files are not what was written are left out: they say nothing about the state.
    """
    digests = {}
    for rank in ranks:
        part = parts[rank]
        with contextlib.suppress(*framework_checkpoints.DAMAGE, OSError):
            if not part.flaw():
                digests[rank] = _digest(load(part.path, rank, parameters, part.manifest.ranks))
    return digests


def _explain(path: Path, world_then: int, why: str) -> str:
    return (
        f"resume: {path} was written by {world_then} ranks, and {why}: the parts of {name_nodes(members().left_out)} "
        "are missing, which the job goes on without. Nothing was changed. Start the job with all its nodes, or resume "
        "it from a checkpoint that fewer ranks can read"
    )
