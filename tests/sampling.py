"""Tests of which only a sample of the cases runs each time: the marker `sampled(count)`.

The cases that CI leaves out are run by `make proof PART=cases` (bench/proofs/cases.py).
"""

from __future__ import annotations

import collections
import random

import pytest

MARKER = "sampled"


def choose_cases(test: str, cases: list[str], count: int, seed: int) -> set[str]:
    """The same ones for the same seed, whatever else there is to run."""
    return set(random.Random(f"{seed} {test}").sample(sorted(cases), min(count, len(cases))))


def leave_out_cases(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """All other tests, and a sample of the cases of those with the marker."""
    cases: dict[str, list[str]] = collections.defaultdict(list)
    counts: dict[str, int] = {}
    for item in items:
        if marker := item.get_closest_marker(MARKER):
            test = name_test(item)
            cases[test].append(item.nodeid)
            (counts[test],) = marker.args
    chosen = {test: choose_cases(test, cases[test], counts[test], seed) for test in cases}
    return [item for item in items if (test := name_test(item)) not in chosen or item.nodeid in chosen[test]]


def name_test(item: pytest.Item) -> str:
    """The test without the name of its case."""
    return item.nodeid.partition("[")[0]
