"""Rules about ranks and layers: members of incidents, and `across`."""

from __future__ import annotations

from sentinel.engine import RUN
from tests.engine.test_evaluation import NAN, evaluator, kinds, layer, rank, step


def test_ranks_with_one_cause_are_one_incident() -> None:
    target = evaluator("alert: A, scope: rank, expr: rss_bytes > 5, annotations: {summary: '{members}'}")
    fired = step(target, 0, {rank(i): {"rss_bytes": 9.0} for i in range(64)})
    assert kinds(fired) == ["fired"]
    assert len(fired[0].incident.members) == 64
    assert fired[0].incident.summary == "rank 0, rank 1, rank 2 and 61 more"


def test_members_join_and_the_last_one_resolves() -> None:
    target = evaluator("alert: A, scope: rank, expr: rss_bytes > 5")
    step(target, 0, {rank(0): {"rss_bytes": 9.0}, rank(1): {"rss_bytes": 0.0}})
    joined = step(target, 1, {rank(0): {"rss_bytes": 0.0}, rank(1): {"rss_bytes": 9.0}})
    assert kinds(joined) == ["joined"]
    assert {entity: member.seq for entity, member in joined[0].incident.members.items()} == {rank(0): 0, rank(1): 1}
    assert kinds(step(target, 2, {rank(1): {"rss_bytes": 0.0}})) == ["resolved"]


def test_a_layer_sees_its_own_metrics_and_the_run_s() -> None:
    target = evaluator("alert: A, scope: layer, expr: 'layer_grad_norm > 2 * mean(grad_norm, 2)'")
    step(target, 0, {RUN: {"grad_norm": 1.0}})
    step(target, 1, {RUN: {"grad_norm": 3.0}})
    fired = step(
        target, 2, {RUN: {"loss": 0.0}, layer("a"): {"layer_grad_norm": 5.0}, layer("b"): {"layer_grad_norm": 3.0}}
    )
    assert list(fired[0].incident.members) == [layer("a")]


def test_across_ranks() -> None:
    values = {rank(i): {"step_seconds": 1.0 + i} for i in range(4)}
    for how, expected in {"max": 4, "min": 1, "mean": 2.5, "spread": 3, "argmax": 3}.items():
        target = evaluator(f"alert: A, let: {{v: 'across(step_seconds, \"{how}\")'}}, expr: v > 100")
        step(target, 0, values)
        assert target.status()[0].values["v"] == expected, how


def test_across_layers() -> None:
    values = {layer(name): {"layer_grad_norm": norm} for name, norm in {"a": 1.0, "b": 5.0, "c": 3.0}.items()}
    for how, expected in {"max": 5, "min": 1, "mean": 3, "spread": 4}.items():
        target = evaluator(f"alert: A, let: {{v: 'across(layer_grad_norm, \"{how}\")'}}, expr: v > 100")
        step(target, 0, values)
        assert target.status()[0].values["v"] == expected, how


def test_across_of_a_window_in_a_rule_about_ranks() -> None:
    target = evaluator(
        "alert: A, scope: rank, let: {own: 'mean(step_seconds, 2)'}, expr: 'own > 1.5 * across(own, \"min\")'"
    )
    for seq in range(2):
        fired = step(target, seq, {rank(0): {"step_seconds": 1.0}, rank(1): {"step_seconds": 2.0}})
    assert list(fired[0].incident.members) == [rank(1)]


def test_across_with_a_rank_that_is_not_finite() -> None:
    target = evaluator("alert: A, expr: 'across(loss, \"max\") > 5'")
    step(target, 0, {rank(0): {"loss": 9.0}, rank(1): {"loss": NAN}})
    assert target.status()[0].state == "nonfinite"


def test_members_of_a_rule_about_the_run_are_named() -> None:
    target = evaluator(
        "alert: A, expr: not isfinite(grad_norm), members: {layer: layer_nonfinite > 0}, "
        "annotations: {summary: '{members}'}"
    )
    layers = {layer("a"): {"layer_nonfinite": 0.0}, layer("b"): {"layer_nonfinite": 3.0}}
    assert step(target, 0, {RUN: {"grad_norm": 1.0}, layer("b"): {"layer_nonfinite": 3.0}}) == []
    fired = step(target, 1, {RUN: {"grad_norm": NAN}, **layers})
    assert (kinds(fired), fired[0].incident.summary) == (["fired"], "b")
    assert list(fired[0].incident.members) == [RUN, layer("b")]
    joined = step(target, 2, {RUN: {"grad_norm": NAN}, layer("a"): {"layer_nonfinite": 1.0}})
    assert (kinds(joined), joined[0].incident.summary) == (["joined"], "b, a")
