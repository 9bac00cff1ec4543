"""Rules about GPUs and nodes, and rules that do not apply to a run."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sentinel.engine import RUN, Entity, Evaluator, Observation, Transition, load_rules
from sentinel.engine.backtest import backtest
from sentinel.errors import RuleError

SIGNALS = {"gpu_temperature": "gpu", "gpu_clock": "gpu", "free_bytes": "node"}


def rules(text: str) -> Evaluator:
    found = load_rules(f"group: t\nrules:\n  - {{{text}}}\n", "t.yaml", signals=SIGNALS)
    return Evaluator(found.rules, run="t")


def gpu(name: str) -> Entity:
    return Entity("gpu", name)


def node(name: str) -> Entity:
    return Entity("node", name)


def step(target: Evaluator, seq: int, values: Mapping[Entity, Mapping[str, float]]) -> list[Transition]:
    return target.observe(Observation(seq, float(seq), values))


def test_a_rule_about_gpus_names_the_gpus() -> None:
    target = rules("alert: Hot, scope: gpu, expr: 'mean(gpu_temperature, 2) > 90', annotations: {summary: '{entity}'}")
    for seq in range(2):
        fired = step(target, seq, {gpu("0"): {"gpu_temperature": 95.0}, gpu("1"): {"gpu_temperature": 60.0}})
    (transition,) = fired
    assert (transition.incident.summary, list(transition.incident.members)) == ("GPU 0", [gpu("0")])


def test_a_gpu_sees_the_run_s_metrics_and_others_of_its_kind() -> None:
    target = rules("alert: Slow, scope: gpu, expr: 'step_seconds > 1 and gpu_clock < 0.8 * across(gpu_clock, \"max\")'")
    clocks = {gpu("0"): {"gpu_clock": 1000.0}, gpu("1"): {"gpu_clock": 1980.0}}
    assert step(target, 0, {RUN: {"step_seconds": 0.5}, **clocks}) == []
    (fired,) = step(target, 1, {RUN: {"step_seconds": 2.0}, **clocks})
    assert list(fired.incident.members) == [gpu("0")]


def test_a_rule_about_nodes_and_members_of_a_run_s_rule() -> None:
    target = rules("alert: Full, scope: node, expr: free_bytes < 10, annotations: {summary: '{members}'}")
    (fired,) = step(target, 0, {node("a"): {"free_bytes": 5.0}, node("b"): {"free_bytes": 50.0}})
    assert fired.incident.summary == "node a"
    target = rules("alert: Slow, expr: step_seconds > 1, members: {gpu: gpu_temperature > 90}")
    (fired,) = step(target, 0, {RUN: {"step_seconds": 2.0}, gpu("3"): {"gpu_temperature": 95.0}})
    assert list(fired.incident.members) == [RUN, gpu("3")]


def test_across_gpus_in_a_run_s_rule_goes_back_with_a_rollback() -> None:
    target = rules("alert: Hot, let: {t: 'mean(across(gpu_temperature, \"max\"), 3)'}, expr: t > 90")
    for seq in range(6):
        step(target, seq, {gpu("0"): {"gpu_temperature": 60.0 + seq}})
    target.rewind(3, 5)
    assert target.status()[0].values["t"] == 62.0


def test_a_gpu_s_metric_belongs_to_gpus() -> None:
    with pytest.raises(
        RuleError, match="gpu_temperature is one number a gpu, and the rule is of scope node; set `scope: gpu`"
    ):
        rules("alert: Hot, scope: node, expr: gpu_temperature > 90")
    with pytest.raises(RuleError, match="across wants metrics of one scope"):
        rules("alert: Hot, expr: 'across(gpu_temperature + loss, \"max\") > 90'")


# needs


def test_a_rule_without_what_it_needs_is_not_applicable() -> None:
    target = rules("alert: A, needs: [loss_scale], expr: loss > 1")
    for seq in range(2):
        assert step(target, seq, {RUN: {"loss": 9.0}}) == []
        (row,) = target.status()
        assert (row.state, row.lacking, row.judged) == ("not applicable", ("loss_scale",), 0)
    (fired,) = step(target, 2, {RUN: {"loss": 9.0, "loss_scale": 65536.0}})
    assert fired.kind == "fired"
    step(target, 3, {RUN: {"loss": 9.0}})
    assert target.status()[0].state == "firing"


def test_not_applicable_is_told_apart_from_no_data() -> None:
    text = "alert: A, needs: [grad_norm], expr: loss > 1"
    found = load_rules(f"group: t\nrules:\n  - {{{text}}}\n", "t.yaml").rules
    step_without = [Observation(0, 0.0, {RUN: {"grad_norm": 1.0}})]
    (looked,) = backtest(found, step_without, run="x").rules
    assert (looked.state, looked.missing) == ("no data", ("loss",))
    (looked,) = backtest(found, [], run="x").rules
    assert (looked.state, looked.missing) == ("not applicable", ("grad_norm",))


def test_each_gpu_has_its_own_needs_and_the_run_s_metrics_count_for_all() -> None:
    target = rules("alert: A, scope: gpu, needs: [gpu_clock, loss_scale], expr: gpu_temperature > 90")
    hot = {"gpu_temperature": 95.0}
    step(target, 0, {RUN: {"loss_scale": 1.0}, gpu("0"): hot, gpu("1"): {**hot, "gpu_clock": 1.0}})
    assert {str(row.entity): row.state for row in target.status()} == {"GPU 0": "not applicable", "GPU 1": "firing"}


def test_an_unknown_metric_in_needs() -> None:
    with pytest.raises(RuleError, match=r"t\.yaml:3:24: needs: unknown metric 'los'; did you mean 'loss'?"):
        rules("alert: A, needs: [los], expr: loss > 1")


def test_what_is_needed_is_read() -> None:
    (rule,) = load_rules("group: t\nrules:\n  - {alert: A, needs: [loss_scale], expr: loss > 1}\n", "t.yaml").rules
    assert rule.metrics == {"loss", "loss_scale"}
