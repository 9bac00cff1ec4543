"""Passes marks to trackers: a thread for each tracker, a bounded queue, at most one write a second.

A tracker may wait for a network or raise: the training thread and the sender never wait for it, and only the end of the
run waits, for at most `END_SECONDS`. Marks that were not written are counted and reported.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sentinel.hooks.core import faults
from sentinel.hooks.core.threads import start_thread
from sentinel.hooks.trackers import IncidentMark, Summary, Tracker, make_mark, mlflow, tensorboard, trackio, wandb
from sentinel.text import format_count

KINDS: dict[str, Callable[[], Tracker]] = {
    wandb.NAME: wandb.WandbRun,
    mlflow.NAME: mlflow.MlflowRun,
    trackio.NAME: trackio.TrackioRun,
    tensorboard.NAME: tensorboard.TensorBoardFolder,
}
WRITE_SECONDS = 1.0
"""Least time between two writes into a tracker."""
LOOK_SECONDS = 1.0
"""Least time between two looks for the runs that the script has open."""
END_SECONDS = 3.0
"""Longest time that the end of a run waits for its trackers."""
WAITING_MARKS = 256
"""Most marks that wait for one tracker. Above it the newest are dropped."""


class TrackerThread(threading.Thread):
    """Writes into one tracker. Other threads call `put` and `end`."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(name=f"sentinel-{name}", daemon=True)
        self.tracker = tracker
        self._label, self._fault = name, ""
        self._marks = deque[IncidentMark]()
        self._summary: Summary | None = None
        self._change = threading.Condition()
        self._ending = False
        self._dropped = 0
        self._next = 0.0
        """Earliest time of the next write."""

    def put(self, mark: IncidentMark) -> None:
        """Queue a mark; returns at once."""
        with self._change:
            if len(self._marks) < WAITING_MARKS:
                self._marks.append(mark)
                self._change.notify()
            else:
                self._drop(1, f"more than {WAITING_MARKS} wait")

    def end(self, summary: Summary | None) -> None:
        """Have the rest written, and the summary; then the thread ends."""
        with self._change:
            self._summary, self._ending = summary, True
            self._change.notify()

    def run(self) -> None:
        """Write until the end. The body of the thread."""
        try:
            while self._turn():
                pass
            self.tracker.close()
        except Exception:
            faults.swallow(self.name, "without it")

    def _turn(self) -> bool:
        """Do one write, when it is due. Returns False after the last."""
        with self._change:
            self._change.wait_for(lambda: self._ending or self._marks)
            while (left := self._next - time.monotonic()) > 0:
                self._change.wait(left)
            marks, summary, last = list(self._marks), self._summary, self._ending
        taken = self._write(marks, summary)
        with self._change:
            self._next = time.monotonic() + WRITE_SECONDS
            for _ in range(taken):
                self._marks.popleft()
            if last and self._marks:
                self._drop(len(self._marks), "the run was over first" if self.tracker.open else "no run is open there")
        if last and self._dropped:
            lost = format_count(self._dropped, "mark")
            faults.say(f"trackers: {lost} of incidents not written into {self._label}: {self._fault}")
        return not last

    def _write(self, marks: list[IncidentMark], summary: Summary | None) -> int:
        if not self.tracker.open:
            return 0
        try:
            return self.tracker.write(marks, summary)
        except Exception as error:
            kind = type(error).__name__  # its text may hold an address with a password
            with self._change:
                self._drop(len(marks), f"it raised {kind}")
            if summary is not None:
                faults.say(f"trackers: {self._label} raised {kind}; the summary may not be there")
            return len(marks)

    def _drop(self, count: int, fault: str) -> None:
        if count and not self._dropped:
            faults.say(f"trackers: {self._label}: marks of incidents are dropped: {fault}")
        self._dropped, self._fault = self._dropped + count, fault


class RunTrackers:
    """The trackers of one run. None are open until the settings have named them, and only the first rank opens any."""

    def __init__(self) -> None:
        self.is_open = False
        """Whether trackers were named, and opened as far as they are known."""
        self._threads: list[TrackerThread] = []
        self._look_at = 0.0

    def open(self, names: Sequence[str]) -> bool:
        """Open those of these names that are known, unless that is done. Returns whether it was done now.

        Raises RuntimeError if no thread can be started.
        """
        if not names or self.is_open:
            return False
        threads = [TrackerThread(name, KINDS[name]()) for name in names if name in KINDS]
        for thread in threads:
            start_thread(thread)
        self._threads, self.is_open = threads, True
        return True

    def abandon(self) -> None:
        """Have no trackers from now on, in a forked child: the threads are the parent's."""
        self._threads, self.is_open = [], False

    def look(self, *, last: bool = False) -> None:
        """See which runs the script has open, now and then, and at the `last` moment. On the training thread."""
        if not self._threads:
            return
        now = time.monotonic()
        if last or now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            for thread in self._threads:
                with faults.swallow_faults(thread.name, "incidents may not be marked there"):
                    thread.tracker.look()

    def put(self, alert: Mapping[str, Any]) -> None:
        """Queue the mark of an alert, as `on_alert` gets it. On the sender's thread."""
        mark = make_mark(alert) if self._threads else None
        if mark is not None:
            for thread in self._threads:
                thread.put(mark)

    def end(self, summary: Summary | None) -> None:
        """End the threads, as the run is over, or as another session goes on with it.

        In the second case there is no summary, and nothing is waited for.
        """
        for thread in self._threads:
            thread.end(summary)
        until = time.monotonic() + END_SECONDS
        for thread in self._threads if summary is not None else ():
            thread.join(max(until - time.monotonic(), 0.0))
            if thread.is_alive():
                faults.say(f"{thread.name}: not everything was written within {END_SECONDS:g} s")
