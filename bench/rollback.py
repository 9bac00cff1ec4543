"""What snapshots cost a loop, and how long a restore takes.

    python bench/rollback.py [--megaparameters 50] [--snapshots 12] [--threads 2]

An MLP with AdamW; a snapshot at every eighth step. A snapshot's cost is all that the two steps it touches take longer
than the median of the steps that it does not touch: its own exit, and the next step, beside which it is copied. Ratios
are of one run; on a shared machine read the median and the quartiles. Bars: 2 % at every=100, 1 s for a restore.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from sentinel import wire
from sentinel.hooks.rollback import Restorer, Rollback

SPACING = 8
WARM = 3 * SPACING
"""Steps left out: the first snapshots touch their memory for the first time."""


class Loop:
    """A plain loop, its steps timed by hooks as the monitor's are."""

    def __init__(self, megaparameters: float) -> None:
        width = 1024
        layers = max(1, round(megaparameters * 1e6 / (width * width + width)))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)  # a deep linear net: stay finite
        self.sent: list[wire.FromRank] = []
        self.restorer = Restorer(
            Rollback(every=SPACING, keep=2, margin=SPACING),
            models=[self.model],
            optimizers=[self.optimizer],
            send=self.sent.append,
        )
        self.seq = 0
        self.blocked: list[float] = []
        self.optimizer.register_step_pre_hook(
            lambda *_: self._timed(lambda: self.restorer.enter_step(self.seq), new=True)
        )
        self.optimizer.register_step_post_hook(
            lambda *_: self._timed(lambda: self.restorer.exit_step(self.seq, skipped=False), new=False)
        )

    def _timed(self, part: Callable[[], None], *, new: bool) -> None:
        started = time.perf_counter()
        part()
        seconds = time.perf_counter() - started
        if new:
            self.blocked.append(seconds)
        else:
            self.blocked[-1] += seconds

    def steps(self, count: int) -> Iterator[float]:
        """Seconds of each."""
        batch = torch.randn(64, self.model[0].in_features)
        for _ in range(count):
            started = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.seq += 1
            yield time.perf_counter() - started

    def roll_back(self) -> wire.RolledBack:
        """At the next step, to the newest snapshot."""
        self.restorer.receive(wire.Prepare(id=1, at=self.seq, to=self.restorer.held[-1]))
        self.restorer.receive(wire.Commit(id=1))
        list(self.steps(1))
        answer = self.sent[-1]
        assert isinstance(answer, wire.RolledBack)
        assert answer.ok, answer.reason
        return answer


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megaparameters", type=float, default=50)
    parser.add_argument("--snapshots", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loop = Loop(options.megaparameters)
    times = list(loop.steps(WARM + SPACING * options.snapshots))
    snapshots = range(WARM, len(times), SPACING)
    plain = statistics.median(times[at + offset] for at in snapshots for offset in range(2, SPACING))
    costs = [times[at] + times[at + 1] - 2 * plain for at in snapshots]
    blocked = [loop.blocked[at] + loop.blocked[at + 1] for at in snapshots]
    taken = [message for message in loop.sent if isinstance(message, wire.SnapshotTaken)]
    next(loop.steps(1))
    restores = sorted(loop.roll_back().seconds for _ in range(5))
    parameters = sum(parameter.numel() for parameter in loop.model.parameters())

    low, middle, high = statistics.quantiles(costs, n=4)
    every = 100 * plain
    print(f"parameters                    {parameters / 1e6:.1f} M, AdamW, float32, {options.threads} threads")
    print(f"step, without a snapshot      {plain * 1e3:.1f} ms (median)")
    print(f"one snapshot                  {taken[-1].nbytes / 1e6:.0f} MB, copied in {taken[-1].seconds * 1e3:.0f} ms")
    print(f"loop blocked by it            {statistics.median(blocked) * 1e3:.1f} ms, {max(blocked) * 1e3:.1f} at most")
    print(f"loop slowed by it             {middle * 1e3:.1f} ms [{low * 1e3:.1f}, {high * 1e3:.1f}]")
    print(f"of the loop, at every=100     {middle / every:.2%} [{low / every:.2%}, {high / every:.2%}]")
    print(f"restore, verified             {restores[2]:.3f} s (median of 5), {restores[-1]:.3f} at most")
    print(f"host memory for two           {2 * taken[-1].nbytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
