"""How often the costly statistics are taken."""

from __future__ import annotations

import pytest

from sentinel.hooks.pacing import (
    COARSEST,
    DECIDE_EVERY,
    DECISIONS,
    FIRST,
    HURRY,
    LONGEST_ATTENTION,
    MEASURED,
    RARE,
    RELAXED,
    SEEN,
    WHOLE,
    Mean,
    Pacing,
    coarsened,
)

pytestmark = pytest.mark.governed


def due(pacing: Pacing, tier: int, seqs: range) -> list[int]:
    return [seq for seq in seqs if pacing.due(tier, seq)]


def loop(pacing: Pacing, seqs: range, *, step: float, tiers: dict[int, float], fixed: float = 0.0) -> dict[int, int]:
    """Steps of `step` seconds and what our samples take. Answers how many of each tier there were."""
    taken = dict.fromkeys(tiers, 0)
    for seq in seqs:
        own = fixed
        for tier, seconds in tiers.items():
            if pacing.due(tier, seq):
                pacing.sampled(tier, seconds)
                own += seconds
                taken[tier] += 1
        pacing.stepped(seq, step + own, own)
    return taken


def sender(pacing: Pacing, share: float, seconds: int = 10) -> None:
    """The sender's thread runs for so many seconds, and uses this share of them."""
    for second in range(seconds):
        pacing.sent(second * share, float(second))


def test_it_begins_the_same_everywhere() -> None:
    pacing = Pacing(0.01)
    assert pacing.spacing == pacing.wanted == FIRST == {0: 1, 1: 1, 2: 8, 3: 256}
    assert due(pacing, 1, range(4)) == [0, 1, 2, 3]
    assert due(pacing, 2, range(20)) == [0, 1, 8, 16]
    assert MEASURED == 2


def test_a_costly_tier_is_not_sampled_fifty_times_first() -> None:
    pacing = Pacing(0.01)
    taken = loop(pacing, range(50), step=0.1, tiers={1: 0.01, 2: 0.05})
    assert taken[1] <= DECISIONS[0] + 4
    assert taken[2] <= 4
    assert pacing.costs["hooks"] < 0.01, "and what it spends from then on is within the budget"


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
    assert spacing[1] <= spacing[2], "norms are taken with the layers anyway"


def test_it_spends_what_it_may() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.004})
    assert pacing.spacing == {0: 1, 1: 1, 2: 1, 3: 256}


def test_the_layers_get_what_the_norms_leave_over() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.006})
    assert pacing.spacing == {0: 1, 1: 1, 2: 1, 3: 256}, "more than half the budget, and all of it fits"


def test_the_cost_of_every_step_is_taken_off_the_budget() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(DECIDE_EVERY), step=0.003, tiers={1: 0.0005, 2: 0.0005}, fixed=0.0001)
    assert pacing.spacing == {0: 1, 1: COARSEST, 2: COARSEST, 3: RARE[-1]}
    assert pacing.costs["hooks"] == pytest.approx(0.0001 / 0.003, rel=0.05)


@pytest.mark.parametrize("part", ["sender", "daemon"])
def test_what_other_threads_and_the_daemon_use_counts(part: str) -> None:
    alone, burdened = Pacing(0.01), Pacing(0.01)
    if part == "sender":
        sender(burdened, 0.0095)
    else:
        burdened.served(0.0095)
    for pacing in (alone, burdened):
        loop(pacing, range(2 * DECIDE_EVERY), step=0.05, tiers={1: 0.0001, 2: 0.0002})
    assert alone.spacing == {0: 1, 1: 1, 2: 1, 3: 256}
    assert burdened.costs[part] == pytest.approx(0.0095)
    assert burdened.spacing[1] > 1
    assert burdened.cost <= 0.01


def test_the_senders_start_is_forgotten() -> None:
    pacing = Pacing(0.01)
    pacing.sent(0.0, 0.0)
    pacing.sent(0.9, 1.0)
    for second in range(2, 5):
        pacing.sent(0.9 + 0.001 * (second - 1), float(second))
    loop(pacing, range(DECIDE_EVERY), step=0.05, tiers={})
    assert pacing.costs["sender"] == pytest.approx(0.001, rel=0.5)


def test_the_first_sample_is_forgotten() -> None:
    """It pays for lazy imports and cold caches."""
    pacing = Pacing(0.01)
    loop(pacing, range(1), step=1.0, tiers={1: 5.0, 2: 5.0})
    loop(pacing, range(1, DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.001})
    assert pacing.spacing == {0: 1, 1: 1, 2: 1, 3: 256}


def test_one_sample_that_somebody_else_interrupted_changes_little() -> None:
    mean = Mean()
    for value in (1.0, 1.0, 1.0, 100.0):
        mean.add(value)
    assert mean.value == 1.75
    idle = Mean()
    for value in (0.0, 0.0, 0.0, 8.0, 8.0):
        idle.add(value)
    assert idle.value == 2.0 + 0.25 * 6.0, "what begins to cost is seen"


def test_it_does_not_go_to_and_fro_at_the_edge() -> None:
    """A sample costs the budget, give or take a tenth."""
    pacing, chosen, edge = Pacing(0.01), set(), 0.005 * SEEN
    for turn in range(40):
        loop(pacing, range(turn * 50, turn * 50 + 50), step=1.0, tiers={1: edge * (1.1 if turn % 2 else 0.95), 2: 0.0})
        chosen.add(pacing.spacing[1])
    assert chosen - {1} == {2}
    loop(pacing, range(2000, 2200), step=1.0, tiers={1: edge * HURRY * 0.95, 2: 0.0})
    assert pacing.spacing[1] == 1, "and comes back where there is room"


def test_steps_of_a_second_optimizer_count_with_the_firsts() -> None:
    pacing = Pacing(0.01)
    for seq in range(DECIDE_EVERY):
        pacing.aside(0.002)
        pacing.stepped(seq, 0.1, 0.001)
    assert pacing.costs["hooks"] == pytest.approx(0.03)


def test_attention() -> None:
    pacing = Pacing(0.01)
    pacing.attend(10, 3)
    pacing.attend(9, 2)
    assert due(pacing, 2, range(9, 25)) == [9, 10, 11, 12, 16, 24]


def test_it_is_attentive_until_the_last_step_that_is_sampled_for_it() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(10), step=1.0, tiers={})
    assert not pacing.attentive
    pacing.attend(10, 3)
    attentive = [pacing.attentive]
    for seq in (10, 11, 12):
        loop(pacing, range(seq, seq + 1), step=1.0, tiers={})
        attentive.append(pacing.attentive)
    assert attentive == [True, True, True, False]


def test_an_order_of_the_daemon_holds_from_its_step_on() -> None:
    pacing = Pacing(0.5)
    pacing.order(60, {1: 2, 2: 4, 7: 1})
    loop(pacing, range(59), step=1.0, tiers={1: 0.1, 2: 0.1})
    assert pacing.spacing == {0: 1, 1: 1, 2: 1, 3: 256}
    loop(pacing, range(59, 60), step=1.0, tiers={})
    assert pacing.spacing == {0: 1, 1: 2, 2: 4, 3: 256}
    loop(pacing, range(60, 400), step=0.0001, tiers={1: 0.01, 2: 0.01})
    assert pacing.spacing == {0: 1, 1: 2, 2: 4, 3: 256}, "and this rank does not decide any more"
    assert pacing.wanted[1] > 2, "but says what it would choose"
    pacing.released()
    loop(pacing, range(400, 500), step=0.0001, tiers={1: 0.01, 2: 0.01})
    assert pacing.spacing == pacing.wanted


def test_coarsened() -> None:
    assert [coarsened(1.0, budget) for budget in (2.0, 1.0, 0.9, 0.25, 0.0, -1.0)] == [1, 1, 2, 4, COARSEST, COARSEST]


def test_what_changes_little_is_taken_more_rarely_where_steps_are_short() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(2 * DECIDE_EVERY), step=0.003, tiers={0: 60e-6, 1: 0.001, 2: 0.001})
    assert pacing.spacing[0] == RELAXED[-1]
    assert [seq for seq in range(WHOLE - 64) if pacing.stretch(seq) > seq] == [], "the first ones are whole"
    seqs = range(WHOLE, WHOLE + 64)
    assert [seq for seq in seqs if pacing.stretch(seq) == seq] == due(pacing, 0, seqs) == list(seqs)[::64]
    assert pacing.stretch(WHOLE + 1) == pacing.stretch(WHOLE + 63) == WHOLE + 64
    pacing.attend(WHOLE + 1, 3)
    assert due(pacing, 0, range(WHOLE, WHOLE + 5)) == [WHOLE, WHOLE + 1, WHOLE + 2, WHOLE + 3]
    assert pacing.stretch(WHOLE + 3) == WHOLE + 3


def test_an_order_is_obeyed_at_its_step_and_the_one_before_is_looked_at_whole() -> None:
    pacing = Pacing(0.01)
    pacing.spacing[0] = RELAXED[-1]
    pacing.order(WHOLE + 8, {1: 4})
    assert [pacing.stretch(WHOLE + seq) - WHOLE for seq in (1, 6, 7)] == [7, 7, 7]
    pacing.stepped(WHOLE + 7, 0.003, 1e-5)
    assert pacing.spacing[1] == 4
    assert pacing.stretch(WHOLE + 8) == WHOLE + 64


def test_steps_on_the_fast_path_count_as_steps() -> None:
    whole, fast = Pacing(0.01), Pacing(0.01)
    loop(whole, range(DECIDE_EVERY), step=0.003, tiers={}, fixed=1e-5)
    for seq in range(0, DECIDE_EVERY, 10):
        fast.account(9, 9 * 0.00301, 9e-5)
        fast.stepped(seq, 0.00301, 1e-5)
    assert fast.costs == whole.costs
    assert fast.hook_seconds == pytest.approx(whole.hook_seconds)


@pytest.mark.parametrize(("step", "overhead"), [(0.2, 0.01), (0.003, 1.0)])
def test_and_at_every_one_where_it_is_not_felt(step: float, overhead: float) -> None:
    pacing = Pacing(overhead)
    loop(pacing, range(2 * DECIDE_EVERY), step=step, tiers={0: 15e-6, 1: 30e-6, 2: 60e-6})
    assert pacing.spacing[0] == 1
    assert all(pacing.stretch(seq) == seq for seq in range(WHOLE, WHOLE + 64))


def test_no_coarser_tier_is_taken_at_a_step_of_which_only_the_loss_is() -> None:
    pacing = Pacing(0.01)
    loop(pacing, range(2 * DECIDE_EVERY), step=0.003, tiers={0: 15e-6, 1: 1e-9, 2: 1e-9})
    assert pacing.spacing[0] == pacing.spacing[1] == 1


def test_what_the_daemon_says_is_bounded() -> None:
    """A mistake of its must not make a run slow for good, nor sample at every step for nothing."""
    pacing = Pacing(0.01)
    pacing.attend(0, 10**18)
    assert pacing._attend_until < LONGEST_ATTENTION
    for share in (float("nan"), float("inf"), -1.0):
        pacing.served(share)
        assert pacing._daemon == 0.0
