"""What is said of steps that take longer: since which step, and of how many backward passes."""

from __future__ import annotations

import pytest

from tests.diagnose.made import judged, run_of

CHANGE, FIRED, SINCE = 320, 346, 341
"""The rule's window is half full of slow steps by then."""


def accumulating(passes: int, each: float = 1.0, had: int = 1, outlier: int = -1) -> dict[str, object]:
    """Passes of 20 ms; from `CHANGE` on so many of them, each so many times as slow in its forward pass."""

    def values(seq: int) -> dict[str, float]:
        n, slower = (passes, each) if seq >= CHANGE else (had, 1.0)
        forward, backward, other = 0.015 * n * slower, 0.004 * n, 0.001 * n
        step = forward + backward + other + 0.001
        if seq == outlier:
            other, step = other + 5.0, step + 5.0
        return {
            "micro_batches": float(n), "step_seconds": step, "forward_seconds": forward, "backward_seconds": backward,
            "other_seconds": other, "optimizer_seconds": 0.001, "data_seconds": 0.0,
        }  # fmt: skip

    said = judged("SlowStep", run_of(FIRED, values), since=SINCE)
    return {"cause": said.cause, "confidence": said.confidence, "evidence": said.evidence, "remedy": said.remedy}


@pytest.mark.parametrize("outlier", [-1, 100, 305, 330])
def test_more_passes_a_step_are_told_as_such_and_since_when(outlier: int) -> None:
    said = accumulating(8, outlier=outlier)
    assert str(said["cause"]).startswith(
        f"a step has 8 backward passes since step {CHANGE}, it had 1; each takes 20.1 ms, it took 21.0 ms"
    )
    assert said["confidence"] == "high"
    assert "a step took 21.0 ms, and takes 161.0 ms" in said["evidence"]  # type: ignore[operator]
    assert "recompilation" not in str(said)


def test_a_slower_forward_pass_is_told_since_its_first_step() -> None:
    said = accumulating(1, each=10.0)
    assert str(said["cause"]).startswith("the forward pass: it grew from 15 to 150 ms")
    assert f"since step {CHANGE}" in str(said["cause"])


def test_where_both_changed_the_parts_are_compared_pass_by_pass() -> None:
    said = accumulating(4, each=3.0, had=2)
    assert str(said["cause"]).startswith("the forward pass: it grew from 60 to 180 ms, 100% of what the step gained")
    assert "a step has 4 backward passes, it had 2" in str(said["evidence"])


def test_fewer_passes_that_take_longer_are_no_accumulation() -> None:
    said = accumulating(1, each=30.0, had=4)
    assert str(said["cause"]).startswith("the forward pass: it grew from 15 to 450 ms")
