"""One watched run, of three parts: `ingest` takes in, `incidents` judge, store and report, `actions` act.

Batch -> RunIngest -> RunIncidents -> RunActions -> ranks
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from sentinel.actions import Factory
from sentinel.actions.restart import is_stall
from sentinel.cluster.membership import Membership
from sentinel.daemon.run.actions import RunActions
from sentinel.daemon.run.context import RunContext
from sentinel.daemon.run.incidents import RunIncidents
from sentinel.daemon.run.ingest import RunIngest
from sentinel.daemon.run.meeting_search import MeetingSearch
from sentinel.diagnose.case import Case
from sentinel.engine import Rule
from sentinel.notify.notifier import Notifier
from sentinel.store import Store

PIDS = 8
"""Most processes that are named: a launcher ends the others."""
TROUBLE_SECONDS = 60.0
"""Seconds between two reports that the history is not written."""


class JobSupervision(Protocol):
    """Reaches the supervisors of jobs."""

    def end_job(self, watch: WatchedRun, case: Case) -> bool:
        """Have the job of a run ended; False if no supervisor would do it."""


class WatchedRun:
    """Composes the parts of one run, and ticks them."""

    def __init__(
        self,
        context: RunContext,
        notifier: Notifier,
        rules: Sequence[Rule],
        actions: Mapping[str, Factory] = MappingProxyType({}),
        supervision: JobSupervision | None = None,
        stop_on: Sequence[str] = (),
    ) -> None:
        """`actions`: those of other packages, by name; `stop_on`: further alerts that stop this run."""
        self.context, self.run, self.store, self.notifier = context, context.run, context.store, notifier
        self._supervision = supervision
        self.incidents = RunIncidents(context, notifier, rules, stop_on)
        self.actions = self.incidents.actions = RunActions(context, self.incidents, actions, self)
        self.ingest = RunIngest(context, self.incidents, self.actions)
        self.membership: Membership | None = None
        """This node's membership in the job, if that is over several nodes that meet."""
        self.search: MeetingSearch | None = None
        """The search for the place where the job's nodes meet, if they must find it."""
        self.why_no_history = ""
        """Why there is no history; empty if there is one."""
        self.looked = 0.0
        """When the run was last ticked, in monotonic seconds."""
        self.left = 0.0
        """When a rank last left, in monotonic seconds."""
        self.faulty = False
        """Whether the last tick failed."""
        self._tell_trouble_at = -math.inf

    def tick(self, now: float) -> None:
        """Check steps that wait for a silent rank, time-outs, and trouble with the disk.

        Called once a second, and more often while `restless`.
        """
        self.ingest.tick(now)
        self.actions.tick(now)
        self.incidents.tick(now)
        self.actions.take_up_interrupted(now)
        if self.store:
            self._tell_of_history(self.store, now)

    @property
    def restless(self) -> bool:
        """Whether something is open that needs a tick several times a second."""
        return self.actions.restless or self.ingest.stalls.restless or self.incidents.evaluator.suspicious

    def end_job(self, case: Case) -> bool:
        """Have the run's job ended because of this case; False if no supervisor would do it, or it ends by itself."""
        if self.actions.stop.reason:
            return False
        if self._supervision is not None and self._supervision.end_job(self, case):
            return True
        if is_stall(case):
            pids = [str(rank.identity.pid) for rank in self.run.attempt.live]
            self.context.tell_once(
                f"{case.alert} at step {case.step}: the job is left as it is: `sentinel run` ends, and starts again, "
                "only one that resumes (sentinel.resume, or --restarts N); to end it: Ctrl-C, or kill "
                + " ".join(pids[:PIDS])
            )
        return False

    def _tell_of_history(self, store: Store, now: float) -> None:
        """Print that the history cannot be written, and that it is written again; at most once a minute."""
        if store.trouble and now >= self._tell_trouble_at:
            self._tell_trouble_at = math.inf
            self.context.tell(store.trouble)
        while store.notes:
            self.context.tell(store.notes.pop(0))
            self.notifier.pipeline.write_anew()
        if not store.trouble and self._tell_trouble_at == math.inf:
            self._tell_trouble_at = now + TROUBLE_SECONDS
