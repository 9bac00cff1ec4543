"""Which signal departed first, and which layers with it."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from sentinel.diagnose.signs import COMPARED_VALUES, LEAST_COMPARED, Sign, first_signs, grown_layers
from sentinel.runs.steps import LayerStats, RunStep
from tests.diagnose.made import layered, run_of


def history(steps: int = 300, **odd: dict[int, float]) -> list[RunStep]:
    """Return a healthy run with noise; `odd` sets single values of a signal by step."""
    rng = random.Random(1)
    run = []
    for seq in range(steps):
        values = {"loss": 3.0 + rng.gauss(0, 0.02), "grad_norm": math.exp(rng.gauss(0, 0.2)), "loss_scale": 65536.0}
        values |= {signal: by_step[seq] for signal, by_step in odd.items() if seq in by_step}
        run.append(RunStep(seq=seq, time=float(seq), ranks={0: values}, run=values))
    return run


def over(first: int, last: int, value: float) -> dict[int, float]:
    return {seq: value for seq in range(first, last + 1)}


def test_the_gradient_norm_moved_before_the_loss() -> None:
    signs = first_signs(history(grad_norm=over(290, 299, 40.0), loss=over(293, 299, 6.0)), since=294, until=296)
    assert [(sign.signal, sign.seq, sign.value) for sign in signs] == [("grad_norm", 290, 40.0), ("loss", 293, 6.0)]
    assert signs[1].usual == pytest.approx(3.0, abs=0.02)


def test_the_loss_moved_alone() -> None:
    assert [(s.signal, s.seq) for s in first_signs(history(loss=over(293, 299, 6.0)), 293, 299)] == [("loss", 293)]


def test_a_falling_loss_scale_is_a_sign() -> None:
    steps = history(loss_scale={seq: 65536.0 / 2 ** (seq - 260) for seq in range(261, 300)}, loss={299: math.nan})
    signs = first_signs(steps, since=299, until=299)
    assert [sign.signal for sign in signs] == ["loss_scale", "loss"]
    assert signs[0].seq == 262


def test_a_hard_batch_long_before_is_not_the_first_sign() -> None:
    steps = history(loss={250: 5.0} | over(293, 299, 6.0), grad_norm={270: 30.0})
    assert [(s.signal, s.seq) for s in first_signs(steps, 293, 299)] == [("loss", 293)]


def test_a_gradient_that_the_loss_outlived_is_not_the_first_sign() -> None:
    """Norms that were sampled rarely do not connect two outliers when the loss fell all the time between them."""

    def values(seq: int) -> dict[str, float]:
        loss = {"loss": 9.0 if seq >= 201 else 3.0 - 0.01 * seq}
        return loss | ({"grad_norm": 8.0 if seq in (16, 201) else 1.0} if seq < 17 or seq >= 201 else {})

    signs = first_signs(run_of(202, values), 201, 201)
    assert [(sign.signal, sign.seq) for sign in signs] == [("grad_norm", 201), ("loss", 201)]


def test_two_normal_steps_within_do_not_break_the_stretch() -> None:
    steps = history(loss={290: 6.0} | over(293, 299, 6.0))
    assert first_signs(steps, since=294, until=299)[0].seq == 290


def test_a_change_after_the_incident_is_no_sign_of_it() -> None:
    assert first_signs(history(loss={280: 9.0}, grad_norm=over(281, 299, 50.0)), 280, 280)[0].signal == "loss"
    assert len(first_signs(history(loss={280: 9.0}, grad_norm=over(281, 299, 50.0)), 280, 280)) == 1


def test_a_run_too_young_to_have_a_past_shows_what_is_not_finite() -> None:
    steps = history(2, loss={1: math.nan})
    assert [(sign.signal, sign.seq) for sign in first_signs(steps, 1, 1)] == [("loss", 1)]


def test_three_samples_are_a_past_and_the_one_that_left_it_is_no_part_of_it() -> None:
    losses = [3.0, 3.1, 3.2, 9.0]
    assert first_signs(run_of(4, lambda seq: {"loss": losses[seq]}), 3, 3) == [Sign("loss", 3, 9.0, usual=3.1)]


def test_a_constant_signal_shows_any_clear_change_and_no_small_one() -> None:
    flat = [RunStep(seq=n, time=0.0, ranks={}, run={"loss": 1e-6}) for n in range(200)]
    odd = RunStep(seq=200, time=0.0, ranks={}, run={"loss": 2e-6})
    same = RunStep(seq=200, time=0.0, ranks={}, run={"loss": 1.02e-6})
    assert len(first_signs([*flat, odd], 200, 200)) == 1
    assert first_signs([*flat, same], 200, 200) == []


def test_a_negative_loss_has_signs_too() -> None:
    flat = [RunStep(seq=n, time=0.0, ranks={}, run={"loss": -5.0 + 0.01 * (n % 7)}) for n in range(200)]
    odd = RunStep(seq=200, time=0.0, ranks={}, run={"loss": -1.0})
    assert first_signs([*flat, odd], 200, 200)[0].seq == 200


def layers(seq: int, **norms: float) -> tuple[int, LayerStats]:
    broken = [0.0 if math.isfinite(norm) else 4.0 for norm in norms.values()]
    stats = {"layer_grad_norm": array("f", norms.values()), "layer_nonfinite": array("f", broken)}
    return seq, LayerStats(tuple(norms), stats, b"\x01" * len(norms))


def test_layers_are_ordered_by_growth_over_their_own_past() -> None:
    blocks = [layers(seq, big=100.0, small=0.1, calm=1.0) for seq in range(0, 80, 8)]
    grown = grown_layers([*blocks, layers(80, big=400.0, small=5.0, calm=1.1)], since=80, until=80)
    assert [(layer.name, round(layer.ratio)) for layer in grown] == [("small", 50), ("big", 4)]


def test_of_very_many_layers_the_newest_samples_are_compared() -> None:
    names = [f"layer {number}" for number in range(COMPARED_VALUES // LEAST_COMPARED)]
    old = [layers(seq, **dict.fromkeys(names, 100.0)) for seq in range(10)]
    new = [layers(seq, **dict.fromkeys(names, 1.0)) for seq in range(10, 10 + LEAST_COMPARED)]
    grown = grown_layers([*old, *new, layers(80, **{names[3]: 50.0})], since=80, until=80)
    assert [(layer.name, layer.ratio) for layer in grown] == [(names[3], 50.0)]


def test_layers_that_are_not_finite_come_first() -> None:
    blocks = [layers(seq, a=1.0, b=1.0) for seq in range(0, 80, 8)]
    grown = grown_layers([*blocks, layers(80, a=1e6, b=math.nan)], since=80, until=80)
    assert [(layer.name, layer.nonfinite) for layer in grown] == [("b", 4), ("a", 0)]


def test_no_statistics_at_these_steps_names_no_layer() -> None:
    assert grown_layers([layers(seq, a=1.0) for seq in range(0, 80, 8)], since=81, until=83) == []


def test_a_layer_that_only_some_ranks_sampled_in_full_is_counted_by_those() -> None:
    """Combined over the ranks, the layer's count is NaN where the other ranks did not sample it."""

    def values(seq: int) -> dict[str, dict[str, float]]:
        return {"a": {"layer_grad_norm": 9.0 if seq == 5 else 1.0, "layer_nonfinite": math.nan if seq == 5 else 0.0}}

    (layer,) = grown_layers(layered(range(6), values), 5, 5)
    assert (layer.ratio, layer.nonfinite) == (9.0, 0)
