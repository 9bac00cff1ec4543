"""Findings about machines, which are made up: each is healthy but for one thing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import pynvml
import pytest

from sentinel.engine.rules.rule import SEVERITIES
from sentinel.toolkit.doctor import driver, environment, model
from sentinel.toolkit.doctor.driver import Driver
from sentinel.toolkit.doctor.environment import Machine, findings

HEALTHY = Machine(
    variables={"PATH": "/bin", "OMP_NUM_THREADS": "8", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    cores=8, shared_memory=16 * 2**30, open_files=65536, torch="2.13.0", cuda=12,
    driver=Driver(module="570.86.15", cuda=(12, 8)),
)  # fmt: skip


def names(**changes: object) -> set[str]:
    return {finding.name for finding in findings(msgspec.structs.replace(HEALTHY, **changes))}


def test_a_healthy_machine_has_no_findings() -> None:
    assert names() == set()


def test_this_machine_can_be_read() -> None:
    assert environment.machine().cores >= 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("no-torch", {"torch": ""}),
        ("cpu-build", {"torch": "2.13.0+cpu", "cuda": 0}),
        ("driver-too-old", {"cuda": 13}),
        ("driver-fault", {"driver": Driver(module="570.86.15", fault="mismatch")}),
        ("driver-fault", {"driver": Driver(module="570.86.15", fault="Unknown Error")}),
        ("gpus-hidden", {"variables": {"CUDA_VISIBLE_DEVICES": ""}}),
        ("shared-memory", {"shared_memory": 64 * 2**20}),
        ("open-files", {"open_files": 256}),
        ("threads", {"variables": {"OMP_NUM_THREADS": "64"}}),
        ("renamed-pytorch-cuda-alloc-conf", {"variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
        ("renamed-nccl-blocking-wait", {"variables": {"NCCL_BLOCKING_WAIT": "0"}}),
        ("renamed-torch-nccl-trace-buffer-size", {"variables": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}}),
        ("allocator-setting", {"variables": {"PYTORCH_ALLOC_CONF": "expandable_segments=True"}}),
        ("allocator-setting", {"variables": {"PYTORCH_ALLOC_CONF": "max_split_size:512"}}),
        ("slow-cuda-launch-blocking", {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}),
        ("slow-nccl-p2p-disable", {"variables": {"NCCL_P2P_DISABLE": "1"}}),
        ("distributed-debug", {"variables": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}}),
        ("flight-recorder-off", {"variables": {"TORCH_FR_BUFFER_SIZE": "0"}}),
        ("errors-not-handled", {"variables": {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}}),
        ("time-outs", {"variables": {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10"}}),
        ("time-outs", {"variables": {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "600000"}}),
    ],
)
def test_one_thing_wrong_is_one_finding(name: str, changes: dict[str, object]) -> None:
    (finding,) = findings(msgspec.structs.replace(HEALTHY, **changes))
    assert finding.name == name
    assert finding.severity in SEVERITIES
    assert all((finding.what, finding.why, finding.line, finding.source))


@pytest.mark.parametrize(
    "changes",
    [
        {"cuda": 11},
        {"driver": Driver(), "cuda": 13},
        {"torch": "2.13.0+cpu", "cuda": 0, "driver": Driver(module="570.86.15", fault="library not found")},
        {"variables": {"CUDA_VISIBLE_DEVICES": "0"}},
    ],
    ids=["a newer driver", "no GPU", "a CPU's container on a GPU's host", "one GPU chosen"],
)
def test_a_driver_that_suffices_is_no_finding(changes: dict[str, object]) -> None:
    assert names(**changes) == set()


class Nvml:
    """As much of NVML as reading the driver's version needs."""

    NVMLError = pynvml.NVMLError

    def __init__(self, error: int | None = None, silent: bool = False) -> None:
        self.error, self.answers = error, threading.Event()
        if not silent:
            self.answers.set()

    def nvmlInit(self) -> None:
        self.answers.wait()
        if self.error is not None:
            raise pynvml.NVMLError(self.error)

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080


@pytest.mark.parametrize(
    ("nvml", "found"),
    [
        (Nvml(), Driver(module="570.86.15", cuda=(12, 8))),
        (Nvml(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND), Driver(module="570.86.15", fault="library not found")),
        (Nvml(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH), Driver(module="570.86.15", fault="mismatch")),
        (Nvml(pynvml.NVML_ERROR_UNKNOWN), Driver(module="570.86.15", fault="Unknown Error")),
        (Nvml(silent=True), Driver(module="570.86.15", fault="silent")),
    ],
    ids=["answers", "no library", "mismatch", "unknown", "silent"],
)
def test_what_nvml_says_of_the_driver(
    nvml: Nvml, found: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML's answers are synthetic, as no GPU was at hand; the text is that of the kernel module."""
    (module := tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 16 22:54:08 UTC 2025\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    monkeypatch.setattr(driver, "_MODULE", module)
    monkeypatch.setattr(driver, "_DEADLINE", 0.05 if not nvml.answers.is_set() else 60.0)
    assert driver.driver(nvml) == found
    nvml.answers.set()


def test_a_machine_without_a_driver_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MODULE", tmp_path / "none")
    assert driver.driver(Nvml()) == Driver()


@pytest.mark.parametrize(
    ("line", "major"), [("cuda: Optional[str] = '12.8'", 12), ("cuda = '13.0'", 13), ("cuda: Optional[str] = None", 0)]
)
def test_the_cuda_of_a_torch_is_read_and_not_imported(
    line: str, major: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip = '6.1'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert driver.torch_cuda() == major


def test_two_names_that_differ_are_worse_than_an_old_one() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    (finding,) = findings(msgspec.structs.replace(HEALTHY, variables=both))
    assert finding.severity == "warning"


@pytest.mark.parametrize(
    ("torch", "variable", "found"),
    [
        ("2.9.1+cu128", "PYTORCH_CUDA_ALLOC_CONF", set()),
        ("2.9.1+cu128", "PYTORCH_ALLOC_CONF", {"not-read-yet-pytorch-alloc-conf"}),
        ("2.10.0", "PYTORCH_CUDA_ALLOC_CONF", {"renamed-pytorch-cuda-alloc-conf"}),
        ("2.7.1", "PYTORCH_CUDA_ALLOC_CONF", set()),
        ("unknown", "PYTORCH_ALLOC_CONF", set()),
    ],
)
def test_a_new_name_is_advised_only_where_torch_reads_it(torch: str, variable: str, found: set[str]) -> None:
    assert names(torch=torch, variables={variable: "expandable_segments:True"}) == found


def test_a_flight_recorder_of_an_older_torch_keeps_the_old_name() -> None:
    assert names(torch="2.7.1", variables={"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}) == set()
    (finding,) = findings(msgspec.structs.replace(HEALTHY, torch="2.7.1", variables={"TORCH_FR_BUFFER_SIZE": "2000"}))
    assert finding.line == "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"


def test_settings_with_brackets_are_one_setting() -> None:
    assert names(variables={"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],backend:native"}) == set()


CUDA = {
    "models": [], "optimizers": [], "loaders": {}, "cuda": True, "forward": {"autocast": "", "batch": 8},
    "matmul_precision": "highest", "rates": [],
}  # fmt: skip
MODEL = {
    "data_parallel": False, "find_unused_parameters": False, "without_gradient": [], "not_in_optimizer": [],
    "dtypes": ["float32"], "devices": ["cuda"], "batch_norms": 0, "adapters": None, "ties_broken": False,
    "unregistered": [],
}  # fmt: skip
LOADER = {"samples": 64, "batch_size": 8, "drop_last": True, "workers": 0, "pin_memory": False}


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("tf32-off", {"models": [MODEL]}),
        ("on-cpu", {"models": [{**MODEL, "devices": ["cpu"]}]}),
        ("memory-not-pinned", {"loaders": {"1": LOADER}, "matmul_precision": "high"}),
        (
            "unused-search-for-nothing",
            {"models": [{**MODEL, "find_unused_parameters": True}], "matmul_precision": "high"},
        ),
    ],
)
def test_what_only_a_gpu_or_many_ranks_show_is_judged_from_facts(name: str, facts: dict[str, object]) -> None:
    """The facts are synthetic, as no GPU was at hand."""
    assert {finding.name for finding in model.findings({**CUDA, **facts})} == {name}


@pytest.mark.parametrize(("autocast", "found"), [("", ["tf32-off"]), ("bfloat16", [])])
def test_tf32_is_advised_only_where_products_are_computed_in_float32(autocast: str, found: list[str]) -> None:
    facts = {**CUDA, "models": [MODEL], "forward": {"autocast": autocast, "batch": 8}}
    assert [finding.name for finding in model.findings(facts)] == found


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        ({"autocast": "", "batch": 2}, ["batch-norm-small-batch"]),
        ({"autocast": "", "batch": 3}, []),
        ({"autocast": "", "batch": 0}, []),
        (None, []),
    ],
    ids=["two samples", "three", "no batch known", "no forward pass seen"],
)
def test_batch_norms_are_judged_only_where_the_batch_is_known(forward: object, found: list[str]) -> None:
    normed = {**MODEL, "batch_norms": 3, "batch_norms_frozen_in_training": 0}
    facts = {**CUDA, "models": [normed], "forward": forward, "matmul_precision": "high"}
    assert [finding.name for finding in model.findings(facts)] == found


def test_a_rate_is_judged_with_its_own_optimizer() -> None:
    """SGD's usual rate beside Adam's is not Adam's."""

    def optimizer(kind: str, rate: float) -> dict[str, object]:
        group = {"lr": rate, "betas": [], "flat": 0, "all": 1}
        return {"class": kind, "groups": [group], "stale": 0, "frozen": []}

    facts = {**CUDA, "cuda": False, "rates": [[0.1], [1e-3]]}
    usual = {**facts, "optimizers": [optimizer("SGD", 0.1), optimizer("Adam", 1e-3)]}
    assert list(model.findings(usual)) == []
    high = {**facts, "optimizers": [optimizer("SGD", 1e-3), optimizer("Adam", 0.1)]}
    assert [finding.name for finding in model.findings(high)] == ["rate-high"]


@pytest.mark.parametrize(("batches", "found"), [((100, 100), []), ((100, 96), ["uneven-shards"]), ((0, 100), [])])
def test_ranks_with_fewer_batches_are_a_finding(batches: tuple[int, ...], found: list[str]) -> None:
    """A count of 0 stands for a stream, whose length is not known."""
    ranks = [{"loaders": {"1": {**LOADER, "batches": count}}} for count in batches]
    assert [finding.name for finding in model.across(ranks)] == found
