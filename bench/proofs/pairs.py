"""Checks that two independent faults in one run lead to two alerts, each with its cause, and to two pages.

Each trial trains one of the pairs of `tests/faults/pairs.py`, 5, 50 or 500 steps apart, at default settings with a real
daemon, and the same loop without the faults. It holds if

    both alerts fire, not before their faults begin, and name their causes
    each receiver got two pages
    the loop without the faults raises no alarm

Alerts that are true on a busy machine, such as SlowStep, may come as well, with a page each.

The bar is 95 % of the trials.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from sentinel.store import History
from tests.faults.pairs import FAULTS, ONSET, PAIRS, PLANTS
from tests.faults.verdict import OF_THE_MACHINE, TRAIN_SECONDS, daemon, fill_steps, find_histories, hold_pages, trained
from tests.notify.pages import paged

TRIALS = len(FAULTS)
SAMPLE = (len(PAIRS) + 1,)
"""The second pair, 50 steps apart."""


def run_trial(seed: int) -> dict[str, Any]:
    fault = FAULTS[seed]
    first, second, apart = fault.id.split()
    begins = {first: ONSET, second: ONSET + int(apart)}
    with tempfile.TemporaryDirectory(prefix="f") as folder:
        with paged(Path(folder, "config/sentinel")) as people:
            with daemon(Path(folder), "pairs") as (address, environment):
                trained("pairs", seed, [fault.id], address, environment, [], TRAIN_SECONDS)
            pages = people.count(f"{fault.id} faulty {seed}")
        cases = {}
        for run, path in find_histories(Path(folder)).items():
            with History(path) as history:
                cases[run] = {case["alert"]: case for case in reversed(history.incidents())}
    faulty, healthy = cases[f"{fault.id} faulty {seed}"], cases[f"{fault.id} healthy {seed}"]
    delays = {}
    for name, onset in begins.items():
        plant = PLANTS[name]
        assert plant.alert in faulty, f"{fault.id}: no {plant.alert}; there were {', '.join(faulty) or 'none'}"
        case = faulty[plant.alert]
        assert case["step"] >= onset, f"{fault.id}: {plant.alert} at step {case['step']}, before {onset}"
        cause = case["diagnosis"]["cause"]
        assert re.search(fill_steps(plant.cause, onset), cause), f"{fault.id}: {plant.alert}: {cause}"
        delays[name] = case["step"] - onset
    assert hold_pages(pages, 2, faulty), f"{fault.id}: {pages}, for {', '.join(faulty)}"
    false = healthy.keys() - set(OF_THE_MACHINE)
    assert not false, f"{fault.id}: the healthy twin raised {', '.join(false)}"
    return {"case": f"{apart} apart", "delay_steps": float(max(delays.values()))}
