"""Real fp16 training with real GradScalers."""

from __future__ import annotations

import re

import pytest

from tests.faults.training import trained

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_a_scale_that_collapses_is_reported_at_the_eighth_withheld_step() -> None:
    (case,), _ = trained("scaling.py", "collapse")
    assert (case["alert"], case["severity"]) == ("ScalerCollapse", "critical")
    assert case["step"] == 157
    assert [member["name"] for member in case["members"] if member["scope"] == "layer"] == ["lift.weight"]
    assert case["diagnosis"]["cause"].startswith("the model, whatever the batch")
    assert not any("roll" in done for done in case["done"])


@pytest.mark.slow
def test_a_scale_that_settles_and_is_tried_again_is_healthy() -> None:
    cases, printed = trained("scaling.py", "settles")
    scales = [float(line.split()[1]) for line in printed.splitlines()]
    falls = [step for step, (now, then) in enumerate(zip(scales[1:], scales[:-1], strict=True)) if now < then]
    assert falls[-1] > 100, "the scale was tried again"
    assert len([step for step in falls if step < 30]) >= 8, "and began too high"
    assert cases == []


@pytest.mark.slow
def test_fp16_without_a_scaler_is_reported_after_20_steps() -> None:
    (case,), _ = trained("scaling.py", "missing")
    assert (case["alert"], case["severity"], case["step"]) == ("ScalerMissing", "warning", 19)
    assert "GradScaler, but it scaled no loss" in case["diagnosis"]["cause"]
    assert re.search(r"[\d.]+% are 0 .* and [\d.]+% are under 6e-5", case["diagnosis"]["evidence"][0])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("what", "cause"),
    [
        (
            "operation",
            r"1 \(Middle\) made it in the backward pass of step 40: .* in SqrtBackward0 at .*poisoning.py:29",
        ),
        ("data", r"bad data: NaN or infinite values in args\[0\] of the batch of step 40"),
        ("targets", r"the loss function: the model's outputs at step 40 are finite, and the loss made of them is not"),
    ],
)
def test_the_first_value_that_is_not_finite_is_traced_back(what: str, cause: str) -> None:
    cases, _ = trained("poisoning.py", what)
    traced = [case for case in cases if case["alert"] in ("NonFiniteLoss", "NonFiniteGradient")]
    assert traced, cases
    for case in traced:
        assert case["provenance"]["0"]["seq"] == 40
        assert re.match(cause, case["diagnosis"]["cause"]), case["diagnosis"]["cause"]
        assert case["diagnosis"]["confidence"] == "high"
