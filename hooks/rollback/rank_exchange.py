"""What ranks tell each other before training: every rank posts a text, and reads those of all.

By the process group's store: it is there whatever the backend, and no collective. In the loop nothing of this is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from sentinel.errors import RollbackError
from sentinel.hooks.core.identity import group_store, place

EXCHANGE_SECONDS = 600.0
"""How long ranks wait for each other: rank 0 of each node reads all files of a snapshot to check them."""
_POLL_SECONDS = 0.02
_Result = TypeVar("_Result")

_made = 0


class RankExchange:
    """One conversation of all ranks, in rounds. Ranks make theirs in the same order."""

    def __init__(self, purpose: str) -> None:
        """`purpose`: what is said where a rank does not come."""
        global _made
        _made += 1
        self.rank, self.world = place()
        self._purpose, self._rounds = purpose, 0
        # With torchrun the store may outlive a restart.
        self._prefix = f"sentinel/exchange/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_made}"

    def gather(self, mine: bytes) -> list[bytes]:
        """What each rank posted in this round, by rank. Raises RollbackError where a rank did not."""
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
        """What `action` returns, once it succeeded on every rank. Raises what it raised here, and RollbackError where
        it failed on another rank."""
        try:
            result = action()
        except Exception as error:
            self.gather(f"{error}".encode() or b"?")
            raise
        for rank, failure in enumerate(self.gather(b"")):
            if failure:
                raise RollbackError(f"{self._purpose}: failed on rank {rank}: {failure.decode()}")
        return result
