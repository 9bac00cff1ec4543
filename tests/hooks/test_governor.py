"""How often the governor lets the costly statistics be taken."""

from __future__ import annotations

import pytest

from sentinel.hooks.core.governor import (
    COARSEST,
    DECIDE_EVERY,
    DECISIONS,
    FIRST,
    FULL_STEPS,
    HURRY,
    LONGEST_ATTENTION,
    MEASURED,
    NORM_SHARE,
    RARE,
    RARE_MOST,
    RARE_SECONDS,
    RARE_STEPS,
    RELAXED,
    SEEN,
    SLOW_STEPS,
    Governor,
    Mean,
    coarsen_spacing,
)
from tests.hooks.governed import make_governor

pytestmark = pytest.mark.governed


def due(governor: Governor, tier: int, seqs: range) -> list[int]:
    return [seq for seq in seqs if governor.due(tier, seq)]


def loop(
    governor: Governor, seqs: range, *, step: float, tiers: dict[int, float], fixed: float = 0.0
) -> dict[int, int]:
    """Simulate steps of `step` seconds and what our samples take; return the number of samples of each tier."""
    taken = dict.fromkeys(tiers, 0)
    for seq in seqs:
        own = fixed
        for tier, seconds in tiers.items():
            if governor.due(tier, seq):
                governor.record_sample(tier, seconds)
                own += seconds
                taken[tier] += 1
        governor.record_step(seq, step + own, own)
    return taken


def sender(governor: Governor, share: float, seconds: int = 10) -> None:
    """Let the sender's thread run for some seconds, and use `share` of them."""
    for second in range(seconds):
        governor.record_sender_time(second * share, float(second))


def test_every_governor_begins_the_same() -> None:
    governor = make_governor(0.01)
    assert governor.spacing == governor.wanted == FIRST == {0: 1, 1: 1, 2: 8, 3: 256}
    assert due(governor, 1, range(4)) == [0, 1, 2, 3]
    assert due(governor, 2, range(20)) == [0, 1, 8, 16]
    assert MEASURED == 2


def test_a_costly_tier_is_not_sampled_fifty_times_first() -> None:
    governor = make_governor(0.01)
    taken = loop(governor, range(50), step=0.1, tiers={1: 0.01, 2: 0.05})
    assert taken[1] <= DECISIONS[0] + 4
    assert taken[2] <= 4
    assert governor.costs["hooks"] < 0.01, "and what it spends from then on is within the budget"


@pytest.mark.parametrize("tiers", [{1: 0.0004, 2: 0.0008}, {1: 1e-6, 2: 0.002}, {1: 0.0001, 2: 0.0001}])
@pytest.mark.parametrize("overhead", [0.01, 0.03, 0.1])
def test_the_governor_keeps_within_the_budget(tiers: dict[int, float], overhead: float) -> None:
    governor = make_governor(overhead)
    loop(governor, range(DECIDE_EVERY), step=0.02, tiers=tiers)
    spacing = dict(governor.spacing)
    loop(governor, range(DECIDE_EVERY, 20 * DECIDE_EVERY), step=0.02, tiers=tiers)
    assert governor.spacing == spacing, "a steady loop has a steady schedule"
    assert sum(seconds / spacing[tier] for tier, seconds in tiers.items()) <= overhead * 0.02
    assert all(every & (every - 1) == 0 for every in spacing.values())
    assert spacing[1] <= spacing[2], "norms are taken with the layers anyway"


def test_the_governor_spends_what_it_may() -> None:
    governor = make_governor(0.01)
    loop(governor, range(DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.004})
    assert governor.spacing == {0: 1, 1: 1, 2: 1, 3: 32}


def test_a_norm_of_one_percent_is_taken_at_every_step_whatever_else_costs() -> None:
    governor, dearer, ceiling = make_governor(norm_first=True), make_governor(norm_first=True), make_governor()
    loop(governor, range(DECIDE_EVERY), step=0.1, tiers={1: 0.001, 2: 0.05}, fixed=0.003)
    loop(dearer, range(DECIDE_EVERY), step=0.1, tiers={1: 0.0012, 2: 0.05}, fixed=0.003)
    loop(ceiling, range(DECIDE_EVERY), step=0.1, tiers={1: 0.001, 2: 0.05}, fixed=0.003)
    assert governor.spacing[1] == 1
    assert governor.spacing[2] == COARSEST
    assert dearer.spacing[1] > 1
    assert ceiling.spacing[1] == COARSEST, "who gave `overhead` gave a ceiling"


def test_a_norm_that_is_cheap_is_taken_at_every_step_where_tier_0_just_does_not_fit() -> None:
    """The demo on a busy machine had no norm at every second step, and a spike no cause."""
    governor, faster = make_governor(norm_first=True), make_governor(norm_first=True)
    loop(governor, range(20 * DECIDE_EVERY), step=0.066, tiers={0: 0.000044, 1: 0.00056}, fixed=0.0003)
    loop(faster, range(20 * DECIDE_EVERY), step=0.006, tiers={0: 0.000044, 1: 0.00005}, fixed=0.00003)
    assert governor.spacing[1] == 1
    assert faster.spacing[1] > 1, "there the norm is cheap, and what comes with it is not"


def test_the_layers_get_what_the_norms_leave_over() -> None:
    governor = make_governor(0.01)
    loop(governor, range(DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.006})
    assert governor.spacing == {0: 1, 1: 1, 2: 1, 3: 32}, "more than half the budget, and all of it fits"


def test_the_cost_of_every_step_is_taken_off_the_budget() -> None:
    governor = make_governor(0.01)
    loop(governor, range(DECIDE_EVERY), step=0.003, tiers={1: 0.0005, 2: 0.0005}, fixed=0.0001)
    assert governor.spacing == {0: 1, 1: COARSEST, 2: COARSEST, 3: RARE_STEPS}
    assert governor.costs["hooks"] == pytest.approx(0.0001 / 0.003, rel=0.05)


@pytest.mark.parametrize("part", ["sender", "daemon"])
def test_what_other_threads_and_the_daemon_use_counts(part: str) -> None:
    alone, burdened = make_governor(0.01), make_governor(0.01)
    if part == "sender":
        sender(burdened, 0.0095)
    else:
        burdened.record_daemon_share(0.0095)
    for governor in (alone, burdened):
        loop(governor, range(2 * DECIDE_EVERY), step=0.05, tiers={1: 0.0001, 2: 0.0002})
    assert alone.spacing == {0: 1, 1: 1, 2: 1, 3: 256}
    assert burdened.costs[part] == pytest.approx(0.0095)
    assert burdened.spacing[1] > 1
    assert sum(burdened.costs.values()) <= 0.01


def test_the_senders_start_is_forgotten() -> None:
    governor = make_governor(0.01)
    governor.record_sender_time(0.0, 0.0)
    governor.record_sender_time(0.9, 1.0)
    for second in range(2, 5):
        governor.record_sender_time(0.9 + 0.001 * (second - 1), float(second))
    loop(governor, range(DECIDE_EVERY), step=0.05, tiers={})
    assert governor.costs["sender"] == pytest.approx(0.001, rel=0.5)


def test_the_first_sample_is_forgotten() -> None:
    """The first sample pays for lazy imports and cold caches."""
    governor = make_governor(0.01)
    loop(governor, range(1), step=1.0, tiers={1: 5.0, 2: 5.0})
    loop(governor, range(1, DECIDE_EVERY), step=1.0, tiers={1: 0.001, 2: 0.001})
    assert governor.spacing == {0: 1, 1: 1, 2: 1, 3: 32}


def test_one_sample_that_was_interrupted_changes_little() -> None:
    mean = Mean()
    for value in (1.0, 1.0, 1.0, 100.0):
        mean.add(value)
    assert mean.value == 1.75
    idle = Mean()
    for value in (0.0, 0.0, 0.0, 8.0, 8.0):
        idle.add(value)
    assert idle.value == 2.0 + 0.25 * 6.0, "what begins to cost is seen"


@pytest.mark.parametrize(("fixed", "spacing"), [(0.0, 2), (0.05, 4)])
def test_the_norm_gets_half_of_its_part_where_the_rest_takes_the_budget(fixed: float, spacing: int) -> None:
    governor = make_governor(0.02, norm_first=True)
    loop(governor, range(400), step=1.0, tiers={1: 1.5 * 0.02 * NORM_SHARE * SEEN, 2: 0.0}, fixed=fixed)
    assert governor.spacing[1] == spacing


def test_the_spacing_does_not_oscillate_at_the_edge() -> None:
    """A sample costs the budget, give or take a tenth."""
    governor, chosen, edge = make_governor(0.01), set(), 0.01 * NORM_SHARE * SEEN
    for turn in range(40):
        loop(
            governor, range(turn * 50, turn * 50 + 50), step=1.0, tiers={1: edge * (1.1 if turn % 2 else 0.95), 2: 0.0}
        )
        chosen.add(governor.spacing[1])
    assert chosen - {1} == {2}
    loop(governor, range(2000, 2200), step=1.0, tiers={1: edge * HURRY * 0.95, 2: 0.0})
    assert governor.spacing[1] == 1, "and comes back where there is room"


def test_steps_of_a_second_optimizer_count_with_the_firsts() -> None:
    governor = make_governor(0.01)
    for seq in range(DECIDE_EVERY):
        governor.aside(0.002)
        governor.record_step(seq, 0.1, 0.001)
    assert governor.costs["hooks"] == pytest.approx(0.03)


def test_the_cost_that_is_reported_is_that_of_many_steps() -> None:
    """An odd step in the last 50 says nothing about a run, and neither does its opening examination."""
    governor = make_governor(0.01)
    loop(governor, range(FULL_STEPS), step=0.01, tiers={}, fixed=0.004)
    assert governor.costs["hooks"] > 0.2
    loop(governor, range(FULL_STEPS, 4000), step=0.01, tiers={}, fixed=0.0001)
    assert governor.costs["hooks"] == pytest.approx(0.01, rel=0.1)
    loop(governor, range(4000, 4100), step=0.01, tiers={}, fixed=0.002)
    assert 0.01 < governor.costs["hooks"] < 0.03


def test_attention() -> None:
    governor = make_governor(0.01)
    governor.attend(10, 3)
    governor.attend(9, 2)
    assert due(governor, 2, range(9, 25)) == [9, 10, 11, 12, 16, 24]


def test_tier_3_is_sampled_more_often_only_where_the_daemon_asks_for_it() -> None:
    governor = make_governor(0.01)
    governor.attend(10, 100)
    assert [seq for seq in range(10, 256) if governor.take_rare_turn(seq)] == []
    governor.attend(300, 50, rare=True)
    assert [seq for seq in range(300, 600) if governor.take_rare_turn(seq)] == [304, 312, 320, 328, 512]


def test_the_governor_is_attentive_until_the_last_step_of_an_attention() -> None:
    governor = make_governor(0.01)
    loop(governor, range(10), step=1.0, tiers={})
    assert not governor.attentive
    governor.attend(10, 3)
    attentive = [governor.attentive]
    for seq in (10, 11, 12):
        loop(governor, range(seq, seq + 1), step=1.0, tiers={})
        attentive.append(governor.attentive)
    assert attentive == [True, True, True, False]


def test_an_order_of_the_daemon_holds_from_its_step_on() -> None:
    governor = make_governor(0.5)
    governor.order(60, {1: 2, 2: 4, 7: 1})
    loop(governor, range(59), step=1.0, tiers={1: 0.1, 2: 0.1})
    assert governor.spacing == {0: 1, 1: 1, 2: 1, 3: 32}
    loop(governor, range(59, 60), step=1.0, tiers={})
    assert governor.spacing == {0: 1, 1: 2, 2: 4, 3: 32}
    loop(governor, range(60, 400), step=0.0001, tiers={1: 0.01, 2: 0.01})
    assert governor.spacing == {0: 1, 1: 2, 2: 4, 3: 32}, "and this rank does not decide any more"
    assert governor.wanted[1] > 2, "but says what it would choose"
    governor.clear_orders()
    loop(governor, range(400, 500), step=0.0001, tiers={1: 0.01, 2: 0.01})
    assert governor.spacing == governor.wanted


def test_coarsened() -> None:
    assert [coarsen_spacing(1.0, budget) for budget in (2.0, 1.0, 0.9, 0.25, 0.0, -1.0)] == [
        1,
        1,
        2,
        4,
        COARSEST,
        COARSEST,
    ]


def test_tier_0_is_sampled_more_rarely_where_steps_are_short() -> None:
    governor = make_governor(0.01)
    loop(governor, range(2 * DECIDE_EVERY), step=0.003, tiers={0: 60e-6, 1: 0.001, 2: 0.001})
    assert governor.spacing[0] == RELAXED[-1]
    assert not any(governor.fast_path_end(seq) > seq for seq in range(FULL_STEPS - 64)), "the first ones are full"
    seqs = range(FULL_STEPS, FULL_STEPS + 64)
    assert [seq for seq in seqs if governor.fast_path_end(seq) == seq] == due(governor, 0, seqs) == list(seqs)[::64]
    assert governor.fast_path_end(FULL_STEPS + 1) == governor.fast_path_end(FULL_STEPS + 63) == FULL_STEPS + 64
    governor.attend(FULL_STEPS + 1, 3)
    assert due(governor, 0, range(FULL_STEPS, FULL_STEPS + 5)) == list(range(FULL_STEPS, FULL_STEPS + 4))
    assert governor.fast_path_end(FULL_STEPS + 3) == FULL_STEPS + 3


def test_tier_0_is_sampled_at_every_step_after_a_slow_one() -> None:
    governor = make_governor(0.01)
    governor.spacing[0] = RELAXED[-1]
    governor.record_step(FULL_STEPS + 3, 0.04, 1e-5)
    assert due(governor, 0, range(FULL_STEPS + 4, FULL_STEPS + 64)) == []
    governor.record_step(FULL_STEPS + 4, 0.06, 1e-5)
    after = range(FULL_STEPS + 5, FULL_STEPS + 4 + SLOW_STEPS)
    assert due(governor, 0, range(FULL_STEPS + 5, FULL_STEPS + 64)) == list(after)
    assert governor.fast_path_end(after[-1]) == after[-1]
    assert governor.fast_path_end(after[-1] + 1) == FULL_STEPS + 64


def test_an_order_is_obeyed_at_its_step_and_the_one_before_is_looked_at_whole() -> None:
    governor = make_governor(0.01)
    governor.spacing[0] = RELAXED[-1]
    governor.order(FULL_STEPS + 8, {1: 4})
    assert [governor.fast_path_end(FULL_STEPS + seq) - FULL_STEPS for seq in (1, 6, 7)] == [7, 7, 7]
    governor.record_step(FULL_STEPS + 7, 0.003, 1e-5)
    assert governor.spacing[1] == 4
    assert governor.fast_path_end(FULL_STEPS + 8) == FULL_STEPS + 64


def test_steps_on_the_fast_path_count_as_steps() -> None:
    whole, fast = make_governor(0.01), make_governor(0.01)
    loop(whole, range(DECIDE_EVERY), step=0.003, tiers={}, fixed=1e-5)
    for seq in range(0, DECIDE_EVERY, 10):
        fast.account(9, 9 * 0.00301, 9e-5)
        fast.record_step(seq, 0.00301, 1e-5)
    assert fast.costs == whole.costs
    assert fast.hook_seconds == pytest.approx(whole.hook_seconds)


@pytest.mark.parametrize(("step", "overhead"), [(0.2, 0.01), (0.003, 1.0)])
def test_tier_0_is_sampled_at_every_step_where_it_is_not_felt(step: float, overhead: float) -> None:
    governor = make_governor(overhead)
    loop(governor, range(2 * DECIDE_EVERY), step=step, tiers={0: 15e-6, 1: 30e-6, 2: 60e-6})
    assert governor.spacing[0] == 1
    assert all(governor.fast_path_end(seq) == seq for seq in range(FULL_STEPS, FULL_STEPS + 64))


def test_no_costlier_tier_is_sampled_at_a_step_of_which_only_the_loss_is_taken() -> None:
    governor = make_governor(0.01)
    loop(governor, range(2 * DECIDE_EVERY), step=0.003, tiers={0: 15e-6, 1: 1e-9, 2: 1e-9})
    assert governor.spacing[0] == governor.spacing[1] == 8, "what tier 0 costs is a part of the norm's price"


@pytest.mark.parametrize(("whole", "apart"), [(3e-5, 16), (3e-4, 32)])
def test_a_sample_is_priced_with_the_step_that_leaves_the_fast_path_for_it(whole: float, apart: int) -> None:
    """`whole`: our seconds of a step off the fast path, without its samples; a step on it takes 30 us."""
    governor = make_governor(0.02, norm_first=True)
    for seq in range(0, 800, 8):
        governor.account(7, 7 * 0.003, 7 * 3e-5)
        governor.record_sample(0, 5e-6)
        governor.record_sample(1, 1.8e-4)
        governor.record_step(seq, 0.003, whole + 1.85e-4)
    assert governor.spacing[1] == apart


@pytest.mark.parametrize(
    ("norm_first", "norm", "checked"), [(True, 3e-5, True), (True, 4e-5, False), (False, 3e-5, False)]
)
def test_the_norm_is_checked_on_the_fast_path_where_it_costs_at_most_a_hundredth(
    norm_first: bool, norm: float, checked: bool
) -> None:
    """Of a step of 3 ms. Of a share that the user gave, something must be left for it."""
    governor = make_governor(0.02, norm_first=norm_first)
    governor.record_daemon_share(0.02)
    for seq in range(0, 800, 8):
        norms = 7 * norm if governor.checks_norm_on_fast_path else 0.0
        governor.account(7, 7 * 0.003, 7 * 1e-5 + norms, norms)
        governor.record_sample(1, 1e-4)
        governor.record_step(seq, 0.003, 1.1e-4)
    assert governor.checks_norm_on_fast_path == checked


def test_what_the_daemon_says_is_bounded() -> None:
    """A mistake of the daemon must neither make a run slow for good nor sample at every step for nothing."""
    governor = make_governor(0.01)
    governor.attend(0, 10**18)
    assert governor._attend_until < LONGEST_ATTENTION
    for share in (float("nan"), float("inf"), -1.0):
        governor.record_daemon_share(share)
        assert governor._daemon == 0.0


@pytest.mark.parametrize(
    ("step", "sample", "apart"),
    [
        (0.001, 5e-4, RARE_STEPS),  # 0.05 % of the loop at 1,024 steps
        (0.001, 1e-2, 2048),  # where 1,024 are too costly: 0.5 % at most
        (0.001, 1.0, RARE[-1]),
        (0.1, 1e-2, 256),
        (2.0, 1e-2, 16),  # 32 s apart
        (2.0, 1.0, 128),  # as the cost allows
    ],
)
def test_tier_3_is_at_most_so_far_apart(step: float, sample: float, apart: int) -> None:
    governor = make_governor(0.01)
    loop(governor, range(4 * DECIDE_EVERY), step=step, tiers={3: sample})
    assert governor.spacing[3] == apart
    assert apart == RARE[-1] or sample / apart <= RARE_MOST * step
    assert apart * step <= RARE_SECONDS or sample / (apart // 2) > RARE_MOST * step
