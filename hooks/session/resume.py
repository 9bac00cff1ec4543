"""`sentinel.resume`: goes on from the newest good snapshot on disk, in a script that was started again.

    step = sentinel.resume(model, optimizer, directory="snapshots")           # 0 where there is none yet
    sentinel.attach(model, optimizer, step=step, rollback=sentinel.Rollback(directory="snapshots"))
    for step in range(step, STEPS): ...

The state of schedulers, a loss scaler or averaged models that the script makes only later is kept for them
(`AwaitedState`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from sentinel.errors import RollbackError
from sentinel.hooks.core import faults
from sentinel.hooks.core.faults import RETRY_SECONDS, Retry
from sentinel.hooks.core.identity import attempt, find_node, leads_node, local_rank, members, spans_nodes
from sentinel.hooks.core.threads import say_if_late
from sentinel.hooks.loop.forward_passes import explain_no_hooks
from sentinel.hooks.rollback import framework_checkpoints
from sentinel.hooks.rollback.disk_writer import begin_line
from sentinel.hooks.rollback.framework_checkpoints import RankExchange
from sentinel.hooks.rollback.options import check_state
from sentinel.hooks.session import arguments
from sentinel.hooks.session.resume_over_nodes import check_sharing, compare_replicas, refuse_sharded, search_parts
from sentinel.hooks.snapshot import directory as snapshots
from sentinel.hooks.snapshot import node_parts
from sentinel.hooks.snapshot.capture import Part, Stateful
from sentinel.hooks.snapshot.checkpoint_files import load
from sentinel.hooks.snapshot.choice import Begin, PassOver, PassParts, Refuse, Take, View, decide
from sentinel.hooks.snapshot.node_parts import Looker, look
from sentinel.hooks.snapshot.parts import RngPart, RunState, rename_parts
from sentinel.hooks.snapshot.snapshot import HalfRestored, put_back
from sentinel.hooks.snapshot.state_owners import Owners
from sentinel.hooks.torch_interop.internals import UncopiedHook, exclude_from_tracing
from sentinel.text import name_ranks

_Read = tuple[dict[str, Any], int]
"""The state by part names, and the number of ranks that wrote it."""


class _Taken(msgspec.Struct, frozen=True):
    """The snapshot to go on from, as this rank has it."""

    step: int
    path: str
    rank: int
    """The rank whose part of it this rank takes, where fewer ranks go on than nodes wrote it; -1: its own."""


def resume(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    directory: str | os.PathLike[str],
    scaler: Any = None,
    scheduler: Any = None,
    state: Mapping[str, Stateful] | None = None,
    before: int | None = None,
) -> int:
    """Put a run back to its newest good snapshot on disk. Call it once everything is built, wrapped and sharded, right
    before `attach`; on every rank where there are several.

    `directory` is what `Rollback(directory=...)` names, and `state` what its `state` does; `scaler` and `scheduler` are
    found where they are not given. It restores parameters, buffers, optimizers, scaler, schedulers, `state` and the
    random generators, bit by bit. It does not restore the loader: leave out the batches that were used, or give a
    sampler that has a `state_dict` as `state`. All ranks take the same snapshot: the newest that is sound for all of
    them, of a step before `before`, or SENTINEL_RESUME_BEFORE, where that is set.

    Returns your number of the next step: 0 where there is no snapshot, and nothing was touched. Raises RollbackError
    where there are snapshots and none can be used, where one cannot be read for 60 s or is of another format, where the
    directory is not yours alone, and where the model or optimizer does not fit. Nothing is renamed then. Raises
    AttachError where an argument makes no sense.
    """
    models, optimizers = arguments.models_of(model), arguments.optimizers_of(optimizer)
    arguments.check(models, optimizers)
    arguments.refuse_meta(models)
    check_state(state or {}, "resume")
    folder = Path(directory).absolute()
    framework_checkpoints.asking()
    exchange = RankExchange("resume")
    taken, damaged = _choose(folder, framework_checkpoints.find_bound(before), exchange)
    if isinstance(taken, Begin):
        makes = exchange.rank == 0 or (spans_nodes() and leads_node())  # each node may have a disk of its own
        exchange.run_on_all(lambda: snapshots.directory(folder, make=True) if makes else None)
        _begin_line(folder, -1, damaged, exchange)
        return 0
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    own = [*(state or {}).values()]
    owners = Owners(models, optimizers, given=given, scaler=scaler, scheduler=scheduler, taken=own, call="resume")
    run = RunState(models, optimizers, owners, state or {})
    path = Path(taken.path)

    def read() -> _Read:
        manifest = snapshots.read_manifest(path)
        if not isinstance(manifest, snapshots.Manifest):
            raise OSError(manifest.why)
        rank = taken.rank if taken.rank >= 0 else exchange.rank
        if taken.rank >= 0:
            refuse_sharded(path, run, manifest.world_size)
        return load(path, rank, run.weights.by_name(), manifest.ranks), manifest.world_size

    with say_if_late(f"resume: reading {path}", speaks=leads_node()):
        named, world_then = exchange.run_on_all(lambda: _compare_names(path, run, owners, _retry(path, read)))
    parts = list(run.parts)
    unseen: Sequence[int] = ()
    is_alone = exchange.rank < world_then  # else this rank did not exist then, and would draw what rank 0 draws
    if taken.rank >= 0:
        compared = compare_replicas(folder, path, named, taken.rank, run.weights.by_name(), exchange)
        is_alone, unseen = compared.is_alone, compared.unseen
    if not is_alone:
        parts = [part for part in parts if not isinstance(part, RngPart)]
    exchange.run_on_all(lambda: _put_back(parts, named))
    if unclaimed := [name for name in named if name not in {part.name for part in run.parts}]:
        AwaitedState(run, named, unclaimed).watch(models, optimizers[0])
    _begin_line(folder, taken.step, damaged, exchange)
    if exchange.rank == 0:
        spread = f", written by {world_then} ranks" if world_then != exchange.world else ""
        if unseen:
            spread += f"; what {name_ranks(unseen)} had is not seen here, and was not compared with theirs"
        faults.say(f"going on after step {taken.step}, from {path}{spread}")
    return taken.step + 1


def _begin_line(folder: Path, after: int, damaged: Collection[int], exchange: RankExchange) -> None:
    """Begin a new line of snapshots, once all ranks have gone back. Younger ones are set aside, later ones belong
    together."""
    is_done = _set_aside(folder, after, damaged) if exchange.rank == 0 else True
    name = exchange.gather(secrets.token_hex(4).encode())[0].decode()
    if spans_nodes():
        if leads_node():  # those that rank 0 did not see
            is_done = _set_aside(folder, after, damaged)
        check_sharing(folder, name, exchange)
    begin_line(name, None if is_done else (folder, after))


def _choose(folder: Path, before: int | None, exchange: RankExchange) -> tuple[_Taken | Begin, set[int]]:
    """Choose the snapshot to go on from, of the same step on all ranks. Returns also the steps passed over as
    damaged."""
    thorough = leads_node()  # once per node is enough: what is damaged is so for all of it
    passed: dict[int, str] = {}  # step -> why: damaged, or not there for all ranks
    damaged: set[int] = set()
    whole: set[int] = set()
    retry, told = Retry(), ""
    looker = Looker(
        rank=exchange.rank, world=exchange.world, node=find_node(exchange.rank), local_rank=local_rank(),
        shrunk=bool(members().left_out),
    )  # fmt: skip
    restarted = attempt(os.environ) > 0 or bool(os.environ.get(framework_checkpoints.BEFORE))
    while True:
        with say_if_late(f"resume: reading {folder}", speaks=thorough):
            mine = look(
                folder, looker, before=before, passed=passed, whole=whole, thorough=thorough, late=retry.over,
                apart=spans_nodes(),
            )  # fmt: skip
        whole |= {step for step, seen in mine.snapshots.items() if seen.state == "whole"}
        views = [msgspec.json.decode(view, type=View) for view in exchange.gather(msgspec.json.encode(mine))]
        match decide(views, before=before, passed=passed, restarted=restarted):
            case Begin() as decision:
                return decision, damaged
            case Take(step):
                return _Taken(step, mine.snapshots[step].path, mine.snapshots[step].rank), damaged
            case PassOver(step, why):
                passed[step] = why
                damaged.add(step)
                retry = Retry()
                if exchange.rank == 0:
                    faults.say(f"the snapshot of step {step} is passed over, it is damaged: {why}")
            case PassParts(steps, ranks, older):
                why = search_parts(folder, steps[0], ranks, looker, exchange, older=older)
                passed.update(dict.fromkeys(steps, why))
                retry = Retry()
                if exchange.rank == 0:
                    faults.say(why)
            case Refuse(why):
                raise RollbackError(f"resume: {why}")
            case wait:
                if views[0].late:
                    raise RollbackError(f"resume: {wait.why} (for {RETRY_SECONDS:.0f} s). Nothing was changed")
                if exchange.rank == 0 and wait.why != told:
                    told = wait.why
                    faults.say(f"resume: {told}; looked at again for {RETRY_SECONDS:.0f} s")
                retry.pause()


_NO_SNAPSHOT = (*framework_checkpoints.DAMAGE, AttributeError, IndexError, TypeError, ValueError)
"""What reading raises if the bytes are not those of a snapshot."""


def _retry(path: Path, read: Callable[[], _Read]) -> _Read:
    """Return what `read` returns; try again if the operating system fails it.

    Raises RollbackError after a while, and at once if what was read makes no sense.
    """
    retry = Retry()
    while True:
        try:
            return read()
        except OSError as error:
            if retry.over:
                raise RollbackError(f"{path}: cannot be read for {RETRY_SECONDS:.0f} s: {error}") from error
        except _NO_SNAPSHOT as error:
            raise RollbackError(
                f"resume: {path}: its files have their checksums and hold no snapshot that can be read "
                f"({faults.describe(error)}). Nothing was changed; resume(before=...) goes on from an older one"
            ) from error
        retry.pause()


def _compare_names(path: Path, run: RunState, owners: Owners, read: _Read) -> _Read:
    """Return what was read, if its parts are those of this run, apart from parts that may be made later.

    Raises RollbackError otherwise.
    """
    found, world = read
    named = rename_parts(found, run.parts, owners.schedulers)
    known = {part.name for part in run.parts}
    if absent := [name for name in known if name not in named]:
        raise RollbackError(f"{path} has no {absent[0]}: it is of a run that had none")
    if missing := [name for name in named if name not in known and not may_come(name)]:
        raise RollbackError(f"{path} has {missing[0]}, which nothing was given for: pass it to resume()")
    return named, world


def _put_back(parts: Sequence[Part], named: Mapping[str, Any]) -> None:
    """Load the state into the run. Raises RollbackError if it was restored only in part."""
    try:
        put_back(parts, {part.name: part.import_named(named[part.name]) for part in parts})
    except HalfRestored as error:
        raise RollbackError(f"{error}. The run is in no state to train: end it") from error


def _set_aside(folder: Path, after: int, damaged: Collection[int]) -> bool:
    """Rename the snapshots younger than the one that the run goes on from. Returns whether that succeeded.

    On rank 0, once all ranks have gone back.
    """
    steps: set[int] = set()
    try:
        with say_if_late(f"resume: setting aside what is younger in {folder}", speaks=True):
            for place in (folder, *(own for _, own in node_parts.list_places(folder))):
                steps.update(snapshots.set_aside(place, after, damaged))
    except OSError as error:
        # It is done before the next snapshot is written. A run that dies before that finds them again.
        faults.say(f"{folder}: snapshots after step {after} could not be set aside ({error.strerror})")
        return False
    if steps:
        faults.say(
            f"snapshots of steps {', '.join(map(str, sorted(steps)))} are set aside as .void-*; they are deleted once "
            "newer ones are there and were read back"
        )
    return True


_MADE_LATER = re.compile(r"optimizers\[\d+\]\.\w+\[\d+\]|AveragedModel\[\d+\]|scaler")


def may_come(name: str) -> bool:
    """Whether the part of this name may be made after `resume`."""
    return _MADE_LATER.fullmatch(name) is not None


class AwaitedState:
    """Holds state until its owners exist: gives it to them at a forward pass or at the first step, then ends.

    It does so before a forward pass, since a loss is scaled right after it; a pass of a compiled graph and that of a
    model without hooks are not seen. A scheduler writes the learning rates when
    it is made: so the parameter groups are put back once more.
    """

    def __init__(self, run: RunState, named: Mapping[str, Any], awaited: Sequence[str]) -> None:
        self._run, self._named, self._awaited = run, named, set(awaited)
        self._handles: list[Any] = []

    def watch(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Begin to wait for the owners."""
        hooked = [model for model in models if not explain_no_hooks(model)]
        self._handles = [UncopiedHook(model.register_forward_pre_hook(self._before_forward)) for model in hooked]
        before_step = exclude_from_tracing(partial(self._before_step))
        self._handles.append(optimizer.register_step_pre_hook(before_step))

    def _before_forward(self, *_: object) -> None:
        if torch.compiler.is_compiling():  # a constant in a compiled graph, which may have no break: then at the step
            return
        with faults.swallow_faults("giving back what was read from the snapshot", "without it"):
            self._give()

    def _before_step(self, *_: object) -> None:
        with faults.swallow_faults("giving back what was read from the snapshot", "without it"):
            self._give()
            if self._awaited:
                faults.say(
                    f"the snapshot has {', '.join(sorted(self._awaited))}, which this run has not made by its first "
                    "step: make it before, or give it to resume()"
                )
            self._end()

    def _give(self) -> None:
        self._run.refresh()
        parts = [part for part in self._run.parts if part.name in self._awaited]
        if not parts:
            return
        groups = [part for part in self._run.parts if part.name.endswith(".param_groups")]
        self._awaited -= {part.name for part in parts}
        put_back(
            [*parts, *groups], {part.name: part.import_named(self._named[part.name]) for part in (*parts, *groups)}
        )
        if not self._awaited:
            self._end()

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._named = {}
