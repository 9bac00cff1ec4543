"""Rules over very many entities are judged in portions, with results as if each step had waited for them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.engine import RUN, Entity, Evaluator, Observation, Transition, load_rules, observation, rules_of
from sentinel.engine.judging import evaluation, rule_state
from tests.engine.test_rewind import told

RULES = """
group: t
rules:
  - {alert: Slow, scope: rank, expr: "median(step_seconds, 3) > 1.5", keep_firing: 3 steps}
  - alert: Apart
    scope: rank
    expr: median(step_seconds, 3) - across(median(step_seconds, 3), "min") > 1
    every: 2
    for: 2 of 2 steps
  - {alert: Held, scope: rank, expr: "step_seconds > 1.9 and loss > 1", for: 3 steps, warmup: 5 steps}
  - {alert: Spread, scope: run, expr: 'across(step_seconds, "spread") > 1.9'}
  - {alert: Now, scope: rank, expr: "rss_bytes > 1", severity: critical}
"""
LOADED = rules_of([load_rules(RULES, "t.yaml")])
RANKS = 7


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make seven ranks count as very many."""
    monkeypatch.setattr(observation, "WIDE", 3)
    monkeypatch.setattr(rule_state, "PIECE", 2)
    monkeypatch.setattr(evaluation, "PORTION", 1)


def run_of(seed: int, length: int) -> Iterator[Observation]:
    rng = random.Random(seed)
    slow = {rank: rng.random() < 0.3 for rank in range(RANKS)}
    for seq in range(length):
        values = {RUN: {"loss": 2.0 * (rng.random() < 0.9)}}
        for rank in range(RANKS):
            slow[rank] ^= rng.random() < 0.1
            if rng.random() < 0.9:
                sample = {"step_seconds": 1 + slow[rank] + 0.3 * rng.random()}
                values[Entity("rank", str(rank))] = sample | ({"rss_bytes": 2.0 * (seq == 9)} if seq % 3 == 0 else {})
        yield Observation(seq, float(seq), values)


def by_rule(transitions: list[Transition]) -> dict[str, list[tuple[object, ...]]]:
    found: dict[str, list[tuple[object, ...]]] = {}
    for line in told(iter(transitions)):
        found.setdefault(str(line[1]), []).append(line)
    return found


def judged(observations: list[Observation], *, rests: bool) -> tuple[Evaluator, dict[str, list[tuple[object, ...]]]]:
    """Judge a run; return the evaluator and its transitions by rule. `rests`: work goes on between some steps."""
    evaluator, transitions = Evaluator(LOADED, run="t"), []
    for one in observations:
        transitions += evaluator.observe(one)
        if rests and one.seq % 3:
            transitions += evaluator.judge_deferred(20)
    return evaluator, by_rule([*transitions, *evaluator.finish_deferred()])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rests=st.booleans())
def test_as_if_each_step_had_waited(seed: int, rests: bool) -> None:
    observations = list(run_of(seed, 60))
    narrow, expected = judged(observations, rests=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observation, "WIDE", 3)
        patch.setattr(rule_state, "PIECE", 2)
        patch.setattr(evaluation, "PORTION", 1)
        wide, found = judged(observations, rests=rests)
    assert found == expected
    assert [(r.rule, r.entity, r.state, r.judged) for r in wide.status()] == [
        (r.rule, r.entity, r.state, r.judged) for r in narrow.status()
    ]


def test_a_step_does_little_of_the_work_and_all_of_what_is_critical(wide: None) -> None:
    evaluator = Evaluator(LOADED, run="t")
    for one in run_of(1, 9):
        evaluator.observe(one)
        assert evaluator._deferred, "something is left"
    (last,) = [one for one in run_of(1, 10) if one.seq == 9]
    assert "Now" in [transition.incident.rule for transition in evaluator.observe(last)]
    for _ in range(100):
        evaluator.judge_deferred(1)
    assert not evaluator._deferred


def test_what_is_left_is_done_before_the_state_is_kept(wide: None) -> None:
    observations = list(run_of(3, 40))
    first, later = observations[:20], observations[20:]
    evaluator, transitions = Evaluator(LOADED, run="t"), []
    for one in first:
        transitions += evaluator.observe(one)
    state, checkpoints = evaluator.save_state()
    other = Evaluator(LOADED, run="t")
    other.restore(state, checkpoints, first)
    mine = [t for one in later for t in other.observe(one)] + other.finish_deferred()
    transitions += [t for one in later for t in evaluator.observe(one)] + evaluator.finish_deferred()
    assert by_rule(transitions) == judged(observations, rests=False)[1]
    assert told(iter(mine)) == told(iter(transitions))[-len(mine) :]


def test_a_rewind_forgets_what_is_left(wide: None) -> None:
    observations = list(run_of(5, 30))
    rewound, clean = Evaluator(LOADED, run="t"), Evaluator(LOADED, run="t")
    for one in observations[:20]:
        rewound.observe(one)
    for one in observations[:11]:
        clean.observe(one)
    clean.finish_deferred()
    rewound.rewind(10, 19)
    clean.rewind(10, 10)
    # The other rules read only times and bytes, which no rollback undoes.
    states = [[(r.entity, r.state, r.values) for r in e.status() if r.rule == "Held"] for e in (rewound, clean)]
    assert states[0]
    assert states[0] == states[1]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), at=st.integers(6, 40))
def test_a_rewind_amid_the_work_loses_nothing_of_rules_that_go_on(seed: int, at: int) -> None:
    observations, lasting = list(run_of(seed, 60)), {rule.name for rule in LOADED if not rule.undoable}

    def judge() -> dict[str, list[tuple[object, ...]]]:
        evaluator, transitions = Evaluator(LOADED, run="t"), list[Transition]()
        for one in observations:
            transitions += evaluator.observe(one)
            if one.seq == at:
                transitions += evaluator.rewind(at - 3, at)
        return by_rule([*transitions, *evaluator.finish_deferred()])

    narrow = judge()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observation, "WIDE", 3)
        patch.setattr(rule_state, "PIECE", 2)
        patch.setattr(evaluation, "PORTION", 1)
        wide = judge()
    assert {"Slow", "Apart"} <= lasting
    for rule in lasting:
        assert wide.get(rule) == narrow.get(rule), rule
