"""Whatever is lost, and whichever daemon dies, a job goes on with one group of nodes, which only gets smaller."""

from __future__ import annotations

import pytest

from tests.cluster.invariants import check_shrink
from tests.cluster.shrink_simulation import ShrinkSimulation
from tests.cluster.simulation import SupervisorMachine

SEEDS = 100


class AloneForLong(ShrinkSimulation):
    """A node's link is down while the others shrink; its ranks stand, and do not end. Then it is heard again."""

    def __init__(self, apart: int) -> None:
        super().__init__(1, nodes=4)
        self.number, self.loss, self.delay = apart, 0.0, 0.05

    def trouble(self) -> None:
        links = {pair for other in range(self.expected) for pair in ((self.number, other), (other, self.number))}
        self.cut = links if 60.0 <= self.now < 210.0 else set()
        if self.now == 70.0:
            self.break_job(self.machines[0])

    def break_job(self, supervisor: SupervisorMachine) -> None:
        if supervisor.number != self.number:
            super().break_job(supervisor)


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nodes_go_on_as_one_group_or_not_at_all(seed: int) -> None:
    simulation = ShrinkSimulation(seed, nodes=3 + seed % 3)
    simulation.play()
    check_shrink(simulation)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [1, 2, 3], ids=["may be the coordinator", "may be, too", "may not be"])
def test_a_node_that_was_cut_off_meanwhile_learns_that_it_was_left_out(apart: int) -> None:
    """Candidates have tried the role while cut off, and have a higher epoch than the acting coordinator."""
    simulation = AloneForLong(apart)
    simulation.play(300.0)
    assert simulation.decisions[1] == tuple(node for node in range(4) if node != apart)
    assert simulation.machines[apart].is_left_out
