"""Judges the rules over the ranks of all nodes, at the coordinator: with the same engine as a node's own rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import msgspec

from sentinel.cluster.protocol.digest import JobSteps
from sentinel.cluster.protocol.messages import Digest
from sentinel.engine import Evaluator, Incident, Rule, Transition
from sentinel.rulebook.observation import mark_resumed, observation
from sentinel.runs import Stage
from sentinel.runs.steps import RunStep
from sentinel.signals import CLOCK, SIGNALS

RECENT_STEPS = 256
"""The most steps that a diagnosis can look back on."""
RECENT_VALUES = 1 << 20
"""The most numbers in the recent steps, at 50 bytes each: 80 steps of 512 ranks with 25 signals."""


def select_job_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules that compare ranks (`across`), which need the ranks of all nodes. All others are judged where
    their signals are measured: the evidence that explains them is there."""
    return tuple(rule for rule in rules if _compares(rule) and rule.scopes <= {"run", "rank"} and not _is_timed(rule))


def find_signals(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the signals of ranks that these rules read, with the parts of which norms are made."""
    names = {name for rule in rules for name in rule.metrics if name not in SIGNALS or SIGNALS[name].scope == "rank"}
    return frozenset(names | {name for name, signal in SIGNALS.items() if signal.part_of in names})


def _compares(rule: Rule) -> bool:
    return any(subplan.scope == "rank" for subplan in rule.condition.plan.subplans)


def _is_timed(rule: Rule) -> bool:
    return any(name in SIGNALS and SIGNALS[name].tier == CLOCK for name in rule.metrics)


class JobRules:
    """The judgement of the job's rules in one attempt."""

    def __init__(self, rules: Sequence[Rule], run: str, own: int, nodes: Iterable[int], *, incidents: int = 0) -> None:
        """Start with no steps. `rules`, `nodes`: those of the job. `own`: the coordinator's node. `incidents`: how many
        there were in this attempt, whose ids are taken."""
        self.steps = JobSteps(own, nodes)
        self.recent = deque[RunStep](maxlen=RECENT_STEPS)
        self._values = 0
        """How many numbers the recent steps hold."""
        self._evaluator = Evaluator(rules, run=run, incidents=incidents, rewindable=False)
        self._rewound_at = -1
        self._time = 0.0
        self._stages_begun = 0

    @property
    def incidents(self) -> list[Incident]:
        """The open incidents and the last that ended."""
        return self._evaluator.incidents

    def find_asking(self, action: str) -> dict[str, int]:
        """Return the rules that are pending or firing and ask for this action -> the first step of their condition."""
        return self._evaluator.find_asking(action)

    def take(self, digest: Digest, now: float) -> None:
        """Take steps of another node. Raises ProtocolError."""
        self.steps.take(digest, now)

    def advance(self, stages: Sequence[Stage], offset: int, now: float) -> list[Transition]:
        """Judge the steps that closed. `stages`: those that were announced. `offset`: added to a seq, it gives the step
        that is shown."""
        self._evaluator.step_offset = offset
        transitions: list[Transition] = []
        for step in self.steps.take_closed(now):
            if step.seq <= self._rewound_at:
                continue
            while self._stages_begun < len(stages) and stages[self._stages_begun].seq <= step.seq:
                self._stages_begun += 1
                transitions += self._evaluator.begin_stage()
            transitions += self._judge(step)
        return transitions

    def judge_deferred(self) -> list[Transition]:
        """Do some of the postponed work. To be called about once a second."""
        return self._evaluator.judge_deferred()

    def be_rewindable(self) -> list[Transition]:
        """Prepare for `rewind`, which may come from now on, as a rank armed a rollback."""
        return self._evaluator.be_rewindable()

    def rewind(self, to: int, at: int) -> list[Transition]:
        """Go back with all ranks to where they were after step `to`; the next step is after `at`."""
        self._rewound_at = at
        self._remember_only([step for step in self.recent if not to < step.seq <= at])
        return self._evaluator.rewind(to, at)

    def replace_rules(self, rules: Sequence[Rule]) -> list[Transition]:
        """Judge by these rules from now on."""
        return self._evaluator.replace_rules(rules)

    def find_newest(self, signal: str) -> float | None:
        """Return the newest value of a signal over the ranks of all nodes; None: there was none."""
        return next((step.run[signal] for step in reversed(self.recent) if signal in step.run), None)

    def finish(self, now: float) -> list[Transition]:
        """Judge the steps that are there, as no more come."""
        for node in self.steps.list_awaited():
            self.steps.leave(node)
        return [*self.advance((), self._evaluator.step_offset, now), *self._evaluator.finish_deferred()]

    def _judge(self, step: RunStep) -> list[Transition]:
        self._time = max(self._time, step.time)  # the clocks of nodes differ
        step = msgspec.structs.replace(step, time=self._time)
        self.recent.append(step)
        self._values += _count_values(step)
        while self._values > RECENT_VALUES or len(self.recent) == RECENT_STEPS:
            self._values -= _count_values(self.recent.popleft())
        seen = observation(step)
        if not self._evaluator.began and step.seq > 0:  # the coordinator was restarted: it is not the run's start
            seen = mark_resumed(seen)
        return self._evaluator.observe(seen)

    def _remember_only(self, steps: Collection[RunStep]) -> None:
        self.recent = deque(steps, RECENT_STEPS)
        self._values = sum(map(_count_values, steps))


def _count_values(step: RunStep) -> int:
    return len(step.run) + sum(map(len, step.ranks.values()))
