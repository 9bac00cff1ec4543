"""A summary and its diagnosis quote the same numbers: those by which the rule judged."""

from __future__ import annotations

import math
import re

from sentinel.diagnose.evidence import Finding
from sentinel.engine import RUN, Entity, Observation
from sentinel.engine.backtest import Alert, backtest
from sentinel.runs import Rank
from sentinel.runs.steps import RunStep
from sentinel.signals import below
from sentinel.wire import Hello, Identity
from tests.diagnose.made import RULES, judged, layered, run_of, table


def fire(alert: str, steps: list[RunStep]) -> tuple[Alert, list[RunStep]]:
    """Return the first alarm of a stock rule, and the steps up to it."""
    seen = [
        Observation(step.seq, step.time, {RUN: step.run, **{Entity("rank", str(n)): v for n, v in step.ranks.items()}})
        for step in steps
    ]
    alarm = backtest([RULES[alert]], seen, run="t").alerts[0]
    return alarm, [step for step in steps if step.seq <= alarm.step]


def fire_and_diagnose(alert: str, steps: list[RunStep], **more: object) -> tuple[str, Finding]:
    """Return the summary of an alarm, and its diagnosis."""
    alarm, before = fire(alert, steps)
    name = alarm.members[0].removeprefix("rank ") if alarm.members else "run"
    return alarm.summary, judged(alert, before, since=alarm.first_step, numbers={name: alarm.values}, **more)


def part_and_whole(text: str) -> tuple[int, float, float]:
    """Return (37, 0.1, 0.27) of `37% of each step ...: 0.1 of 0.27 s`."""
    found = re.search(r"(\d+)% of .*: ([\d.]+) of ([\d.]+) s", text)
    assert found is not None, text
    return int(found[1]), float(found[2]), float(found[3])


def test_the_share_of_waiting_is_one_number() -> None:
    """The last steps wait for little, and the very last step is shorter than the usual wait."""

    def values(seq: int) -> dict[str, float]:
        if seq >= 95:
            return {"data_seconds": 0.0006, "step_seconds": 0.015 if seq < 100 else 0.003}
        return {"data_seconds": 0.00745, "step_seconds": 0.026}

    summary, found = fire_and_diagnose("InputBound", run_of(101, values), facts={"loader": {"num_workers": 0}})
    share, wait, whole = part_and_whole(summary)
    assert (share, wait, whole) == (29, 0.00745, 0.026)
    assert found.cause.startswith(f"{share}% of each step (7 ms) is waiting for data")
    assert found.evidence[0].startswith(f"{share}% of the step, 7.5 ms")


def test_the_share_of_reducing_is_one_number() -> None:
    def values(seq: int) -> dict[str, float]:
        timed = seq < 10 or seq % 100 == 0
        return {"step_seconds": 0.010 if timed else 0.00644} | ({"communication_seconds": 0.00745} if timed else {})

    summary, found = fire_and_diagnose("CommunicationBound", run_of(900, values))
    share, spent, whole = part_and_whole(summary)
    assert (share, spent, whole) == (74, 0.00745, 0.01)
    assert "74%" in found.cause
    assert "ranks; passes a step: 1, parameters: 0" in found.cause


def test_passes_are_those_of_the_ranks_that_are_seen() -> None:
    """The daemon sees two ranks of four, because the others are on another node."""
    found = {"step_seconds": 0.01, "communication_seconds": 0.007, "micro_batches": 1.0}
    steps = [RunStep(seq, float(seq), {0: found, 1: found}, found | {"micro_batches": 2.0}) for seq in range(900)]
    identity = Identity(run="t", run_id="t", world_size=4)
    _, told_cause = fire_and_diagnose(
        "CommunicationBound", steps, live={0: Rank(Hello(version="0", identity=identity), 0.0)}
    )
    assert "among 4 ranks; passes a step: 1," in told_cause.cause


def test_sums_over_ranks_are_quoted_for_one_rank() -> None:
    def steps(found: dict[str, float], summed: str) -> list[RunStep]:
        run = found | {summed: 2 * found[summed]}
        return [RunStep(seq, float(seq), {0: found, 1: found}, run) for seq in range(60)]

    passes = steps({"micro_batches": 4.0, "accumulation_error": 0.004}, "micro_batches")
    _, lost = fire_and_diagnose("LowPrecisionAccumulation", passes)
    assert lost.cause.startswith("gradients of 4 passes are added up")
    batches = steps({"batch_size": 16.0, "step_seconds": 0.1, "forward_seconds": 0.03, "backward_seconds": 0.03,
                     "optimizer_seconds": 0.02}, "batch_size")  # fmt: skip
    idle = judged("LowUtilization", batches, numbers={"0": {"busy": 0.12}})
    assert "for a batch of 16 on each rank," in idle.cause


def slow_rank(part: str) -> list[RunStep]:
    """Return steps of three ranks: the second is 40 ms late in a part from step 100 on; step 125 is quick on all."""

    def times(rank: int, seq: int) -> dict[str, float]:
        if seq == 125:
            return {"step_seconds": 0.0104, "data_seconds": 0.001, "forward_seconds": 0.001, "backward_seconds": 0.002,
                    "other_seconds": 0.0064}  # fmt: skip
        late = 0.04 if rank == 1 and seq >= 100 else 0.0
        found = {"data_seconds": 0.001, "forward_seconds": 0.02, "other_seconds": 0.005}
        if part:
            found[part] += late
        whole = 0.09 if seq >= 100 else 0.05
        return {"step_seconds": whole, "backward_seconds": whole - 0.026 - late, **found}

    every = range(140)
    return [
        RunStep(seq, float(seq), {rank: times(rank, seq) for rank in range(3)}, times(1, seq), None) for seq in every
    ]


def test_a_slow_rank_is_behind_by_what_the_rule_says() -> None:
    identity = Identity(run="t", run_id="t", world_size=3, rank=1, hostname="vm")
    live = {1: Rank(Hello(version="0", identity=identity), 0.0)}
    for part, words in (("data_seconds", "mostly for waiting for its data, "), ("", "")):
        summary, found = fire_and_diagnose("Straggler", slow_rank(part), live=live, ranks=(1,))
        own, whole = (float(number) for number in re.findall(r"([\d.]+) of ([\d.]+) s outside", summary)[0])
        quickest = float(re.findall(r"the quickest rank ([\d.]+) s", summary)[0])
        assert own <= whole
        longer = round(1e3 * (own - quickest))
        assert found.cause.startswith(f"rank 1, on vm, takes {longer} ms a step longer than the quickest rank, {words}")
        assert longer == 40
        assert found.confidence == ("high" if part else "medium")


def test_gradients_that_vanish_with_depth_are_not_proved_by_their_norm() -> None:
    def values(seq: int) -> dict[str, float]:
        found = {"grad_norm": 0.415 if seq < 5 else 0.369, "loss": 2.3}
        return found | ({"gradient_depth_ratio": 4e6} if seq % 8 == 0 or seq < 2 else {})

    summary, found = fire_and_diagnose("VanishingGradient", run_of(40, values))
    assert "the last layers' are 4e+06 times the first layers' (limit 1,000)" in summary
    assert "norm 0.369, 0.89 times that of the start (limit 0.001)" in summary
    assert "with depth" in found.cause


def test_how_many_were_clipped_is_one_number() -> None:
    """Of the 200 norms from which the usual norm is taken, a smaller share was clipped."""
    steps = run_of(900, lambda seq: {"grad_norm": 4.0 if seq % 20 or seq > 640 else 0.5, "clip_limit": 1.0})
    summary, found = fire_and_diagnose("AlwaysClipping", steps)
    assert summary.startswith("20 of the last 20 sampled gradients were clipped")
    assert ": 20 of the last 20 sampled gradients were clipped" in found.cause


def test_the_share_of_updates_that_are_lost_is_one_number() -> None:
    shares = {8: 0.9, 16: 0.85, 24: 0.62}
    steps = run_of(25, lambda seq: {"learning_rate": 1e-6, "update_ratio": 1e-8, "lost_update_share": shares[seq]}
                   if seq in shares else {"learning_rate": 1e-6})  # fmt: skip
    summary, found = fire_and_diagnose("LostUpdates", steps, table=table("w"))
    assert summary.startswith("62% of the updates are rounded away")
    assert found.cause.startswith("62% of the updates are rounded away though weights are float32")


def test_a_divergence_begins_where_the_loss_or_the_gradient_left_its_past() -> None:
    def values(seq: int) -> dict[str, float]:
        loss = math.nan if seq == 199 else 50.0 if seq == 198 else 2.0
        return {"loss": loss, "loss_scale": 65536.0 if seq < 160 else 1024.0, "grad_norm": 1.0}

    found = judged("NonFiniteLoss", run_of(200, values))
    assert found.cause == (
        "divergence: loss or gradient norm were unusual from step 198 on, 1 step before the loss overflowed"
    )


def test_how_many_batches_were_repeated_is_one_number() -> None:
    """The rule fires at six repeated batches."""
    steps = run_of(40, lambda seq: {"batch_repeated": float(seq >= 20)})
    summary, found = fire_and_diagnose("DuplicateBatches", steps, facts={"loader": {"num_workers": 2}})
    count = summary.partition(" ")[0]
    assert f": {count} of the last 16 batches looked at" in found.cause


def test_what_a_sum_loses_is_one_number() -> None:
    steps = run_of(40, lambda seq: {"accumulation_error": 0.001 if seq < 30 else 0.004, "micro_batches": 8.0})
    summary, found = fire_and_diagnose("LowPrecisionAccumulation", steps)
    assert f"{summary.partition(' ')[0]} of the sum is lost" in found.cause


def test_no_scale_is_advised_under_the_present_one() -> None:
    """The histogram covers all layers; as the bulk of it is far from 0, it would allow a scale of less than 1."""
    steps = run_of(20, lambda _: {"loss_scale": 1.0, below(-24): 0.0, below(-16): 0.0, below(-8): 0.01})
    blocks = layered([10], lambda _: {"a": {"layer_grad_tiny_share": 0.9}})
    found = judged("GradientUnderflow", steps, blocks, members=("a",), table=table("a"))
    assert "at a scale of" not in found.cause
    assert "GradScaler(init_scale=65536) or 65536 at least" in found.remedy
    assert "the scale that would keep them" in found.missing[-1]
