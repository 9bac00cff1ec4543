"""NVIDIA's driver against the CUDA that torch was built for, by NVML and without a context on any GPU."""

from __future__ import annotations

import importlib
import importlib.util
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sentinel.collect.patience import Patient
from sentinel.toolkit.doctor.finding import DoctorFinding

_MODULE = Path("/proc/driver/nvidia/version")
_DEADLINE = 5.0
"""Seconds that NVML gets: a driver that is stuck never answers."""
_LEAST = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the oldest driver that runs it."""
_TABLE = "docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1"
_NVML = "docs.nvidia.com/deploy/nvml-api, nvmlReturn_t"
_FAULTS = {12: "library not found", 18: "mismatch"}
"""NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_LIB_RM_VERSION_MISMATCH."""
_MEANING = {
    "library not found": (
        "the kernel has driver {module}, and its library is not here",
        "a container that was started without GPUs, as a rule: training is on the CPU",
        "docker run --gpus all, with NVIDIA's container toolkit on the host",
    ),
    "mismatch": (
        "the kernel has driver {module}, and the library is of another version",
        "the driver was updated under a running kernel: no new process gets a GPU",
        "reboot the node, or reload the nvidia modules",
    ),
    "silent": (
        "driver {module} does not answer",
        "a GPU that has fallen off the bus, or a driver that is stuck: training will hang with it",
        "drain the node; dmesg (NVRM: Xid) says more",
    ),
}
"""Fault -> what, why, line."""
_UNKNOWN = ("driver {module} says: {fault}", "what NVML cannot reach, CUDA cannot as a rule", "nvidia-smi, and dmesg")
_HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that leave no GPU; the last is Slurm's."""


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """What there is."""

    module: str = ""
    """Version of the kernel module; empty: not loaded."""
    cuda: tuple[int, int] | None = None
    """The newest that its library runs, a compatibility package counted in; None: not known."""
    fault: str = ""
    """Of NVML: `library not found`, `mismatch`, `silent`, or its own words."""


def driver(nvml: Any = None) -> Driver:
    """This machine's. `nvml`: pynvml, or what stands in for it."""
    if not _MODULE.exists():
        return Driver()
    nvml = nvml or importlib.import_module("pynvml")
    module = _version(_MODULE.read_text(errors="replace"))
    asked = Patient("nvml", lambda: _cuda(nvml))
    asked.order()
    try:
        cuda = asked.collect(time.monotonic() + _DEADLINE)
    except nvml.NVMLError as error:
        return Driver(module=module, fault=_FAULTS.get(error.value, str(error)))
    finally:
        asked.close()
    return Driver(module=module, cuda=cuda, fault="" if cuda else "silent")


def torch_cuda() -> int:
    """Major version of CUDA that the installed torch was built for, read from its text; 0: none, or not known."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(place) / "version.py"
        found = re.search(r"^cuda\b[^=\n]*= '(\d+)\.", file.read_text() if file.exists() else "", re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def findings(driver: Driver, cuda: int, variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """`cuda`: see `torch_cuda`."""
    if not driver.module:
        return
    if driver.fault and cuda:
        what, why, line = (
            part.format(module=driver.module, fault=driver.fault) for part in _MEANING.get(driver.fault, _UNKNOWN)
        )
        yield DoctorFinding(name="driver-fault", severity="critical", what=what, why=why, line=line, source=_NVML)
    if driver.cuda is not None and cuda > driver.cuda[0]:
        needed = f"driver {_LEAST[cuda]} or newer" if cuda in _LEAST else "a newer driver"
        yield DoctorFinding(
            name="driver-too-old",
            severity="critical",
            what=f"torch was built for CUDA {cuda}; driver {driver.module} runs CUDA up to "
            f"{driver.cuda[0]}.{driver.cuda[1]}",
            why="CUDA does not start: torch.cuda.is_available() is False, and training is on the CPU",
            line=f"install {needed}, or a torch that was built for CUDA {driver.cuda[0]}",
            source=_TABLE,
        )
    if cuda and variables.get("CUDA_VISIBLE_DEVICES", "0") in _HIDING:
        yield DoctorFinding(
            name="gpus-hidden",
            severity="warning",
            what=f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']!r} hides all GPUs of this machine",
            why="training is on the CPU",
            line="unset CUDA_VISIBLE_DEVICES; under Slurm ask for a GPU: --gres=gpu:1",
            source="docs.nvidia.com/cuda/cuda-programming-guide, 'CUDA Environment Variables'",
        )


def _cuda(nvml: Any) -> tuple[int, int]:
    nvml.nvmlInit()
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040: 12.4
    finally:
        nvml.nvmlShutdown()
    return number // 1000, number % 1000 // 10


def _version(text: str) -> str:
    """Of `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...`."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "of unknown version"
