"""Simulate the protocol of a job over nodes, 10,000 times: what is sent is lost, doubled, delayed or late, links go,
nodes and the coordinator die and come back.

A trial is 100 simulations of one kind (tests/cluster/simulation.py). It fails where two coordinators act, where an
order of an older coordinator or of a minority is carried out, where a case is told by no page or open in two, where a
step is not judged (tests/cluster/invariants.py). It names the seed of the first that fails: `Simulation(seed, ...)`
plays it again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.cluster.invariants import check_all
from tests.cluster.simulation import Simulation

TRIALS, SEEDS = 100, 100
SAMPLE = (0,)


class Kind(NamedTuple):
    nodes: int
    deaths: bool
    cuts: bool


KINDS = {
    "deaths, 3 nodes": Kind(3, deaths=True, cuts=True),
    "deaths, 4 nodes": Kind(4, deaths=True, cuts=True),
    "deaths, 5 nodes": Kind(5, deaths=True, cuts=True),
    "cuts": Kind(4, deaths=False, cuts=True),
    "losses": Kind(4, deaths=False, cuts=False),
}


def run_trial(seed: int) -> dict[str, Any]:
    """100 simulations of one kind, and what happened in them."""
    name = list(KINDS)[seed % len(KINDS)]
    counted = {"simulations": 0, "faults": 0, "coordinators": 0, "starts": 0}
    for number in range(seed * SEEDS, (seed + 1) * SEEDS):
        simulation = Simulation(number, **KINDS[name]._asdict())
        try:
            simulation.play()
            check_all(simulation)
        except AssertionError as error:
            raise AssertionError(f"{name}, simulation {number}: {error}") from error
        counted["simulations"] += 1
        counted["faults"] += len(set(simulation.faults.values()))
        counted["coordinators"] += len(simulation.coordinators)
        counted["starts"] += max(one.start for one in simulation.supervisors)
    return {"case": name} | counted
