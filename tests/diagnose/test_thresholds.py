"""Thresholds between two causes, from both sides; and the numbers and words with which a cause is stated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sentinel.diagnose.evidence import NOT_KNOWN, Finding
from sentinel.runs.devices import Devices
from sentinel.signals import below
from tests.diagnose.made import WAITING, judged, layered, run_of, table

ADAM = {"optimizer": "Adam"}


def climbing(high: float, rise: int = 380, fall: int = 1000) -> Finding:
    """Diagnose a loss that climbs from step 400 on; the rate goes from 1e-3 to `high` by `rise`, and back at `fall`."""

    def values(seq: int) -> dict[str, float]:
        rate = 1e-3 + (high - 1e-3) * min(max(seq - rise + 40, 0) / 40, 1) if seq < fall else 1e-3
        return {"loss": 1.0 + max(0, seq - 400) / 50, "grad_norm": 1.0, "learning_rate": rate}

    return judged("Divergence", run_of(460, values), since=430)


def rising(high: float) -> Finding:
    """Diagnose the same loss with a rate that grows all the way from 1e-3 at the start to `high` at step 400."""

    def values(seq: int) -> dict[str, float]:
        rate = 1e-3 + (high - 1e-3) * min(seq, 400) / 400
        return {"loss": 1.0 + max(0, seq - 400) / 50, "grad_norm": 1.0, "learning_rate": rate}

    return judged("Divergence", run_of(460, values), since=430)


@pytest.mark.parametrize(
    ("rate", "course"),
    [
        (lambda seq: 0.1 if seq >= 300 else 1e-3, "0.1, and has been since step 300, after 0.001"),
        (lambda seq: 1e-3 if seq >= 300 else 0.1, "0.001, and has been since step 300, after 0.1"),
        (lambda seq: 1e-3, "0.001, and has been since step 0 at least"),
        (lambda seq: seq / 1000, "0.459, and still rises: a warm-up"),
        (lambda seq: (500 - abs(seq - 300)) / 1000, "0.341, and falls since its peak of 0.5 at step 300"),
    ],
    ids=["jumped", "dropped", "constant", "warm-up", "decay"],
)
def test_the_course_of_the_rate(rate: Callable[[int], float], course: str) -> None:
    steps = run_of(460, lambda seq: {"loss": 1.0 + max(0, seq - 400) / 50, "learning_rate": rate(seq)})
    assert f"the learning rate is {course}" in judged("Divergence", steps, since=430).evidence


def others(low: int, moved: int = 403) -> Finding:
    """Diagnose losses that double at step 400, except `low` of 20, and a gradient norm that triples at `moved`."""

    def values(seq: int) -> dict[str, float]:
        up = seq >= 400 and seq % 20 >= low
        return {"loss": (2.0 if up else 0.99) + 0.01 * (seq % 3), "grad_norm": 3.0 if seq >= moved else 1.0}

    return judged("Divergence", run_of(460, values), since=430)


def leapt(times: float, before: int) -> Finding:
    """Diagnose a rate that leaps to `times` its value so many steps `before` the loss does."""

    def values(seq: int) -> dict[str, float]:
        late = seq >= 300
        rate = 1e-3 * (times if seq >= 300 - before else 1.0)
        return {
            "loss": 9.0 if late else 2.0 + 0.01 * (seq % 3),
            "grad_norm": 5.0 if late else 1.0,
            "learning_rate": rate,
        }

    return judged("LossSpike", run_of(302, values), since=300)


def spiked(norm: float, at: int = 1160, first: int = 0, clip: dict[str, float] | None = None) -> Finding:
    """Diagnose a loss that jumps at step 1200 after one gradient of `norm`, usually 1; norms are known from `first`."""

    def values(seq: int) -> dict[str, float]:
        loss = 9.0 if seq >= 1200 else 2.0 + 0.01 * (seq % 3)
        usual = 5.0 if seq >= 1200 else 1.0 + 0.01 * (seq % 5)
        norms = {"grad_norm": norm if seq == at else usual} if seq >= first else {}
        return {"loss": loss} | norms | (clip or {})

    return judged("LossSpike", run_of(1202, values), since=1200, facts=ADAM)


def clipped_spike(limit: float) -> Finding:
    steps = run_of(204, lambda seq: {"grad_norm": 20.0 if seq > 200 else 1.0, "clip_limit": limit})
    return judged("GradientSpike", steps, since=201)


def grown(*times: float) -> Finding:
    """Diagnose gradients that grew in three modules, by these factors."""
    growth = dict(zip(("a.weight", "b.weight", "c.weight"), times, strict=True))
    steps = run_of(60, lambda seq: {"grad_norm": 50.0 if seq > 57 else 1.0})
    blocks = layered(range(60), lambda seq: {
        name: {"layer_grad_norm": by if seq > 57 else 1.0} for name, by in growth.items()
    })  # fmt: skip
    return judged("GradientSpike", steps, blocks, since=58, table=table(*growth))


def learning(ratio: float, moved: int = 4) -> Finding:
    steps = run_of(100, lambda _: {"loss": 2.3, "learning_rate": 1e-3, "update_ratio": ratio, "grad_norm": 1.0})
    names = [f"{name}.weight" for name in "abcdef"]
    moves = {name: {"layer_update_ratio": ratio if place < moved else 0.0} for place, name in enumerate(names)}
    return judged("LossNotDecreasing", steps, layered([90], lambda _: moves), table=table(*names))


def shallow(alert: str, ratio: float) -> Finding:
    return judged(alert, run_of(40, lambda _: {"gradient_depth_ratio": ratio, "loss": 2.0, "grad_norm": 1.0}))


def exploded(rate: float) -> Finding:
    """Diagnose small gradients that grew by 100 while the rate went from 1e-3 to `rate`."""

    def values(seq: int) -> dict[str, float]:
        return {"grad_norm": 0.5 * 100 ** min(seq / 600, 1), "learning_rate": rate if seq > 300 else 1e-3}

    return judged("ExplodingGradient", run_of(700, values), numbers={"0": {"now": 50.0, "early": 0.5}})


def faded(loss: float) -> Finding:
    return judged("VanishingGradient", run_of(40, lambda seq: {"loss": 2.0 if seq < 20 else loss, "grad_norm": 1.0}))


def adapters(rate: float) -> Finding:
    names = ("q.lora_A.default.weight", "q.lora_B.default.weight")
    steps = run_of(513, lambda _: {"adapter_ratio": 1e-3, "learning_rate": rate})
    return judged("AdapterStarved", steps, table=table(*names))


def schedule(last: float) -> Finding:
    """Diagnose a rate of 1e-3 that comes to `last` and then to 0."""
    steps = run_of(60, lambda seq: {"learning_rate": 1e-3 if seq < 30 else last if seq < 40 else 0.0})
    return judged("SchedulerMisused", steps)


def slower(forward: float, backward: float) -> Finding:
    """Diagnose two passes of 0.1 s each that take these seconds from step 250 on."""

    def values(seq: int) -> dict[str, float]:
        grew = seq >= 250
        return {"forward_seconds": forward if grew else 0.1, "backward_seconds": backward if grew else 0.1}

    return judged("SlowStep", run_of(300, values), since=280)


def starving(cpu: float, workers: int = 4) -> Finding:
    steps = run_of(20, lambda _: {"loss": 1.0})
    devices = Devices("node-1")
    devices.host["host_cpu_ratio"] = cpu
    return judged("InputBound", steps, facts={"loader": {"num_workers": workers}}, devices=devices, numbers=WAITING)


def idle(**seconds: float) -> Finding:
    """Diagnose a GPU that waits, with these parts of steps of 0.1 s."""
    steps = run_of(20, lambda _: {"step_seconds": 0.1, **seconds})
    return judged("LowUtilization", steps, numbers={"0": {"busy": 0.2}})


def long_batch(elements: float) -> Finding:
    def values(seq: int) -> dict[str, float]:
        return {"batch_elements": elements if seq == 38 else 512.0, "memory_reserved_bytes": 7e10}

    return judged("MemoryPressure", run_of(40, values))


def dead(*shares: float) -> Finding:
    """Diagnose modules, from the input to the output, with these shares of zeros in their gradients."""
    names = [f"{name}.weight" for name, _ in zip("abcdef", shares, strict=False)]
    blocks = layered([10], lambda _: {
        name: {"layer_grad_norm": 1.0 - share} for name, share in zip(names, shares, strict=True)
    })  # fmt: skip
    members = tuple(name for name, share in zip(names, shares, strict=True) if share >= 1)
    return judged("DeadLayer", run_of(20, lambda _: {"loss": 1.0}), blocks, members=members, table=table(*names))


def evaluating(since: int) -> Finding:
    steps = run_of(60, lambda seq: {"eval_mode": 1.0} if seq >= since else {})
    return judged("TrainingInEvalMode", steps, facts={"mode_dependent": {"Dropout": 2}})


CASES: dict[str, tuple[Callable[[], Finding], str]] = {
    "a rate that rose by less than half": (lambda: climbing(1.4e-3), NOT_KNOWN),
    "a rate that rose by more": (lambda: climbing(1.6e-3), "the learning rate: it rose from 0.001 to 0.0016 by step"),
    "a rate that rose long before": (lambda: climbing(1.6e-3, rise=60), NOT_KNOWN),
    "a rate that rose and had fallen again": (lambda: climbing(1.6e-3, rise=300, fall=340), NOT_KNOWN),
    "a rate that rises by less than half in 300 steps": (lambda: rising(1.7e-3), NOT_KNOWN),
    "by more": (lambda: rising(1.9e-3), "the learning rate: it rose from 0.0012 to 0.0019 by step 400"),
    "data that are others": (lambda: others(low=1), "the data are others since step 40"),
    "losses that come down now and then": (lambda: others(low=3), NOT_KNOWN),
    "a gradient that moved before the data can have": (lambda: others(low=1, moved=390), NOT_KNOWN),
    "a rate that leapt by less than a warm-up may": (lambda: leapt(2.9, before=1), "the batch of step 300"),
    "a rate that leapt by more": (lambda: leapt(3.1, before=1), "the learning rate: it jumped"),
    "a rate that leapt a while before": (lambda: leapt(9.0, before=19), "the learning rate: it jumped"),
    "a rate that leapt longer before": (lambda: leapt(9.0, before=30), "the batch of step 300"),
    "a huge gradient among fifty": (lambda: spiked(30.0, at=1180, first=1150), "the optimizer's state"),
    "among fewer": (lambda: spiked(30.0, at=1180, first=1151), "the batch of step 1200"),
    "a gradient of 15 times the usual": (lambda: spiked(15.0), "the batch of step 1200"),
    "a gradient of 30 times the usual": (lambda: spiked(30.0), "the optimizer's state: a gradient of norm 30 at step"),
    "a gradient that momentum still carries": (lambda: spiked(30.0, at=1151), "the optimizer's state"),
    "a gradient that momentum has forgotten": (lambda: spiked(30.0, at=1150), "the batch of step 1200"),
    "one that was clipped": (lambda: spiked(30.0, clip={"clip_limit": 2.0}), "the batch of step 1200"),
    "one layer that holds nine tenths": (lambda: grown(50.0, 10.0, 10.0), "one layer makes most of it: a.weight"),
    "one layer that holds less": (lambda: grown(50.0, 15.0, 15.0), NOT_KNOWN),
    "the first layers, and not the last": (lambda: grown(20.0, 20.0, 4.9), "it comes in right after b"),
    "all layers": (lambda: grown(20.0, 20.0, 5.1), NOT_KNOWN),
    "updates of a millionth": (lambda: learning(8e-7), "the rate is too small"),
    "updates that are small": (lambda: learning(2e-6), NOT_KNOWN),
    "updates that are large": (lambda: learning(0.09), NOT_KNOWN),
    "updates of a tenth": (lambda: learning(0.11), "the rate is too high"),
    "half of the layers that move": (lambda: learning(1e-3, moved=3), NOT_KNOWN),
    "fewer": (lambda: learning(1e-3, moved=2), "2 of 6 parameter tensors"),
    "gradients that shrink by 90 along depth": (lambda: shallow("VanishingGradient", 90.0), NOT_KNOWN),
    "by 110": (lambda: shallow("VanishingGradient", 110.0), "with depth"),
    "gradients that grow by 90 along depth": (lambda: shallow("ExplodingGradient", 1 / 90), NOT_KNOWN),
    "by 110, too": (lambda: shallow("ExplodingGradient", 1 / 110), "with depth"),
    "gradients that grow with a rate that rose by 1.4": (lambda: exploded(1.4e-3), NOT_KNOWN),
    "by 1.6": (lambda: exploded(1.6e-3), "the learning rate"),
    "a loss at two hundredths of its first": (lambda: faded(0.04), NOT_KNOWN),
    "at less than one": (lambda: faded(0.018), "the loss has come to nothing"),
    "adapters at a small rate": (lambda: adapters(2.9e-5), "the rate"),
    "at a third of the usual one": (lambda: adapters(3.1e-5), NOT_KNOWN),
    "a rate that was falling": (lambda: schedule(0.9e-4), "the schedule is over: the rate was 0.001 at its highest"),
    "a rate that fell at once": (lambda: schedule(1.1e-4), "the rate fell from 0.001 to 0 at step 40, within one step"),
    "most of the growth in one part": (lambda: slower(0.17, 0.14), "the forward pass"),
    "growth of all parts alike": (lambda: slower(0.16, 0.15), "the machine: all parts of the step grew alike"),
    "growth of little": (lambda: slower(0.124, 0.118), NOT_KNOWN),
    "CPUs that are busy": (lambda: starving(0.89), "storage"),
    "CPUs that are full": (lambda: starving(0.91), "they cannot keep up"),
    "no workers, and a CPU that is free": (lambda: starving(0.89, 0), "the loader has no workers"),
    "no workers, and none that is free": (lambda: starving(0.91, 0), "and the host's CPUs are 91% busy"),
    "a GPU that waits little for data": (lambda: idle(data_seconds=0.019), NOT_KNOWN),
    "a GPU that waits for data": (lambda: idle(data_seconds=0.021), "the input"),
    "a GPU that waits for less than half of the loop's own code": (lambda: idle(other_seconds=0.049), NOT_KNOWN),
    "for more": (lambda: idle(other_seconds=0.051), "the host: 51% of each step"),
    "dead up to a layer": (lambda: dead(1.0, 1.0, 0.1, 0.1), "no gradient comes past c: b, and all that lies before"),
    "dead between two that learn": (lambda: dead(0.1, 1.0, 0.1), "b.weight gets exact zeros, while layers on both"),
    "evaluation mode from the first step": (lambda: evaluating(0), "in evaluation mode since the first step"),
    "evaluation mode from a later one": (lambda: evaluating(40), "model.eval() was called before step 40"),
    "a batch that is a tenth larger": (lambda: long_batch(565.0), NOT_KNOWN),
    "a batch that is a third larger": (lambda: long_batch(683.0), "a batch that is larger than the usual ones"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_cause_on_either_side_of_a_threshold(case: str) -> None:
    judge, cause = CASES[case]
    assert cause in judge().cause


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [(1.9, "the limit of 1.9 has clipped it already"), (2.1, "clip harder: the limit is 2.1, and the usual norm 1")],
)
def test_a_limit_that_is_loose(limit: float, remedy: str) -> None:
    assert clipped_spike(limit).remedy.startswith(remedy)


def test_updates_are_taken_for_the_rate_that_they_were_made_with() -> None:
    """The rate falls to a tenth, and is not sampled at the steps at which updates are."""

    def values(seq: int) -> dict[str, float]:
        rate = 1e-3 * (1 - 0.9 * (seq - seq % 16) / 2560)
        found = {"loss": 1.0, "grad_norm": 1.0} | ({"learning_rate": rate} if seq % 16 == 0 and seq % 256 else {})
        before = 1e-3 * (1 - 0.9 * (seq - 16) / 2560)
        return found | ({"update_ratio": before * (30.0 if seq > 2000 else 1.0)} if seq % 256 == 0 and seq else {})

    found = judged("OptimizerStateCorrupt", run_of(2561, values), since=2048, facts=ADAM)
    assert found.cause.startswith("the updates have become 30 times as large for the learning rate")
    plain = judged("OptimizerStateCorrupt", run_of(2561, values), since=2048, facts={"optimizer": "SGD"})
    assert plain.cause == "not known", "it has no second moments that could be too small"


@pytest.mark.parametrize(
    ("growth", "cause"), [(101.0, "the second moments of Adam grew 1e+02x between"), (99.0, "not known")]
)
def test_second_moments_that_one_gradient_filled_unseen(growth: float, cause: str) -> None:
    """The gradient's own norm was not sampled, and only two samples of the updates are still in memory."""

    def values(seq: int) -> dict[str, float]:
        rare = {"update_ratio": 1e-3, "second_moment_growth": 1.0} if seq % 1024 == 0 else {}
        filled = {"update_ratio": 9e-5, "second_moment_growth": growth} if seq == 2048 else {}
        return {"loss": 1.0, "learning_rate": 1e-3} | rare | filled

    assert judged("OptimizerStateCorrupt", run_of(2049, values), since=2048, facts=ADAM).cause.startswith(cause)
    alone = judged("OptimizerStateCorrupt", run_of(2049, values)[-2:], since=2048, facts=ADAM).cause
    assert alone.startswith(cause.replace("between", "by step 2048"))


def test_how_much_updates_changed_is_quoted_from_the_rule_and_since_when_is_said() -> None:
    """The rule looks further back than the steps that are still in memory."""

    def values(seq: int) -> dict[str, float]:
        rare = {"update_ratio": 7e-4 if seq == 2048 else 1e-4} if seq % 512 == 0 else {}
        return {"loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1000.0 if seq == 1700 else 1.0} | rare

    numbers = {"the run": {"size": 0.7, "base": 9.0}}
    found = judged("OptimizerStateCorrupt", run_of(2049, values), since=2048, facts=ADAM, numbers=numbers)
    assert found.cause.startswith("a gradient of norm 1e+03 at step 1700")
    assert "updates are 0.078 times what they were" in found.cause
    assert found.since == 1700


def test_workers_are_no_advice_where_no_cpu_is_free() -> None:
    assert "num_workers=4" in starving(0.89, 0).remedy
    assert starving(0.91, 0).remedy.startswith("num_workers cannot help: ")


@pytest.mark.parametrize(("share", "scale"), [(0.11, "1024"), (0.09, "64")])
def test_the_scale_that_would_keep_nine_tenths(share: float, scale: str) -> None:
    """Next to none of the gradients is under 2^-24, and `share` of them is under 2^-20."""
    histogram = {below(-24): 0.01, below(-20): share, below(-16): 0.6}
    steps = run_of(20, lambda _: {"loss_scale": 1.0, **histogram})
    blocks = layered([10], lambda _: {"a": {"layer_grad_tiny_share": 0.9}})
    found = judged("GradientUnderflow", steps, blocks, members=("a",), table=table("a"))
    assert f"; at a scale of {scale} less than 10% of all gradients would be" in found.cause


def test_only_a_wrapped_model_is_advised_to_find_unused_parameters() -> None:
    def remedy(*wrappers: str) -> str:
        steps = run_of(20, lambda _: {"parameters_without_gradient": 1.0})
        blocks = layered([10], lambda _: {"a": {"layer_grad_norm": 1.0}})
        return judged("UnusedParameters", steps, blocks, table=table("a", "b"), facts={"wrappers": wrappers}).remedy

    assert "DDP needs find_unused_parameters=True as long as they are there" in remedy("DistributedDataParallel")
    assert "under DDP find_unused_parameters=True, or it waits for them" in remedy()


def test_layers_whose_updates_left_the_rest_are_named() -> None:
    def values(seq: int) -> dict[str, float]:
        found = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3}
        return found | ({"update_ratio": 0.1 if seq > 2000 else 1e-3} if seq % 256 == 0 else {})

    times = {"a": 100.0, "b": 2.9, "c": 3.1}
    blocks = layered(range(0, 2561, 256), lambda seq: {
        name: {"layer_update_ratio": 1e-3 * (by if seq > 2000 else 1.0)} for name, by in times.items()
    })  # fmt: skip
    found = judged("OptimizerStateCorrupt", run_of(2561, values), blocks, since=2048, facts=ADAM)
    assert found.cause.endswith(", most of all in a, c")


def test_clipping_at_every_step_in_words() -> None:
    steps = run_of(300, lambda seq: {"grad_norm": 0.5 if seq % 10 == 9 else 4.0, "clip_limit": 1.0})
    found = judged("AlwaysClipping", steps, numbers={"run": {"clipped": 20.0}})
    assert found.cause == (
        "the limit of 1 lies under the usual gradient norm of 4: 20 of the last 20 sampled gradients were "
        "clipped, to 0.25 of their size"
    )
    assert found.remedy.startswith("set max_norm to two to three times the usual norm, about 10, and lower the rate")
    assert (found.confidence, found.missing) == ("high", ())
    assert NOT_KNOWN in judged("AlwaysClipping", run_of(300, lambda _: {"grad_norm": 4.0})).cause


def test_norms_of_a_run_that_diverges_are_no_measure_of_a_limit() -> None:
    steps = run_of(
        300,
        lambda seq: {
            "grad_norm": 1e5 if seq > 250 else 4.0, "clip_limit": 1.0, "loss": 50.0 if seq > 250 else 2.0,
        },
    )  # fmt: skip
    found = judged("AlwaysClipping", steps, since=299)
    assert found.cause.startswith("the loss became unusual at step 251 (50, usually 2)")
    assert "max_norm" not in found.remedy


@pytest.mark.parametrize(
    ("held", "cause"),
    [
        (True, "the gradients are gone by optimizer.step(): 20 backward passes ran"),
        (False, "the optimizer holds 3 parameter(s) that no"),
    ],
)
def test_no_gradient_at_the_step_is_another_thing_where_the_optimizer_holds_the_model(held: bool, cause: str) -> None:
    steps = run_of(20, lambda _: {"no_gradient": 1.0, "micro_batches": 1.0})
    facts = {"optimizers": [{"groups": [{"parameters": 3}]}]}
    found = judged("ParametersNotUpdated", steps, table=table("a", "b", held=held), facts=facts)
    assert found.cause.startswith(cause)
    assert ("2 parameters that train and are in no optimizer (a, b)" in found.cause) is not held
