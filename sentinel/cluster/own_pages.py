"""What people are told from one node: of its own incidents where no coordinator is heard, and what they know from here
of the job's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from sentinel.cluster.protocol.node import Node
from sentinel.diagnose.case import Case
from sentinel.notify.entry import Entry
from sentinel.notify.pipeline import Pipeline

OVER_HERE = "over here: the coordinator is heard again, and tells of it"


def own_name(run_id: str, node: int) -> str:
    """Run id under which a node that hears no coordinator tells people: a page of its own, beside the job's."""
    return f"{run_id}@node-{node}"


class OwnPages:
    """A node's pages in the pipeline of its run."""

    def __init__(self, pipeline: Pipeline, node: Node, run_id: str, list_cases: Callable[[], Iterable[Case]]) -> None:
        """`list_cases`: those of this node."""
        self._pipeline, self._node, self._list_cases = pipeline, node, list_cases
        self._name = own_name(run_id, node.node)
        self._withheld: list[Entry] = []
        """What people were told of the job from here, while another may tell them."""
        self._ended = set[str]()
        """Ids of cases of whose end people were told: the pipeline forgets what is over."""

    def is_known(self, identity: str) -> bool:
        """Whether people know of a case by this node."""
        return self._pipeline.is_known(identity, self._name)

    def may_be_told(self, identity: str) -> bool:
        """Whether people were told of a case by this node, be it over by now, or will be."""
        own = (entry for entry in self._pipeline.entries if entry.run_id == self._name)
        return any(identity in entry.cases or entry.may_be_told(identity) for entry in own)

    def put(self, case: Case) -> None:
        """Tell people of a case of this node; of its end once."""
        if case.state == "firing":
            self._ended.discard(case.id)
        elif case.id in self._ended:
            return
        else:
            self._ended.add(case.id)
        self._pipeline.put(case, self._name)

    def tell_alone(self, now: float, *, leaving: bool = False) -> None:
        """Tell people of what no coordinator will. `leaving`: without waiting for one."""
        for case in self._node.take_untold(now, leaving=leaving):
            self.put(case)

    def end(self, identities: Iterable[str]) -> None:
        """The coordinator has these cases now, and tells people of those that fire: each has one page, the job's. Of
        what is over already they are told from here, as that began here."""
        known = [identity for identity in identities if self.is_known(identity)]
        for case in self._list_cases() if known else ():
            if case.id in known and case.state == "firing":
                done = (*case.done, OVER_HERE)
                over = msgspec.structs.replace(case, state="resolved", resolved_time=time.time(), done=done)
                self._ended.add(case.id)
                self._pipeline.put(over, self._name, moved=True)

    def withhold(self) -> None:
        """Another may be the coordinator, and tell people of the job. It learns of what they were told from here."""
        self._withheld = self._pipeline.withdraw()
        told = {
            case.id: entry.ends.get(case.id, case)
            for entry in self._withheld
            for case in entry.cases.values()
            if case.state == "firing" or entry.pending
        }
        for case in told.values():
            self._node.record_page(case)

    def take_up(self) -> None:
        """This node is the coordinator: it goes on with what was withheld."""
        withheld, self._withheld = self._withheld, []
        self._pipeline.restore(withheld)

    def forget(self) -> None:
        """Another coordinator has all that was withheld."""
        withheld, self._withheld = self._withheld, []
        self._pipeline.forget(withheld)
