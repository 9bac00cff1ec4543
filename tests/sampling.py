"""Chooses the tests to run: `count` cases of tests marked `sampled(count)`, and a share of the slow tests.

The cases that CI leaves out are run by `make proof PART=cases` (bench/proofs/cases.py), all slow tests by `make slow`.
"""

from __future__ import annotations

import collections
import random

import pytest

MARKER = "sampled"


def choose_cases(test: str, cases: list[str], count: int, seed: int) -> set[str]:
    """Return the sample of a test's cases, which depends only on the seed and the test."""
    return set(random.Random(f"{seed} {test}").sample(sorted(cases), min(count, len(cases))))


def leave_out_cases(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Return a sample of the cases of tests with the marker, and all other tests."""
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
    """Return all fast tests, and a `share`-th of the slow tests of each package; other seeds choose others."""
    slow: dict[str, list[str]] = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            slow[str(item.path.parent)].append(item.nodeid)
    chosen = {case for name, cases in slow.items() for case in choose_cases(name, cases, -(-len(cases) // share), seed)}
    return [item for item in items if not item.get_closest_marker("slow") or item.nodeid in chosen]


def name_test(item: pytest.Item) -> str:
    """Return a test's id without the name of its case."""
    return item.nodeid.partition("[")[0]
