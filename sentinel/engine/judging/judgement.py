"""Judge whether a rule fires for one entity: warming, inactive, pending, firing.

    inactive --condition true--> pending --held for `for`--> firing --false, and `keep_firing` over--> inactive

A judgement that cannot be made (an input is NaN or infinite) changes nothing: it counts neither for nor against.
"""

from __future__ import annotations

from typing import Literal, get_args

from sentinel.engine.span import Hold, Span

Status = Literal["firing", "pending", "nonfinite", "warming", "no data", "not applicable", "inactive"]
STATES: tuple[str, ...] = get_args(Status)
"""The states; the ones that need attention come first."""
Change = Literal["", "fired", "resolved"]


class Judge:
    """The state of one rule for one entity. Data only: what the rule says is passed in with each call."""

    __slots__ = (
        "_first_time", "_held", "_last_seq", "_last_time", "_recent", "_since", "firing", "first_seq", "judged", "note",
    )  # fmt: skip

    def __init__(self) -> None:
        self.firing = False
        self.judged = 0
        """Number of judgements so far."""
        self.note: Status = "warming"
        """What prevented the last judgement; `inactive` where nothing did."""
        self.first_seq, self._first_time = -1, 0.0
        """The first step of the stretch in which the condition holds; once it holds no more, of the last such
        stretch."""
        self._held = False
        self._since = -1
        """When it left `inactive`; from then on baselines are frozen. Before `first_seq`, where the window of `n of m`
        slid on."""
        self._last_seq, self._last_time = -1, 0.0
        """When the condition was last true."""
        self._recent: list[int] = []
        """For `n of m`: the last m judgements, each the seq where it was true, else -1."""

    @property
    def pending(self) -> bool:
        """Whether the condition holds, but not yet for long enough."""
        return self._held and not self.firing

    @property
    def suspicious(self) -> bool:
        """Whether it is pending or firing. If not, a condition that does not hold changes nothing."""
        return self._held or self.firing

    @property
    def status(self) -> Status:
        """The state in one word. While firing, it stays `firing` even if it cannot be judged."""
        if self.firing:
            return "firing"
        if self.note != "inactive":
            return self.note
        return "pending" if self._held else "inactive"

    def is_frozen(self, seq: int, rebase_after: int) -> bool:
        """Return whether baselines are frozen: pending or firing, for no longer than `rebase_after` steps."""
        return (self._held or self.firing) and seq - self._since <= rebase_after

    def judge(self, condition: bool, seq: int, time: float, hold: Hold, keep: Span) -> Change:
        """Take a judgement; return what it changed."""
        self.judged += 1
        if hold.of:
            self._recent.append(seq if condition else -1)
            del self._recent[: -hold.of]
        if condition:
            return self._take_true(seq, time, hold)
        return self._take_false(seq, time, hold, keep)

    def _take_true(self, seq: int, time: float, hold: Hold) -> Change:
        if not self._held and not self.firing:
            self.first_seq, self._first_time, self._since = seq, time, seq
        self._held, self._last_seq, self._last_time = True, seq, time
        if hold.of:
            trues = [at for at in self._recent if at >= 0]
            if not self.firing:
                self.first_seq = trues[0]
            enough = len(trues) >= hold.times
        else:
            enough = hold.span.is_reached(seq - self.first_seq + 1, time - self._first_time)
        if self.firing or not enough:
            return ""
        self.firing = True
        return "fired"

    def _take_false(self, seq: int, time: float, hold: Hold, keep: Span) -> Change:
        # Between two steps, the seq is that at which the condition held last.
        over = self.firing and keep.is_reached(max(seq - self._last_seq - 1, 0), time - self._last_time)
        # With n = m, one false judgement leaves nothing to wait for, and no samples to ask ranks for.
        self._held = not over and hold.times < hold.of and max(self._recent, default=-1) >= 0
        if not self._held:
            self._recent.clear()
        if not over:
            return ""
        self.firing = False
        return "resolved"
