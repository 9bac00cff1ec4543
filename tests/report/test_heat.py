"""Each rank's own time over the steps, as the report shows it."""

from __future__ import annotations

from array import array

import pytest

from sentinel.report.ranks import COLUMNS, matrix
from sentinel.store import Series


def series(first: int, values: list[float]) -> Series:
    return Series(array("q", range(first, first + len(values))), array("d", values), array("d", values))


def test_a_ranks_own_time_is_the_steps_without_its_backward_passes_at_the_users_steps() -> None:
    """All ranks wait for the slowest in those, so the whole step takes each of them equally long."""
    ranks = {
        0: {"step_seconds": series(2, [1.0, 1.0, 1.0]), "backward_seconds": series(2, [0.75, 0.5, 0.75])},
        1: {"step_seconds": series(3, [1.0, 1.0])},
        2: {"loss": series(2, [3.0])},
    }
    heat = matrix(ranks, offset=1000)
    assert heat is not None
    assert (heat.rows, heat.steps, heat.hidden) == (("rank 0", "rank 1"), (1002, 1003, 1004), 0)
    assert heat.values == ((0.25, 0.5, 0.25), (None, 1.0, 1.0))
    assert matrix({0: ranks[0], 2: ranks[2]}, offset=0) is None, "one rank has nothing to be compared with"


def test_a_long_run_has_the_mean_of_the_steps_of_a_column() -> None:
    count = 2 * COLUMNS
    ranks = {rank: {"step_seconds": series(0, [1.0 + rank, 2.0 + rank] * COLUMNS)} for rank in range(2)}
    heat = matrix(ranks, offset=0)
    assert heat is not None
    assert heat.steps == tuple(range(0, count, 2))
    assert heat.values[1] == pytest.approx([2.5] * COLUMNS)
