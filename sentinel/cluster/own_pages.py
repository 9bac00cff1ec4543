"""A node's own pages to people: of its incidents where no coordinator is heard, and of the job's from its time as the
coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from sentinel.cluster.local_run import LocalRun
from sentinel.cluster.protocol.node import Node
from sentinel.diagnose.case import Case
from sentinel.notify.entry import Entry
from sentinel.notify.pipeline import Pipeline

OVER_HERE = "over here: the coordinator is heard again, and tells of it"


def own_name(run_id: str, node: int) -> str:
    """Return the run id with which a node that hears no coordinator tells people: its own page, beside the job's."""
    return f"{run_id}@node-{node}"


class OwnPages:
    """A node's pages in the pipeline of its run."""

    def __init__(self, pipeline: Pipeline, node: Node, run_id: str, local: LocalRun) -> None:
        """Start with no page."""
        self._pipeline, self._node, self._local = pipeline, node, local
        self._name = own_name(run_id, node.node)
        self._withheld: list[Entry] = []
        """What was sent about the job from here, while another node may be the coordinator and send it."""
        self._ended = set[str]()
        """Ids of cases whose end was put into the pipeline, which forgets what is over."""

    def is_known(self, identity: str) -> bool:
        """Whether people know of a case from this node."""
        return self._pipeline.is_known(identity, self._name)

    def may_be_told(self, identity: str) -> bool:
        """Whether people were or will be notified of a case from this node; the case may have ended."""
        own = (entry for entry in self._pipeline.entries if entry.run_id == self._name)
        return any(identity in entry.cases or entry.may_be_told(identity) for entry in own)

    def put(self, case: Case) -> None:
        """Tell people of a case of this node, and only once of its end."""
        if case.state == "firing":
            self._ended.discard(case.id)
        elif case.id in self._ended:
            return
        else:
            self._ended.add(case.id)
        self._pipeline.put(case, self._name)

    def tell_alone(self, now: float, *, leaving: bool = False) -> None:
        """Tell people of the cases of which no coordinator will. `leaving`: without waiting for one."""
        for case in self._node.take_untold(now, leaving=leaving):
            self.put(case)

    def end(self, identities: Iterable[str]) -> None:
        """End this node's pages of cases that the coordinator has now: it tells people of those that fire, on the page
        of the job. Of a case that is over already people hear from here, where its page began."""
        known = [identity for identity in identities if self.is_known(identity)]
        for case in self._local.list_cases() if known else ():
            if case.id in known and case.state == "firing":
                done = (*case.done, OVER_HERE)
                over = msgspec.structs.replace(case, state="resolved", resolved_time=time.time(), done=done)
                self._ended.add(case.id)
                self._pipeline.put(over, self._name, moved=True)

    def withhold(self) -> None:
        """Send no more about the job, as another node may be the coordinator, and let that node know what was sent."""
        self._withheld = self._pipeline.withdraw()
        told = [
            (case.state == "firing", entry.ends.get(case.id, case))
            for entry in self._withheld
            for case in entry.cases.values()
            if case.state == "firing" or entry.pending
        ]
        # A case that became a problem of its own has ended in the former one: it is as in the one where it fires.
        for _, case in sorted(told, key=lambda one: one[0]):
            self._node.record_page(case)

    def take_up(self) -> None:
        """Go on with what was withheld, as this node is the coordinator."""
        withheld, self._withheld = self._withheld, []
        self._pipeline.restore(withheld)

    def forget(self) -> None:
        """Drop what was withheld, as another coordinator has all of it."""
        withheld, self._withheld = self._withheld, []
        self._pipeline.forget(withheld)
