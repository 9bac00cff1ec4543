"""Compares NVIDIA's driver with the CUDA that torch was built for, by NVML and without a context on any GPU."""

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
from sentinel.toolkit.doctor.finding import DoctorFinding, describe_finding

_MODULE = Path("/proc/driver/nvidia/version")
_DEADLINE = 5.0
"""Seconds to wait for NVML: a driver that is stuck never answers."""
_LEAST = {11: 450, 12: 525, 13: 580}
"""The oldest driver that runs each major version of CUDA."""
_FAULTS = {12: "library not found", 18: "mismatch"}
"""Words for NVML_ERROR_LIBRARY_NOT_FOUND and NVML_ERROR_LIB_RM_VERSION_MISMATCH."""
_HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that leave no GPU; the last is Slurm's."""


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    """The driver of a machine."""

    module: str = ""
    """Version of the kernel module; empty: not loaded."""
    cuda: tuple[int, int] | None = None
    """The newest CUDA that its library runs, including a compatibility package; None: unknown."""
    fault: str = ""
    """NVML's fault: `library not found`, `mismatch`, `silent`, or its own words."""


def driver(nvml: Any = None) -> Driver:
    """Return this machine's driver. `nvml`: pynvml, or a substitute."""
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
    """Return the major version of CUDA that the installed torch was built for, from its files; 0: none, or unknown."""
    spec = importlib.util.find_spec("torch")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(place) / "version.py"
        found = re.search(r"^cuda\b[^=\n]*= '(\d+)\.", file.read_text() if file.exists() else "", re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def findings(driver: Driver, cuda: int, variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield the findings on the driver. `cuda`: as `torch_cuda` returns it."""
    if not driver.module:
        return
    if driver.fault and cuda:
        name = f"driver-fault/{driver.fault}" if driver.fault in (*_FAULTS.values(), "silent") else "driver-fault"
        yield describe_finding(name, driver=driver.module, fault=driver.fault)
    if driver.cuda is not None and cuda > driver.cuda[0]:
        needed = f"driver {_LEAST[cuda]} or newer" if cuda in _LEAST else "a newer driver"
        yield describe_finding(
            "driver-too-old", cuda=cuda, driver=driver.module, major=driver.cuda[0], minor=driver.cuda[1], needed=needed
        )
    if cuda and variables.get("CUDA_VISIBLE_DEVICES", "0") in _HIDING:
        yield describe_finding("gpus-hidden", value=variables["CUDA_VISIBLE_DEVICES"])


def _cuda(nvml: Any) -> tuple[int, int]:
    nvml.nvmlInit()
    try:
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040: 12.4
    finally:
        nvml.nvmlShutdown()
    return number // 1000, number % 1000 // 10


def _version(text: str) -> str:
    """Return the version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...`."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "of unknown version"
