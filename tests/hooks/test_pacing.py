"""How often the costly statistics are taken."""

from __future__ import annotations

import pytest

from sentinel.hooks.pacing import COARSEST, DECIDE_EVERY, FIRST, Pacing, coarsened


def due(pacing: Pacing, tier: int, seqs: range) -> list[int]:
    return [seq for seq in seqs if pacing.due(tier, seq)]


def loop(pacing: Pacing, seqs: range, *, step: float, tiers: dict[int, float], fixed: float = 0.0) -> None:
    """Steps of `step` seconds, of which a sample of each tier takes its seconds."""
    for seq in seqs:
        own = fixed
        for tier, seconds in tiers.items():
            if pacing.due(tier, seq):
                pacing.sampled(tier, seconds)
                own += seconds
        pacing.stepped(seq, step, own)


def test_it_begins_the_same_everywhere() -> None:
    pacing = Pacing(0.01)
    assert pacing.spacing == FIRST == {1: 1, 2: 8}
    assert due(pacing, 1, range(4)) == [0, 1, 2, 3]
    assert due(pacing, 2, range(20)) == [0, 8, 16]


@pytest.mark.parametrize("tiers", [{1: 0.0004, 2: 0.0008}, {1: 1e-6, 2: 0.002}, {1: 0.0001, 2: 0.0001}])
@pytest.mark.parametrize("overhead", [0.01, 0.03, 0.1])
def test_it_keeps_within_the_budget(tiers: dict[int, float], overhead: float) -> None:
    pacing = Pacing(overhead)
    loop(pacing, range(DECIDE_EVERY), step=0.02, tiers=tiers)
    spacing = dict(pacing.spacing)
    loop(pacing, range(DECIDE_EVERY, 20 * DECIDE_EVERY), step=0.02, tiers=tiers)
    assert pacing.spacing == spacing, "a steady loop has a steady schedule"
    assert sum(seconds / spacing[tier] for tier, seconds in tiers.items()) <= overhead * 0.02
    assert all(every & (every - 1) == 0 for every in spacing.values())


def test_it_spends_what_it_may() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.004})
    assert pacing.spacing == {1: 1, 2: 1}


def test_the_cost_of_every_step_is_taken_off_the_budget() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(DECIDE_EVERY), step=0.003, tiers={1: 0.0005, 2: 0.0005}, fixed=0.0001)
    assert pacing.spacing == {1: COARSEST, 2: COARSEST}
    assert pacing.cost == pytest.approx((0.0001 + 0.0005 + 7 / 50 * 0.0005) / 0.003)


def test_the_senders_cpu_counts() -> None:
    pacing = Pacing(0.01)
    pacing.sent(DECIDE_EVERY * 0.0005)
    loop(pacing, range(DECIDE_EVERY), step=0.05, tiers={1: 0.0001, 2: 0.0002})
    assert pacing.cost == pytest.approx((0.0005 + 0.0001 + 7 / 50 * 0.0002) / 0.05)
    assert pacing.spacing == {1: 1, 2: 2} or sum(pacing.spacing.values()) > 2


def test_the_first_sample_is_forgotten() -> None:
    """It pays for lazy imports and cold caches."""
    pacing = Pacing(0.01)
    pacing.sampled(1, 5.0)
    pacing.sampled(2, 5.0)
    loop(pacing, range(DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.001})
    assert pacing.spacing == {1: 1, 2: 1}


def test_attention() -> None:
    pacing = Pacing(0.01)
    pacing.attend(10, 3)
    pacing.attend(9, 2)
    assert due(pacing, 2, range(9, 25)) == [9, 10, 11, 12, 16, 24]


def test_an_order_of_the_daemon_holds_from_its_step_on() -> None:
    pacing = Pacing(0.01)
    pacing.order(60, {2: 4})
    loop(pacing, range(59), step=1.0, tiers={})
    assert pacing.spacing[2] == 8
    loop(pacing, range(59, 60), step=1.0, tiers={})
    assert pacing.spacing[2] == 4
    loop(pacing, range(60, 400), step=0.0001, tiers={1: 0.01, 2: 0.01})
    assert pacing.spacing == {1: 1, 2: 4}, "and this rank does not decide any more"


def test_coarsened() -> None:
    assert [coarsened(1.0, budget) for budget in (2.0, 1.0, 0.9, 0.25, 0.0, -1.0)] == [1, 1, 2, 4, COARSEST, COARSEST]
