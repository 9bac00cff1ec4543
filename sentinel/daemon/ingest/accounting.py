"""What the daemon costs each rank: its own CPU time, divided by the bytes that the ranks sent.

The governor in the hooks holds all of Sentinel to a budget, and the daemon runs on the same cores. The daemon tells a
rank its cost only when that has changed: each message wakes the rank's sender, which takes time from training too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from sentinel.runs import Rank

NEWEST = 0.3
"""Weight of the newest second in a rank's running mean."""
NEWS = 0.2
"""Relative change of the mean above which a rank is told."""
NOTICEABLE = 0.0005
"""CPU seconds per second: a rank is not told of a smaller change."""


class Accounting:
    """Charges ranks about once a second. `used` returns the CPU seconds of this process, all threads."""

    def __init__(self, used: Callable[[], float] = time.process_time) -> None:
        self._used = used
        self._bytes: Counter[Rank] = Counter()
        self._told: dict[Rank, float] = {}
        self._since: tuple[float, float] | None = None

    def count_frame(self, rank: Rank, nbytes: int) -> None:
        """Count a frame of `nbytes` bytes from this rank."""
        self._bytes[rank] += nbytes

    def turn(self, ranks: Collection[Rank], now: float) -> list[Rank]:
        """Divide the time used since the last turn, and return the ranks to be told. `now` in seconds.

        A rank is not charged for its first turn: hello, history and tables come once. Nor for the daemon's start.
        """
        used, since, sent = self._used(), self._since, self._bytes
        self._since, self._bytes = (used, now), Counter()
        known = {rank: self._told.get(rank, -1.0) for rank in ranks}
        fresh = known.keys() - self._told.keys()
        self._told = known
        if since is None or now <= since[1]:
            return []
        # One byte more for each: a second in which no rank sent anything is divided evenly.
        weight = (used - since[0]) / (now - since[1]) / (sum(sent[rank] for rank in ranks) + max(len(ranks), 1))
        return [rank for rank in ranks if rank not in fresh and self._charge(rank, (sent[rank] + 1) * weight)]

    def _charge(self, rank: Rank, share: float) -> bool:
        """Charge a rank with CPU seconds per second; return whether to tell it."""
        told = self._told[rank]
        rank.daemon_share += (share - rank.daemon_share) * (NEWEST if told >= 0.0 else 1.0)
        if told >= 0.0 and abs(rank.daemon_share - told) <= max(NEWS * told, NOTICEABLE):
            return False
        self._told[rank] = rank.daemon_share
        return True
