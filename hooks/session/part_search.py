"""Where the parts of a snapshot are that ranks of several nodes look for, and whether the nodes share a directory."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sentinel.errors import RollbackError
from sentinel.hooks.core.identity import leads_node
from sentinel.hooks.rollback.framework_checkpoints import RankExchange
from sentinel.hooks.snapshot import directory, node_parts
from sentinel.hooks.snapshot.view import Looker

_NAMED = 4
_OWN_DISKS = "a disk of each node's own"
_sharing = ""


class _Part(msgspec.Struct):
    """A part that a node sees."""

    path: str
    manifest: directory.Manifest


class _Found(msgspec.Struct):
    """What one rank's node sees of a snapshot."""

    host: str
    directory: str
    looker: Looker
    parts: list[_Part] = []


def search_parts(
    folder: Path, step: int, ranks: Sequence[int], looker: Looker, exchange: RankExchange, *, older: bool
) -> str:
    """Why the snapshot of `step` is passed over, of which `ranks` have no part; all ranks call it.

    Raises RollbackError where no older one is there, or the parts are on the disks of other nodes: they can be copied.
    """
    mine = _Found(socket.gethostname(), str(folder), looker, _list_parts(folder, step) if leads_node() else [])
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


def _list_parts(folder: Path, step: int) -> list[_Part]:
    """The parts of a snapshot that are seen here."""
    try:
        paths = [directory.path_of(own, step) for _, own in node_parts.list_places(folder)]
    except OSError:
        return []
    read = [(path, directory.read_manifest(path)) for path in paths]
    return [
        _Part(str(path), msgspec.structs.replace(one, files={}))
        for path, one in read
        if isinstance(one, directory.Manifest)
    ]


def _name_more(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return ""
    listed = ", ".join(map(str, ranks[1 : 1 + _NAMED]))
    more = f" and {len(ranks) - 1 - _NAMED} more" if len(ranks) > 1 + _NAMED else ""
    return f" (the same of rank{'s' if len(ranks) > 2 else ''} {listed}{more})"


def check_sharing(folder: Path, name: str, exchange: RankExchange) -> None:
    """Find out whether all nodes see the same directory: by a file of rank 0's. All ranks call it. A file that cannot
    be looked for counts as not seen: this is for people to read."""
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
    """Where nodes write, as far as `resume` found out."""
    return _sharing or "not known whether all nodes share it"
