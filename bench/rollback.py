"""Measures what snapshots cost a loop, and how long a restore takes.

    python -m bench.rollback [--megaparameters 50] [--snapshots 12] [--threads 2]
    python -m bench.rollback --disk                                 and one snapshot to disk, and back
    torchrun --nproc-per-node 2 -m bench.rollback --ddp             each rank its own, in step by DDP

An MLP with AdamW; a snapshot at every eighth step. A snapshot touches two steps: the one at whose exit it begins, and
the next, during which it is copied. Its cost is what these two take longer than the median of the untouched steps.
Ratios are of one run; on a shared machine read the median and the quartiles. Bars: 2 % at every=100, 1 s for a restore.

With --ddp the restore includes the rank consensus: the group that is made for it, and its collective. A snapshot is
written to disk while the loop goes on; its cost is what the steps take longer meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.armed import Armed
from sentinel import wire
from sentinel.hooks.rollback.options import Rollback

SPACING = 8
WARM = 3 * SPACING
"""First steps, which are left out: there snapshots touch their memory for the first time."""


class Loop:
    """A plain loop with a restorer, driven by hooks as the monitor drives it."""

    def __init__(self, megaparameters: float, *, ddp: bool = False, directory: Path | None = None) -> None:
        width = 1024
        layers = max(1, round(megaparameters * 1e6 / (width * width + width)))
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.called: nn.Module = nn.parallel.DistributedDataParallel(self.model) if ddp else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)  # a deep linear net: stay finite
        terms = Rollback(every=SPACING, keep=2, margin=SPACING, directory=directory)
        self.armed = Armed(lambda: next(self.steps(1)), [self.called], self.optimizer, terms)

    def steps(self, count: int) -> Iterator[float]:
        """Make `count` steps, yielding the seconds of each."""
        batch = torch.randn(64, self.model[0].in_features)
        for _ in range(count):
            started = time.perf_counter()
            self.optimizer.zero_grad()
            self.called(batch).square().mean().backward()
            self.optimizer.step()
            yield time.perf_counter() - started

    def roll_back(self) -> wire.RolledBack:
        """Roll back to the newest snapshot, at the next step; return the restorer's answer."""
        answer = self.armed.roll_back(self.armed.restorer.held[-1])
        assert answer.ok, answer.reason
        return answer

    def publish(self, plain: float) -> tuple[wire.Published, float]:
        """Write the newest snapshot to disk; return the answer, and the seconds that the loop lost meanwhile.

        `plain`: seconds of a step that no snapshot touches.
        """
        seq = self.armed.restorer.held[-1]
        self.armed.restorer.receive(wire.Publish(id=1, seq=seq, step=seq, run="bench", run_id="bench", attempt=0))
        lost = 0.0
        while not isinstance(self.armed.sent[-1], wire.Published):
            lost += next(self.steps(1)) - plain
        answer = self.armed.sent[-1]
        assert answer.ok, answer.reason
        return answer, lost


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megaparameters", type=float, default=50)
    parser.add_argument("--snapshots", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.ddp:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(options.megaparameters, ddp=options.ddp, directory=Path(folder) if options.disk else None)
        report(loop, options)
    if options.ddp:
        dist.barrier()
        time.sleep(0.5)  # pytorch#190489: otherwise gloo's threads may abort the process at its end
        dist.destroy_process_group()


def report(loop: Loop, options: argparse.Namespace) -> None:
    """Measure, and print what rank 0 found."""
    times = list(loop.steps(WARM + SPACING * options.snapshots))
    snapshots = range(WARM, len(times), SPACING)
    plain = statistics.median(times[at + offset] for at in snapshots for offset in range(2, SPACING))
    costs = [times[at] + times[at + 1] - 2 * plain for at in snapshots]
    blocked = [loop.armed.blocked[at] + loop.armed.blocked[at + 1] for at in snapshots]
    taken = [message for message in loop.armed.sent if isinstance(message, wire.SnapshotTaken)]
    next(loop.steps(1))
    restores = sorted(loop.roll_back().seconds for _ in range(5))
    written = loop.publish(plain) if options.disk else None
    if options.ddp and dist.get_rank():
        return
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
    if written is not None:
        answer, lost = written
        megabytes, share = answer.nbytes / 1e6, lost / (1000 * plain)
        print(f"to disk, beside the loop      {megabytes:.0f} MB in {answer.seconds:.1f} s, synced and checksummed")
        print(f"loop slowed by it             {lost:.1f} s: {share:.2%} at every=200, disk_every=5")
    print(f"host memory for two           {2 * taken[-1].nbytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
