"""`sentinel.resume`: goes on from the newest good snapshot on disk, in a script that was started again.

step = sentinel.resume(model, optimizer, directory="snapshots")           # 0 where there is none yet
sentinel.attach(model, optimizer, step=step, rollback=sentinel.Rollback(directory="snapshots"))
for step in range(step, STEPS): ...
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from sentinel import snapshots
from sentinel.errors import RollbackError
from sentinel.hooks import checkpoints, faults, search, targets
from sentinel.hooks.identity import group_store, place
from sentinel.hooks.snapshot import put_back
from sentinel.hooks.snapshot_capture import Stateful
from sentinel.hooks.snapshot_disk import load
from sentinel.hooks.snapshot_parts import Randomness, parts_of
from sentinel.hooks.snapshot_weights import Weights

AGREEMENT_SECONDS = 600.0
"""How long ranks wait for each other: rank 0 of each node reads all files of a snapshot to check them."""
_POLL_SECONDS = 0.02

_calls = 0


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
    found where they are not given. Back come parameters, buffers, optimizers, scaler, schedulers, `state` and the
    random generators, bit by bit. The loader does not: leave out the batches that were used, or give a sampler that has
    a `state_dict` as `state`. All ranks take the same snapshot, the newest that is sound for all of them; of steps
    before `before`, or SENTINEL_RESUME_BEFORE, where that is set.

    Returns your number of the next step: 0 where there is no snapshot, and nothing was touched. Raises RollbackError
    where the directory is not yours alone, or where a snapshot is there and the model or optimizer does not fit it.
    """
    models, optimizers = targets.models_of(model), targets.optimizers_of(optimizer)
    targets.check(models, optimizers)
    directory = snapshots.directory(directory, make=True)
    checkpoints.asking()
    chosen = _chosen(directory, checkpoints.bound(before))
    rank, world = place()
    if rank == 0 and (void := snapshots.void(directory, chosen.step if chosen is not None else -1)):
        faults.say(f"snapshots that are damaged or were ruled out are set aside: of steps {', '.join(map(str, void))}")
    if chosen is None:
        return 0
    scaler, schedulers = search.completed(optimizers, scaler, scheduler, "resume")
    parts = parts_of(models, optimizers, state=state or {}, schedulers=schedulers, scaler=scaler)
    parameters = Weights(models, optimizers).by_name()
    named = load(chosen.path, rank, parameters)
    if absent := [part.name for part in parts if part.name not in named]:
        raise RollbackError(f"{chosen.path} has no {absent[0]}: it is of a run that had none")
    if unclaimed := [name for name in named if name not in {part.name for part in parts}]:
        raise RollbackError(f"{chosen.path} has {unclaimed[0]}, which nothing was given for: pass it to resume()")
    if rank >= chosen.manifest.world_size:  # it was not there then, and would draw what rank 0 draws
        parts = [part for part in parts if not isinstance(part, Randomness)]
    put_back(parts, [part.found(named[part.name]) for part in parts])
    if rank == 0:
        spread = f", written by {chosen.manifest.world_size} ranks" if chosen.manifest.world_size != world else ""
        faults.say(f"going on after step {chosen.step}, from {chosen.path}{spread}")
    return chosen.step + 1


def _chosen(directory: Path, before: int | None) -> snapshots.Snapshot | None:
    """The newest snapshot that is sound for every rank."""
    thorough = os.environ.get("LOCAL_RANK", "0") == "0"  # once a node is enough: what is damaged is so for all of it
    sound: dict[int, snapshots.Snapshot] = {}
    rank, world = place()
    for snapshot in snapshots.published(directory):
        if before is not None and snapshot.step >= before:
            continue
        if flaw := snapshot.flaw(thorough=thorough):
            faults.say(f"a snapshot is left out: {flaw}")
            continue
        sound[snapshot.step] = snapshot
        if world == 1:
            break
    common = set(sound) if world == 1 else _common(rank, world, sorted(sound))
    return sound[max(common)] if common else None


def _common(rank: int, world: int, steps: list[int]) -> set[int]:
    """What all ranks have, by the process group's store: it is there whatever the backend, and no collective."""
    global _calls
    store = group_store()
    if store is None:
        raise RollbackError("resume: call it after torch.distributed.init_process_group, on every rank")
    _calls += 1
    keys = [f"sentinel/resume/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_calls}/{r}" for r in range(world)]
    store.set(keys[rank], json.dumps(steps))
    deadline = time.monotonic() + AGREEMENT_SECONDS
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RollbackError(f"resume: not every rank called it within {AGREEMENT_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
    return set.intersection(*(set(json.loads(store.get(key))) for key in keys))
