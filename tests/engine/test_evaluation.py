"""States of a rule, `for`, NaN, frozen baselines, incidents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from sentinel.engine import RUN, Entity, Evaluator, Observation, Transition, load_rules, rules_of
from sentinel.errors import RuleError

NAN = math.nan


def evaluator(*rules: str, signals: str = "") -> Evaluator:
    """Return an evaluator of rules in YAML's flow style: `alert: A, expr: loss > 1`."""
    body = "\n".join(f"  - {{{rule}}}" for rule in rules)
    return Evaluator(rules_of([load_rules(f"group: t\n{signals}\nrules:\n{body}\n", "t.yaml")]), run="t")


def rank(number: int) -> Entity:
    return Entity("rank", str(number))


def layer(name: str) -> Entity:
    return Entity("layer", name)


def step(target: Evaluator, seq: int, values: Mapping[Entity, Mapping[str, float]], time: float | None = None) -> Any:
    return target.observe(Observation(seq, float(seq) if time is None else time, values))


def played(target: Evaluator, losses: Iterable[float | None], start: int = 0) -> list[str]:
    """Return the rule's state after each step of a loss."""
    states = []
    for seq, loss in enumerate(losses, start):
        step(target, seq, {RUN: {} if loss is None else {"loss": loss}})
        states.append(target.status()[0].state)
    return states


def kinds(transitions: Iterable[Transition]) -> list[str]:
    return [transition.kind for transition in transitions]


# States.


def test_a_metric_that_was_never_seen() -> None:
    target = evaluator("alert: A, expr: loss > 1")
    assert [row.state for row in target.status()] == ["no data"]
    assert played(target, [None, None, 0.0, None]) == ["no data", "no data", "inactive", "inactive"]


def test_warming_until_windows_are_full_and_warmup_is_over() -> None:
    assert played(evaluator("alert: A, expr: 'mean(loss, 3) > 1'"), [9, 9, 9]) == ["warming", "warming", "firing"]
    assert played(evaluator("alert: A, expr: loss > 1, warmup: 2 steps"), [9, 9, 9]) == ["warming", "warming", "firing"]
    assert played(evaluator("alert: A, expr: loss > 1, warmup: 2s"), [9, 9, 9]) == ["warming", "warming", "firing"]


def test_no_data_of_one_metric_is_told_from_warming_of_another() -> None:
    target = evaluator("alert: A, expr: 'mean(loss, 3) > 1 and mean(grad_norm, 3) > 1'")
    assert played(target, [9, 9, 9]) == ["warming", "warming", "no data"]
    assert played(evaluator("alert: A, expr: 'mean(loss + grad_norm, 2) > 1'"), [9, 9]) == ["no data", "no data"]


def test_for_counts_steps() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 3 steps")
    assert played(target, [9, 9, 0, 9, 9, 9, 0]) == [
        "pending", "pending", "inactive", "pending", "pending", "firing", "inactive",
    ]  # fmt: skip


def test_for_counts_the_steps_between_the_samples_of_a_sparse_metric() -> None:
    assert played(evaluator("alert: A, expr: loss > 1, for: 3 steps"), [9, None, None, 9]) == [
        "pending", "pending", "pending", "firing",
    ]  # fmt: skip


def test_for_counts_time() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 90s")
    for seq, time in enumerate([0.0, 60.0, 89.0]):
        step(target, seq, {RUN: {"loss": 9.0}}, time)
        assert target.status()[0].state == "pending"
    step(target, 3, {RUN: {"loss": 9.0}}, 90.0)
    assert target.status()[0].state == "firing"


def test_for_n_of_m() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 3 of 5 steps")
    losses = [9, 0, 0, 0, 0, 0, 9, 0, 9, 0, 9]
    assert played(target, losses) == ["pending"] * 5 + ["inactive"] + ["pending"] * 4 + ["firing"]
    assert target.incidents[0].first_seq == 6


def test_the_first_sign_of_n_of_m_is_within_the_last_m() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 3 of 5 steps")
    played(target, [9, 0, 0, 9, 0, 9, 9])
    assert [(incident.first_seq, incident.seq) for incident in target.incidents] == [(3, 6)]


def test_n_of_m_starts_over_after_it_resolved() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 3 of 5 steps")
    assert played(target, [9, 9, 9, 0, 9])[2:] == ["firing", "inactive", "pending"]


def test_keep_firing_bridges_a_lull() -> None:
    target = evaluator("alert: A, expr: loss > 1, keep_firing: 2 steps")
    assert played(target, [9, 0, 0, 9, 0, 0, 0]) == ["firing"] * 6 + ["inactive"]
    assert [(incident.seq, incident.resolved_seq) for incident in target.incidents] == [(0, 6)]


def test_the_text_at_the_end_has_the_numbers_of_the_end() -> None:
    target = evaluator("alert: A, expr: loss > 1, annotations: {summary: '{loss}', over: '{loss} since {step}'}")
    played(target, [0, 9, 0.5])
    (incident,) = target.incidents
    assert incident.annotations == {"summary": "9", "over": "0.5 since 1"}
    played(target, [9], start=3)
    assert target.incidents[-1].annotations == {"summary": "9"}


def test_a_new_firing_is_a_new_incident() -> None:
    target = evaluator("alert: A, expr: loss > 1")
    played(target, [9, 0, 9])
    assert [(i.id, i.state, i.seq) for i in target.incidents] == [(1, "resolved", 0), (2, "firing", 2)]


# NaN.


def test_comparisons_with_nan_are_false() -> None:
    for comparison in ("v > 0", "v < 0", "v == v", "v != v", "v >= 0"):
        target = evaluator(f"alert: A, let: {{v: 'log(0 - 1 - 0 * loss)'}}, expr: {comparison}")
        assert played(target, [1.0]) == ["inactive"], comparison


def test_division_by_zero_is_that_of_ieee() -> None:
    assert played(evaluator("alert: A, expr: 1 / loss > 1e308"), [0.0]) == ["firing"]
    assert played(evaluator("alert: A, expr: -1 / loss < -1e308"), [0.0]) == ["firing"]
    assert played(evaluator("alert: A, expr: isnan(0 / loss)"), [0.0]) == ["firing"]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_nonfinite_counts_neither_for_nor_against(bad: float) -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 3 steps")
    assert played(target, [9, bad, 9]) == ["pending", "nonfinite", "firing"]
    assert played(target, [bad, bad, 0], start=3) == ["firing", "firing", "inactive"]


def test_nonfinite_inside_is_and_count_is_judged() -> None:
    assert played(evaluator("alert: A, expr: not isfinite(loss)"), [1, NAN, math.inf]) == [
        "inactive",
        "firing",
        "firing",
    ]
    target = evaluator("alert: A, expr: 'count(isnan(loss), 3) >= 2'")
    assert played(target, [1, NAN, 1, NAN, 1, 1]) == [
        "warming",
        "warming",
        "inactive",
        "firing",
        "inactive",
        "inactive",
    ]


def test_inside_count_a_comparison_with_nan_is_a_sample_that_is_false() -> None:
    target = evaluator("alert: A, expr: 'count(loss > 5, 3) >= 2'")
    assert played(target, [9, 9, NAN, NAN]) == ["warming", "warming", "firing", "inactive"]


def test_windows_stay_finite() -> None:
    target = evaluator("alert: A, let: {m: 'mean(loss, 2)'}, expr: m > 10")
    played(target, [1.0, NAN, math.inf, 3.0])
    assert target.status()[0].values["m"] == 2.0


def test_absent_guards_a_comparison_from_missing_data() -> None:
    target = evaluator("alert: A, expr: 'loss > 5 and (absent(loss_scale) or loss_scale > 2)'")
    assert played(target, [9]) == ["firing"]
    step(target, 1, {RUN: {"loss": 9.0, "loss_scale": 1.0}})
    assert target.status()[0].state == "inactive"


# Samples of several metrics.


def test_other_metrics_hold_their_last_value_and_windows_take_new_samples_only() -> None:
    target = evaluator("alert: A, let: {m: 'sum(grad_norm, 2)'}, expr: loss + m > 100")
    for seq in range(9):
        step(target, seq, {RUN: {"loss": 1.0} | ({"grad_norm": float(seq)} if seq % 4 == 0 else {})})
    assert target.status()[0].values == {"loss": 1.0, "grad_norm": 8.0, "m": 12.0}


def test_a_rule_is_judged_only_where_one_of_its_metrics_has_a_sample() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 2 of 3 steps")
    played(target, [9, None, None])
    assert target.status()[0].state == "pending"


def test_age_and_absent_ask_at_every_step() -> None:
    target = evaluator("alert: A, expr: age(loss) >= 2")
    assert played(target, [None, 1, None, None, 1]) == ["no data", "inactive", "inactive", "firing", "inactive"]
    target = evaluator("alert: A, expr: 'absent(loss, 2)'")
    assert played(target, [None, 1, None, None]) == ["firing", "inactive", "inactive", "firing"]


def test_declared_signals() -> None:
    target = evaluator("alert: A, expr: reward < 0", signals="signals: {reward: mean reward of the batch}")
    assert kinds(step(target, 0, {RUN: {"reward": -1.0}})) == ["fired"]


# Baselines.


def test_baselines_freeze_while_firing_and_thaw_after_rebase() -> None:
    rule = "alert: A, let: {base: 'median(past(loss, 1), 5)', now: 'median(loss, 3)'}, expr: now > 2 * base"
    target = evaluator(rule + ", rebase_after: 20 steps")
    states = played(target, [1.0] * 10 + [9.0] * 40)
    fired = states.index("firing")
    assert fired == 11
    assert target.status()[0].values["now"] == 9.0  # a window that is not over past() goes on
    assert "inactive" in states[fired:]
    resolved = fired + states[fired:].index("inactive")
    # It is frozen for 20 steps. The median of 5 follows at the third sample of the new level; it froze with one.
    assert resolved == fired + 20 + 2


def test_a_pending_rule_does_not_poison_its_own_baseline() -> None:
    rule = "alert: A, let: {base: 'median(past(loss, 1), 5)'}, expr: loss > 2 * base, for: 10 steps"
    assert played(evaluator(rule), [1.0] * 8 + [9.0] * 10)[-1] == "firing"


# Incidents.


def test_a_whole_number_is_written_in_any_format_of_a_number() -> None:
    """`age` counts steps, and Python takes no `.3` for an int."""
    text = "'{age(grad_norm):.3} {median(age(grad_norm), 1):.2} {age(grad_norm):.1f} {age(grad_norm)}'"
    target = evaluator(f"alert: A, expr: loss > 1, annotations: {{summary: {text}}}")
    target.observe(Observation(0, 0.0, {RUN: {"grad_norm": 1.0}}))
    played(target, [3.0], start=2)
    (incident,) = target.incidents
    assert incident.summary == "2.0 2.0 2.0 2"


def test_an_incident_carries_what_a_person_needs() -> None:
    rule = (
        "alert: A, let: {base: 'mean(past(loss), 2)'}, expr: loss > 2 * base, for: 2 steps, severity: critical, "
        "actions: [evidence, rollback], "
        "annotations: {summary: 'loss {loss:.2f} is {loss / base:.1f}x, {{step}} {step} of {run}', "
        "description: 'since {first_step}, {entity}, {grad_norm:.1f}', remedy: go back, runbook: loss-spike}"
    )
    target = evaluator(rule)
    target.step_offset = 1000
    played(target, [1.0, 1.0, 1.0, 3.0, 3.5])
    (incident,) = target.incidents
    assert incident.summary == "loss 3.50 is 3.5x, {step} 1004 of t"
    assert incident.annotations["description"] == "since 1003, the run, n/a"
    assert (incident.first_seq, incident.seq, incident.time, incident.state) == (3, 4, 4.0, "firing")
    assert (incident.severity, incident.actions, incident.runbook) == (
        "critical",
        ("evidence", "rollback"),
        "loss-spike",
    )
    assert incident.members[RUN].values == {"loss": 3.5, "base": 1.0}


def test_suspicious_while_pending_firing_or_nonfinite() -> None:
    target = evaluator("alert: A, expr: loss > 1, for: 2 steps")
    seen = []
    for seq, loss in enumerate([0.0, 9.0, 9.0, 0.0, NAN, 0.0]):
        step(target, seq, {RUN: {"loss": loss}})
        seen.append(target.suspicious)
    assert seen == [False, True, True, False, True, False]


def test_signals_of_the_clock_make_no_step_suspicious() -> None:
    target = evaluator("alert: A, scope: rank, expr: stalled_seconds > 1")
    rank = Entity("rank", "0")
    target.observe_between(Observation(seq=1, time=1.0, values={rank: {"stalled_seconds": 2.0}}))
    assert [incident.state for incident in target.incidents] == ["firing"]
    assert target.suspicious is False


def test_between_steps_a_rule_uses_only_the_samples_that_its_at_names() -> None:
    target = evaluator(
        "alert: A, scope: rank, at: step_seconds, expr: stalled_seconds > 1 and step_seconds > 0, for: 2 of 3 steps"
    )
    rank = Entity("rank", "0")
    step(target, 0, {rank: {"step_seconds": 1.0, "stalled_seconds": 2.0}})
    for time in (1.0, 2.0):
        target.observe_between(Observation(seq=0, time=time, values={rank: {"stalled_seconds": 2.0}}))
    assert target.incidents == []


# where.


def test_where_takes_the_samples_at_which_its_condition_holds() -> None:
    target = evaluator("alert: A, expr: 'sum(where(loss, step_skipped == 0), 2) > 10'")
    states = []
    for seq, (loss, skipped) in enumerate([(9.0, 1.0), (1.0, 0.0), (NAN, 1.0), (2.0, 0.0), (9.0, 0.0), (1.0, 1.0)]):
        step(target, seq, {RUN: {"loss": loss, "step_skipped": skipped}})
        states.append(target.status()[0].state)
    assert states == ["warming", "warming", "warming", "inactive", "firing", "firing"]


def test_where_does_not_hide_what_is_not_finite_and_is_taken() -> None:
    target = evaluator("alert: A, expr: 'where(loss, step_skipped == 0) > 10'")
    states = []
    for seq, (loss, skipped) in enumerate([(1.0, 0.0), (NAN, 1.0), (NAN, 0.0), (2.0, 0.0), (2.0, NAN)]):
        step(target, seq, {RUN: {"loss": loss, "step_skipped": skipped}})
        states.append(target.status()[0].state)
    assert states == ["inactive", "inactive", "nonfinite", "inactive", "nonfinite"]


def test_where_in_a_layers_rule_may_ask_about_the_run() -> None:
    target = evaluator("alert: A, scope: layer, expr: 'count(where(layer_grad_norm, step_skipped == 0) > 5, 2) >= 2'")
    for seq, skipped in enumerate([0.0, 1.0, 0.0]):
        step(target, seq, {RUN: {"step_skipped": skipped}, layer("a"): {"layer_grad_norm": 9.0}})
        assert [row.state for row in target.status()] == ["firing" if seq == 2 else "warming"]


def test_where_samples_with_its_number_and_not_with_its_condition() -> None:
    target = evaluator("alert: A, expr: 'count(where(grad_norm, step_skipped == 0) > 0, 3) >= 3'")
    states = []
    for seq in range(9):
        step(target, seq, {RUN: {"step_skipped": 0.0} | ({"grad_norm": 1.0} if seq % 4 == 0 else {})})
        states.append(target.status()[0].state)
    assert states == ["warming"] * 8 + ["firing"]


# Rules that are replaced.


def test_an_unchanged_rule_keeps_what_it_has_seen_and_the_others_start_over() -> None:
    one, two = "alert: A, expr: 'mean(loss, 3) > 1'", "alert: B, expr: 'mean(loss, 3) > 2'"
    target = evaluator(one, two)
    played(target, [9, 9, 9])
    changed = rules_of(
        [load_rules(f"group: t\nrules:\n  - {{{one}}}\n  - {{{two.replace('2', '3')}}}\n", "other.yaml")]
    )
    ended = target.replace_rules(changed)
    assert [(t.incident.rule, t.kind, t.incident.resolved_seq) for t in ended] == [("B", "resolved", None)]
    assert step(target, 3, {RUN: {"loss": 9}}) == []  # A still fires, as the one incident
    assert {row.rule: row.state for row in target.status()} == {"A": "firing", "B": "warming"}
    assert kinds(played_transitions(target, [9, 9], 4)) == ["fired"]  # B, once its window is full
    assert kinds(target.replace_rules(())) == ["resolved", "resolved"]
    assert target.status() == []


def test_a_rewind_past_a_reload_begins_with_empty_windows() -> None:
    target = evaluator("alert: A, expr: 'mean(loss, 3) > 1'")
    played(target, [0, 0, 0])
    target.replace_rules(target._rules)
    played(target, [9, 9, 9], 3)
    assert kinds(target.rewind(1, 5)) == ["rolled_back"]
    assert played(target, [0, 0, 0], 6) == ["warming", "warming", "inactive"]


def played_transitions(target: Evaluator, losses: Iterable[float], start: int) -> list[Transition]:
    return [found for seq, loss in enumerate(losses, start) for found in step(target, seq, {RUN: {"loss": loss}})]


# Between steps.


def test_numbers_of_the_clock_touch_no_other_rule() -> None:
    target = evaluator(
        "alert: Hang, scope: rank, expr: stalled_seconds > 60",
        "alert: Mean, expr: 'mean(loss, 3) > 1 and age(loss) == 0', for: 2 of 3 steps",
    )

    def between(seq: int, seconds: float) -> list[str]:
        return kinds(target.observe_between(Observation(seq, 100.0, {rank(0): {"stalled_seconds": seconds}})))

    assert between(-1, 0.0) == []
    played(target, [9, 9])
    before = target.save_state()[1]
    assert between(1, 61.0) == ["fired"]
    assert between(1, 62.0) == []
    assert between(1, 0.0) == ["resolved"]
    assert {row.rule: row.state for row in target.status()} == {"Hang": "inactive", "Mean": "warming"}
    played(target, [9, 9], 2)
    assert {row.rule: row.state for row in target.status()} == {"Hang": "inactive", "Mean": "firing"}
    assert target.save_state()[1] == before
    assert [(t.incident.rule, t.kind) for t in target.rewind(1, 3)] == [("Mean", "rolled_back")]
    assert {row.rule: row.state for row in target.status()}["Mean"] == "warming"


def test_the_first_number_of_the_clock_may_come_before_the_first_step() -> None:
    target = evaluator("alert: Hang, scope: rank, expr: stalled_seconds > 60")
    [fired] = target.observe_between(Observation(-1, 100.0, {rank(0): {"stalled_seconds": 61.0}}))
    assert (fired.kind, fired.incident.seq) == ("fired", -1)


def test_every_nth_sample_is_what_a_rule_sees_and_its_windows_hold() -> None:
    rule = "{alert: Slow, expr: 'sum(loss, 3) > 5', every: 4}"
    evaluator = Evaluator(load_rules(f"{{group: t, rules: [{rule}]}}", "t").rules, run="t")
    fired = []
    for seq in range(40):
        loss = {} if seq % 2 else {"loss": 2.0 if seq % 8 == 0 and seq > 5 else 100.0 if seq % 8 else 0.0}
        fired += [(t.kind, seq) for t in evaluator.observe(Observation(seq, float(seq), {RUN: loss}))]
    # Samples at even steps, and of those every fourth: 0, 8, 16, 24. The third of 2.0 makes 6.
    assert fired == [("fired", 24)]


def test_a_rule_at_a_metric_is_judged_where_that_has_a_sample_and_reads_the_others_there() -> None:
    rule = "{alert: Rare, expr: 'sum(update_ratio / learning_rate, 2) > 25', at: update_ratio}"
    evaluator = Evaluator(load_rules(f"{{group: t, rules: [{rule}]}}", "t").rules, run="t")
    fired = []
    for seq in range(30):
        values = {"learning_rate": 0.1 if seq < 15 else 0.05} | ({} if seq % 10 else {"update_ratio": 1.0})
        fired += [(t.kind, seq) for t in evaluator.observe(Observation(seq, float(seq), {RUN: values}))]
    assert fired == [("fired", 20)]  # 10 at steps 0 and 10, 20 at step 20


@pytest.mark.parametrize(("span", "pending"), [("3 of 3", [0, 1]), ("3 of 4", [0, 1, 2, 3, 4])])
def test_pending_ends_once_n_in_a_row_are_out_of_reach(span: str, pending: list[int]) -> None:
    rules = load_rules(f"{{group: t, rules: [{{alert: High, expr: loss > 10, for: {span} steps}}]}}", "t").rules
    evaluator, found = Evaluator(rules, run="t"), []
    for seq, loss in enumerate([11.0, 11.0, 1.0, 1.0, 1.0, 1.0, 1.0]):
        evaluator.observe(Observation(seq, float(seq), {RUN: {"loss": loss}}))
        found += [seq] * bool(evaluator.pending)
    assert found == pending


def test_a_rule_may_end_by_another_condition_than_it_begins() -> None:
    rule = "{alert: High, expr: loss > 10, keep_while: 'mean(loss, 2) > 5', keep_firing: 2 steps}"
    evaluator = Evaluator(load_rules(f"{{group: t, rules: [{rule}]}}", "t").rules, run="t")
    found = []
    for seq, loss in enumerate([6, 6, 11, 6, 6, 6, 6, 11, 1, 1, 1, 1, 6, 6]):
        found += [(t.kind, seq) for t in evaluator.observe(Observation(seq, float(seq), {RUN: {"loss": float(loss)}}))]
    assert found == [("fired", 2), ("resolved", 11)]


def test_a_rule_is_judged_where_any_metric_of_its_list_has_a_sample() -> None:
    rule = "{alert: Rare, expr: 'update_ratio + loss > grad_norm', at: [update_ratio, loss], for: 3 of 3 steps}"
    evaluator = Evaluator(load_rules(f"{{group: t, rules: [{rule}]}}", "t").rules, run="t")
    fired, pending = [], []
    for seq in range(40):
        values = (
            {"grad_norm": 0.1} | ({} if seq % 10 else {"update_ratio": 1.0}) | ({"loss": 1.0} if seq in (0, 15) else {})
        )
        fired += [(t.kind, seq) for t in evaluator.observe(Observation(seq, float(seq), {RUN: values}))]
        pending += [seq] * bool(evaluator.pending)
    assert fired == [("fired", 15)]  # judged at 0, 10 and 15
    assert pending == list(range(15))


@pytest.mark.parametrize("at", ["loss", "[grad_norm, loss]"])
def test_at_must_be_a_metric_of_the_rule(at: str) -> None:
    with pytest.raises(RuleError, match="the rule does not read 'loss'"):
        load_rules(f"{{group: t, rules: [{{alert: A, expr: grad_norm > 1, at: {at}}}]}}", "t")


@pytest.mark.parametrize(
    ("calm", "severity", "actions"), [(1.0, "warning", ("evidence",)), (0.0, "critical", ("rollback",))]
)
def test_a_downgrade_is_decided_as_the_rule_fires(calm: float, severity: str, actions: tuple[str, ...]) -> None:
    rules = evaluator(
        "alert: A, expr: loss > 1, severity: critical, actions: [rollback], "
        "downgrade: {when: calm > 0, severity: warning, actions: [evidence]}",
        signals="signals: {calm: whether it is}",
    )
    (fired,) = step(rules, 0, {RUN: {"loss": 2.0, "calm": calm}})
    assert (fired.incident.severity, fired.incident.actions) == (severity, actions)
    assert rules.find_asking("rollback") == ({} if calm else {"A": 0})
    step(rules, 1, {RUN: {"loss": 3.0, "calm": 1.0 - calm}})
    assert fired.incident.severity == severity, "what was told stays as it was"


def test_a_downgrade_that_cannot_be_judged_does_not_apply() -> None:
    rules = evaluator(
        "alert: A, expr: loss > 1, severity: critical, downgrade: {when: 'median(grad_norm, 5) > 0', severity: info}"
    )
    (fired,) = step(rules, 0, {RUN: {"loss": 2.0, "grad_norm": 1.0}})
    assert fired.incident.severity == "critical"
