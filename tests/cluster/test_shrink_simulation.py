"""Whatever is lost, and whichever daemon dies, a job goes on with one group of nodes, which only gets smaller."""

from __future__ import annotations

import pytest

from tests.cluster.invariants import check_shrink
from tests.cluster.shrink_simulation import ShrinkSimulation

SEEDS = 100


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nodes_go_on_as_one_group_or_not_at_all(seed: int) -> None:
    simulation = ShrinkSimulation(seed, nodes=3 + seed % 3)
    simulation.play()
    check_shrink(simulation)
