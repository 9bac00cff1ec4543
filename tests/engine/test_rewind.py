"""After a rollback the rules are in the state that they would have without the undone samples."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.engine import RUN, Entity, Evaluator, Observation, Transition, load_rules
from sentinel.engine.judging import history
from sentinel.engine.observation import ObservedStep

RULES = """
group: test
rules:
  - alert: Spike
    let: {base: "median(past(loss, 3), 10)", progress: "first(loss) - lowest(median(loss, 3))"}
    expr: median(loss, 3) > base + 2 * mad(past(loss, 3), 10) and progress > -100
    keep_firing: 4 steps
    rebase_after: 12 steps
    annotations: {summary: "{loss} {base}"}
  - alert: Often
    expr: loss > mean(loss, 5) + std(loss, 5) / 4
    for: 2 of 4 steps
  - alert: Lasting
    expr: ewma(loss, 4) > highest(past(loss, 5)) - 1
    for: 3 steps
  - alert: Timed
    expr: rate(loss, 7s) > 0.3 or slope(loss, 6) > 0.3 or quantile(loss, 0.9, 8) - min(loss, 8) > 4
    for: 2s
  - alert: NonFinite
    expr: not isfinite(loss) or count(isnan(loss), 6) >= 2 or age(loss) > 2 or absent(loss, 4)
  - alert: Third
    expr: loss > mean(loss, 3)
    every: 3
  - alert: At
    expr: sum(step_seconds, 3) > mean(loss, 2)
    at: step_seconds
  - alert: Straggler
    scope: rank
    expr: max(step_seconds, 3) > 1.2 * across(sum(step_seconds, 2), "mean") and loss > -1000
    for: 2 steps
  - alert: Layer
    scope: layer
    expr: layer_grad_norm > 1.5 * mean(past(layer_grad_norm), 3) and delta(loss, 3) > -3
  - alert: Named
    expr: loss > 6
    members: {layer: "layer_grad_norm > max(past(layer_grad_norm), 4)"}
"""

LOADED = load_rules(RULES, "test.yaml").rules


@pytest.fixture(autouse=True)
def small_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make checkpoints every 8 steps, so that a short run meets all that a long one would; exact over 3 of them."""
    monkeypatch.setattr(history, "SPACING", 8)


def run_of(seed: int, length: int) -> list[Observation]:
    """Return noise with spikes, gaps, NaN, sparse layers and ranks that come and go."""
    source, observations, level = random.Random(seed), [], 3.0
    for seq in range(length):
        level += source.choice([0, 0, 0, 0, 0, 0, 4, -2]) if seq % 5 == 0 else 0
        values: dict[Entity, dict[str, float]] = {RUN: {}}
        if source.random() < 0.9:
            values[RUN]["loss"] = math.nan if source.random() < 0.05 else level + source.gauss(0, 0.5)
        for rank in range(3):
            if source.random() < 0.9:
                values[Entity("rank", str(rank))] = {"step_seconds": 1 + source.random()}
        if seq % 3 == 0:
            for name in "ab":
                values[Entity("layer", name)] = {"layer_grad_norm": 1 + source.random()}
        observations.append(Observation(seq, seq * 1.0, values))
    return observations


def told(transitions: Iterator[Transition]) -> list[tuple[object, ...]]:
    """Return transitions without the ids of incidents, which differ, as they rise."""
    return [
        (kind, incident.rule, incident.first_seq, incident.seq, incident.summary, sorted(incident.members))
        for incident, kind in transitions
    ]


def fed(observations: list[Observation], *, rewindable: bool = True) -> Evaluator:
    evaluator = Evaluator(LOADED, run="t", rewindable=rewindable)
    for observation in observations:
        evaluator.observe(observation)
    return evaluator


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), to=st.integers(0, 119), lost=st.integers(1, 24), after=st.integers(1, 30))
def test_as_if_later_samples_had_never_been(seed: int, to: int, lost: int, after: int) -> None:
    observations = run_of(seed, to + lost + after)
    before, bad, later = observations[: to + 1], observations[to + 1 : to + lost], observations[to + lost :]
    rewound, clean = fed(before + bad), fed(before)
    rewound.rewind(to, to + lost - 1)
    firing = {incident.rule for incident in clean.incidents if incident.state == "firing"}
    settled = [row for row in clean.status() if row.rule not in firing]
    assert repr([row for row in rewound.status() if row.rule not in firing]) == repr(settled)
    for observation in later:
        told_rewound = [t for t in told(rewound.observe(observation)) if t[1] not in firing]
        assert told_rewound == [t for t in told(clean.observe(observation)) if t[1] not in firing]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), before=st.integers(0, 40), to=st.integers(0, 60), lost=st.integers(1, 24))
def test_from_the_moment_on_at_which_it_is_told_that_one_may_come(seed: int, before: int, to: int, lost: int) -> None:
    observations = run_of(seed, before + to + lost)
    rewound, clean = fed(observations[:before], rewindable=False), fed(observations[: before + to])
    rewound.be_rewindable()
    for observation in observations[before:]:
        rewound.observe(observation)
    rewound.be_rewindable()  # as at every hello: what is kept stays
    rewound.rewind(before + to - 1, before + to + lost - 1)
    firing = {incident.rule for incident in clean.incidents if incident.state == "firing"}
    settled = [row for row in clean.status() if row.rule not in firing]
    assert repr([row for row in rewound.status() if row.rule not in firing]) == repr(settled)


def test_an_evaluator_that_is_not_rewindable_keeps_nothing_and_finds_the_same() -> None:
    observations = run_of(3, 100)
    bare, kept = Evaluator(LOADED, run="t", rewindable=False), Evaluator(LOADED, run="t")
    for observation in observations:
        assert told(iter(bare.observe(observation))) == told(iter(kept.observe(observation)))
    assert bare.save_state()[0] == kept.save_state()[0]
    assert kept.save_state()[1]
    assert not bare.save_state()[1]
    bare.replace_rules(LOADED)
    bare.observe(observations[-1])
    assert not bare.save_state()[1]


def test_rules_that_a_reload_does_not_change_keep_their_windows_in_a_later_rewind() -> None:
    observations = run_of(5, 45)
    reloaded, untouched = fed(observations[:30]), fed(observations[:36])
    reloaded.replace_rules(load_rules(RULES, "test.yaml").rules)
    for observation in observations[30:]:
        reloaded.observe(observation)
    reloaded.rewind(35, 44)
    untouched.rewind(35, 35)  # only disarms what fires
    assert repr(reloaded.status()) == repr(untouched.status())


def test_a_rewind_to_before_anything_was_kept_begins_with_empty_windows() -> None:
    observations = run_of(7, 90)
    for told_of in (False, True):
        evaluator = fed(observations[:60], rewindable=False)
        if told_of:
            evaluator.be_rewindable()
            for observation in observations[60:80]:
                evaluator.observe(observation)
        evaluator.rewind(30, 79)
        assert [row.values for row in evaluator.status()] == [{}] * len(LOADED)
        for observation in observations[80:]:
            evaluator.observe(observation)


def test_a_rewind_twice_and_one_to_before_the_first_step() -> None:
    observations = run_of(7, 90)
    evaluator = fed(observations[:60])
    evaluator.rewind(45, 59)
    evaluator.rewind(36, 59)
    clean = fed(observations[:37]).status()
    assert repr([row.values for row in evaluator.status()]) == repr([row.values for row in clean])
    evaluator.rewind(-1, 59)
    assert [row.values for row in evaluator.status()] == [{}] * len(LOADED)


def test_open_incidents_end_as_rolled_back_and_what_held_already_is_pending() -> None:
    rules = load_rules("{group: t, rules: [{alert: A, expr: loss > 5, keep_firing: 9 steps}]}", "t").rules
    evaluator = Evaluator(rules, run="t")
    for seq in range(20):
        evaluator.observe(Observation(seq, float(seq), {RUN: {"loss": 9.0 if seq >= 10 else 1.0}}))
    ended = evaluator.rewind(12, 19)
    assert [(t.kind, t.incident.state, t.incident.resolved_seq) for t in ended] == [("rolled_back", "rolled_back", 19)]
    assert [row.state for row in evaluator.status()] == ["pending"]
    fired = evaluator.observe(Observation(20, 20.0, {RUN: {"loss": 9.0}}))
    assert [(t.kind, t.incident.id, t.incident.first_seq) for t in fired] == [("fired", 2, 10)]
    evaluator.rewind(5, 20)
    assert [row.state for row in evaluator.status()] == ["inactive"]
    assert evaluator.suspicious is False


def test_a_rewind_further_back_than_the_samples_uses_an_older_state() -> None:
    """No sample from after `to` counts: values since the start stay, and windows are those of the checkpoint."""
    rules = load_rules(
        "{group: t, rules: [{alert: A, let: {a: first(loss), b: highest(loss), c: 'max(loss, 4)'}, expr: loss > 1e9}]}",
        "t",
    ).rules
    evaluator = Evaluator(rules, run="t")
    for seq in range(400):
        evaluator.observe(Observation(seq, float(seq), {RUN: {"loss": float(seq)}}))
    for to in (350, 300, 200):
        evaluator.rewind(to, 399)
        values = evaluator.status()[0].values
        assert values["a"] == 0.0
        assert to / 2 < values["b"] <= to
        assert values["b"] == values["c"]


def test_memory_is_bounded() -> None:
    evaluator = fed(run_of(3, 2000))
    kept = evaluator._history
    assert len(kept._checkpoints) <= history.DENSE + history.SPARSE
    assert len(kept._steps) <= (history.DENSE + 1) * history.SPACING
    assert len(kept._blocks) == len(kept._steps)
    seqs = [seq for seq, _ in kept._checkpoints]
    assert seqs[0] < 1000, "something old is kept too"


@pytest.mark.parametrize(("seconds", "gap"), [(1.0, 8), (0.0031, 1291), (0.0, 2048)])
def test_in_a_fast_loop_the_state_is_copied_every_four_seconds(seconds: float, gap: int) -> None:
    kept, copied = history.ObservationHistory(()), [-1]
    for seq in range(3 * gap):
        kept.record(ObservedStep(Observation(seq, seq * seconds, {RUN: {}})))
        if kept.checkpoint_due:
            kept.checkpoint(seq, b"")
            copied.append(seq)
    assert [later - earlier for earlier, later in pairwise(copied)] == pytest.approx([gap] * (len(copied) - 1), abs=1)
    assert len(copied) >= 3


def test_alerts_about_what_no_rollback_undoes_go_on_firing() -> None:
    """After a rollback steps are as slow and memory is as full: no end is reported, and no new alert."""
    text = """
group: test
rules:
  - {alert: Slow, expr: "step_seconds > 1", for: 3 steps}
  - {alert: Full, scope: rank, expr: "rss_bytes > 1"}
  - {alert: High, expr: "loss > 1"}
"""
    evaluator = Evaluator(load_rules(text, "test.yaml").rules, run="r")
    rank = Entity("rank", "0")
    for seq in range(10):
        values = {"loss": float(seq > 7) * 2, "step_seconds": 2.0}
        evaluator.observe(Observation(seq, seq, {RUN: values, rank: {"rss_bytes": 5.0}}))
    ended = evaluator.rewind(5, 9)
    assert [(found.incident.rule, found.kind) for found in ended] == [("High", "rolled_back")]
    assert {incident.rule for incident in evaluator.incidents if incident.state == "firing"} == {"Slow", "Full"}
    good = {RUN: {"loss": 0.0, "step_seconds": 2.0}, rank: {"rss_bytes": 5.0}}
    assert evaluator.observe(Observation(10, 10, good)) == []
    over = evaluator.observe(Observation(11, 11, {RUN: {"loss": 0.0, "step_seconds": 0.5}}))
    assert [(found.incident.rule, found.kind) for found in over] == [("Slow", "resolved")]
