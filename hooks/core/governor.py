"""Chooses how often the costly statistics are taken, so that all of Sentinel stays within its share of the loop's time.

The budget covers three parts: the hooks on the training thread, the sender's thread, and this rank's part of the
daemon, which the daemon measures and sends. Spacings are powers of two and a tier is taken where seq % k == 0, so that
every schedule contains the coarser ones: ranks with different spacings still sample common steps. Of tier 0, the loss,
the loss scale and withheld steps are taken at every step; its other signals (times, rates) at least at every 64th, in
loops so fast that its cost is measurable, never before the first 512 steps are over, nor soon after a slow step.

A tier is sampled at a step if any line of its column says so:

                  tier 0            tiers 1 and 2                  tier 3
    first steps   all of 512        all of 64, then fewer of 512   every 8th of 64           what `Opening` affords
    slow steps    40 after each     -                              -                         one takes over 50 ms
    attention     every step        every step                     4 times, at every 8th     after `attend`
    spacing       seq % k == 0      seq % k == 0, and 0 and 1      seq % k == 0, and 0, 1    as the budget allows

Tier 2 is also sampled with tier 3, at a withheld step, and where the norm is odd (`OutlierWatch`). The fast path takes
steps at which nothing is due, up to `fast_path_end`, and ends early where a loss is odd.
"""

from __future__ import annotations

import math

from sentinel import wire
from sentinel.hooks.core.opening import RARE_EVERY, Opening

OVERHEAD, OVERHEAD_GPU = 0.02, 0.01
"""Default share of the loop's time that all of Sentinel may take: for a model on the CPU, and for others."""
DECISIONS = (4, 10, 20, 50)
"""Steps after which the first decisions are made, early enough that a costly tier is not sampled 50 times before."""
UNDECIDED = DECISIONS[0]
"""Steps before the first decision: only the opening examination keeps a costly sample from being repeated there."""
DECIDE_EVERY = 50
"""Steps between two decisions after the last of `DECISIONS`."""
FIRST = {0: 1, 1: 1, 2: 8, 3: 256}
"""Spacing by tier until the cost has been measured."""
MEASURED = 2
"""Number of first steps at which every tier is sampled: the first sample pays for cold caches, the second counts."""
COLD_SECONDS = 0.03
"""A first sample that took less is repeated whatever share the user gave: otherwise the spacing would be chosen by the
cost with cold caches, and be far too coarse."""
FULL_STEPS = 512
"""Number of first steps at which all of tier 0 is taken."""
SLOW_SECONDS, SLOW_STEPS = 0.05, 40
"""A step that takes so long can afford tier 0, and so can this many steps after it: SlowStep needs the times of 30, and
judges no slowdown of less than 50 ms."""
RELAXED = range(1, 65)
"""Finest and coarsest spacing of tier 0."""
RELAXED_SHARE = 0.15
"""Tier 0's part of the budget."""
AFTERWARDS = 4.0
"""Seconds that sender and daemon take for each second of tier 0 here, by bench/overhead.py with and without it."""
COARSEST = 256
RARE = range(COARSEST, 8193)
"""Finest and coarsest spacing of tier 3: what it measures changes over thousands of steps."""
NORM_SHARE = 0.6
"""Part of the budget that tier 1 may take before the others; at the default it is 1 % of a step. Where it is enough,
the total gradient norm is taken at every step: only the norm of the step before can decide whether the gradient or the
loss moved first. Where it is not enough, and the rest takes all of the budget, tier 1 gets half of this part."""
NORM_ALONE = 4.0
"""How many times cheaper the norm alone is on the fast path than a sample of tier 1, until it was measured: 2 to 4."""
RARE_SHARE = 0.05
"""Tier 3's part of what is left of the budget."""
RARE_MOST = 0.005
"""Share of the loop's time that tier 3 may take where its samples would else be further apart than the next limits."""
RARE_STEPS, RARE_SECONDS = 1024, 60.0
"""Most steps and most seconds between two samples of tier 3 at that share; the shorter one holds."""
NONFINITE_STEPS = 50
"""Steps for which everything is sampled after a non-finite value."""
LONGEST_ATTENTION = 10_000
"""Most steps the daemon may ask for in one request: a mistake there must not slow a run down permanently."""
OUTLIER_STEPS, OUTLIER_EVERY = 512, 128
"""Steps that may be sampled in full because a loss or a norm was odd, and the steps in which one of them is restored: a
transformer that has converged has an odd loss in each of 20 steps, and following all of them costs 2 % of its time."""
RARE_ATTENTION = 4
"""Samples of tier 3 that one request for attention causes: rules ask for three in a row."""
LATELY = 0.96
"""Weight of the steps before in the cost that is reported, at each decision: 25 decisions are 1,250 steps."""
SEEN = 0.85
"""Share of the budget that is given out. The rest is for what is not timed (the hooks of the forward and the backward
pass, PyTorch's way to all hooks) and for the error of the means."""
HURRY = 0.8
"""Share of the budget that a finer spacing must fit into: at the limit itself the spacing would alternate."""
_NEWEST = 0.25
"""Weight of the newest measurement in a running mean."""
_OUTLIER = 4.0
"""A measurement counts as at most this many times the mean: a reading of 0.1 ms may include another process's turn."""
_WINDOW_SECONDS = 1.0


class Mean:
    """Running mean of a cost. The first measurement pays for cold caches, and is dropped once there is a second."""

    def __init__(self) -> None:
        self.value = 0.0
        self.least = 0.0
        """The smallest measurement: the cost where nothing else took the processor."""
        self.count = 0

    def add(self, value: float) -> None:
        """Add a measurement."""
        self.least = value if self.count == 0 else min(self.least, value)
        self.count += 1
        if self.count <= 2:
            self.value = value
        else:
            most = _OUTLIER * self.value if self.value > 0.0 else value
            self.value += _NEWEST * (min(value, most) - self.value)


class CpuRate:
    """CPU seconds per second of a thread, over windows of a second. The first, with its start, is dropped by `Mean`."""

    def __init__(self) -> None:
        self.mean = Mean()
        self._since: tuple[float, float] | None = None

    def record_use(self, total: float, now: float) -> None:
        """Record that the thread has used `total` seconds of CPU up to `now`."""
        if self._since is None:
            self._since = total, now
        elif now - self._since[1] >= _WINDOW_SECONDS:
            self.mean.add((total - self._since[0]) / (now - self._since[1]))
            self._since = total, now


class Governor:
    """Chooses the tiers' spacings. The training thread records steps, the sender's thread the daemon's orders."""

    def __init__(self, overhead: float, opening: Opening, *, norm_first: bool = False) -> None:
        """`overhead`: share of the loop's time. `opening` samples more of the first steps, with a limit of its own.
        `norm_first`: tier 1 gets half of its part whatever the rest costs; else `overhead` is a hard limit for it."""
        self.spacing = dict(FIRST)
        self.wanted = dict(FIRST)
        """The spacings that this rank would choose: other than `spacing` only where the daemon ordered one for all."""
        self.costs: dict[str, float] = {}
        """Part (hooks, sender, daemon) -> share of the loop's time that it took, at the last decision."""
        self.hook_seconds = 0.0
        """Seconds on the training thread so far, by the host's clock."""
        self.attentive = False
        """Whether everything is sampled because something looked odd."""
        self.slow_seconds = SLOW_SECONDS
        """A step that takes longer is followed by steps at which all of tier 0 is taken."""
        self.checks_norm_on_fast_path = True
        """Whether the gradient norm is computed at steps on the fast path, too, and compared with what is usual. It is
        not sent, which would cost more; but the step at which it is odd is measured in full before the update."""
        self._overhead, self._opening, self._norm_first = overhead, opening, norm_first
        self._tiers = {tier: Mean() for tier in FIRST}
        self._samples: dict[int, float] = {}
        """Tier -> seconds of its samples in the present step of one optimizer."""
        self._felt: dict[int, float] = {}
        """Tier -> seconds that the loop felt of its samples, in all optimizers since the first one's last step."""
        self._fixed = Mean()
        self._full, self._fast = Mean(), Mean()
        """Seconds of a step off the fast path without its samples, and of one on the fast path."""
        self._fast_norm = Mean()
        """Seconds of a gradient norm on the fast path."""
        self._sender, self._daemon = CpuRate(), 0.0
        self._attend_until, self._latest = -1, -1
        """Steps of the first optimizer: the last one at which everything is sampled, and the last one that is over."""
        self._outlier_steps, self._restored_at = float(OUTLIER_STEPS), -1
        """What was left of `OUTLIER_STEPS` at the last odd step, and that step."""
        self._full_until = FULL_STEPS
        """The first step at which tier 0 may be left out."""
        self._rare_left = 0
        """Samples of tier 3 that the daemon asked for and that are still to be taken."""
        self._order: tuple[int, dict[int, int]] | None = None
        self._ordered = False
        self._aside = 0.0
        self._own_lately = self._loop_lately = 0.0
        """Seconds of ours and of the loop's after the first `FULL_STEPS`, those before a decision weighing less with
        each one after it."""
        self._counted = 0
        self._next = DECISIONS[0]
        self._begin()

    def _begin(self) -> None:
        self._steps, self._loop, self._own, self._beside = 0, 0.0, 0.0, 0.0

    @property
    def pace(self) -> wire.Pace:
        """The spacings and costs in the form in which the daemon gets them."""
        spacing, wanted = ({str(tier): every for tier, every in of.items()} for of in (self.spacing, self.wanted))
        return wire.Pace(spacing=spacing, wanted=wanted, costs=dict(self.costs))

    def due(self, tier: int, seq: int, *, first: bool = True) -> bool:
        """Whether this tier must be sampled at step `seq`. `first`: the step is one of the first optimizer, by whose
        steps attention is counted; another optimizer may step five times as often, or a fifth as often."""
        if (seq if first else self._latest + 1) <= self._attend_until:
            return True
        if tier == 0:
            return seq % self.spacing[0] == 0 or seq < self._full_until
        return self._is_scheduled(tier, seq) or self._opens(tier, seq)

    def _is_scheduled(self, tier: int, seq: int) -> bool:
        """Whether a tier is sampled by its spacing alone, without the opening examination."""
        if 0 < seq <= UNDECIDED:
            again = self._tiers[tier].count < MEASURED and self._expect(tier) < COLD_SECONDS
            if not again and self._opening.forbids(self._expect(tier)):
                return False
        return seq % self.spacing[tier] == 0 or seq < MEASURED

    def fast_path_end(self, seq: int) -> int:
        """Return the first step from `seq` on at which more is taken than at every step, as far as is known; `seq`
        itself where that is not known yet."""
        if seq < self._full_until or seq <= self._attend_until or not self._opening.is_over(seq):
            return seq
        end = -(-seq // self.spacing[0]) * self.spacing[0]
        return end if self._order is None else max(min(end, self._order[0] - 1), seq)  # the step that applies the order

    def take_rare_turn(self, seq: int, *, first: bool = True) -> bool:
        """Return whether tier 3 must be sampled at step `seq`, and count one of the samples that attention asked for as
        taken; called once per step. Attention counts only at steps of the first optimizer, by which rules judge."""
        if first and self._rare_left and seq % RARE_EVERY == 0:
            self._rare_left -= 1
            return True
        return self._is_scheduled(3, seq) or self._opens(3, seq)

    def _opens(self, tier: int, seq: int) -> bool:
        return self._opening.wants(tier, seq, self._expect(tier))

    def _expect(self, tier: int) -> float:
        """Return the seconds that a sample of a tier takes, those of the tiers below it included."""
        # The least, as a mean of two samples, one of them interrupted, would keep a tier from being measured again.
        return sum(self._tiers[part].least for part in range(1, tier + 1))

    def mark_opening(self, seq: int) -> float | None:
        """Return `Opening.mark` of step `seq`."""
        return self._opening.mark(seq)

    def begin_stage(self, seq: int) -> None:
        """Examine the first steps of a stage, which begins at step `seq`: faults from its start show there."""
        self._opening.begin_stage(seq)

    def attend(self, seq: int | None, steps: int = NONFINITE_STEPS, *, rare: bool = False) -> None:
        """Sample tiers 1 and 2 for `steps` steps of the first optimizer, from its step `seq` on, or from its next one
        if None; with `rare`, tier 3 too, at the next `RARE_ATTENTION` steps at which it is possible."""
        seq = self._latest + 1 if seq is None else seq
        self._rare_left = RARE_ATTENTION if rare else self._rare_left
        self._attend_until = max(self._attend_until, seq + min(steps, LONGEST_ATTENTION) - 1)
        self.attentive = True

    @property
    def follows_outliers(self) -> bool:
        """Whether an odd loss or norm would be followed by samples at the present step."""
        return self._count_outlier_steps() >= 1.0

    def follow_outlier(self, seq: int | None, steps: int) -> bool:
        """Do as `attend` does, because a loss or a norm is odd; return whether at least one step is sampled for it.
        Where more is odd than `OUTLIER_STEPS` allow, it is usual in this loop, and fewer steps or none are sampled."""
        left = self._count_outlier_steps()
        if left < 1.0:
            return False
        seq = self._latest + 1 if seq is None else seq
        steps = min(steps, int(left))
        added = seq + steps - 1 - max(self._attend_until, seq - 1)
        self._outlier_steps, self._restored_at = left - max(added, 0), self._latest
        self.attend(seq, steps)
        return True

    def _count_outlier_steps(self) -> float:
        restored = (self._latest - self._restored_at) / OUTLIER_EVERY
        return min(self._outlier_steps + restored, float(OUTLIER_STEPS))

    def order(self, at: int, tiers: dict[int, int]) -> None:
        """Take over the daemon's spacings for all ranks from step `at` on. This rank's own are then only `wanted`."""
        self._order = (at, {tier: min(max(every, 1), RARE[-1]) for tier, every in tiers.items() if tier in self._tiers})

    def clear_orders(self) -> None:
        """Drop the daemon's orders, because that daemon is gone."""
        self._order, self._ordered = None, False

    def record_sender_time(self, total: float, now: float) -> None:
        """Record that the sender's thread has used `total` seconds of CPU up to `now`."""
        self._sender.record_use(total, now)

    def record_daemon_share(self, share: float) -> None:
        """Record that the daemon uses `share` CPU seconds per second for this rank."""
        if 0.0 <= share < math.inf:
            self._daemon = share

    def record_sample(self, tier: int, seconds: float) -> None:
        """Record that one sample of a tier took `seconds`."""
        self._samples[tier] = self._samples.get(tier, 0.0) + seconds

    def aside(self, own: float, share: float = 1.0) -> None:
        """Record that a step of another optimizer than the first took `own` seconds of ours. They count with the next
        step of the first one. `share`: see `record_step`."""
        self.hook_seconds += own
        self._aside += own * share
        self._feel_samples(share)

    def record_first_step(self, own: float) -> None:
        """Record that the first optimizer's first step took `own` seconds of ours; the loop's time is not known."""
        self.hook_seconds += own
        self._feel_samples(1.0)
        self._take_samples()
        self._opening.record_first_step(own)

    def _feel_samples(self, share: float) -> None:
        for tier, seconds in self._samples.items():
            self._felt[tier] = self._felt.get(tier, 0.0) + seconds * share
        self._samples.clear()

    def _take_samples(self) -> None:
        for tier, seconds in self._felt.items():
            self._tiers[tier].add(seconds)
        self._felt.clear()

    def record_step(self, seq: int, loop: float, own: float, share: float = 1.0) -> None:
        """Record that step `seq` of the first optimizer came `loop` seconds after the one before, `own` of them ours on
        the host. `share`: how much of these, and of the samples' seconds, the loop felt (`device_clock`)."""
        if self._order is not None and seq + 1 >= self._order[0]:
            self.spacing.update(self._order[1])
            self._order, self._ordered = None, True
        self._latest = seq
        if loop > self.slow_seconds:
            self._full_until = max(self._full_until, seq + SLOW_STEPS)
        self.hook_seconds += own
        own, self._aside = own * share + self._aside, 0.0
        self._feel_samples(share)
        self.attentive = seq < self._attend_until
        self._count(1, loop, own)
        sampled = sum(self._felt.values())
        self._beside -= sampled
        self._full.add(own - sampled)
        self._take_samples()
        self._opening.record_step(seq, loop, own)
        if self._counted >= self._next:
            self._next = next((n for n in DECISIONS if n > self._counted), self._counted + DECIDE_EVERY)
            self._decide()
            self._begin()

    def account(self, steps: int, loop: float, own: float, norms: float = 0.0) -> None:
        """Record that `steps` steps on the fast path took `loop` seconds in all, `own` of them ours, `norms` of these
        for gradient norms. The next decision waits for the next step off the fast path."""
        self.hook_seconds += own
        if norms > 0.0:
            self._fast_norm.add(norms / steps)
        self._fast.add(own / steps)
        self._count(steps, loop, own)

    def _count(self, steps: int, loop: float, own: float) -> None:
        self._counted += steps
        self._steps += steps
        self._loop += loop
        self._own += own
        self._beside += own

    def _decide(self) -> None:
        if self._loop <= 0.0:
            return
        self._fixed.add(self._beside / self._steps)
        sender = self._sender.mean.value
        costs = {"hooks": self._average_cost(), "sender": sender, "daemon": self._daemon}
        self.costs = {part: round(share, 5) for part, share in costs.items()}
        bare = (self._loop - self._own) / self._steps
        others = (sender + self._daemon) * self._loop / self._steps
        relaxed = (1.0 + AFTERWARDS) * self._tiers[0].value + self._price_full_step()
        zero = choose_spacing(relaxed, RELAXED_SHARE * self._overhead * bare, self.wanted[0], RELAXED)
        budget = whole = SEEN * self._overhead * bare
        budget -= self._fixed.value + self._tiers[0].value / zero + others
        norms, layers, rare = (self._tiers[tier].value for tier in (1, 2, 3))
        third = choose_spacing(rare, RARE_SHARE * budget, self.wanted[3], RARE)
        third = min(third, max(_steps_apart(bare), coarsen_spacing(rare, RARE_MOST * bare, _ANY_RARE)))
        # Tier 2's samples include the norm, so tier 2 is never the finer one. It gets what tier 1 leaves over.
        claim = NORM_SHARE * whole
        alone = self._fast_norm.least or norms / NORM_ALONE
        paid = alone if self.checks_norm_on_fast_path and self._fast_norm.count else 0.0
        self.checks_norm_on_fast_path = alone <= (claim if self._norm_first else min(claim, budget + paid))
        norm_step = norms + (relaxed if zero > 1 else 0.0)  # such a step is off the fast path
        if norms > claim or not self._norm_first:  # else it is taken at every step, unless that ends the fast path
            claim = min(claim, max(budget, claim / 2 if self._norm_first else 0.0))
        elif zero > 1:  # all of tier 0 comes with such a step, and so does its part
            claim += RELAXED_SHARE * self._overhead * bare
        first = choose_spacing(norm_step, claim, self.wanted[1])
        budget -= rare / third
        second = choose_spacing(layers, budget - norms / first, self.wanted[2])
        self.wanted = {0: min(zero, first), 1: first, 2: max(first, second), 3: third}
        if not self._ordered:
            self.spacing.update(self.wanted)

    def _average_cost(self) -> float:
        """Return the hooks' share of the loop's time since the last decision; after the first `FULL_STEPS`, in the last
        thousand or two since then: 50 steps with an odd one among them say little about a run."""
        if self._counted - self._steps >= FULL_STEPS:
            self._own_lately = self._own + LATELY * self._own_lately
            self._loop_lately = self._loop + LATELY * self._loop_lately
            return self._own_lately / self._loop_lately
        return self._own / self._loop

    def _price_full_step(self) -> float:
        """Return the seconds that a step costs by being off the fast path; 0 where none was on it so far."""
        return max(self._full.value - self._fast.value, 0.0) if self._fast.count else 0.0


_ANY, _ANY_RARE = range(1, COARSEST + 1), range(1, RARE[-1] + 1)


def _steps_apart(seconds: float) -> int:
    """Return the most steps, of `seconds` each, between two samples of tier 3, a power of two."""
    steps = int(min(RARE_STEPS, RARE_SECONDS / max(seconds, 1e-6)))
    return 1 << max(steps.bit_length() - 1, 0)


def choose_spacing(seconds: float, budget: float, present: int, within: range = _ANY) -> int:
    """Return the finest spacing, a power of two, at which a sample of `seconds` costs at most `budget` a step.

    A spacing finer than `present` is chosen only where it leaves some of the budget.
    """
    spacing = coarsen_spacing(seconds, budget, within)
    return spacing if spacing >= present else min(coarsen_spacing(seconds, HURRY * budget, within), present)


def coarsen_spacing(seconds: float, budget: float, within: range = _ANY) -> int:
    """Return the same as `choose_spacing`, whatever the present spacing is."""
    spacing = within.start
    while spacing < within[-1] and seconds > budget * spacing:
        spacing *= 2
    return spacing
