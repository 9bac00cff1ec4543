"""What the daemon costs each rank: its own CPU time, shared out by what the ranks sent.

The governor in the hooks holds all of Sentinel to a budget, and the daemon runs on the same cores. It tells a rank
what it spends on it once that has changed: each message wakes the rank's sender, which takes time from training too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from sentinel.runs import Rank

NEWEST = 0.3
"""Weight of the newest second in a rank's running mean."""
NEWS = 0.2
"""Share by which it must have changed to be told."""
NOTICEABLE = 0.0005
"""CPU seconds per second. A rank is not told of a change by less."""


class Accounting:
    """Called about once a second. `used` tells the CPU seconds of this process, all threads."""

    def __init__(self, used: Callable[[], float] = time.process_time) -> None:
        self._used = used
        self._bytes: Counter[Rank] = Counter()
        self._told: dict[Rank, float] = {}
        self._since: tuple[float, float] | None = None

    def count_frame(self, rank: Rank, nbytes: int) -> None:
        """A frame of so many bytes came from this rank."""
        self._bytes[rank] += nbytes

    def turn(self, ranks: Collection[Rank], now: float) -> list[Rank]:
        """Share out what was used since the last turn; answer the ranks that are to be told. `now` in seconds.

        A rank's first turn does not count against it: hello, history and tables come once. Nor does a daemon's start.
        """
        used, since, sent = self._used(), self._since, self._bytes
        self._since, self._bytes = (used, now), Counter()
        known = {rank: self._told.get(rank, -1.0) for rank in ranks}
        fresh = known.keys() - self._told.keys()
        self._told = known
        if since is None or now <= since[1]:
            return []
        # One byte more each: a second in which no rank sent anything is shared out evenly.
        weight = (used - since[0]) / (now - since[1]) / (sum(sent[rank] for rank in ranks) + max(len(ranks), 1))
        return [rank for rank in ranks if rank not in fresh and self._charge(rank, (sent[rank] + 1) * weight)]

    def _charge(self, rank: Rank, share: float) -> bool:
        """Charge a rank with CPU seconds a second; answer whether it is to be told."""
        told = self._told[rank]
        rank.daemon_share += (share - rank.daemon_share) * (NEWEST if told >= 0.0 else 1.0)
        if told >= 0.0 and abs(rank.daemon_share - told) <= max(NEWS * told, NOTICEABLE):
            return False
        self._told[rank] = rank.daemon_share
        return True
