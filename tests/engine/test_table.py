"""Layers in columns are judged, kept and restored like the same layers one by one."""

from __future__ import annotations

import math
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.engine import RUN, Entity, Evaluator, Observation, Table, load_rules, observation, rules_of
from sentinel.rulebook.observation import observation as observed
from sentinel.runs.steps import LayerStats, RunStep
from tests.engine.test_rewind import told

RULES = """
group: t
rules:
  - {alert: Gone, scope: layer, expr: "layer_nonfinite > 0", keep_firing: 3 steps}
  - {alert: Large, scope: layer, expr: "layer_grad_norm > 1.8 * median(past(layer_grad_norm), 5)", for: 2 of 3 steps}
  - {alert: Rare, scope: layer, expr: "median(layer_grad_norm, 2) > 1.5 and loss > 1", every: 3}
  - {alert: Apart, scope: run, expr: 'across(layer_grad_norm, "spread") > 0.9'}
  - {alert: Missing, scope: layer, expr: 'age(layer_grad_norm) > 2'}
  - {alert: Row, scope: layer, expr: "layer_nonfinite > 0 and loss > 1", for: 2 of 2 steps, warmup: 3 steps}
  - {alert: Some, scope: layer, expr: "layer_nonfinite > 0 or mean(loss, 3) < 1", for: 2 of 4 steps, keep_firing: 2s}
  - alert: Needy
    scope: layer
    needs: [fp16]
    let: {shown: layer_grad_norm * loss}
    expr: (layer_nonfinite > 0 or isnan(layer_grad_norm)) and loss > 1
"""
LOADED = rules_of([load_rules(RULES, "t.yaml")])
LAYERS = tuple(f"layer.{i}" for i in range(5))
ENTITIES = tuple(Entity("layer", name) for name in LAYERS)


def both(seed: int, length: int) -> tuple[list[Observation], list[Observation]]:
    """Return a run whose layers come in columns, and the same run with its layers one by one."""
    rng = random.Random(seed)
    tabled, single = [], []
    for seq in range(length):
        values = {RUN: {"loss": 2.0 * (rng.random() < 0.9)} | ({"fp16": 1.0} if rng.random() < 0.1 else {})}
        if rng.random() < 0.03:
            values[RUN]["loss"] = math.nan
        table, rows = None, {}
        if rng.random() < 0.8:
            # Now and then other layers than before, a NaN, and layers with something nonfinite for steps in a row.
            entities = ENTITIES[: 5 if seq < 20 or rng.random() < 0.8 else 3]
            columns = {"layer_grad_norm": array("f", [1 + rng.random() for _ in entities])}
            if rng.random() < 0.7:
                share = 0.2 * (seq // 10 % 3)
                columns["layer_nonfinite"] = array("f", [float(rng.random() < share) for _ in entities])
            if rng.random() < 0.05:
                rng.choice(list(columns.values()))[1] = math.nan
            table = Table(entities, columns)
            rows = {
                entity: {metric: column[i] for metric, column in columns.items()} for i, entity in enumerate(entities)
            }
        tabled.append(Observation(seq, 0.1 * seq, values, table))
        single.append(Observation(seq, 0.1 * seq, values | rows))
    return tabled, single


def judge_and_look(evaluator: Evaluator, sample: Observation) -> list[object]:
    """Judge a step; return its transitions, and at some steps also the states of the rules."""
    seen: list[object] = [*told(evaluator.observe(sample)), evaluator.suspicions]
    if sample.seq % 5 == 0:
        seen.append(evaluator.states())
    if sample.seq % 7 == 0:
        seen.append(repr(evaluator.status()))
    return seen


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), to=st.integers(0, 59), wide=st.booleans())
def test_as_if_each_came_by_itself(seed: int, to: int, wide: bool) -> None:
    limit, observation.WIDE = observation.WIDE, 3 if wide else observation.WIDE
    try:
        outcomes = []
        for run in both(seed, 90):
            evaluator = Evaluator(LOADED, run="r")
            seen = [row for sample in run[:60] for row in judge_and_look(evaluator, sample)]
            seen += told(evaluator.rewind(to, 59))
            seen += [row for sample in run[60:] for row in judge_and_look(evaluator, sample)]
            outcomes.append(seen)
        assert outcomes[0] == outcomes[1]
    finally:
        observation.WIDE = limit


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), before=st.integers(1, 59))
def test_what_was_kept_of_columns_goes_on(seed: int, before: int) -> None:
    run, _ = both(seed, 60)
    first = Evaluator(LOADED, run="r")
    for sample in run[:before]:
        first.observe(sample)
    state, checkpoints = first.save_state()
    second = Evaluator(LOADED, run="r")
    second.restore(state, checkpoints, run[:before])
    for sample in run[before:]:
        assert told(second.observe(sample)) == told(first.observe(sample))
    assert repr(second.status()) == repr(first.status())


def test_layers_that_all_have_values_come_in_columns_and_others_do_not() -> None:
    stats = {"layer_grad_norm": array("f", [1.0, 2.0])}
    whole = observed(RunStep(3, 0.0, {0: {}}, {}, LayerStats(("a", "b"), stats, b"\x01\x01")))
    partly = observed(RunStep(4, 0.0, {0: {}}, {}, LayerStats(("a", "b"), stats, b"\x01\x00")))
    assert whole.table == Table((Entity("layer", "a"), Entity("layer", "b")), stats)
    assert whole.values.keys() == {RUN, Entity("rank", "0")}
    assert partly.table is None
    assert partly.values[Entity("layer", "a")] == {"layer_grad_norm": 1.0}
    assert Entity("layer", "b") not in partly.values


def test_a_layer_that_is_new_in_a_table_is_known_to_rules_over_other_metrics() -> None:
    rows = {entity: {"layer_grad_norm": 1.0} for entity in ENTITIES}
    table = Table(ENTITIES, {"layer_grad_norm": array("f", [1.0] * len(ENTITIES))})
    statuses = []
    for first in (Observation(1, 0.1, {RUN: {}}, table), Observation(1, 0.1, {RUN: {}} | rows)):
        evaluator = Evaluator(LOADED, run="r")
        evaluator.observe(Observation(0, 0.0, {RUN: {}}))
        evaluator.observe(first)
        statuses.append(evaluator.status())
    assert statuses[0] == statuses[1]
    assert {row.entity for row in statuses[0] if row.rule == "Gone"} == set(ENTITIES)
