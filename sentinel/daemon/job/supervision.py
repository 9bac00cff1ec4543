"""Connected supervisors (`sentinel run`), and what is sent to them about their jobs."""

from __future__ import annotations

from collections import deque

from sentinel import wire
from sentinel.actions.rollback import RollbackAction
from sentinel.cluster.protocol.job_extent import count_nodes
from sentinel.daemon.ingest.peer import Peer
from sentinel.daemon.run.summary import summarize_run
from sentinel.daemon.run.watched_run import WatchedRun
from sentinel.daemon.tenancy.tenants import Tenants
from sentinel.diagnose.case import Case
from sentinel.errors import EXIT_BY_RULE
from sentinel.runs import Run

NOTICES = 64
"""Most notices that wait for one supervisor."""


class Supervision:
    """The connected supervisors, found by the mark that a job's ranks send.

    A supervisor must belong to root or to the user who owns the run: another user who learned the mark neither gets to
    know the run nor takes the supervisor's place.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._peers: dict[tuple[str, int], tuple[Peer, wire.Supervise]] = {}
        self._told: set[tuple[str, int]] = set()
        """Marks and attempts whose supervisor was told that the run is over."""
        self._notices: dict[str, deque[wire.Notice]] = {}
        """Notices that wait for a supervisor, by mark: it looks for this daemon now and then."""

    def handle_message(self, peer: Peer, message: wire.Supervise) -> None:
        """Take note of a supervisor and what it asks for."""
        self.drop_peer(peer)  # one job per connection
        if message.mark:
            self._peers[message.mark, peer.uid] = peer, message

    def is_of(self, watch: WatchedRun, mark: str) -> bool:
        """Whether the run is the job of the supervisor with this mark."""
        return bool(mark) and find_mark(watch.run) == mark

    def serves(self, watch: WatchedRun) -> bool:
        """Whether the run's supervisor is connected: it may start the job again."""
        return self._find_supervisor(watch.run) is not None

    def owes(self, watch: WatchedRun) -> bool:
        """Whether a supervisor is still to be told how its job ended."""
        mark = find_mark(watch.run)
        return bool(mark) and (mark, watch.run.attempt.number) not in self._told

    def drop_peer(self, peer: Peer) -> None:
        """Forget the supervisor of a connection that ended, if it was one."""
        for key in [key for key, (known, _) in self._peers.items() if known is peer]:
            del self._peers[key]

    def end_job(self, watch: WatchedRun, case: Case) -> bool:
        """Have the job of a run ended; False if no supervisor would do it."""
        supervisor = self._find_supervisor(watch.run)
        if supervisor is None:
            return False
        peer, asked = supervisor
        if not (asked.always or _resumes(watch)):
            return False
        peer.send(standing(watch, case, ends=True))
        return True

    def tell(self, watch: WatchedRun, *, over: bool) -> None:
        """Tell the supervisor how the job stands. `over`: no rank of the run is left."""
        self._print_notices(watch.run)
        if (supervisor := self._find_supervisor(watch.run)) is not None:
            supervisor[0].send(standing(watch, _explanation(watch), over=over))
            if over:
                self._told.add((find_mark(watch.run), watch.run.attempt.number))

    def print_notice(self, run: Run, notice: wire.Notice) -> None:
        """Print on the terminal of a run's supervisor, if it has one; at the latest before it learns of the end."""
        if mark := find_mark(run):
            self._notices.setdefault(mark, deque(maxlen=NOTICES)).append(notice)
            self._print_notices(run)

    def _print_notices(self, run: Run) -> None:
        if (supervisor := self._find_supervisor(run)) is not None:
            for notice in self._notices.pop(find_mark(run), ()):
                supervisor[0].send(notice)

    def find_report(self, watch: WatchedRun) -> wire.JobReport | None:
        """Return how the job of a run stands on this node; None if there is no supervisor, or several."""
        supervisor = self._find_supervisor(watch.run)
        return supervisor[1].job if supervisor is not None and not _is_shared(watch) else None

    def give_order(self, watch: WatchedRun, order: wire.Order) -> None:
        """Send an order to the supervisor of a run, if it is connected."""
        if (supervisor := self._find_supervisor(watch.run)) is not None:
            supervisor[0].send(order)

    def take_report(self, watch: WatchedRun, peer: Peer, report: wire.JobReport) -> None:
        """Pass a supervisor's report of the job on to the other nodes.

        If that is impossible, and the report has a fault, order the supervisor to stop.
        """
        if watch.membership is not None and not _is_shared(watch):
            watch.membership.pass_on_report()
        elif report.fault is not None:
            why = "several `sentinel run` share this node" if watch.membership else "the nodes of this job do not meet"
            why = f"{why}: they cannot be started again at once"
            peer.send(wire.Order(start=report.start, does="stop", why=why))

    def _find_supervisor(self, run: Run) -> tuple[Peer, wire.Supervise] | None:
        mark, uid = find_mark(run), self._tenants.uid(run.run_id)
        return self._peers.get((mark, uid)) or self._peers.get((mark, 0))


def standing(watch: WatchedRun, case: Case | None, *, ends: bool = False, over: bool = False) -> wire.Standing:
    """Return how the job of a run stands, for its supervisor. `case` explains it."""
    attempt = watch.run.attempt
    left = sorted(attempt.ranks.values(), key=lambda rank: rank.heard)  # others may fail because the first did
    goodbyes = [rank.goodbye for rank in left if rank.goodbye is not None]
    by_rule = watch.actions.stop.reason  # also where a rank was killed before its goodbye, while it saved
    return wire.Standing(
        run=watch.run.name,
        run_id=watch.run.run_id,
        attempt=attempt.number,
        step=attempt.last_seq + attempt.step_offset if attempt.last_seq >= 0 else None,
        step_seconds=attempt.step_seconds(),
        nodes=max((count_nodes(rank.identity) for rank in attempt.ranks.values()), default=1),
        resumes=_resumes(watch),
        ends=ends,
        over=over,
        alert=case.alert if case is not None else "",
        case=case.id if case is not None else "",
        cause=case.diagnosis.cause if case is not None else "",
        time=case.time if case is not None else None,
        sign=_sign(watch),
        raised=next((goodbye.detail for goodbye in goodbyes if goodbye.reason == "exception"), ""),
        stopped=by_rule or next((goodbye.detail for goodbye in goodbyes if goodbye.reason == "stopped"), ""),
        by_rule=bool(by_rule) or any(goodbye.status == EXIT_BY_RULE for goodbye in goodbyes),
        summary=summarize_run(watch),
    )


def find_mark(run: Run) -> str:
    """Return the mark of a run's supervisor, as its ranks send it; empty: it has none."""
    return next((rank.hello.supervisor for rank in run.attempt.ranks.values() if rank.hello.supervisor), "")


def _is_shared(watch: WatchedRun) -> bool:
    """Whether the ranks of this node have different supervisors."""
    return len({rank.hello.supervisor for rank in watch.run.attempt.ranks.values()}) > 1


def _resumes(watch: WatchedRun) -> bool:
    return any(rank.hello.resumes for rank in watch.run.attempt.ranks.values())


def _open(watch: WatchedRun) -> list[Case]:
    mine = watch.incidents.log.present()
    return [case for case in mine if case.state == "firing" and case.severity == "critical"]


def _explanation(watch: WatchedRun) -> Case | None:
    """Return the case that fired first: the others may well follow from it."""
    return min(_open(watch), key=lambda case: case.time, default=None)


def _sign(watch: WatchedRun) -> int | None:
    """Return the first step of an open fault that only a rollback fixes, whatever its severity."""
    asking = watch.incidents.list_asking(RollbackAction.name)
    return min((case.first_step for case in asking if case.state == "firing"), default=None)
