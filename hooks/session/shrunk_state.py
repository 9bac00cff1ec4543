"""Whether fewer ranks can go on from what more ranks of several nodes wrote: only where each of them had all of it.

Nothing tells replicas from tensors that a script sharded by hand. So the ranks that are left compare what they read:
where the weights and the state of the optimizers are the same on all, to the bit, those that are missing had nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sentinel.errors import RollbackError
from sentinel.hooks.core.identity import members
from sentinel.hooks.rollback.framework_checkpoints import RankExchange
from sentinel.hooks.snapshot.capture import spread
from sentinel.hooks.snapshot.checkpoint_files import digest_state
from sentinel.hooks.snapshot.parts import RunState
from sentinel.text import name_nodes


def refuse_sharded(path: Path, run: RunState, world_then: int) -> None:
    """Raises RollbackError where parts of tensors are missing."""
    sharded = next((name for name, one in run.weights.by_name().items() if spread(one) is not None), "")
    if sharded:
        raise RollbackError(_explain(path, world_then, f"{sharded} is sharded over them"))


def check_replicas(path: Path, named: Mapping[str, Any], rank: int, world_then: int, exchange: RankExchange) -> bool:
    """All ranks call it. `named`: what was read, as it was on `rank`. Returns whether no other rank goes on as that
    one: then its random generators are this one's alone. Raises RollbackError where parts are missing."""
    state = {name: part for name, part in named.items() if name == "weights" or name.startswith("optimizers[")}
    said = [word.decode().split() for word in exchange.gather(f"{rank} {digest_state(state)}".encode())]
    other = next((number for number, (_, digest) in enumerate(said) if digest != said[0][1]), None)
    if other is not None:
        raise RollbackError(
            _explain(path, world_then, f"ranks 0 and {other} have other weights, or other state of the optimizer")
        )
    return [taken for taken, _ in said].count(str(rank)) == 1


def _explain(path: Path, world_then: int, why: str) -> str:
    return (
        f"resume: {path} was written by {world_then} ranks, and {why}: the parts of {name_nodes(members().left_out)} "
        "are missing, which the job goes on without. Nothing was changed. Start the job with all its nodes, or resume "
        "it from a checkpoint that fewer ranks can read"
    )
