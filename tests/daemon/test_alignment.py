"""Steps of 1, 4 and 64 ranks, some of which are late, silent, lost or connected again."""

from __future__ import annotations

import random

import pytest

from sentinel.runs.step_alignment import Alignment


def seqs(alignment: Alignment[int], now: float) -> list[int]:
    return [seq for seq, _ in alignment.take_closed(now)]


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_step_closes_when_all_ranks_reported_it(ranks: int) -> None:
    alignment: Alignment[int] = Alignment()
    for rank in range(ranks):
        alignment.join(rank)
    for rank in range(ranks - 1):
        alignment.report(rank, 0, rank, now=0.0)
        assert seqs(alignment, 0.1) == []
    alignment.report(ranks - 1, 0, ranks - 1, now=0.1)
    [(seq, samples)] = alignment.take_closed(0.1)
    assert seq == 0
    assert samples == {rank: rank for rank in range(ranks)}


@pytest.mark.parametrize("ranks", [4, 64])
def test_any_order_of_arrival_gives_all_steps_in_order_with_all_samples(ranks: int) -> None:
    rng = random.Random(ranks)
    alignment: Alignment[tuple[int, int]] = Alignment(steps=1000)
    for rank in range(ranks):
        alignment.join(rank)
    queues = {rank: list(range(50)) for rank in range(ranks)}
    closed: list[tuple[int, int]] = []
    while queues:
        rank = rng.choice(list(queues))
        seq = queues[rank].pop(0)
        alignment.report(rank, seq, (rank, seq), now=0.0)
        closed += [(number, len(samples)) for number, samples in alignment.take_closed(0.0)]
        if not queues[rank]:
            del queues[rank]
    assert closed == [(seq, ranks) for seq in range(50)]


@pytest.mark.parametrize("seed", range(200))
def test_a_batch_is_as_if_its_steps_were_reported_one_by_one(seed: int) -> None:
    """With one rank (which is taken in at once) or several, which leave with open steps, return and fall silent."""
    rng = random.Random(seed)
    by_step, by_batch = Alignment[int](), Alignment[int]()
    following, now = dict.fromkeys(range(rng.choice([1, 1, 2, 3])), 0), 0.0
    for _ in range(100):
        rank, now = rng.choice(list(following)), now + rng.choice([0.0, 0.3, 1.5])
        if rng.random() < 0.1:
            by_step.leave(rank)
            by_batch.leave(rank)
            if rng.random() < 0.3:
                by_step.join(rank, following[rank])
                by_batch.join(rank, following[rank])
        first = following[rank] + (rng.randrange(-2, 5) if rng.random() < 0.1 else 0)
        seqs = range(max(first, 0), max(first, 0) + rng.randrange(4))
        following[rank] = max(following[rank], *seqs, -1) + 1
        for seq in seqs:
            by_step.report(rank, seq, 100 * seq + rank, now)
        by_batch.report_all(rank, [(seq, 100 * seq + rank) for seq in seqs], now)
        if rng.random() < 0.7:
            assert [*by_batch.take_closed(now)] == [*by_step.take_closed(now)]
        assert (by_batch.closed_to, by_batch.silent) == (by_step.closed_to, by_step.silent)


@pytest.mark.parametrize("ranks", [4, 64])
def test_a_silent_rank_holds_the_others_up_for_two_seconds_once(ranks: int) -> None:
    alignment: Alignment[int] = Alignment()
    for rank in range(ranks):
        alignment.join(rank)
    for rank in range(1, ranks):
        alignment.report(rank, 0, rank, now=10.0)
    assert seqs(alignment, 11.9) == []
    assert seqs(alignment, 12.0) == [0]
    assert alignment.silent == {0}
    for rank in range(1, ranks):
        alignment.report(rank, 1, rank, now=12.0)
    assert seqs(alignment, 12.0) == [1]


def test_fast_steps_wait_for_eight_of_them() -> None:
    alignment: Alignment[int] = Alignment()
    alignment.join(0)
    alignment.join(1)
    for seq in range(8):
        alignment.report(0, seq, 0, now=0.0)
    assert seqs(alignment, 1.5) == []
    alignment.report(0, 8, 0, now=0.0)
    # A batch of a hundred steps of one rank does not make the other rank silent.
    assert seqs(alignment, 0.9) == []
    # Rank 1 made step 0 wait too long, so no later step waits for it.
    assert seqs(alignment, 1.0) == list(range(9))


def test_a_silent_rank_is_waited_for_again_once_it_has_caught_up() -> None:
    alignment: Alignment[int] = Alignment()
    alignment.join(0)
    alignment.join(1)
    for seq in range(20):
        alignment.report(0, seq, 0, now=0.0)
    seqs(alignment, 1.0)
    assert alignment.silent == {1}
    for seq in range(20):
        alignment.report(1, seq, 1, now=0.0)
    assert alignment.silent == frozenset()
    assert seqs(alignment, 1.0) == []
    alignment.report(0, 20, 0, now=1.0)
    assert seqs(alignment, 1.0) == []
    alignment.report(1, 20, 1, now=1.0)
    assert [(seq, dict(samples)) for seq, samples in alignment.take_closed(1.0)] == [(20, {0: 0, 1: 1})]


@pytest.mark.parametrize("ranks", [4, 64])
def test_a_lost_rank_is_no_longer_waited_for(ranks: int) -> None:
    alignment: Alignment[int] = Alignment()
    for rank in range(ranks):
        alignment.join(rank)
    for rank in range(ranks - 1):
        alignment.report(rank, 0, rank, now=0.0)
    assert seqs(alignment, 0.0) == []
    alignment.leave(ranks - 1)
    assert seqs(alignment, 0.0) == [0]


def test_a_rank_whose_connection_broke_goes_on_where_it_was() -> None:
    alignment: Alignment[int] = Alignment()
    alignment.join(0)
    alignment.join(1)
    for seq in range(3):
        alignment.report(0, seq, 0, now=0.0)
        alignment.report(1, seq, 1, now=0.0)
    assert seqs(alignment, 0.0) == [0, 1, 2]
    alignment.leave(1)
    alignment.join(1, 5)
    for seq in (3, 4, 5):
        alignment.report(0, seq, 0, now=0.0)
    # Steps 3 and 4 were dropped while the connection was down; rank 1 will never report them.
    assert seqs(alignment, 0.0) == [3, 4]
    alignment.report(1, 5, 1, now=0.0)
    assert seqs(alignment, 0.0) == [5]
