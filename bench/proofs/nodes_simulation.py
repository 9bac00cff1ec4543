"""Simulates the protocol of a job over nodes, 10,000 times, with lost messages, broken links and dead nodes.

Messages are lost, doubled, delayed or late; links break; nodes and the coordinator die, or are ended in order, and
come back; a daemon of a former job is heard.

A trial is 100 simulations of one kind (tests/cluster/simulation.py). It fails if two coordinators act, if an order of
an older coordinator or of a minority is carried out, if a case is on no page or open on two, if a step is not judged,
if one rank leaves without the others, or if a job that may shrink goes on as two groups
(tests/cluster/invariants.py). It names the seed of the first simulation that fails: `Simulation(seed, ...)`,
`StopSimulation` or `ShrinkSimulation` plays it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.cluster.invariants import check_all, check_shrink, check_stop
from tests.cluster.shrink_simulation import ShrinkSimulation
from tests.cluster.simulation import Simulation
from tests.cluster.stop_simulation import StopSimulation

TRIALS, SEEDS = 100, 100
SAMPLE = (0,)


class Kind(NamedTuple):
    nodes: int
    deaths: bool = True
    cuts: bool = True
    stops: bool = False
    shrinks: bool = False
    leaves: bool = False

    def play(self, seed: int) -> Simulation:
        """Play one simulation, and check what must hold; return it."""
        if self.stops:
            stopping = StopSimulation(seed, nodes=self.nodes)
            stopping.play()
            check_stop(stopping)
            return stopping
        if self.shrinks:
            shrinking = ShrinkSimulation(seed, nodes=self.nodes)
            shrinking.play()
            check_shrink(shrinking)
            return shrinking
        simulation = Simulation(seed, nodes=self.nodes, deaths=self.deaths, cuts=self.cuts, leaves=self.leaves)
        simulation.play()
        check_all(simulation)
        return simulation


KINDS = {
    "deaths, 3 nodes": Kind(3),
    "deaths, 4 nodes": Kind(4),
    "deaths, 5 nodes": Kind(5),
    "cuts": Kind(4, deaths=False),
    "losses": Kind(4, deaths=False, cuts=False),
    "stops": Kind(4, stops=True),
    "shrinks, 3 nodes": Kind(3, shrinks=True),
    "shrinks, 5 nodes": Kind(5, shrinks=True),
    "daemons restarted in order": Kind(4, leaves=True),
}


def run_trial(seed: int) -> dict[str, Any]:
    """Run 100 simulations of one kind; return what was counted in them."""
    name = list(KINDS)[seed % len(KINDS)]
    counted = {"simulations": 0, "faults": 0, "coordinators": 0, "starts": 0}
    for number in range(seed * SEEDS, (seed + 1) * SEEDS):
        try:
            simulation = KINDS[name].play(number)
        except AssertionError as error:
            raise AssertionError(f"{name}, simulation {number}: {error}") from error
        counted["simulations"] += 1
        counted["faults"] += len(set(simulation.faults.values()))
        counted["coordinators"] += len(simulation.coordinators)
        counted["starts"] += max(one.start for one in simulation.supervisors)
    return {"case": name} | counted
