"""The loop of `sentinel run`: runs a command, and runs it again.

All signals wait in the kernel and are taken one by one (sigtimedwait), with their sender: no handler, no race. Signals
from outside are passed on to the command, once; after a signal that requests the end nothing is started again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from sentinel import wire
from sentinel.errors import EXIT_BY_RULE, EXIT_LEFT_OUT, EXIT_STOPPED, EXIT_UNFINISHED
from sentinel.node.run_ids import shorten_id
from sentinel.supervise.job import Job, count_launched_nodes
from sentinel.supervise.job_nodes import JobNodes
from sentinel.supervise.policy import PAUSE_SECONDS, RESTARTS, Again, Over, Policy
from sentinel.supervise.telling import Telling, ending, signal_name
from sentinel.supervise.words import Words
from sentinel.text import close_run, format_duration, name_nodes, name_reached

MARK = "SENTINEL_SUPERVISOR"
"""Variable of the job's environment with the mark of its supervisor."""
ATTEMPT, BEFORE = "SENTINEL_ATTEMPT", "SENTINEL_RESUME_BEFORE"
"""Variables for a script that is started again: which attempt it is, and before which step its saves are good."""
LOOK_SECONDS = 0.5
"""Seconds between two looks for messages of the daemon."""
LAST_WORD_SECONDS = 5.0
"""Seconds for the daemon to examine how the job ended."""
CLOSING_SECONDS = 1.0
"""Further seconds for the daemon to report the run's outcome."""
ORDER_SECONDS = 120.0
"""Seconds for which a node whose ranks have ended waits for an order: twice as many as the coordinator's for nodes."""
END_SECONDS = 10.0
"""Seconds for which a node whose job is not started again stays, so that others learn it: ten coordinator's beats."""
ORDER_LOOK_SECONDS = 0.1
ATTACH_SECONDS, ATTACH_LOOK_SECONDS = 60.0, 10.0
"""Seconds after which ranks that have not attached may be waiting for another job's; and seconds between two looks,
which read all of /proc."""
WHOLE_AGAIN = "a job that runs takes no node back; end it, and start it on all nodes (docs/cluster.md)"
_ELASTIC = "TORCHELASTIC_RUN_ID"
"""Variable in the environment of processes that torchrun starts."""
_WORDS = 1000
"""Most characters of a fault's kind and words, which are sent to other nodes."""
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_PASSED = _ENDING | {signal.SIGUSR1, signal.SIGUSR2}
_SI_KERNEL = 0x80
"""`si_code` of signals that a terminal's keys send (sigaction(2))."""


class NotStarted(Exception):
    """The command cannot be started at all."""

    def __init__(self, cause: OSError | ValueError) -> None:
        """`cause`: what the system says; a ValueError for a name with a null byte."""
        self.cause = cause
        super().__init__(str(cause))


class Supervisor:
    """Runs one command, and starts it again as `Policy` decides. Linux only."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        restarts: int = RESTARTS,
        always: bool = False,
        pause: float = PAUSE_SECONDS,
        over_nodes: bool = False,
        nodes: JobNodes | None = None,
        as_json: bool = False,
    ) -> None:
        """`restarts`: the most restarts. `always`: restart also a script that does not announce that it resumes from
        what it saved; without `always` it is only watched. `pause`: seconds before the first restart. `over_nodes`:
        according to the command, other nodes have ranks of the job, too; its daemon may report it as well. `nodes`: the
        nodes of a job that may go on without some of them. `as_json`: print JSON lines."""
        self._command, self._environment = command, {**environment, MARK: secrets.token_hex(8)}
        self._always, self._over_nodes, self._nodes = always, over_nodes, nodes
        self._awaits_ranks = _ELASTIC not in environment
        """Whether torchrun has started no ranks yet, so that it may have met another job than this."""
        self._look_at = time.monotonic() + ATTACH_SECONDS
        """When to check next which job torchrun has met, in monotonic seconds."""
        self._met = ""
        """The other job that torchrun has met, in words; empty: none."""
        self._begun: wire.Order | None = None
        """The order by which all nodes began the present start, or will begin the next one."""
        self._policy = Policy(restarts, pause)
        self._telling = Telling(as_json=as_json)
        run_id = shorten_id(named) if (named := environment.get("SENTINEL_RUN_ID")) else None
        self._words = Words(self._environment[MARK], run_id, always=always, print_notice=self._telling.pass_on)
        self._status: int | None = None
        """Exit status of the present start of the command; None: it runs, or it was ended."""
        self._launched = 0
        """How often the command was started."""
        self._attempt = int(given) if (given := environment.get(ATTEMPT, "")).isdecimal() else 0
        self._ended_by: int | None = None
        """The signal from outside that requested the end, if one came."""
        self._passed: set[int] = set()

    def run(self) -> int:
        """Run the command to its end. Returns the exit status; negative: the signal that ended the command.

        Raises NotStarted where the command cannot be started at all.
        """
        own = {number for number in _PASSED if signal.getsignal(number) is not signal.SIG_IGN}
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would leave no exit status to wait for
        former = signal.pthread_sigmask(signal.SIG_BLOCK, own | {signal.SIGCHLD})
        began = time.monotonic()
        try:
            status = self._starts(own | {signal.SIGCHLD}, former)
            self._say_closing(status, time.monotonic() - began)
            self._telling.end(status, self._launched)
            while signal.sigtimedwait(own, 0) is not None:  # too late for the command, whose status this one must have
                pass
            return status
        finally:
            self._words.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, former)

    def _starts(self, awaited: set[int], mask: set[int]) -> int:
        while True:
            self._status = None
            self._report(None)
            try:
                job = self._start_job(mask)
            except (OSError, ValueError) as error:
                if self._policy.made == 0:
                    raise NotStarted(error) from None
                why = error.strerror if isinstance(error, OSError) else str(error)
                return self._leave(EXIT_UNFINISHED, f"{self._command[0]}: {why}")
            self._launched += 1
            self._status = status = self._follow_job(job, awaited)
            if status is None:
                standing = self._words.standing
                why = self._name_own_reason(standing)
                left_out = bool(why) and why == self._explain_left_out()
                self._words.announce_end(self._ended_by or signal.SIGTERM, why, left_out=left_out)
            else:
                standing = self._words.last(LAST_WORD_SECONDS)  # the job may have ended before its daemon judged it
                self._report(None)
            if status == 0:
                if self._ended_by is not None:  # what a command leaves behind that ends by itself is meant to go on
                    job.end()
                self._say_complete()
                return 0
            if status is not None and self._ended_by is None and standing is not None and not standing.over:
                self._words.announce_end(0, f"its command ended ({ending(status)})")
            job.end()
            verdict = self._verdict(status, standing, awaited)
            if isinstance(verdict, int):
                return verdict
            if (number := self._pause(verdict.pause, awaited)) is not None:
                return -number
            self._prepare(verdict, standing)

    def _start_job(self, mask: set[int]) -> Job:
        if self._nodes is None:
            return Job(self._command, self._environment, mask)
        return Job(self._nodes.fill(self._command), {**self._environment, **self._nodes.list_environment()}, mask)

    def _follow_job(self, job: Job, awaited: set[int]) -> int | None:
        """Wait until the command has ended, and return its status; None: it must be ended."""
        while True:
            taken = signal.sigtimedwait(awaited, LOOK_SECONDS)
            if taken is not None and taken.si_signo != signal.SIGCHLD:
                self._pass_on(job, taken)
            if (status := job.reap()) is not None:
                return status
            standing, order = self._words.read(), self._words.order
            ends = order is not None and (order.does == "end" or bool(self._explain_left_out()))
            self._awaits_ranks &= standing is None
            if ends or (standing is not None and standing.ends) or self._meets_smaller_job():
                return None

    def _name_own_reason(self, standing: wire.Standing | None) -> str:
        """Return why a command that would go on is ended, in words; empty: a signal from outside asked for its end."""
        if self._ended_by is not None:
            return ""
        own = self._met or self._explain_left_out()
        return own or _fault(None, standing, self._words.order).words or "a fault on another node"

    def _meets_smaller_job(self) -> bool:
        """Whether torchrun met a smaller job at its address, which goes on without this node: before a rank attaches no
        daemon can say so, and these ranks would wait for others in vain. Never on node 0, which has the address."""
        if self._nodes is None or self._nodes.node == 0 or not self._awaits_ranks or time.monotonic() < self._look_at:
            return False
        self._look_at += ATTACH_LOOK_SECONDS
        expected = len(self._nodes.members.nodes)
        if (found := count_launched_nodes(expected)) is not None:
            self._awaits_ranks = False
            if found < expected:
                self._met = f"torchrun met a job of {found} nodes at its address, where this start has {expected}"
        return bool(self._met)

    def _pass_on(self, job: Job, taken: signal.struct_siginfo) -> None:
        if taken.si_signo in _ENDING:
            self._ended_by = taken.si_signo
            self._words.announce_end(taken.si_signo)
        self._passed.add(taken.si_signo)
        if not (job.shares_group and taken.si_code == _SI_KERNEL):  # the terminal has signalled the command itself
            job.signal(taken.si_signo)

    def _verdict(self, status: int | None, standing: wire.Standing | None, awaited: set[int]) -> int | Again:
        """Return the exit status, or the restart that follows."""
        if self._ended_by is not None or (status is not None and -status in self._passed):  # the end was asked for
            self._say_wanted(status, standing)
            return status if status is not None else -(self._ended_by or signal.SIGTERM)
        if self._met:
            why = f"{self._met}: it goes on without this node; {WHOLE_AGAIN}"
            return self._leave(EXIT_LEFT_OUT, why, why)
        if status is None and (why := self._explain_left_out()):
            where = f" at step {standing.step}" if standing is not None and standing.step is not None else ""
            return self._leave(EXIT_LEFT_OUT, why, f"this node's ranks were ended{where}: {why}")
        if standing is not None and standing.by_rule:
            where = f"stopped at step {standing.step}, by {standing.stopped}"
            return self._leave(EXIT_BY_RULE, standing.stopped, f"not started again: {where}")
        has_trained = self._words.attached or self._policy.made > 0
        may_restart = self._always or self._policy.made > 0 or (standing is not None and standing.resumes)
        over_nodes = self._over_nodes or (standing is not None and standing.nodes > 1)
        fault = _fault(status, standing, self._words.order)
        if has_trained and not may_restart and over_nodes and (status is None or _broke_in_training(standing)):
            self._end_with_nodes(fault, awaited)
            if self._ended_by is not None:
                return status if status is not None else -self._ended_by
        if status is not None and not (has_trained and may_restart):
            if not has_trained and self._nodes is not None:
                why = f"no rank of this node came to train; if the others do, {WHOLE_AGAIN}"
                self._telling.say("stopped", why, status=status, why=why)
            return EXIT_STOPPED if _used_up_rollbacks(standing) else status
        self._say_fault(fault, standing, "ended" if status is not None else "was ended")
        if not may_restart and over_nodes and not self._explain_left_out():
            return self._leave(EXIT_STOPPED, "the script does not say that it resumes, and --restarts is not given")
        return self._decide(fault, standing, awaited, over_nodes=over_nodes)

    def _decide(
        self, fault: wire.JobFault, standing: wire.Standing | None, awaited: set[int], *, over_nodes: bool
    ) -> int | Again:
        """Return the exit status, or the restart that follows, of a job that may be started again."""
        decided = self._decide_with_nodes(fault, awaited) if over_nodes else self._policy.decide(fault)
        if self._ended_by is not None:
            return -self._ended_by
        if isinstance(decided, Again):
            self._say_again(decided)
            return decided
        # Over several nodes this is one node's view only, and all need the same exit status.
        stopped = not over_nodes and _used_up_rollbacks(standing)
        return self._leave(EXIT_STOPPED if stopped else decided.status, decided.why)

    def _leave(self, code: int, why: str, said: str = "") -> int:
        """Print why nothing is started again; `said`: in other words than usual. Returns the exit code."""
        said = said or f"not started again: {why}"
        self._telling.say("stopped", f"{said} (exit code {code})", status=code, why=why)
        return code

    def _decide_with_nodes(self, fault: wire.JobFault, awaited: set[int]) -> Again | Over:
        """Decide the same on all nodes of the job: each node's policy judges the fault that the coordinator names."""
        self._report(fault)
        until = time.monotonic() + ORDER_SECONDS
        while self._ended_by is None and time.monotonic() < until:
            self._words.read()
            order = self._words.order
            if why := self._explain_left_out():
                self._words.announce_end(0, why, left_out=True)
                return Over(EXIT_LEFT_OUT, why)
            if order is not None and order.does == "stop":
                return Over(EXIT_UNFINISHED, order.why)
            if order is not None and order.does == "begin" and order.fault is not None:
                self._attempt, self._begun = order.attempt, order
                self._say_nodes(order, order.fault)
                return self._policy.decide(order.fault)
            if order is not None and self._nodes is not None and self._nodes.hear(order):
                self._report(fault)
            self._pause(ORDER_LOOK_SECONDS, awaited)
        why = self._words.order.why if self._words.order is not None else "no daemon of this node is there"
        return Over(EXIT_UNFINISHED, f"no order came from the job's coordinator within {ORDER_SECONDS:g} s: {why}")

    def _end_with_nodes(self, fault: wire.JobFault, awaited: set[int]) -> None:
        """Have the other nodes' ranks ended, which may wait for the ranks here for as long as torch lets them. This job
        is not started again."""
        self._report(fault, final=True)
        until = time.monotonic() + END_SECONDS
        while self._ended_by is None and time.monotonic() < until:
            self._words.read()
            if (order := self._words.order) is not None and order.does in ("begin", "stop"):
                return
            self._pause(ORDER_LOOK_SECONDS, awaited)

    def _explain_left_out(self) -> str:
        """Return why the job goes on without this node; empty: it does not, as far as is known."""
        order = self._words.order
        if order is None or self._nodes is None or not self._nodes.is_left_out(order):
            return ""
        return self._nodes.explain(order)[:_WORDS]

    def _say_nodes(self, order: wire.Order, fault: wire.JobFault) -> None:
        """Print which nodes go on after this fault."""
        lost = self._nodes.begin(order) if self._nodes is not None else ()
        if self._nodes is None or not lost:
            self._telling.say("nodes", f"all nodes have ended: {fault.words}", kind=fault.kind)
            return
        members = self._nodes.members
        left = f"{len(members.nodes)} of {members.whole} nodes"
        said = f"{fault.words}. {name_nodes(lost).capitalize()} cannot be waited for: the job goes on with {left}, and "
        said += "with as much less in each global batch, unless the script makes up for it"
        self._telling.say("nodes", said, kind=fault.kind, nodes=members.nodes, left_out=lost)

    def _report(self, fault: wire.JobFault | None, *, final: bool = False) -> None:
        """Send the daemon the job's state on this node: for the history, and for the other nodes. `final`: the job is
        not started again here, whatever was allowed."""
        standing = self._words.standing
        attempt = max(self._attempt, standing.attempt if standing is not None else 0)
        start, restarts = self._policy.made, 0 if final else self._policy.restarts
        report = wire.JobReport(
            start=start, attempt=attempt, restarts=restarts, fault=fault, status=self._status, begun=self._begun,
            mark=self._environment[MARK],
        )  # fmt: skip
        self._words.report(self._nodes.add_to(report) if self._nodes is not None else report)

    def _pause(self, seconds: float, awaited: set[int]) -> int | None:
        """Wait for `seconds`, or until a signal requests the end. Returns that signal."""
        until = time.monotonic() + seconds
        while self._ended_by is None and (rest := until - time.monotonic()) > 0:
            taken = signal.sigtimedwait(awaited, rest)
            if taken is not None and taken.si_signo in _ENDING:
                self._ended_by = taken.si_signo
        return self._ended_by

    def _prepare(self, again: Again, standing: wire.Standing | None) -> None:
        """Set the environment of the next start."""
        attempt = 1 + max(self._attempt, standing.attempt if standing is not None else 0)
        self._environment[ATTEMPT], self._attempt = str(attempt), attempt
        self._environment.pop(BEFORE, None)
        if again.before is not None:
            self._environment[BEFORE] = str(again.before)
        self._words.forget(attempt)

    def _say_wanted(self, status: int | None, standing: wire.Standing | None) -> None:
        if self._ended_by is None or standing is None or standing.step is None:
            return
        name = signal_name(-self._ended_by) or str(self._ended_by)
        how = ending(status) if status is not None else "ended by its supervisor"
        said = f"{name} was passed on: the job ended at step {standing.step} ({how})"
        self._telling.say("ended", said, signal=name, step=standing.step)

    def _say_fault(self, fault: wire.JobFault, standing: wire.Standing | None, ended: str) -> None:
        where = f" at step {fault.step}" if fault.step is not None else ", and no step was heard of"
        self._telling.say(
            "fault", f"the job {ended}{where}: {fault.words}", step=fault.step, kind=fault.kind, first_sign=fault.sign
        )
        if standing is not None and standing.case:
            said = f"the case: sentinel incidents show {standing.case} --run {standing.run_id}"
            self._telling.say("case", said, case=standing.case, run_id=standing.run_id)

    def _say_again(self, again: Again) -> None:
        which = f"restart {again.number} of {self._policy.restarts}"
        before = f", from what it saved before step {again.before}" if again.before is not None else ""
        self._telling.say(
            "restart", f"it starts again in {again.pause:.3g} s ({which}){before}",
            number=again.number, restarts=self._policy.restarts, pause_seconds=again.pause, before_step=again.before,
        )  # fmt: skip

    def _say_complete(self) -> None:
        if made := self._policy.made:
            self._telling.say("complete", f"the run is complete, after {made} restart(s)", restarts=made)

    def _say_closing(self, status: int, seconds: float) -> None:
        """Print the outcome of each run of the job, or that no daemon reported one; nothing where no run attached."""
        self._words.last(CLOSING_SECONDS)
        how = "left out of the job" if status == EXIT_LEFT_OUT else ending(status) if status else ""
        for standing in self._words.standings.values():
            summary = standing.summary
            found = summary.text if summary is not None else "no step was judged"
            if not standing.over:
                found += "; its daemon may have more to judge"
            reached = name_reached(summary.steps, summary.step, cut=summary.cut) if summary is not None else ""
            run_id = standing.run_id if summary is None or summary.kept else ""
            took = (summary.seconds if summary is not None else 0.0) or seconds
            said = close_run(standing.run, run_id, reached, seconds=took, how=how, found=found)
            facts = (msgspec.to_builtins(summary) if summary is not None else {}) | {"seconds": took}
            self._telling.say("closing", said, run=standing.run, run_id=standing.run_id, **facts)
        if self._words.attached and not self._words.standings:
            ended = f"the job ended in {format_duration(seconds)}" + (f", {how}" if how else "")
            self._telling.say("closing", f"{ended}: no daemon told what it found", seconds=seconds)


def leave(status: int) -> None:
    """End this process as the command ended: with its exit status, or by its signal. Raises SystemExit."""
    if status < 0:
        resource.setrlimit(
            resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
        )  # the command has left its own core
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
        status = 128 - status  # as a shell reports it, if this process outlives the signal
    sys.exit(status)


def _broke_in_training(standing: wire.Standing | None) -> bool:
    """Whether the job broke in training, and not after it."""
    return standing is not None and bool(standing.alert or standing.raised)


def _used_up_rollbacks(standing: wire.Standing | None) -> bool:
    return standing is not None and bool(standing.stopped)


def _fault(status: int | None, standing: wire.Standing | None, order: wire.Order | None) -> wire.JobFault:
    how = ending(status) if status is not None else ""
    elsewhere = order.fault.words if order is not None and order.does == "end" and order.fault is not None else ""
    if standing is None:
        return wire.JobFault(kind=how, words=how or elsewhere)
    raised = standing.raised.partition(":")[0]
    cause = standing.cause or standing.raised or standing.stopped
    words = ": ".join(part for part in (standing.alert, cause) if part) or how or elsewhere
    return wire.JobFault(
        kind=(standing.alert or raised or how)[:_WORDS],
        words=(f"{words} ({how})" if how and how != words else words)[:_WORDS],
        step=standing.step,
        sign=standing.sign,
        step_seconds=standing.step_seconds,
        time=standing.time,
    )
