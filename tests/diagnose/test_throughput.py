"""What is reported of steps that take longer: since which step, and how many backward passes they have."""

from __future__ import annotations

import pytest

from sentinel.diagnose.evidence import Finding
from sentinel.runs.devices import Devices
from tests.diagnose.made import judged, run_of

CHANGE, FIRED, SINCE = 320, 346, 341
"""Steps: the first slow one, that of the alert, and the first of its condition, when half of the window is slow."""


def accumulating(passes: int, each: float = 1.0, had: int = 1, outlier: int = -1) -> dict[str, object]:
    """Diagnose passes of 20 ms, `had` a step; from `CHANGE` on `passes`, whose forward is `each` times as slow."""

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
def test_more_passes_a_step_are_reported_as_such_and_since_when(outlier: int) -> None:
    said = accumulating(8, outlier=outlier)
    assert str(said["cause"]).startswith(
        f"a step has 8 backward passes since step {CHANGE}, it had 1; each takes 20.1 ms, it took 21.0 ms"
    )
    assert said["confidence"] == "high"
    assert "a step took 21.0 ms, and takes 161.0 ms" in said["evidence"]  # type: ignore[operator]
    assert "recompilation" not in str(said)


def test_steps_that_were_slow_before_are_no_part_of_what_is_slow_now() -> None:
    def values(seq: int) -> dict[str, float]:
        slow = 0.1 if 600 <= seq < 900 else 0.3
        return {"step_seconds": slow + 0.01, "forward_seconds": slow, "backward_seconds": 0.01}

    found = judged("SlowStep", run_of(931, values), since=925)
    assert found.since == 900
    assert found.cause.startswith("the forward pass: it grew from 100 to 300 ms, 200 of the 200 ms that a step gained")


def test_a_slower_forward_pass_is_reported_since_its_first_step() -> None:
    said = accumulating(1, each=10.0)
    assert str(said["cause"]).startswith("the forward pass: it grew from 15 to 150 ms")
    assert f"since step {CHANGE}" in str(said["cause"])


def test_where_both_changed_the_parts_are_compared_pass_by_pass() -> None:
    said = accumulating(4, each=3.0, had=2)
    grew = "the forward pass: it grew from 60 to 180 ms, 119 of the 119 ms that a step gained"
    assert str(said["cause"]).startswith(grew)
    assert "a step has 4 backward passes, it had 2" in str(said["evidence"])


def test_fewer_passes_that_take_longer_are_no_accumulation() -> None:
    said = accumulating(1, each=30.0, had=4)
    assert str(said["cause"]).startswith("the forward pass: it grew from 15 to 450 ms")


def busy(backward: float, step: float, load: float, **other: float) -> Finding:
    """Diagnose steps of 123 ms, 94 ms of them backward, which take `step` and `backward` seconds from step 300 on."""

    def values(seq: int) -> dict[str, float]:
        late = seq >= 300
        parts = {name: value if late else 0.001 for name, value in other.items()}
        return {"step_seconds": step if late else 0.123, "backward_seconds": backward if late else 0.094, **parts}

    devices = Devices("node-1")
    devices.host = {"host_load_ratio": load, "host_cpu_ratio": 0.98}
    numbers = {"run": {"now": step, "base": 0.123}}
    return judged("SlowStep", run_of(350, values), since=340, devices=devices, numbers=numbers)


def test_a_part_that_explains_little_of_what_a_step_gained_is_not_the_cause() -> None:
    found = busy(backward=0.115, step=0.189, load=0.5)
    assert found.confidence == "none"
    assert "the backward pass: 94.0 to 115.0 ms" in found.evidence
    assert "45 of the 66 ms that a step gained are in none of these" in found.evidence


@pytest.mark.parametrize("backward", [0.115, 0.155])
def test_where_others_hold_the_processors_no_pass_is_the_cause(backward: float) -> None:
    found = busy(backward=backward, step=0.189, load=3.2)
    assert found.cause == (
        "too many processes for the CPUs: 3.2 processes and threads want to run for each CPU, and none is idle; "
        "a step has gained 66 ms since step 300"
    )
    assert busy(backward=0.155, step=0.189, load=0.9).cause.startswith(
        "the backward pass: it grew from 94 to 155 ms, 61 of the 66 ms that a step gained since step 300"
    )


def test_code_that_takes_longer_is_the_cause_on_a_busy_machine_too() -> None:
    found = busy(backward=0.100, step=0.189, load=3.2, other_seconds=0.06)
    assert found.cause.startswith("the loop's own code between the passes: it grew from 1 to 60 ms, 59 of the 66 ms")


def test_steps_of_the_opening_examination_are_no_measure() -> None:
    def values(seq: int) -> dict[str, float]:
        opening = {"opening_step": float(seq < 64)} if seq < 128 else {}
        slow = 0.9 if seq < 64 else 0.2 if seq >= 90 else 0.1
        return {"step_seconds": slow + 0.01, "forward_seconds": slow, "backward_seconds": 0.01} | opening

    found = judged("SlowStep", run_of(140, values), since=130)
    assert found.cause.startswith("the forward pass: it grew from 100 to 200 ms, 100 of the 100 ms that a step gained")
