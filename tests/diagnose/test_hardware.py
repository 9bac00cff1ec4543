"""GPUs and hosts: the case names what the driver reported, which ranks are concerned, and the node."""

from __future__ import annotations

import pytest

from sentinel import wire
from sentinel.diagnose.catalogue import diagnose
from sentinel.diagnose.evidence import Evidence, Finding
from sentinel.runs import Rank
from sentinel.runs.devices import Devices, Gpu, GpuFault
from sentinel.runs.steps import RunStep


def gpu(**values: float) -> Gpu:
    return Gpu(3, "GPU-aa-bb", model="NVIDIA H100", bus="00000000:5d:00.0", values=values)


def diagnosis(
    alert: str, board: Gpu, steps: list[RunStep] | None = None, numbers: dict[str, float] | None = None
) -> Finding:
    identity = wire.Identity(run="train", run_id="r", rank=11, session="s")
    rank = Rank(wire.Hello(version="t", identity=identity, gpus=("aa-bb",)), 0.0)
    evidence = Evidence(
        alert=alert,
        since=40,
        until=40,
        numbers={} if numbers is None else {str(board.index): numbers},
        last=RunStep(40, 0.0, {}, {}),
        steps=steps or [],
        live={11: rank},
        gpus=[board],
        devices=Devices("trainer-7", gpus={board.uuid: board}),
        step_offset=1000,
    )
    return diagnose(evidence, "what the rule says")


def test_an_xid_is_named_with_gpu_rank_and_node() -> None:
    board = gpu(gpu_temperature_celsius=64.0, gpu_lost=0.0, gpu_xid=48.0)
    board.record_fault(GpuFault(1.0, "xid", 48, "double-bit ECC error: uncorrectable"))
    found = diagnosis("GpuFault", board)
    assert found.cause == "GPU 3: XID 48, double-bit ECC error: uncorrectable"
    assert found.confidence == "high"
    assert found.evidence == (
        "GPU 3 of trainer-7: NVIDIA H100 GPU-aa-bb at 00000000:5d:00.0; on it rank 11",
        "  xid 48: double-bit ECC error: uncorrectable",
        "  64 C",
    )
    assert found.remedy.startswith("drain node trainer-7 after this job, and have GPU 3 reset and tested")
    assert "since step 1040" in found.remedy


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ({"new_ecc_errors": 1.0, "nvlinks_lost": 0.0}, "1 uncorrectable ECC error since the run began"),
        ({"new_ecc_errors": 0.0, "nvlinks_lost": 2.0}, "2 NVLinks that had been up went down"),
        ({"gpu_row_remap_failed": 1.0}, "a row of its memory could not be replaced"),
        ({"gpu_silent_seconds": 12.0}, "silent: no answer from the driver in 12 s"),
        ({"gpu_lost": 1.0}, "it is lost: it needs a reset"),
        ({"gpu_xid": 79.0, "gpu_lost": 1.0}, "XID 79, fallen off the bus, and it is lost: it needs a reset"),
    ],
)
def test_the_cause_is_what_the_rule_fired_for(numbers: dict[str, float], cause: str) -> None:
    """Earlier errors, and XIDs that the program itself caused, are not."""
    board = gpu(gpu_ecc_uncorrected=3.0, gpu_nvlinks_up=17.0)
    for kind, code, text in (
        ("xid", 79, "fallen off the bus"), ("lost", 0, "it needs a reset"), ("xid", 31, "GPU memory page fault"),
    ):  # fmt: skip
        board.record_fault(GpuFault(1.0, kind, code, text))
    quiet = {"gpu_xid": 0.0, "gpu_lost": 0.0, "gpu_silent_seconds": 0.0}
    found = diagnosis("GpuFault", board, numbers=quiet | numbers)
    assert (found.cause, found.confidence) == (f"GPU 3: {cause}", "high")


def test_a_fault_that_no_number_shows_is_not_guessed() -> None:
    board = gpu(gpu_ecc_uncorrected=3.0, gpu_nvlinks_up=17.0)
    found = diagnosis("GpuFault", board)
    assert (found.confidence, found.missing) == ("none", ("which of its readings was at fault",))


def test_the_reason_of_a_slow_clock() -> None:
    found = diagnosis("GpuThrottled", gpu(gpu_throttled_thermal=1.0, gpu_throttled_power=0.0, gpu_clock_hertz=1.2e9))
    assert found.cause == "clocks of GPU 3 are held down by heat"
    assert found.evidence[1:] == ("  1200 MHz",)
    assert found.remedy == "what the rule says"


def test_a_full_host_names_the_ranks_that_hold_its_memory() -> None:
    steps = [RunStep(40, 0.0, {11: {"rss_bytes": 30e9}}, {})]
    assert diagnosis("HostMemoryLow", gpu(), steps).evidence == ("rank 11 holds 30.0 GB",)
    assert diagnosis("HostMemoryLow", gpu()).missing == ("how much the ranks hold: it was not sampled yet",)


def test_other_alerts_of_a_gpu_name_the_rank_on_it() -> None:
    assert "on it rank 11" in diagnosis("GpuShared", gpu()).evidence[0]
