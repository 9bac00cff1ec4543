"""An incident begins at a first sign that is near it and explains it, or else with its own condition."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.daemon.test_problems import Watched, watched

NOISE = [random.Random(0).gauss(0, 1) for _ in range(2000)]


@pytest.mark.parametrize("nonfinite", [range(100, 500), range(395, 450)])
def test_a_slow_step_does_not_begin_with_a_loss_that_is_not_finite(nonfinite: range, tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        losses = [math.nan if seq in nonfinite else 2.0 + 0.01 * NOISE[seq] for seq in range(500)]
        seconds = [(0.3 if seq >= 400 else 0.1) + 0.001 * NOISE[seq] for seq in range(500)]
        await run.steps(loss=losses, grad_norm=losses, step_seconds=seconds, forward_seconds=[0.9 * s for s in seconds])

    case = watched(tmp_path, scenario, stock=True).case("SlowStep")
    assert case.signs == ()
    assert (case.first_step, case.first_seq) == (400, 400)
    assert "since step 400" in case.diagnosis.cause


@pytest.mark.parametrize("left", [50e9, 2e9])
def test_a_leak_begins_where_memory_began_to_rise(left: float, tmp_path: Path) -> None:
    def held(seq: int) -> float:
        grown_at_start = 2e8 * min(seq / 30, 1.0)
        return 1e9 + grown_at_start + 5e5 * max(seq - 300, 0) + 5e5 * NOISE[seq]

    async def scenario(run: Watched) -> None:
        memory = [held(seq) for seq in range(1500)]
        for first in range(0, 1500, 100):
            taken = memory[first : first + 100]
            await run.steps(memory_held_bytes=taken, memory_left_bytes=[left - (value - 1.2e9) for value in taken])

    run = watched(tmp_path, scenario, stock=True)
    case = run.case("MemoryCreep")
    assert abs(case.first_step - 300) <= 20
    assert f"\u2503 since   step {case.first_step}" in run.notices[0].text.splitlines()


def test_a_leak_from_the_first_step_on_begins_there(tmp_path: Path) -> None:
    async def scenario(run: Watched) -> None:
        memory = [1e9 + 1e6 * seq for seq in range(900)]
        await run.steps(memory_held_bytes=memory, memory_left_bytes=[50e9 - value for value in memory])

    assert watched(tmp_path, scenario, stock=True).case("MemoryCreep").first_step == 0
