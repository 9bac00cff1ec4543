"""The line at the end of a run: how it ended, and what was found in it. For its terminal and its trackers."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from sentinel import wire
from sentinel.hooks.core import faults
from sentinel.hooks.core.identity import place
from sentinel.hooks.trackers import Summary
from sentinel.hooks.trackers.tracker_threads import RunTrackers
from sentinel.hooks.transport.sender import GREETING, RECORDING, STREAMING, Sender
from sentinel.text import close_run, name_reached


class _LastMoment(NamedTuple):
    """The end of a run: its goodbye, and the sender's state then."""

    goodbye: wire.Goodbye
    sender_state: str


class ClosingLine:
    """The closing line of a run. Printed once, unless another session goes on with the run."""

    def __init__(self, run_name: str, sender: Sender, trackers: RunTrackers) -> None:
        self._run_name, self._sender, self._trackers = run_name, sender, trackers
        self.began = time.time()
        self.closing: wire.Closing | None = None
        """The daemon's findings at the end of the run; None until they arrive."""
        self._prints = place()[0] == 0 and not os.environ.get("SENTINEL_SUPERVISOR")
        """Whether this process prints the line: the first rank does, unless `sentinel run` does."""
        self._run_id = ""
        self._last: _LastMoment | None = None

    @property
    def wanted(self) -> bool:
        """Whether this process uses what the daemon says at the end."""
        return self._prints or self._trackers.is_open

    def identify(self, identity: wire.Identity) -> None:
        """Set which rank of which run this is."""
        self._run_id = identity.run_id
        self._prints = self._prints and identity.rank == 0

    def note_end(self, goodbye: wire.Goodbye) -> None:
        """Note that the run is over; `say` prints the line."""
        self._last = _LastMoment(goodbye, self._sender.state)

    @property
    def is_due(self) -> bool:
        """Whether the run is over, and the line was not printed yet."""
        return self._last is not None

    def say(self, step_offset: int) -> None:
        """Print the closing line, and give it to the trackers, if the run is over and that was not said.

        `step_offset`: the step that the run began with.
        """
        last, self._last = self._last, None
        if last is None or not self.wanted:
            return
        found, in_history = self._describe_findings(last)
        steps, reason = last.goodbye.next_seq, last.goodbye.reason
        how = {"exception": f"by {last.goodbye.detail.partition(':')[0]}", "stopped": "stopped by Sentinel"}
        summary = self.closing.summary if self.closing is not None else None
        text = close_run(
            self._run_name,
            self._run_id if in_history else "",
            name_reached(steps, steps - 1 + step_offset),
            seconds=(summary.seconds if summary is not None else 0.0) or last.goodbye.time - self.began,
            how=how.get(reason, ""),
            found=found,
        )
        if self._prints:
            faults.say(text)
        incidents = summary.incidents if summary is not None else {}
        self._trackers.end(Summary(text, max(steps - 1, 0) + step_offset, incidents))

    def _describe_findings(self, last: _LastMoment) -> tuple[str, bool]:
        """Return what the daemon found, as far as known here, and whether the history says more, or will."""
        if not last.goodbye.next_seq:
            return "there was nothing to judge", False
        if self.closing is not None:
            summary = self.closing.summary
            if summary is None:
                return "no step was judged", True
            short = last.goodbye.next_seq > summary.steps
            return summary.text + (f"; judged up to step {summary.step:,}" if short else ""), summary.kept
        if self._sender.left_record:
            return "its daemon has yet to judge it", True
        state = self._sender.last_state or last.sender_state  # the sender may have connected after the last step only
        if state.startswith(RECORDING):
            return f"recorded and not judged; sentinel replay {state.removeprefix(RECORDING)}", False
        # What was sent is judged, whether an answer came or not.
        if self._sender.has_answered or state in (GREETING, STREAMING):
            return "its daemon did not say in time what it found", True
        return "not judged, as no daemon took part", False
