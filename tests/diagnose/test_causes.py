"""Causes, and the numbers that support them."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from sentinel import wire
from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.diagnose.signs import GrownLayer, first_signs
from sentinel.runs import Rank
from sentinel.runs.steps import RunStep
from tests.diagnose.made import judged, layered, run_of, table


def diagnosis(alert: str, steps: list[RunStep], layers: tuple[str, ...] = (), **facts: object) -> Finding:
    found = [GrownLayer(name, math.inf, 1.0, nonfinite=3) for name in layers]
    last = steps[-1]
    evidence = Evidence(
        alert=alert, since=last.seq, until=last.seq, layers=found, last=last, steps=steps, ranks=(0,), facts=facts
    )
    return diagnose(evidence, "what the rule says")


def test_growth_is_given_in_three_digits_however_large() -> None:
    steps = run_of(41, lambda _: {"loss": 2.0})
    layers = [GrownLayer("h.1", 1638.3968, 0.001), GrownLayer("h.0", 1.26, 0.1)]
    evidence = Evidence(
        alert="LossSpike", since=40, until=40, layers=layers, last=steps[-1], steps=steps, ranks=(0,), about_layers=True
    )
    assert any("most of all h.1 (1.64e+06x), h.0 (12.6x)" in fact for fact in diagnose(evidence, "").evidence)


def scaled(skipped: Callable[[int], bool], loss: float = 2.0) -> list[RunStep]:
    return run_of(
        120,
        lambda seq: {
            "loss": loss if skipped(seq) else 2.0, "step_skipped": float(skipped(seq)), "loss_scale": 1024.0,
        },
    )  # fmt: skip


def test_a_model_that_overflows_at_every_step() -> None:
    found = diagnosis("ScalerCollapse", scaled(lambda seq: seq >= 112), ("wte", "h.0", "h.1"))
    assert found.cause.startswith("the model, whatever the batch: 8 steps overflowed, 0 between them did not")
    assert "of 3 layers that overflow, h.1 is nearest the output" in found.cause
    assert found.evidence[0] == "8 of the last 50 steps were withheld, the first of them step 112"
    assert found.remedy == "what the rule says"


def test_batches_that_overflow_now_and_then() -> None:
    found = diagnosis("ScalerCollapse", scaled(lambda seq: seq % 6 == 5))
    assert found.cause.startswith("some batches: between the 9 withheld steps 40 were applied")
    assert "steps 95, 101, 107, 113, 119" in found.remedy


def test_a_forward_pass_that_overflows_at_any_scale() -> None:
    found = diagnosis("ScalerCollapse", scaled(lambda seq: seq >= 112, loss=math.nan))
    assert found.cause.startswith("the forward pass: the loss itself is not finite at 8 of these steps")
    assert found.confidence == "high"


def test_a_scaler_that_was_given_and_is_not_used() -> None:
    found = diagnosis("ScalerMissing", run_of(20, lambda _: {"fp16": 1.0}), scaler="GradScaler")
    assert "attach was given a GradScaler, but it scaled no loss (enabled=False?)" in found.cause


def test_the_gradient_of_a_withheld_step_is_no_sign() -> None:
    def values(seq: int) -> dict[str, float]:
        withheld = seq == 50
        return {
            "loss": math.nan if seq == 60 else 2.0, "grad_norm": math.inf if withheld else 1.0,
            "step_skipped": float(withheld),
        }  # fmt: skip

    assert [sign.signal for sign in first_signs(run_of(61, values), 60, 60)] == ["loss"]


def test_memory_that_creeps_has_bytes_a_step_and_an_end() -> None:
    steps = run_of(1600, lambda seq: {"step_seconds": 0.1} | ({"rss_bytes": 3e8 + 5e4 * seq} if seq % 8 == 0 else {}))
    found = diagnosis("MemoryCreep", steps, memory_limit_bytes=4e9)
    assert found.cause.endswith("grows by 50 kB a step, and 4 GB are full in 72,000 steps, 2 hours")
    assert "was 303 MB at step 64 and never under 361 MB in the last 48 samples up to step 1592" in found.evidence[0]
    assert "who holds it" in found.missing[0]


def test_memory_that_creeps_is_measured_on_its_rise_and_against_what_is_left() -> None:
    def values(seq: int) -> dict[str, float]:
        taken = 1e8 * max(seq - 99, 0)
        left = {"memory_held_bytes": 1e9 + taken, "memory_left_bytes": 2e9 - taken}
        return {"rss_bytes": 3e9 + 1e9 * seq, "step_seconds": 0.1} | left

    found = diagnosis("MemoryCreep", run_of(111, values), memory_limit_bytes=4e9, memory_limited_by="ulimit -d")
    gone = "the 900 MB that are left (ulimit -d) are gone in 9 steps, 1 seconds"
    assert found.cause.endswith(f"the resident set grows by 100 MB a step, and {gone}")


def test_memory_that_several_ranks_of_a_node_take_is_gone_sooner() -> None:
    def values(seq: int) -> dict[str, float]:
        return {"memory_held_bytes": 1e9 + 1e6 * seq, "memory_left_bytes": 8e9 - 8e6 * seq}

    found = diagnosis("MemoryCreep", run_of(101, values))
    gone = "the 7.2 GB that are left, of which all together take 8 MB a step, are gone in 900 steps"
    assert found.cause.endswith(f"the resident set grows by 1 MB a step, and {gone}")


def test_memory_creeps_since_the_step_at_which_it_left_its_level() -> None:
    steps = run_of(1600, lambda seq: {"rss_bytes": 3e8 + 5e4 * max(seq - 800, 0)} if seq % 8 == 0 else {})
    assert diagnosis("MemoryCreep", steps).since == 800


def test_samples_that_are_far_apart_and_few() -> None:
    steps = run_of(2048, lambda seq: {"rss_bytes": 3e8 + 5e4 * seq} if seq % 64 == 0 else {})
    assert diagnosis("MemoryCreep", steps).cause.endswith("grows by 50 kB a step")
    assert diagnosis("MemoryCreep", steps[:640]).cause == "memory rises and does not fall back"


def test_device_memory_that_creeps_while_the_host_does_not() -> None:
    steps = run_of(200, lambda seq: {"rss_bytes": 3e8, "memory_allocated_bytes": 8e9 + 1e6 * seq})
    found = diagnosis("MemoryCreep", steps, device_memory_bytes=80e9)
    assert found.cause.endswith("live tensors grows by 1 MB a step, and 80 GB are full in 72,000 steps")


@pytest.mark.parametrize(("retries", "confidence"), [(0.0, "medium"), (1.0, "high")])
def test_fragmentation_with_its_setting(retries: float, confidence: str) -> None:
    steps = run_of(
        60,
        lambda seq: {
            "memory_reserved_bytes": 40e9, "memory_allocated_bytes": 12e9, "memory_inactive_split_bytes": 15e9,
            "allocation_retries": retries * (seq // 30),
        },
    )  # fmt: skip
    found = diagnosis("Fragmentation", steps)
    assert found.confidence == confidence
    assert "40 GB" in found.evidence[0]
    assert "15 GB in free pieces of split blocks (38%)" in found.evidence[0]
    assert found.evidence[1:] == (("1 cache flushes (failed cudaMalloc) in the last 50 samples",) if retries else ())
    assert "expandable_segments:True" in found.remedy


def test_fragmentation_is_measured_on_the_rank_that_it_fired_for() -> None:
    """Of each figure the run has the largest of any rank."""

    def figures(reserved: float, allocated: float, idle: float) -> dict[str, float]:
        return {
            "memory_reserved_bytes": reserved, "memory_allocated_bytes": allocated, "memory_inactive_split_bytes": idle,
            "allocation_retries": 0.0,
        }  # fmt: skip

    ranks = {0: figures(70e9, 65e9, 1e9), 1: figures(60e9, 20e9, 30e9)}
    steps = [RunStep(seq, float(seq), ranks, figures(70e9, 65e9, 30e9)) for seq in range(60)]
    evidence = Evidence(alert="Fragmentation", since=59, until=59, last=steps[-1], steps=steps, ranks=(1,))
    assert diagnose(evidence, "").evidence[0] == (
        "rank 1: reserved 60 GB, of which 20 GB in live tensors after the step and 30 GB in free pieces of split "
        "blocks (50%)"
    )


@pytest.mark.parametrize(
    ("every", "confidence", "unseen"),
    [
        (1, "medium", ()),
        (2, "low", ("the batches of 4 of the steps in which it happened: they were not looked at",)),
    ],
)
def test_a_long_batch_is_less_certain_where_others_of_these_steps_were_not_looked_at(
    every: int, confidence: str, unseen: tuple[str, ...]
) -> None:
    """Memory was sampled at steps 32 and 40, batches at every or every second step."""

    def values(seq: int) -> dict[str, float]:
        memory = {"memory_reserved_bytes": 7e10} if seq % 8 == 0 else {}
        return memory | ({"batch_elements": 2048.0 if seq == 38 else 512.0} if seq % every == 0 else {})

    found = judged("MemoryPressure", run_of(41, values), since=39)
    assert found.cause.startswith("a batch that is larger than the usual ones: 2048 elements at step 38")
    assert (found.confidence, found.missing[1:]) == (confidence, unseen)


def test_a_frozen_parameter_that_moved_has_a_name() -> None:
    def values(seq: int) -> dict[str, float]:
        looked = {
            "frozen_changed": float(seq == 8),
            "frozen_moved": 0.0,
            "frozen_changed_row": 1.0 if seq == 8 else -1.0,
        }
        return looked if seq % 4 == 0 else {}

    steps = run_of(9, values)
    names = table("wte", "wpe")
    evidence = Evidence(alert="FrozenParameterChanged", since=8, until=8, last=steps[-1], steps=steps, table=names)
    found = diagnose(evidence, "what the rule says")
    assert found.cause.startswith("wpe is frozen and changed, after step 4; it is in the optimizer")
    nameless = msgspec.structs.replace(evidence, table=())
    assert diagnose(nameless, "").cause == "not known"


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"forward_seconds": 0.03, "backward_seconds": 0.03, "optimizer_seconds": 0.02}, "the batch is too small"),
        (
            {"forward_seconds": 0.01, "other_seconds": 0.07},
            "the host: 70% of each step of 100 ms is the loop's own code",
        ),
    ],
)
def test_a_gpu_that_waits_for_the_host(parts: dict[str, float], cause: str) -> None:
    steps = run_of(60, lambda _: {"step_seconds": 0.1, "data_seconds": 0.001, **parts})
    numbers = {"0": {"busy": 0.12}}
    evidence = Evidence(alert="LowUtilization", since=59, until=59, last=steps[-1], steps=steps, numbers=numbers)
    found = diagnose(evidence, "what the rule says")
    assert found.cause.startswith(cause)
    assert (found.confidence, len(found.missing)) == ("medium", 1)


def test_a_scheduler_that_was_stepped_first_is_reported_with_the_order() -> None:
    steps = run_of(17, lambda seq: {"learning_rate": 1e-3} | ({"scheduler_first": 2e-3} if seq == 0 else {}))
    found = diagnosis("SchedulerMisused", steps)
    assert found.cause.startswith("the order: scheduler.step() was called before the first optimizer.step()")
    assert "at a rate of 0.001 in place of 0.002" in found.cause


def test_an_overwritten_state_is_reported_with_the_samples_before_and_after() -> None:
    kept = {10: 1.2, 26: 1.0, 42: 0.01}
    steps = run_of(43, lambda seq: {"second_moment_kept": kept[seq]} if seq in kept else {})
    found = diagnosis("OptimizerStateLost", steps)
    assert found.cause.startswith("the optimizer's second moments were zeroed or overwritten between steps 26 and 42")


def test_a_rate_that_jumps_is_named_with_both_values_and_the_step_to_go_back_to() -> None:
    found = diagnosis("LearningRateJump", run_of(51, lambda seq: {"learning_rate": 1e-1 if seq == 50 else 1e-3}))
    assert found.cause == "the learning rate: it jumped from 0.001 to 0.1 at step 50"
    assert found.remedy.startswith("go back to step 49 or before")


@pytest.mark.parametrize(
    ("steps", "cause", "confidence"),
    [
        (
            0.0,
            "the rate has been 0 since the first step: its schedule begins at 0, and by step 8 had never been",
            "high",
        ),
        (9.0, "the rate has been 0 since the first step, though its scheduler was stepped 9 times by step 8", "medium"),
        (-1.0, "the rate has been 0 since the first step, and no scheduler of torch's is there", "medium"),
        (None, "the rate has been 0 since the first step", "low"),
    ],
)
def test_a_rate_that_was_always_0_is_explained_by_what_is_known_of_its_scheduler(
    steps: float | None, cause: str, confidence: str
) -> None:
    seen = {} if steps is None else {"scheduler_steps": steps}
    rates = run_of(17, lambda seq: {"learning_rate": 0.0} | (seen if seq == 8 else {}))
    found = diagnosis("SchedulerMisused", rates)
    assert found.cause.startswith(cause)
    assert found.confidence == confidence
    assert ("never" in found.cause) == (steps == 0)


def test_fp16_without_a_scale_names_the_layers_that_lose_most() -> None:
    shares = {"a": (0.1, 0.2), "b": (0.4, 0.3)}
    blocks = layered([0], lambda _: {
        name: {"layer_grad_zero_share": zero, "layer_grad_tiny_share": tiny} for name, (zero, tiny) in shares.items()
    })  # fmt: skip
    steps = run_of(20, lambda _: {"fp16": 1.0, "grad_zero_share": 0.3, "grad_tiny_share": 0.25})
    evidence = Evidence(alert="ScalerMissing", since=0, until=19, last=steps[-1], steps=steps, blocks=blocks)
    found = diagnose(evidence, "what the rule says")
    assert found.evidence[1] == "most of all in b (40% are 0, 30% under 6e-5), a (10% are 0, 20% under 6e-5)"
    assert found.missing == ()


def leapt(alert: str, spacing: int = 1, at: int = 200) -> Finding:
    """Diagnose a rate that leaps at `at`, loss and gradient a step later; earlier rates are `spacing` steps apart."""

    def values(seq: int) -> dict[str, float]:
        rate = 0.5 if seq >= at else 1e-3 * (1 - seq / 1000)
        found = {"loss": (12.0 if seq > at else 2.0) + 0.01 * (seq % 3), "grad_norm": 7.0 if seq > at else 0.9}
        return found | ({"learning_rate": rate} if seq % spacing == 0 or seq > at + 1 else {})

    steps = run_of(at + 4, values)
    evidence = Evidence(
        alert=alert, since=at + 1, until=at + 3, last=steps[-1], steps=steps, signs=first_signs(steps, at + 1, at + 3)
    )
    return diagnose(evidence, "what the rule says")


@pytest.mark.parametrize("alert", ["LossSpike", "GradientSpike", "Divergence"])
def test_a_rate_that_leapt_is_no_bad_batch(alert: str) -> None:
    found = leapt(alert)
    assert found.cause.startswith("the learning rate: it jumped from 0.0008 to 0.5 at step 200")
    assert found.remedy.startswith("go back to step 199 or before")


def test_a_rate_that_leapt_between_two_samples() -> None:
    assert "between steps 192 and 202" in leapt("LossSpike", spacing=16).cause


def test_a_rate_that_leapt_after_the_loss_is_not_its_cause() -> None:
    steps = run_of(204, lambda seq: {
        "loss": (12.0 if seq > 200 else 2.0) + 0.01 * (seq % 3), "grad_norm": 7.0 if seq > 200 else 0.9,
        "learning_rate": 0.5 if seq > 200 else 1e-3,
    })  # fmt: skip
    evidence = Evidence(
        alert="LossSpike", since=201, until=203, last=steps[-1], steps=steps, signs=first_signs(steps, 201, 203)
    )
    assert diagnose(evidence, "what the rule says").cause.startswith("the batch of step 201")


@pytest.mark.parametrize(
    ("other", "ranks", "named"), [(2.0, 2, True), (900.0, 2, False), (math.nan, 2, False), (2.0, 8, False)]
)
def test_a_batch_that_made_only_one_ranks_loss_jump_is_attributed_to_that_rank(
    other: float, ranks: int, named: bool
) -> None:
    """Two ranks of the job's `ranks` are seen; rank 1 has another task, and a larger loss."""

    def step(seq: int) -> RunStep:
        losses = {0: 2.0, 1: 8.0} if seq < 200 else {0: other, 1: 1000.0}
        by_rank = {rank: {"loss": loss} for rank, loss in losses.items()}
        return RunStep(seq, 0.0, by_rank, {"loss": sum(losses.values()) / 2, "grad_norm": 1.0})

    identity = wire.Identity(run="r", run_id="r-1", world_size=ranks)
    live = {0: Rank(wire.Hello(version="1", identity=identity), 0.0)}
    found = judged("LossSpike", [step(seq) for seq in range(201)], live=live)
    assert (" on rank " in found.cause) is named
    told = "of the ranks, the loss of rank 1 alone left its usual 8: it is 1000 at that step"
    assert (told in found.evidence) is named


def test_a_run_that_already_clips_is_not_advised_to_clip() -> None:
    def spiked(limit: float | None) -> str:
        steps = run_of(204, lambda seq: {"grad_norm": 20.0 if seq > 200 else 0.9} | (
            {} if limit is None else {"clip_limit": limit}
        ))  # fmt: skip
        evidence = Evidence(
            alert="GradientSpike", since=201, until=203, last=steps[-1], steps=steps, signs=first_signs(steps, 201, 203)
        )
        return diagnose(evidence, "what the rule says").remedy

    assert spiked(None).startswith("clip: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.9) before")
    assert spiked(1.0) == "the limit of 1 has clipped it already; lower the rate"
    assert spiked(100.0) == "clip harder: the limit is 100, and the usual norm 0.9; lower the rate"


def test_a_tied_weight_has_the_gradient_of_its_first_name() -> None:
    tied = msgspec.structs.replace(table("lm_head.weight")[0], tied_to="wte.weight")
    blocks = layered([10], lambda _: {"wte.weight": {"layer_grad_norm": 1.0, "layer_update_ratio": 1e-3}})
    steps = run_of(20, lambda _: {"parameters_without_gradient": 1.0, "learning_rate": 1e-3, "update_ratio": 1e-3})
    unused = judged("UnusedParameters", steps, blocks, table=[*table("wte.weight", "aux.weight"), tied])
    assert unused.cause.startswith(
        "1 parameter tensors that train and are in the optimizer get no gradient: aux.weight"
    )
    stuck = judged("LossNotDecreasing", steps, blocks, table=[*table("wte.weight"), tied])
    assert "1 of 1 parameter tensors move" in stuck.evidence[0]


def test_gradients_of_long_ago_are_in_no_moments_by_now() -> None:
    """For over 1,024 steps no gradient norm is known."""
    steps = run_of(2048, lambda seq: {"loss": 5.0 if seq > 2030 else 2.0} | ({"grad_norm": 1.0} if seq < 900 else {}))
    assert judged("Divergence", steps, since=2040, facts={"optimizer": "AdamW"}).cause.startswith("the data are others")


def test_a_layer_that_was_copied_before_the_optimizer_was_made() -> None:
    blocks = layered(range(20), lambda _: {"0.weight": {"layer_grad_norm": 1.0}})
    steps = run_of(20, lambda _: {"parameters_without_gradient": 1.0})
    evidence = Evidence(
        alert="UnusedParameters", since=19, until=19, layers=[], last=steps[-1], steps=steps, ranks=(0,), facts={},
        blocks=blocks, table=[*table("0.weight", "param_groups[0].params[1]"), *table("2.weight", held=False)],
    )  # fmt: skip
    found = diagnose(evidence, "what the rule says")
    assert found.cause.startswith("the optimizer holds 1 tensors that are no parameters of the model")
    assert "(2.weight)" in found.cause


def test_an_optimizer_of_a_copy_is_named_where_parameters_are_left_out() -> None:
    """The copy's tensors get no gradient, and would stay in the optimizer if the model's own parameters were added."""
    steps = run_of(20, lambda _: {"parameters_outside": 1.0, "outside_share": 0.5})
    blocks = layered([10], lambda _: {"0.weight": {"layer_grad_norm": 1.0}})
    names = "0.weight", "param_groups[0].params[1]"
    known = {"blocks": blocks, "table": [*table(*names), *table("2.weight", held=False)]}
    found = judged("ParametersNotInOptimizer", steps, **known)
    assert found.cause.startswith("the optimizer holds 1 tensors that are no parameters of the model")
    assert "after the last change to the model" in found.remedy
    added = layered([10], lambda _: {name: {"layer_grad_norm": 1.0} for name in names})
    assert (
        "1 parameter tensors are in no optimizer"
        in judged("ParametersNotInOptimizer", steps, **(known | {"blocks": added})).cause
    )


def test_copied_generators_are_named() -> None:
    steps = run_of(3, lambda _: {"copied_generators": 1.0})
    found = diagnosis("RepeatedRandomness", steps, copied_generators=["Noisy.rng"], copying_workers=4)
    assert "each of the 4 workers got a copy of Noisy.rng in the same state" in found.cause
    assert "seed Noisy.rng in a worker_init_fn" in found.remedy
    unnamed = diagnosis("RepeatedRandomness", steps, loader={"num_workers": 4})
    assert (unnamed.cause, unnamed.missing[:1]) == ("not known", ("which attribute of the data set it is",))


def test_frozen_statistics_name_their_module() -> None:
    steps = run_of(3, lambda _: {"frozen_statistics": 2.0, "frozen_statistics_row": 1.0})
    evidence = Evidence(
        alert="FrozenStatistics", since=2, until=2, layers=[], last=steps[-1], steps=steps, ranks=(0,), facts={},
        table=table("0.weight", "body.norm.weight"),
    )  # fmt: skip
    assert "2 normalisations, the first of them body.norm" in diagnose(evidence, "what the rule says").cause
