"""Judges the machine and its variables. Names and defaults are those of torch 2.6 to 2.13."""

from __future__ import annotations

import importlib.metadata
import os
import resource
from collections.abc import Iterator, Mapping

import msgspec

from sentinel.toolkit.doctor import driver as drivers
from sentinel.toolkit.doctor.driver import Driver, driver, torch_cuda
from sentinel.toolkit.doctor.finding import DoctorFinding

_RENAMED = {
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_CPP_STACK": "TORCH_FR_CPP_STACK",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "TORCH_FR_DUMP_TEMP_FILE",
    "PYTORCH_CUDA_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF": "PYTORCH_ALLOC_CONF",
}
"""Old name -> present one. The old ones are still read."""
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
"""What a container gets unless --shm-size says otherwise."""
_FILES = 1024


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the findings are made from."""

    variables: Mapping[str, str]
    cores: int
    shared_memory: int
    """Bytes of /dev/shm; 0: not known."""
    open_files: int
    """The soft limit."""
    torch: str
    """Version; empty: not installed."""
    cuda: int
    """Major version of CUDA that torch was built for; 0: none."""
    driver: Driver
    """NVIDIA's."""


def machine() -> Machine:
    """This one."""
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
    """What is known before anything runs."""
    yield from _torch(machine)
    yield from drivers.findings(machine.driver, machine.cuda, machine.variables)
    yield from _limits(machine)
    yield from _check_renamed(machine.variables)
    yield from _allocator(machine.variables)
    yield from _slow(machine.variables)
    yield from _hangs(machine.variables)


def _torch(machine: Machine) -> Iterator[DoctorFinding]:
    if not machine.torch:
        yield DoctorFinding(
            name="no-torch",
            severity="critical",
            what="torch is not installed in this environment",
            why="nothing can be trained with it",
            line="pip install 'training-sentinel[torch]'",
            source="pytorch.org/get-started/locally",
        )
    elif machine.driver.cuda and machine.torch.endswith("+cpu"):
        yield DoctorFinding(
            name="cpu-build",
            severity="critical",
            what=f"torch {machine.torch} is the build without CUDA, and there is an NVIDIA driver",
            why="training would run on the CPU",
            line="pip install torch --index-url https://download.pytorch.org/whl/cu128",
            source="pytorch.org/get-started/locally",
        )


def _limits(machine: Machine) -> Iterator[DoctorFinding]:
    if 0 < machine.shared_memory < _SHARED:
        small = machine.shared_memory <= _DOCKER_SHARED
        yield DoctorFinding(
            name="shared-memory",
            severity="critical" if small else "warning",
            what=f"/dev/shm has {machine.shared_memory / 2**20:.0f} MiB",
            why="DataLoader workers hand batches over in it, and NCCL uses it: full, they die of a bus error",
            line="docker run --shm-size=16g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm",
            source="github.com/pytorch/pytorch#docker-image",
        )
    if machine.open_files < _FILES:
        yield DoctorFinding(
            name="open-files",
            severity="warning",
            what=f"at most {machine.open_files} open files",
            why="each tensor that a DataLoader worker sends is a file: 'Too many open files' after a while",
            line="ulimit -n 65536",
            source="torch.multiprocessing documentation, 'Sharing strategies'",
        )
    threads = machine.variables.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > machine.cores:
        yield DoctorFinding(
            name="threads",
            severity="warning",
            what=f"OMP_NUM_THREADS={threads} on {machine.cores} cores",
            why="threads that share a core wait for each other in every operation",
            line=f"OMP_NUM_THREADS={machine.cores}, divided by the ranks of this node",
            source="pytorch.org/docs/stable/notes/cpu_threading_torchscript_inference.html",
        )


def _check_renamed(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for old, new in _RENAMED.items():
        if old not in variables:
            continue
        both = new in variables and variables[new] != variables[old]
        yield DoctorFinding(
            name=f"renamed-{old.lower().replace('_', '-')}",
            severity="warning" if both else "info",
            what=f"{old} is the old name of {new}" + (", and they differ" if both else ""),
            why="which of the two holds depends on the version of torch" if both else "it is read still, for now",
            line=f"unset {old}" if both else f"{new}={variables[old]}",
            source="torch/csrc/distributed/c10d/{ProcessGroupNCCL,FlightRecorder}.hpp, c10/core/AllocatorConfig.h",
        )


def _allocator(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for entry in filter(None, _entries(variables.get(name, ""))):
            key, colon, _ = entry.partition(":")
            if not colon or key.strip() not in _ALLOCATOR_KEYS:
                yield DoctorFinding(
                    name="allocator-setting",
                    severity="warning",
                    what=f"{name} has {entry!r}, which is no setting",
                    why="torch raises at the first use of the GPU, or leaves it out",
                    line=f"{name}=expandable_segments:True",
                    source="pytorch.org/docs/stable/notes/cuda.html, 'Optimizing memory usage'",
                )


def _entries(setting: str) -> Iterator[str]:
    """Split at commas outside of brackets: roundup_power2_divisions:[256:1,512:2]."""
    depth, start = 0, 0
    for at, character in enumerate(setting):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            yield setting[start:at].strip()
            start = at + 1
    yield setting[start:].strip()


def _slow(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, (why, source) in _SLOW.items():
        if variables.get(name, "0") not in ("", "0"):
            yield DoctorFinding(
                name=f"slow-{name.lower().replace('_', '-')}",
                severity="warning",
                what=f"{name}={variables[name]}",
                why=f"for the search of a fault only: {why}",
                line=f"unset {name}",
                source=source,
            )
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield DoctorFinding(
            name="distributed-debug",
            severity="warning",
            what="TORCH_DISTRIBUTED_DEBUG=DETAIL",
            why="every collective is checked by another one first",
            line="TORCH_DISTRIBUTED_DEBUG=INFO",
            source="torch.distributed documentation, 'Debugging'",
        )


def _hangs(variables: Mapping[str, str]) -> Iterator[DoctorFinding]:
    def number(default: int, *names: str) -> int:
        found = next((variables[name] for name in names if name in variables), "")
        return int(found) if found.lstrip("-").isdecimal() else default

    if number(1, "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE") == 0:
        yield DoctorFinding(
            name="flight-recorder-off",
            severity="warning",
            what="the flight recorder is off (TORCH_FR_BUFFER_SIZE=0)",
            why="after a hang nobody can tell which rank did not come to which collective",
            line="TORCH_FR_BUFFER_SIZE=2000",
            source="pytorch.org/tutorials/unstable/flight_recorder_tutorial.html",
        )
    if number(3, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING") == 0:
        yield DoctorFinding(
            name="errors-not-handled",
            severity="warning",
            what="TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
            why="a collective that times out ends nothing: the job hangs until its end",
            line="unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
            source=_NOTES,
        )
    heartbeat = number(_HEARTBEAT, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    dump = number(_DUMP, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    if dump >= heartbeat * 1000:
        yield DoctorFinding(
            name="time-outs",
            severity="warning",
            what=f"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC={dump} ms, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat}",
            why="the monitor ends the process before the flight recorder is written",
            line=f"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC={_DUMP} TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={_HEARTBEAT}",
            source=_NOTES,
        )
