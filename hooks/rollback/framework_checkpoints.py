"""Chooses which of a framework's own checkpoints a restarted script goes on from: their files, our decision.

It is the newest that is whole, finite, and from before the first sign of what ended the job (`SENTINEL_RESUME_BEFORE`,
which `sentinel run` sets). Newer ones are set aside under another name, as they would be the newest at the next start,
and are never deleted by us. All ranks read the same files. If there is a process group already, they compare what they
saw (`RankExchange`), by its store: every backend has one, and it needs no collective. Nothing of this is used in the
loop.

Only the content of a file rules a checkpoint out. A read that fails is tried again for 60 s, and is then an error, as
it is if none of the checkpoints can be used. A file that is missing or cut short is looked at again for as long, as a
network file system may show an old state, and then its checkpoint is passed over: a job that is killed while it saves
leaves such a checkpoint.
"""

from __future__ import annotations

import json
import os
import pickle
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import torch

from sentinel.errors import AttachError, RollbackError
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import RETRY_SECONDS, Retry
from sentinel.hooks.core.identity import group_store, place

BEFORE = "SENTINEL_RESUME_BEFORE"
"""Environment variable with a step: only a checkpoint saved before it is used. Set by `sentinel run` after a later
fault."""
DAMAGE = (
    FileNotFoundError, EOFError, json.JSONDecodeError, UnicodeDecodeError, KeyError, RuntimeError,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip
"""What reading a damaged checkpoint raises, once all of its bytes could be read.

Other errors say nothing about the checkpoint: a class that cannot be imported, a lack of memory.
"""
_CHUNK = 1 << 20
_asked = False


class CheckpointView(msgspec.Struct, kw_only=True):
    """What one rank sees of the checkpoints in a directory."""

    absent: bool = False
    """Whether there is no such directory."""
    trouble: str = ""
    """Why it could not be read just now."""
    refusal: str = ""
    """Why nothing can be said."""
    chosen: str = ""
    """Name of the newest good checkpoint."""
    steps: int = 0
    unfit: dict[str, str] = {}
    """Name of each newer checkpoint -> what is wrong with it."""
    damaged: bool = False
    """Whether one of these is damaged, and not only too new."""
    late: bool = False
    """Whether this rank has looked for as long as allowed. If rank 0 has, the next look is the last, for all ranks."""


class Incomplete(Exception):
    """Files of a checkpoint are missing, cut short, or hold no checkpoint that can be read."""


class CheckpointFormat(Protocol):
    """How the checkpoints of one framework are read and named."""

    @property
    def damage(self) -> tuple[type[Exception], ...]:
        """What reading a damaged one raises: `DAMAGE`, and what else this framework raises."""

    def read_steps(self, path: Path) -> int | None:
        """Return the number of steps before the checkpoint at a path, by its name; None: it is no checkpoint."""

    def find_flaw(self, path: Path, steps: int) -> str:
        """Return what is wrong with one; empty if nothing is. Raises `damage`, Incomplete, and OSError if it cannot be
        read."""

    def name_void(self, path: Path) -> Path:
        """Return the path to move a checkpoint to that must not be used."""


def asking() -> None:
    """Note that the script asks where it goes on: started again, it does not begin at step 0."""
    global _asked
    _asked = True


def was_asked() -> bool:
    """Whether the script asked where it goes on."""
    return _asked


def find_bound(given: int | None) -> int | None:
    """Return the step before which a checkpoint must have been saved: the lower of the one given and the supervisor's.

    Raises AttachError if one of them is not a number.
    """
    if given is not None and not isinstance(given, Integral):
        raise AttachError(f"before={given!r}: must be the number of a step")
    named = os.environ.get(BEFORE)
    if named and not named.isdecimal():
        raise AttachError(f"{BEFORE}={named}: must be the number of a step")
    return min((each for each in (given, int(named) if named else None) if each is not None), default=None)


def choose(directory: str | os.PathLike[str], kind: CheckpointFormat, before: int | None) -> str | None:
    """Choose the checkpoint to go on from; None: begin at the start, as there is none, or `before` rules out all.

    Raises RollbackError if there are checkpoints and none can be used, or one cannot be read.
    """
    asking()
    folder, limit, retry = Path(directory).absolute(), find_bound(before), Retry()
    exchange = RankExchange("checkpoint") if group_store() is not None else None
    last = False
    while True:
        mine = _look(folder, kind, limit, last=last)
        mine.late = retry.over
        views = [mine]
        if exchange is not None:
            views = [
                msgspec.json.decode(view, type=CheckpointView) for view in exchange.gather(msgspec.json.encode(mine))
            ]
        if refusal := next((view.refusal for view in views if view.refusal), ""):
            raise RollbackError(refusal)
        trouble = _find_trouble(folder, views)
        if not trouble:
            return _conclude(folder, views[0], kind)
        if last:
            raise RollbackError(f"{trouble} (for {RETRY_SECONDS:.0f} s). Nothing was changed")
        last = views[0].late
        if not last:
            retry.pause()


def read_through(path: Path) -> None:
    """Read a file to its end: an error here is the machine's, one after it the content's. Raises OSError."""
    with path.open("rb") as file:
        while file.read(_CHUNK):
            pass


def find_nonfinite(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the first weight that is not finite, as a flaw in words; empty if all are finite."""
    for name, tensor in weights:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return f"{name} has values that are not finite"
    return ""


_WEIGHTS = ("model.", "state_dict.")
"""How the names of a model's tensors begin in the folders that trainers have torch.distributed.checkpoint write."""


def read_shards(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights in a folder that torch.distributed.checkpoint wrote, each whole, without a collective.

    Raises what reading one of them raised.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # slow to import, and rarely needed
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    stored = reader.read_metadata()
    reader.read_metadata = lambda *_, **__: stored  # type: ignore[method-assign]  # not again for each tensor
    for name, kind in stored.state_dict_metadata.items():
        if name.startswith(_WEIGHTS) and isinstance(kind, TensorStorageMetadata):
            tensor = torch.empty(kind.size, dtype=kind.properties.dtype, device="cpu")
            try:
                load({name: tensor}, storage_reader=reader, no_dist=True)
            except CheckpointException as error:  # a BaseException around the error of each rank
                raise next(iter(error.failures.values()))[0] from None
            yield name, tensor


def _look(folder: Path, kind: CheckpointFormat, limit: int | None, *, last: bool) -> CheckpointView:
    seen = CheckpointView()
    try:
        with os.scandir(folder) as entries:
            paths = [folder / entry.name for entry in entries]
        found = {path: steps for path in paths if (steps := kind.read_steps(path)) is not None}
    except FileNotFoundError:
        return CheckpointView(absent=True)
    except OSError as error:
        return CheckpointView(trouble=f"{folder}: {error.strerror}")
    for path, steps in sorted(found.items(), key=lambda item: (-item[1], item[0].name)):
        if limit is not None and steps > limit:
            seen.unfit[path.name] = f"saved after step {limit}, the first sign of a fault"
            continue
        try:
            why = _find_flaw(kind, path, steps)
        except (OSError, MemoryError) as error:
            return CheckpointView(trouble=f"{path}: cannot be read just now ({error})")
        except Incomplete as error:
            if not last:
                return CheckpointView(trouble=f"{path}: {error}")
            why = str(error)
        except Exception as error:  # raised in code that is not ours: the loop's own load would raise it too
            return CheckpointView(
                refusal=f"{path}: cannot be read ({type(error).__name__}: {error}). Nothing was changed"
            )
        if not why:
            seen.chosen, seen.steps = path.name, steps
            break
        seen.unfit[path.name], seen.damaged = why, True
    return seen


def _find_flaw(kind: CheckpointFormat, path: Path, steps: int) -> str:
    try:
        return kind.find_flaw(path, steps)
    except kind.damage as error:
        raise Incomplete(f"it cannot be read ({type(error).__name__}: {error})") from error


def _find_trouble(folder: Path, views: Sequence[CheckpointView]) -> str:
    """Return what keeps the ranks from a decision; empty if nothing does."""
    for rank, view in enumerate(views):
        if view.trouble:
            return f"rank {rank}: {view.trouble}" if len(views) > 1 else view.trouble
        if view.absent and not all(other.absent for other in views):
            return f"rank {rank} does not see {folder}, which other ranks do: is its file system mounted there?"
        if view.chosen != views[0].chosen:
            first, other = views[0].chosen or "none", view.chosen or "none"
            return f"{folder}: rank 0 would go on from {first}, rank {rank} from {other}"
    return ""


def _conclude(folder: Path, seen: CheckpointView, kind: CheckpointFormat) -> str | None:
    if not seen.chosen and seen.damaged:
        listed = "; ".join(f"{name}: {why}" for name, why in seen.unfit.items())
        raise RollbackError(
            f"{folder} holds checkpoints, and none can be used: {listed}. Nothing was changed. To begin at step 0, "
            "move them away"
        )
    _set_aside(folder, seen, kind)
    if not seen.chosen:
        return None
    if _first():
        faults.say(f"going on after {seen.steps} steps, from {folder / seen.chosen}")
    return str(folder / seen.chosen)


def _set_aside(folder: Path, seen: CheckpointView, kind: CheckpointFormat) -> None:
    if not _first():
        return
    for name, why in seen.unfit.items():
        void = kind.name_void(folder / name)
        try:
            (folder / name).rename(void)
            faults.say(f"{name} is set aside as {void.name}: {why}")
        except OSError as error:
            faults.say(f"{name} is passed over: {why}; it cannot be renamed ({error.strerror})")


def _first() -> bool:
    """Whether this is rank 0, by the launcher's variable: there may be no process group yet."""
    return os.environ.get("RANK", "0") == "0"


EXCHANGE_SECONDS = 600.0
"""How long ranks wait for each other: rank 0 of each node reads all files of a snapshot to check them."""
_POLL_SECONDS = 0.02
_Result = TypeVar("_Result")

_made = 0


class RankExchange:
    """One exchange between all ranks, in rounds. All ranks make theirs in the same order."""

    def __init__(self, purpose: str) -> None:
        """`purpose`: begins the error messages."""
        global _made
        _made += 1
        self.rank, self.world = place()
        self._purpose, self._rounds = purpose, 0
        # With torchrun the store may outlive a restart.
        self._prefix = f"sentinel/exchange/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_made}"

    def gather(self, mine: bytes) -> list[bytes]:
        """Post a value, and return what each rank posted in this round, by rank. Raises RollbackError if a rank did
        not."""
        if self.world == 1:
            return [mine]
        self._rounds += 1
        store = group_store()
        if store is None:
            raise RollbackError(f"{self._purpose}: call it after torch.distributed.init_process_group, on every rank")
        keys = [f"{self._prefix}/{self._rounds}/{rank}" for rank in range(self.world)]
        try:
            store.set(keys[self.rank], mine)
            deadline = time.monotonic() + EXCHANGE_SECONDS
            while not store.check(keys):
                if time.monotonic() > deadline:
                    raise RollbackError(f"{self._purpose}: not every rank called it within {EXCHANGE_SECONDS:.0f} s")
                time.sleep(_POLL_SECONDS)
            return [bytes(store.get(key)) for key in keys]
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RollbackError(f"{self._purpose}: the process group's store is gone ({reason})") from error

    def run_on_all(self, action: Callable[[], _Result]) -> _Result:
        """Run `action`, and return its result once it succeeded on every rank.

        Raises what it raised here, and RollbackError if it failed on another rank.
        """
        try:
            result = action()
        except Exception as error:
            self.gather(f"{error}".encode() or b"?")
            raise
        for rank, failure in enumerate(self.gather(b"")):
            if failure:
                raise RollbackError(f"{self._purpose}: failed on rank {rank}: {failure.decode()}")
        return result
