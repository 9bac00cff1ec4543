"""The ranks' last word before a restore: all of them, or none.

    present    each rank that has the commit counts itself in, and waits for the rest
    verified   one collective: the same snapshot, the same step, and a snapshot that is sound on every rank
    decided    `go` or why not, written once, by the first rank that gets there; later ones read it

The daemon's commit goes out rank by rank, and the daemon may die between two of them; a collective may end on one rank
and time out on another. So neither of them decides, but a key in the process group's store, written by compare-and-set:
whatever a rank has seen or missed, it does what is written there. `go` is written by a rank that came out of the
collective, into which all ranks have to go with the commit in hand. A rank that has waited too long, for the verdict,
the others or the collective, writes why it did; if `go` was there before, it restores with the rest.

The collective runs in a group of its own, made for it and gone after it: the loop's own groups may be in any state, and
one in which somebody timed out is of no use for a second time.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from sentinel import wire
from sentinel.hooks.identity import group_store, place

VERIFY_SECONDS = 60.0
"""For the collective, and for making its group. Below the time-outs of process groups (NCCL 10 min, gloo 30 min): the
ranks that go on wait for those that stand here."""
_GO = "go"
_POLL_SECONDS = 0.001
_POLL_SECONDS_LATER = 0.02


class Consent:
    """Of one rank. Used at the exit of the promised step, on the training thread."""

    def __init__(self, patience_seconds: float) -> None:
        """How long the other ranks are waited for, besides the time that a step takes."""
        self._patience = patience_seconds

    def impossible(self) -> str:
        """Why the ranks cannot agree; empty if they can, or if there is but one."""
        if place()[1] == 1:
            return ""
        if group_store() is None:
            return "there is no process group that the ranks could agree by"
        if not torch.distributed.is_gloo_available():
            return "this PyTorch has no gloo, by which the ranks would agree"
        return ""

    def withhold(self, promise: wire.Prepare) -> None:
        """This rank goes on without a restore: no rank that waits for it may restore."""
        rank, world = place()
        if world > 1:
            try:
                self._decide(promise, f"rank {rank} got no verdict")
            except RuntimeError:
                pass  # then nobody comes out of the collective either, which is made by the store

    def asked(self, promise: wire.Prepare, sound: bool, step_seconds: float) -> str:
        """With the commit in hand: whether all ranks restore. Empty if so, else why nobody does."""
        rank, world = place()
        if world == 1:
            return ""
        try:
            word = self._await(promise, world, self._patience + 4 * step_seconds)
            if not word:
                word = self._decide(promise, self._verify(promise, sound, rank, world))
        except RuntimeError as error:
            # It takes the job with it: rank 0, or torchrun, holds it.
            word = f"the process group's store is gone ({_first_line(error)})"
        return "" if word == _GO else word

    def _await(self, promise: wire.Prepare, world: int, seconds: float) -> str:
        """Wait until all ranks are here; what was decided, where they will not be."""
        store, present, decided = group_store(), _key(promise, "present"), _key(promise, "decided")
        begun = time.monotonic()
        here = store.add(present, 1)
        while here < world:
            if store.check([decided]):
                return self._decide(promise, "")
            waited = time.monotonic() - begun
            if waited > seconds:
                word = f"only {here} of {world} ranks came to step {promise.at} within {seconds:.3g} s"
                return self._decide(promise, word)
            time.sleep(_POLL_SECONDS if waited < 1 else _POLL_SECONDS_LATER)
            here = store.add(present, 0)
        # The last may have come after another one had given up.
        return self._decide(promise, "") if store.check([decided]) else ""

    def _verify(self, promise: wire.Prepare, sound: bool, rank: int, world: int) -> str:
        """The collective: `go`, or what is wrong."""
        dist: Any = torch.distributed
        mine = (promise.to, promise.at, int(sound))
        least = torch.tensor([*mine, *(-number for number in mine)], device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        try:
            store = dist.PrefixStore(_key(promise, "group"), group_store())
            group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=VERIFY_SECONDS))
            group.allreduce([least], options).wait()
        except RuntimeError as error:  # DistStoreError and DistBackendError are
            return f"rank {rank}: the ranks could not verify the rollback ({_first_line(error)})"
        low, high = least[:3].tolist(), (-least[3:]).tolist()
        if low[:2] != high[:2]:
            return f"the ranks mean different snapshots or steps: {low[:2]} to {high[:2]}"
        return _GO if low[2] else f"the snapshot of step {promise.to} is not sound on every rank"

    def _decide(self, promise: wire.Prepare, word: str) -> str:
        """Write the word, unless one is written; the one that holds."""
        return bytes(group_store().compare_set(_key(promise, "decided"), "", word)).decode()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]


def _key(promise: wire.Prepare, part: str) -> str:
    return f"sentinel/rollback/{promise.id}/{part}"
