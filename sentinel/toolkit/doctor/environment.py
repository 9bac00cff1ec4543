"""Judges the machine and its variables. Names and defaults are those of torch 2.6 to 2.13."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
from collections.abc import Iterator, Mapping

import msgspec

from sentinel.toolkit.doctor import driver as drivers
from sentinel.toolkit.doctor.driver import Driver, driver, torch_cuda
from sentinel.toolkit.doctor.finding import DoctorFinding, describe_finding

_RENAMED = {
    (2, 2): {
        "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
        "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
        "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    },
    (2, 8): {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
        "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    },
    (2, 10): {  # torch 2.9 warns of the old name, and leaves out the new one on CUDA: pytorch/pytorch issue 183387
        "PYTORCH_HIP_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    },
}
"""The first version of torch that reads a new name -> new names of variables by their old ones, which all versions
read."""
_NOTES = "pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_CUDA_NOTES = "pytorch.org/docs/stable/notes/cuda.html"
_NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("every kernel is waited for", f"{_CUDA_NOTES}, 'Asynchronous execution'"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "every allocation is a cudaMalloc, which waits for the device",
        f"{_CUDA_NOTES}, 'Memory management'",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": ("the CPU waits for every collective", _NOTES),
    "NCCL_P2P_DISABLE": ("GPUs of a node talk through the host's memory", _NCCL),
    "NCCL_IB_DISABLE": ("nodes talk over TCP", _NCCL),
    "NCCL_SHM_DISABLE": ("GPUs of a node that have no peer access talk over the network", _NCCL),
}
_ALLOCATOR_KEYS = frozenset({
    "backend", "expandable_segments", "garbage_collection_threshold", "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc", "roundup_power2_divisions", "throw_on_cudamalloc_oom",
})  # fmt: skip
_HEARTBEAT, _DUMP = 480, 15_000
"""Defaults of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC and TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC."""
_SHARED = 1024**3
_DOCKER_SHARED = 64 * 1024**2
"""Bytes of /dev/shm in a container without --shm-size."""
_FILES = 1024


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The facts from which the findings are made."""

    variables: Mapping[str, str]
    cores: int
    shared_memory: int
    """Bytes of /dev/shm; 0: unknown."""
    open_files: int
    """The soft limit of open files."""
    torch: str
    """Version of torch; empty: not installed."""
    cuda: int
    """Major version of CUDA that torch was built for; 0: none."""
    driver: Driver
    """NVIDIA's driver."""


def machine() -> Machine:
    """Return the facts of this machine."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    try:
        shared = os.statvfs("/dev/shm")
        shared_memory = shared.f_frsize * shared.f_blocks
    except OSError:
        shared_memory = 0
    return Machine(
        variables=dict(os.environ),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        shared_memory=shared_memory,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        torch=torch,
        cuda=torch_cuda(),
        driver=driver(),
    )


def findings(machine: Machine) -> Iterator[DoctorFinding]:
    """Yield the findings that need no run of the command."""
    yield from _torch(machine)
    yield from drivers.findings(machine.driver, machine.cuda, machine.variables)
    yield from _limits(machine)
    yield from _check_renamed(machine.variables, machine.torch)
    yield from _allocator(machine.variables)
    yield from _slow(machine.variables)
    yield from _hangs(machine.variables)


def _torch(machine: Machine) -> Iterator[DoctorFinding]:
    if not machine.torch:
        yield describe_finding("no-torch")
    elif machine.driver.cuda and machine.torch.endswith("+cpu"):
        yield describe_finding("cpu-build", torch=machine.torch)


def _limits(machine: Machine) -> Iterator[DoctorFinding]:
    if 0 < machine.shared_memory < _SHARED:
        name = "shared-memory/container-default" if machine.shared_memory <= _DOCKER_SHARED else "shared-memory"
        yield describe_finding(name, mebibytes=machine.shared_memory / 2**20)
    if machine.open_files < _FILES:
        yield describe_finding("open-files", files=machine.open_files)
    threads = machine.variables.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > machine.cores:
        yield describe_finding("threads", threads=threads, cores=machine.cores)


def _check_renamed(variables: Mapping[str, str], torch: str) -> Iterator[DoctorFinding]:
    version = tuple(map(int, re.findall(r"\d+", torch)[:2]))
    for since, names in _RENAMED.items():
        if version < since:
            for new, old in {new: old for old, new in names.items()}.items():  # of several old names the last one
                if version and new in variables and old not in variables:
                    facts = {"torch": torch, "old": old, "new": new, "value": variables[new]}
                    yield describe_finding("not-read-yet", slug=_slug(new), **facts)
            continue
        for old, new in names.items():
            if old in variables:
                both = new in variables and variables[new] != variables[old]
                name = "renamed/both" if both else "renamed"
                yield describe_finding(name, slug=_slug(old), old=old, new=new, value=variables[old])


def _slug(variable: str) -> str:
    return variable.lower().replace("_", "-")


def _allocator(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for entry in filter(None, _entries(variables.get(name, ""))):
            key, colon, _ = entry.partition(":")
            if not colon or key.strip() not in _ALLOCATOR_KEYS:
                yield describe_finding("allocator-setting", variable=name, entry=entry)


def _entries(setting: str) -> Iterator[str]:
    """Split a setting at commas outside of brackets, as in roundup_power2_divisions:[256:1,512:2]."""
    depth, start = 0, 0
    for at, character in enumerate(setting):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield setting[start:at].strip()
            start = at + 1
    yield setting[start:].strip()


def _slow(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, (cost, source) in _SLOW.items():
        value = variables.get(name, "0")
        if value not in ("", "0"):
            yield describe_finding("slow", slug=_slug(name), variable=name, value=value, cost=cost, source=source)
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield describe_finding("distributed-debug")


def _hangs(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    def number(default: int, *names: str) -> int:
        found = next((variables[name] for name in names if name in variables), "")
        return int(found) if found.lstrip("-").isdecimal() else default

    if number(1, "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") == 0:
        yield describe_finding("flight-recorder-off")
    if number(3, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING") == 0:
        yield describe_finding("errors-not-handled")
    heartbeat = number(_HEARTBEAT, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    dump = number(_DUMP, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    if dump >= heartbeat * 1000:
        yield describe_finding(
            "time-outs", dump=dump, heartbeat=heartbeat, least_dump=_DUMP, least_heartbeat=_HEARTBEAT
        )
