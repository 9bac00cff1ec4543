"""Of tests with many cases at a high price a sample runs each time, and a proof knows all of them."""

from __future__ import annotations

from pathlib import Path

from bench.proofs import cases
from tests.sampling import choose_cases

CASES = [f"test[{number}]" for number in range(20)]


def test_the_same_seed_chooses_the_same_cases_in_whatever_order_they_come() -> None:
    assert choose_cases("test", CASES, 3, 7) == choose_cases("test", CASES[::-1], 3, 7)
    assert len(choose_cases("test", CASES, 3, 7)) == 3


def test_the_seeds_come_to_every_case() -> None:
    assert set().union(*(choose_cases("test", CASES, 3, seed) for seed in range(200))) == set(CASES)


def test_a_case_that_is_named_alone_runs() -> None:
    assert choose_cases("test", CASES[4:5], 3, 0) == {CASES[4]}


def test_the_proof_knows_each_test_that_is_sampled() -> None:
    """A marker that stands elsewhere than over a function would leave out cases that no proof runs."""
    marked = sum(path.read_text().count(cases.MARKED) for path in Path(__file__).parent.rglob("test_*.py"))
    assert len(cases.TESTS) == marked > 0
