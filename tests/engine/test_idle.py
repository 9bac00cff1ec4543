"""A rule for which a step has no samples is skipped: the results are as if it had been evaluated."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel.engine import RUN, Entity, Evaluator, Observation, load_rules, rules_of
from sentinel.engine.judging import rule_state, schedule
from tests.engine.test_rewind import told

RULES = """
group: t
rules:
  - {alert: Stale, expr: age(loss) >= 4, for: 3 steps, keep_firing: 2 steps}
  - {alert: Never, expr: "absent(loss_scale)", for: 5 steps}
  - {alert: Missing, expr: "absent(grad_norm, 6)", warmup: 10 steps}
  - {alert: Fresh, expr: "loss > 1 and age(loss) == 0", keep_firing: 3 steps}
  - {alert: Short, expr: "loss > 1 and age(grad_norm) > 5"}
  - {alert: Often, expr: "loss > 1 and not absent(grad_norm)", for: 2 of 4 steps}
  - {alert: Gated, expr: "median(where(grad_norm, absent(step_skipped) or step_skipped == 0), 3) > 1"}
  - {alert: Counted, expr: "count(age(loss) > 2, 8) >= 4"}
  - {alert: Ranked, scope: rank, expr: "absent(rss_bytes)", warmup: 5 steps}
  - {alert: Layered, scope: layer, expr: "layer_grad_norm > 1 and loss > 1"}
  - {alert: Across, expr: "across(rss_bytes, 'spread') > 1"}
  - {alert: At, expr: "count(grad_norm > loss, 3) > 1", at: grad_norm}
  - {alert: AtEither, expr: "count(grad_norm > loss, 3) > 1", at: [grad_norm, loss], for: 2 of 2 steps}
  - {alert: Third, expr: "sum(loss, 3) > 3", every: 3}
  - {alert: Named, expr: "loss > 1", members: {layer: "layer_nonfinite > 0"}, keep_firing: 5 steps}
"""
LOADED = rules_of([load_rules(RULES, "t.yaml")])


def sparse_run(seed: int, steps: int) -> list[Observation]:
    """Return a run with each metric at some steps or never, ranks that come and go, and steps without samples."""
    rng = random.Random(seed)
    share = {name: rng.choice([0.0, 0.1, 0.5, 1.0]) for name in ("loss", "grad_norm", "step_skipped", "loss_scale")}

    def sample(names: dict[str, float]) -> dict[str, float]:
        return {n: rng.choice([0.0, 0.0, 2.0, float("nan")]) for n, p in names.items() if rng.random() < p}

    observations = []
    for seq in range(steps):
        values = {RUN: sample(share)}
        for number in range(rng.randint(0, 2)):
            values[Entity("rank", str(number))] = sample({"rss_bytes": 0.3})
        if rng.random() < 0.2:
            values[Entity("layer", "a")] = sample({"layer_grad_norm": 0.9, "layer_nonfinite": 0.5})
        observations.append(Observation(seq, float(seq), values))
    return observations


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_as_if_every_rule_had_been_looked_at(seed: int) -> None:
    spared, whole = Evaluator(LOADED, run="t"), Evaluator(LOADED, run="t")
    for observation in sparse_run(seed, 80):
        mine = told(iter(spared.observe(observation)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rule_state.RuleState, "idle", lambda *_: False)
            patch.setattr(
                schedule.Schedule,
                "due",
                lambda schedule, step: schedule._list_due(schedule._list_sampled(step), whole=True),
            )
            theirs = told(iter(whole.observe(observation)))
        assert mine == theirs
        assert [(r.rule, r.entity, r.state) for r in spared.status()] == [
            (r.rule, r.entity, r.state) for r in whole.status()
        ]


def test_a_step_that_has_nothing_for_a_rule_costs_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    verdict = rule_state._verdict

    def seen(condition: rule_state.Condition, *rest: object) -> object:
        judged.append(condition.term.key)
        return verdict(condition, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(rule_state, "_verdict", seen)
    target = Evaluator(LOADED, run="t")
    for seq in range(20):
        target.observe(Observation(seq, float(seq), {RUN: {"loss": 0.0}}))
    judged.clear()
    target.observe(Observation(20, 20.0, {RUN: {"learning_rate": 1.0}}))
    assert len(judged) == len([rule for rule in LOADED if rule.name in ("Stale", "Never", "Missing", "Counted")])
