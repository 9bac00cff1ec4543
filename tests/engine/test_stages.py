"""When a stage is announced, rules over losses, gradients and times start over, and no others."""

from __future__ import annotations

import pytest

from sentinel.engine import RUN, Evaluator, Observation, load_rules
from tests.engine.test_rewind import run_of, small_history, told

__all__ = ["small_history"]

RULES = load_rules(
    """
group: test
signals: {reward: of the user's own}
rules:
  - alert: Risen
    expr: loss > 2 * first(loss)
    warmup: 5 steps
  - alert: Wide
    expr: max(loss, 3) > 2 * lowest(loss)
  - alert: Slow
    expr: step_seconds > 2 * median(past(step_seconds), 10)
  - alert: Poor
    expr: reward < first(reward)
  - alert: Memory
    expr: rss_bytes > 2 * first(rss_bytes)
  - alert: Often
    expr: loss > mean(loss, 5) + 0.1
    for: 2 of 4 steps
""",
    "test.yaml",
).rules
CHANGED = ["Risen", "Wide", "Slow", "Poor", "Often"]


def observation(seq: int, loss: float = 1.0, **others: float) -> Observation:
    return Observation(seq, float(seq), {RUN: {"loss": loss, "step_seconds": 1.0, "reward": 1.0} | others})


def evaluator(**how: bool) -> Evaluator:
    return Evaluator(RULES, run="t", **how)


def fired(one: Evaluator, observations: list[Observation]) -> list[tuple[str, int]]:
    return [
        (transition.incident.rule, transition.incident.seq)
        for each in observations
        for transition in one.observe(each)
        if transition.kind == "fired"
    ]


LATER = [observation(seq, 5.0, step_seconds=4.0, reward=0.5, rss_bytes=30.0) for seq in range(20, 60)]


def test_without_a_stage_all_rules_fire() -> None:
    one = evaluator()
    assert not fired(one, [observation(seq, rss_bytes=10.0) for seq in range(20)])
    assert {rule for rule, _ in fired(one, LATER)} == {*CHANGED, "Memory"}


def test_rules_over_what_a_stage_changes_start_over_and_others_go_on() -> None:
    one = evaluator()
    fired(one, [observation(seq, rss_bytes=10.0) for seq in range(20)])
    assert one.begin_stage() == []
    assert fired(one, LATER) == [("Memory", 20)]


def test_warmup_counts_from_the_stage() -> None:
    one = evaluator()
    fired(one, [observation(seq) for seq in range(20)])
    one.begin_stage()
    losses = [1.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert ("Risen", 25) in fired(one, [observation(20 + n, loss) for n, loss in enumerate(losses)])


def test_open_incidents_of_these_rules_resolve_and_others_stay() -> None:
    one = evaluator()
    fired(one, [observation(seq, rss_bytes=10.0) for seq in range(20)])
    fired(one, LATER[:4])
    ended = one.begin_stage()
    assert {transition.incident.rule for transition in ended} >= {"Risen", "Wide", "Slow", "Poor"}
    assert {transition.kind for transition in ended} == {"resolved"}
    assert [incident.rule for incident in one.incidents if incident.state == "firing"] == ["Memory"]


def test_a_stage_before_the_first_step_changes_nothing() -> None:
    one = evaluator()
    assert one.begin_stage() == []
    assert fired(one, [observation(seq) for seq in range(20)]) == []


@pytest.mark.parametrize("seed", range(6))
def test_rules_find_what_they_would_if_the_run_had_begun_there(seed: int) -> None:
    observations = [
        Observation(each.seq, each.time, {RUN: each.values[RUN]} if RUN in each.values else {})
        for each in run_of(seed, 90)
    ]
    staged, fresh = evaluator(), evaluator()
    fired(staged, observations[:40])
    staged.begin_stage()
    for each in observations[40:]:
        assert told(iter(staged.observe(each))) == told(iter(fresh.observe(each)))


@pytest.mark.parametrize("seed", range(6))
def test_a_rollback_within_the_stage_and_a_restart_keep_the_stage(seed: int) -> None:
    observations = [
        Observation(each.seq, each.time, {RUN: each.values[RUN]} if RUN in each.values else {})
        for each in run_of(seed, 90)
    ]
    for to in (40, 41, 47, 55, 69):
        clean, one = evaluator(), evaluator()
        for other in (clean, one):
            fired(other, observations[:40])
            other.begin_stage()
        fired(clean, observations[40 : to + 1])
        fired(one, observations[40:70])
        state, checkpoints = one.save_state()
        two = evaluator()
        two.restore(state, checkpoints, observations[:70])
        for other in (one, two):
            other.rewind(to, 69)
        clean.rewind(to, to)  # so that nothing is firing in any of them
        assert repr(one.status()) == repr(clean.status()) == repr(two.status())
        rest = [observation(seq, 7.0) for seq in range(70, 90)]
        assert fired(one, rest) == fired(two, rest) == fired(clean, rest)
