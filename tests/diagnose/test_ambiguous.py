"""Ambiguous evidence gives no cause: it fits several causes, or lacks what would decide."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sentinel.diagnose.evidence import NOT_KNOWN, Finding
from sentinel.runs.devices import Devices
from tests.diagnose.made import WAITING, judged, layered, run_of, table

ADAM = {"optimizer": "Adam"}


def updates(seq: int, *, odd: float, norm: Callable[[int], float] = lambda _: 1.0) -> dict[str, float]:
    """Return a step's signals in a run whose updates change at step 2048."""
    found = {"learning_rate": 1e-3, "grad_norm": norm(seq), "loss": 1.0}
    return found | ({"update_ratio": odd if seq >= 2048 else 1e-3} if seq % 256 == 0 else {})


def spike(seq: int) -> dict[str, float]:
    """A loss that jumps at step 197, and gradient norms at every fourth step."""
    norms = {"grad_norm": 9.0 if seq > 196 else 1.0 + 0.01 * (seq % 5)} if seq % 4 == 3 else {}
    return {"loss": 9.0 if seq > 196 else 2.0 + 0.01 * (seq % 3)} | norms


def times(seq: int, slow: bool, **parts: tuple[float, float]) -> dict[str, float]:
    found = {name: values[slow] for name, values in parts.items()}
    return found | {"step_seconds": sum(found.values())}


def gradients(scale: Callable[[int], float]) -> list[tuple[int, object]]:
    return layered(range(60), lambda seq: {name: {"layer_grad_norm": scale(seq)} for name in "abc"})


CASES: dict[str, tuple[Callable[[], Finding], str]] = {
    "a spike whose gradients were not sampled": (
        lambda: judged("LossSpike", run_of(60, lambda seq: {"loss": 9.0 if seq > 57 else 2.0 + 0.01 * (seq % 3)})),
        "the gradient norm of step 57, which was not sampled (there is none before it)",
    ),
    "a spike right after a step whose gradient was not sampled": (
        lambda: judged("LossSpike", run_of(200, spike), since=197),
        "the gradient norm of step 196, which was not sampled (the last before it is of step 195)",
    ),
    "a NaN after steps whose gradients were not sampled": (
        lambda: judged("NonFiniteLoss", run_of(60, lambda seq: {"loss": math.nan if seq == 59 else 2.0})),
        "the gradient norm of step 58",
    ),
    "gradients that grew in all layers alike": (
        lambda: judged(
            "GradientSpike",
            run_of(60, lambda seq: {"grad_norm": 50.0 if seq > 57 else 1.0, "loss": 2.0}),
            gradients(lambda seq: 50.0 if seq > 57 else 1.0),
            table=table("a", "b", "c"),
        ),
        "the batch of that step",
    ),
    "gradients that grew, without a layer that was sampled": (
        lambda: judged("GradientSpike", run_of(60, lambda seq: {"grad_norm": 50.0 if seq > 57 else 1.0})),
        "layer statistics of these steps",
    ),
    "a slow climb at one rate": (
        lambda: judged(
            "Divergence",
            run_of(400, lambda seq: {"loss": 1.0 + max(0, seq - 200) / 100, "learning_rate": 1e-3, "grad_norm": 1.0}),
            since=370,
        ),
        "the update norm at every step",
    ),
    "a climb of which nothing is known but the loss": (
        lambda: judged("Divergence", run_of(400, lambda seq: {"loss": 1.0 + max(0, seq - 200) / 100}), since=370),
        "a run at a lower rate",
    ),
    "nothing learnt, with updates of the usual size": (
        lambda: judged(
            "LossNotDecreasing",
            run_of(1001, lambda seq: {"loss": 2.3, "learning_rate": 1e-3, "update_ratio": 1e-3, "grad_norm": 1.0}),
            layered([768], lambda _: {"a": {"layer_update_ratio": 1e-3}}),
            table=table("a"),
        ),
        "whether the labels belong to their inputs",
    ),
    "nothing learnt, and no update looked at": (
        lambda: judged("LossNotDecreasing", run_of(1001, lambda _: {"loss": 2.3, "learning_rate": 1e-3})),
        "the size of the updates",
    ),
    "small updates without a huge gradient": (
        lambda: judged(
            "OptimizerStateCorrupt", run_of(2561, lambda seq: updates(seq, odd=5e-5)), since=2304, facts=ADAM
        ),
        "the optimizer's second moments",
    ),
    "large updates after a huge gradient": (
        lambda: judged(
            "OptimizerStateCorrupt",
            run_of(2561, lambda seq: updates(seq, odd=0.1, norm=lambda at: 1e5 if at == 2000 else 1.0)),
            since=2304,
            facts=ADAM,
        ),
        "the optimizer's second moments",
    ),
    "small updates after a huge gradient, of an optimizer without moments": (
        lambda: judged(
            "OptimizerStateCorrupt",
            run_of(2561, lambda seq: updates(seq, odd=5e-5, norm=lambda at: 1e5 if at == 2000 else 1.0)),
            since=2304,
            facts={"optimizer": "SGD"},
        ),
        "the optimizer's second moments",
    ),
    "a dead layer, and no norms of layers": (
        lambda: judged("DeadLayer", run_of(20, lambda _: {"loss": 1.0}), members=("a",)),
        "the gradient norm of each layer",
    ),
    "unused parameters, and no layer that was sampled": (
        lambda: judged(
            "UnusedParameters", run_of(20, lambda _: {"parameters_without_gradient": 2.0}), table=table("a")
        ),
        "which parameters",
    ),
    "weights that stand still, and no layer that was looked at": (
        lambda: judged("ParametersNotUpdated", run_of(20, lambda _: {"update_ratio": 0.0, "learning_rate": 1e-3})),
        "a sample of the weights before and after a step",
    ),
    "a rate of 0 whose beginning is forgotten": (
        lambda: judged("SchedulerMisused", run_of(40, lambda seq: {"learning_rate": 0.0} if seq > 20 else {})),
        "the rates of the first steps",
    ),
    "waiting for a loader that nobody showed": (
        lambda: judged("InputBound", run_of(20, lambda _: {"loss": 1.0}), numbers=WAITING),
        "how many workers the loader has",
    ),
    "waiting for workers, the CPUs not read yet": (
        lambda: judged(
            "InputBound",
            run_of(20, lambda _: {"loss": 1.0}),
            numbers=WAITING,
            facts={"loader": {"num_workers": 4}},
        ),
        "how busy the host's CPUs are",
    ),
    "two parts of the step that grew": (
        lambda: judged(
            "SlowStep",
            run_of(
                300,
                lambda seq: times(
                    seq,
                    seq >= 250,
                    forward_seconds=(0.1, 0.2),
                    backward_seconds=(0.1, 0.21),
                    other_seconds=(0.05, 0.05),
                ),
            ),
            since=280,
        ),
        "a profile of the step",
    ),
    "slow steps without their parts": (
        lambda: judged("SlowStep", run_of(300, lambda seq: {"step_seconds": 0.1 if seq < 250 else 0.3}), since=280),
        "the parts of the steps before it",
    ),
    "a GPU that idles though nothing is waited for": (
        lambda: judged(
            "LowUtilization",
            run_of(20, lambda _: {"data_seconds": 0.001, "backward_seconds": 0.04, "step_seconds": 0.1}),
            numbers={"0": {"busy": 0.2}},
        ),
        "kernel times",
    ),
    "memory that ran out on an ordinary batch": (
        lambda: judged("MemoryPressure", run_of(40, lambda _: {"batch_elements": 512.0, "memory_peak_bytes": 7e10})),
        "what else took the memory",
    ),
    "memory that ran out on a batch that was not looked at": (
        lambda: judged("MemoryPressure", run_of(40, lambda _: {"memory_peak_bytes": 7e10})),
        "the shape of that batch",
    ),
    "small gradients, and no share by layer": (
        lambda: judged("GradientUnderflow", run_of(20, lambda _: {"loss_scale": 1.0}), members=("a",)),
        "the share of small gradients by layer",
    ),
    "lost updates of weights of an unknown format": (
        lambda: judged("LostUpdates", run_of(20, lambda _: {"lost_update_share": 0.9, "update_ratio": 1e-4})),
        "the format of the weights",
    ),
    "adapters that stay at their start at a usual rate": (
        lambda: judged(
            "AdapterStarved",
            run_of(513, lambda _: {"adapter_ratio": 1e-3, "learning_rate": 1e-4}),
            table=table("q.lora_A.default.weight", "q.lora_B.default.weight"),
        ),
        "whether gradients reach the adapters",
    ),
    "a fault of a GPU that is not read any more": (
        lambda: judged("GpuFault", run_of(20, lambda _: {"loss": 1.0}), devices=Devices("node-1")),
        "the GPU's numbers: it is not read any more",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_ambiguous_cause_is_not_known_and_says_what_is_missing(case: str) -> None:
    judge, missing = CASES[case]
    found = judge()
    assert NOT_KNOWN in found.cause
    assert found.confidence in ("none", "low")
    assert any(missing in text for text in found.missing)


def test_a_spike_after_a_norm_that_was_not_sampled_is_of_its_batch_or_of_the_update_before() -> None:
    judge, _ = CASES["a spike right after a step whose gradient was not sampled"]
    assert judge().cause == "not known: the batch of step 197, at which the loss jumped, or the update of step 196"


@pytest.mark.parametrize(
    ("size", "first", "cause"),
    [
        (1.1, 0, "the batch of step 197, not the last update: that was 1.1x the usual size, by the optimizer's state"),
        (5.0, 0, "not known: the batch of step 197, at which the loss jumped, or the update of step 196"),
        (
            1.1,
            189,
            "not known: the batch of step 197, at which the loss jumped, or the update of step 196",
        ),  # two samples
    ],
)
def test_the_size_of_the_update_before_a_spike_tells_whether_it_was_the_batch(
    size: float, first: int, cause: str
) -> None:
    def values(seq: int) -> dict[str, float]:
        sampled = seq % 4 == 1 and seq >= first
        return spike(seq) | ({"last_update_size": size if seq == 197 else 1.0} if sampled else {})

    assert judged("LossSpike", run_of(200, values), since=197).cause == cause
