"""Tests of which only a sample runs each time: of those marked `sampled(count)` so many cases, of slow ones a share.

The cases that CI leaves out are run by `make proof PART=cases` (bench/proofs/cases.py), all slow tests by `make slow`.
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


def leave_out_slow(items: list[pytest.Item], seed: int, share: int) -> list[pytest.Item]:
    """All that is not slow, and of what is, a `share`-th of each package: what is left out has its turn at other
    seeds."""
    slow: dict[str, list[str]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            slow[str(item.path.parent)].append(item.nodeid)
    chosen = {case for name, cases in slow.items() for case in choose_cases(name, cases, -(-len(cases) // share), seed)}
    return [item for item in items if not item.get_closest_marker("slow") or item.nodeid in chosen]


def name_test(item: pytest.Item) -> str:
    """The test without the name of its case."""
    return item.nodeid.partition("[")[0]
