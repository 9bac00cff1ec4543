"""The ZeRO paper's table 1: memory of model states per device, in GB, at stages 1, 2 and 3 (arXiv 1910.02054v3)."""

from __future__ import annotations

import pytest

from sentinel.toolkit.plan.ranking import rank_strategies
from sentinel.toolkit.plan.recipe import OPTIMIZERS, PRECISIONS, Setup
from sentinel.toolkit.plan.subject import Subject

TABLE = {
    7.5e9: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128e9: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513, 257, 2),
    },
    1e12: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187, 2218, 250),
        256: (4046, 2054, 62.5),
        1024: (4011, 2013, 15.6),
    },
}


def totals(parameters: float, gpus: int) -> dict[str, float]:
    subject = Subject(name="paper", parameters=int(parameters), trainable=int(parameters))
    setup = Setup(gpus=gpus, memory=32 * 10**9, precision=PRECISIONS["mixed"], optimizer=OPTIMIZERS["adamw"])
    return {candidate.strategy: candidate.per_gpu.total / 1e9 for candidate in rank_strategies(subject, setup)}


@pytest.mark.parametrize("gpus", [4, 16, 64, 256, 1024])
@pytest.mark.parametrize("parameters", list(TABLE))
def test_model_states_are_those_of_the_papers_table(parameters: float, gpus: int) -> None:
    found = totals(parameters, gpus)
    stages = tuple(found[name] for name in ("ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP"))
    assert stages == pytest.approx(TABLE[parameters][gpus], rel=0.05)  # the table rounds 0.117 to 0.12
    assert found["DDP"] == pytest.approx(TABLE[parameters][1][0], rel=0.001)


@pytest.mark.parametrize("parameters", list(TABLE))
def test_one_gpu_holds_all_states(parameters: float) -> None:
    assert totals(parameters, 1)["one GPU"] == pytest.approx(TABLE[parameters][1][0], rel=0.001)
