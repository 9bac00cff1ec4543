"""Supervisors (`sentinel run`) that are connected, and what they are told of their jobs."""

from __future__ import annotations

from sentinel import wire
from sentinel.daemon.server import Peer
from sentinel.daemon.watched_run import WatchedRun
from sentinel.diagnose.case import Case


class Supervision:
    """By the mark that a job's ranks bear: nobody else knows it."""

    def __init__(self) -> None:
        self._peers: dict[str, tuple[Peer, bool]] = {}
        self._told: set[tuple[str, int]] = set()
        """Marks and attempts of which the last word was said."""

    def arrived(self, peer: Peer, message: wire.Supervise) -> None:
        """A supervisor asks."""
        if message.mark:
            self._peers[message.mark] = peer, message.always

    def serves(self, watch: WatchedRun) -> bool:
        """Whether its supervisor is connected: it may start the job again."""
        return _mark(watch) in self._peers

    def owes(self, watch: WatchedRun) -> bool:
        """Whether a supervisor is still to be told how its job ended."""
        mark = _mark(watch)
        return bool(mark) and (mark, watch.attempt.number) not in self._told

    def left(self, peer: Peer) -> None:
        """A connection ended, maybe a supervisor's."""
        for mark in [mark for mark, (known, _) in self._peers.items() if known is peer]:
            del self._peers[mark]

    def end(self, watch: WatchedRun, case: Case) -> bool:
        """Have a job ended. False: there is no supervisor that would."""
        peer, always = self._peers.get(_mark(watch), (None, False))
        if peer is None or not (always or _resumes(watch)):
            return False
        peer.send(standing(watch, case, ends=True))
        return True

    def tell(self, watch: WatchedRun, *, over: bool) -> None:
        """How the job stands."""
        mark = _mark(watch)
        peer, _ = self._peers.get(mark, (None, False))
        if peer is not None:
            peer.send(standing(watch, _explanation(watch), over=over))
            if over:
                self._told.add((mark, watch.attempt.number))


def standing(watch: WatchedRun, case: Case | None, *, ends: bool = False, over: bool = False) -> wire.Standing:
    """Of a run; `case` explains it."""
    attempt = watch.attempt
    left = sorted(attempt.ranks.values(), key=lambda rank: rank.heard)  # others may fail because the first did
    goodbyes = [rank.goodbye for rank in left if rank.goodbye is not None]
    return wire.Standing(
        run=watch.run.name,
        run_id=watch.run.run_id,
        attempt=attempt.number,
        step=attempt.last_seq + attempt.step_offset if attempt.last_seq >= 0 else None,
        step_seconds=attempt.step_seconds(),
        resumes=_resumes(watch),
        ends=ends,
        over=over,
        alert=case.alert if case is not None else "",
        case=case.id if case is not None else "",
        cause=case.diagnosis.cause if case is not None else "",
        sign=_sign(watch),
        raised=next((goodbye.detail for goodbye in goodbyes if goodbye.reason == "exception"), ""),
        stopped=next((goodbye.detail for goodbye in goodbyes if goodbye.reason == "stopped"), ""),
    )


def _mark(watch: WatchedRun) -> str:
    return next((rank.hello.supervisor for rank in watch.attempt.ranks.values() if rank.hello.supervisor), "")


def _resumes(watch: WatchedRun) -> bool:
    return any(rank.hello.resumes for rank in watch.attempt.ranks.values())


def _open(watch: WatchedRun) -> list[Case]:
    mine = watch.book.present()
    return [case for case in mine if case.state == "firing" and case.severity == "critical"]


def _explanation(watch: WatchedRun) -> Case | None:
    """What fired first: the rest may well follow from it."""
    return min(_open(watch), key=lambda case: case.time, default=None)


def _sign(watch: WatchedRun) -> int | None:
    """The step of the first sign of a fault that only a rollback fixes."""
    harmful = {rule.name for rule in watch.rules if "rollback" in rule.actions}
    return min((case.first_step for case in _open(watch) if case.alert in harmful), default=None)
