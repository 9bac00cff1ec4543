"""Of tests with many costly cases only a sample runs each time, and a proof knows all of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.proofs import cases
from tests.sampling import choose_cases, leave_out_slow

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


def make_items(package: str, slow: int, quick: int) -> list[Any]:
    return [
        SimpleNamespace(
            nodeid=f"{package}/test_a.py::test_{number}",
            path=Path(package, "test_a.py"),
            get_closest_marker=lambda name, is_slow=number < slow: name == "slow" and is_slow,
        )
        for number in range(slow + quick)
    ]


def test_half_of_each_packages_slow_tests_and_all_others_run() -> None:
    items = make_items("one", 7, 3) + make_items("two", 1, 2)
    left = leave_out_slow(items, 5, 2)
    assert [item for item in items if not item.get_closest_marker("slow")] == [
        item for item in left if not item.get_closest_marker("slow")
    ]
    assert [sum(item.nodeid.startswith(name) for item in left) for name in ("one", "two")] == [4 + 3, 1 + 2]
    assert leave_out_slow(items, 5, 1) == items


def test_each_slow_test_has_its_turn() -> None:
    items = make_items("one", 7, 0)
    assert {item.nodeid for seed in range(50) for item in leave_out_slow(items, seed, 2)} == {i.nodeid for i in items}
