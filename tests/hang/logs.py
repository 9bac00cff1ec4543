# ruff: noqa: E501
"""Logs of launchers, and what must be said of each: the first failure, or that it is not known.

`torchrun/` holds what torchrun of torch 2.13 wrote in runs of 3 and 4 gloo ranks, in each of which a rank failed in
another way (paths shortened, lines of carets left out). The other logs are short reproductions of the formats in public
reports; `source` tells where the format can be seen.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

REAL = Path(__file__).parent / "torchrun"


class Case(msgspec.Struct, frozen=True):
    """One job's log."""

    name: str
    text: str
    cause: str
    """Text in the cause; `not known` if nothing in the log names a rank."""
    most: str = "high"
    """The highest confidence that is justified."""
    source: str = "torchrun of torch 2.13"
    remedy: str = ""
    """Text in the remedy."""
    file: str = "job.out"


def real(name: str, cause: str, most: str = "high", *more: str, remedy: str = "") -> Case:
    text = "".join((REAL / f"{each}.log").read_text(encoding="utf-8") for each in (name, *more))
    return Case(" and ".join((name, *more)), text, cause, most, remedy=remedy)


def traceback(prefix: str, error: str, line: int = 40) -> str:
    """Return a traceback as Python writes it, in a user's script, with a prefix before each line."""
    lines = (
        "Traceback (most recent call last):", f'  File "/home/me/train.py", line {line}, in main', "    step(batch)",
        '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl',
        "    return forward_call(*args, **kwargs)", error,
    )  # fmt: skip
    return "".join(f"{prefix}{each}\n" for each in lines)


def footer(first: tuple[int, int, str], *others: tuple[int, int, str], prefix: str = "") -> str:
    """Return torchrun's footer, with (rank, exit code, words) of the first failure and of the others."""

    def entry(index: int, rank: int, code: int, words: str) -> list[str]:
        return [
            f"[{index}]:", "  time      : 2024-07-26_10:59:45", "  host      : node-24-95",
            f"  rank      : {rank} (local_rank: {rank % 8})", f"  exitcode  : {code} (pid: 214033)",
            "  error_file: <N/A>", f"  traceback : {words}",
        ]  # fmt: skip

    lines = ["=" * 60, "train.py FAILED", "-" * 60, "Failures:"]
    for index, other in enumerate(others, 1):
        lines += entry(index, *other)
    lines += ["  <NO_OTHER_FAILURES>"] if not others else []
    lines += ["-" * 60, "Root Cause (first observed failure):", *entry(0, *first), "=" * 60]
    return "".join(f"{prefix}{line}\n" for line in lines)


TO_ENABLE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
TERMINATED = "Signal 15 (SIGTERM) received by PID 214034"
CLOSED = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:50586"
REMOTE = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, remote process "
    "exited or there was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
)


def watchdog(rank: int, seq: int, *, prefix: str = "", stamp: str = "", more: str = "NumelIn=8, NumelOut=8, ") -> str:
    return (
        f"{prefix}[E{stamp} ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, {more}Timeout(ms)=600000) ran for 600060 milliseconds before timing "
        "out.\n"
    )


def timeouts(*ranks: int, group: str = "PG ID 0 PG GUID 0(default_pg) ", verb: str = "NCCL work") -> str:
    """Return time-outs as torch 2.2 to 2.5 write them: the ranks waited in collective 808, after 807 had completed."""
    lines = ""
    for rank in ranks:
        lines += watchdog(rank, 808, prefix=f"[rank{rank}]:", stamp="626 06:24:44.903881913")
        lines += (
            f"[rank{rank}]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [{group}Rank {rank}] Exception (either an "
            f"error or timeout) detected by watchdog at work: 808, last enqueued {verb}: 811, last completed {verb}: 807.\n"
        )
    return lines


RAY = "(RayTrainWorker pid={}, ip=10.0.0.{}) "


def ray(rank: int, text: str, *, says: bool = True) -> str:
    prefix = RAY.format(4000 + rank, rank)
    said = f"{prefix}Setting up process group for: env:// [rank={rank}, world_size=4]\n" if says else ""
    return said + "".join(f"{prefix}{line}\n" for line in text.splitlines())


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


BY_RANK = traceback("[rank3]: ", "KeyError: 'shard-7'") + traceback("[rank0]: ", CLOSED)
SPAWN = (
    "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following error:\n"
    + traceback("", "ValueError: bad shard 7")
)
FINGERPRINT = (
    "CollectiveFingerPrint(SequenceNumber=101, OpType={}, TensorShape=[{}], TensorDtypes=Long, TensorDeviceTypes="
    "TensorOptions(dtype=float (default), device=cuda, layout=Strided (default), requires_grad=false (default), "
    "pinned_memory=false (default), memory_format=(nullopt)))"
)
MISMATCH = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
    + FINGERPRINT.format("ALLREDUCE", "195812480")
    + ", but Rank 0 is running collective: "
    + FINGERPRINT.format("ALLREDUCE", "51123456")
    + ".Collectives differ in the following aspects:   Tensor Tensor shapes: 195812480vs 51123456"
)
ISSUES = "https://github.com/{}/issues/{}"
PYTORCH = "pytorch/pytorch"

CASES = [
    real("raise", "rank 1: it raised ValueError: bad shard 7, at /home/me/job.py:17 in fail"),
    real("chained", "rank 1: it raised RuntimeError: cannot load x (after KeyError: 'x'), at /home/me/job.py:20"),
    real("multi", "rank 1: it raised RuntimeError: first line"),
    real("exit3", "rank 1: it was ended by signal 6 (SIGABRT)"),
    real("osexit", "rank 1: it exited with status 7"),
    real("sigkill", "rank 1: it was ended by signal 9 (SIGKILL)", remedy="oom"),
    real("segv", "rank 1: it was ended by signal 11 (SIGSEGV)", remedy="PYTHONFAULTHANDLER"),
    real("oom", "rank 1: it raised MemoryError, at /home/me/mon.py:18"),
    real("rec", "rank 2: it raised ValueError: bad shard 7, at /home/me/rec.py:9"),
    real("tee", "rank 2: it raised ValueError: bad shard 7, at /home/me/rec.py:9"),
    real("worker", "rank 1: it raised RuntimeError: DataLoader worker (pid 12166) is killed by signal: Killed.",
         remedy="num_workers or a smaller prefetch_factor of the DataLoader at /home/me/job.py:31"),
    real("workerraise", "rank 1: it raised KeyError: 'img_5.png' (after KeyError: Caught KeyError in DataLoader worker",
         remedy="/home/me/job.py:36 in __getitem__"),
    real("shape", "mismatched collectives: a rank received 8 bytes where it expected 4", "medium"),
    real("d_detail", "as number 1 ranks 0, 2 issued allreduce of [3], rank 1 issued allreduce of [5]"),
    real("d_detailop", "as number 1 ranks 0, 2 issued allreduce of [3], rank 1 issued broadcast of [3]"),
    real("monitored", "rank 1 never came to the monitored barrier", "medium"),
    real("d_monitored", "rank 1 never came to the monitored barrier", "medium"),
    real("timeout", "rank 1 did not come to where ranks 0, 2 waited", "low"),
    real("term", "rank 0 did not come to where rank 1 waited", "low"),
    real("knode0", "not known", "none"),
    real("knode0", "rank 3: it was ended by signal 9 (SIGKILL)", "high", "knode1"),
    Case("torchrun 2.0, tracebacks without ranks", traceback("", "ValueError: bad shard 7") + traceback("", CLOSED)
         + "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 2 (pid: 5528) of binary: "
         "/opt/conda/bin/python3.8\n" + footer((2, 1, TO_ENABLE), (0, -15, TERMINATED)),
         "rank 2: it raised ValueError: bad shard 7", "medium", ISSUES.format("NVlabs/nvdiffrecmc", 21)),
    Case("torchrun 1.13, a crash", "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -11) local_rank: "
         "1 (pid: 5528) of binary: /opt/conda/bin/python3.8\n" + footer((1, -11, "Signal 11 (SIGSEGV) received by PID 1")),
         "rank 1: it was ended by signal 11 (SIGSEGV)", "high", ISSUES.format("NVlabs/nvdiffrecmc", 21)),
    Case("torchrun's agent alone, without a footer", "ERROR:torch.distributed.elastic.multiprocessing.api:failed "
         "(exitcode: -9) local_rank: 3 (pid: 407727) of binary: /usr/bin/python\n",
         "a process whose rank torchrun does not say: it was ended by signal 9 (SIGKILL)", "low",
         ISSUES.format("showlab/EgoVLP", 21)),
    Case("accelerate, stderr: before each line", prefixed("stderr: ", traceback("", "ValueError: bad shard 7")
         + footer((7, 1, TO_ENABLE), (0, -15, TERMINATED))), "rank 7: it raised ValueError: bad shard 7", "medium",
         ISSUES.format("hiyouga/LlamaFactory", 163)),
    Case("torchrun under srun: a task is a node", footer((10, -6, "Signal 6 (SIGABRT) received by PID 214033"))
         + "srun: error: node-24-95: task 0: Exited with exit code 1\nsrun: error: node-24-96: task 1: Exited with exit "
         "code 1\n", "rank 10: it was ended by signal 6", "high", ISSUES.format("huggingface/accelerate", 2960)),
    Case("all ranks but one timed out, torch 2.5", timeouts(0, 1, 2, 4, 5, 6, 7) + footer((0, -6, "Signal 6 (SIGABRT)")),
         "rank 3 never came to allreduce of 8, number 808", "medium", ISSUES.format("XPixelGroup/BasicSR", 737)),
    # Group 1 is not the default group, and nothing here says who is in it.
    Case("all ranks but one timed out, torch 2.4: [PG 1 Rank 0]", timeouts(0, 1, 3, group="PG 1 "),
         "rank 2 may be missing", "low", ISSUES.format("hiyouga/LlamaFactory", 7396)),
    Case("the watchdog of torch 2.1, without [rankN]",
         "".join(watchdog(rank, 469508, more="") for rank in (1, 3, 2)) + traceback("", "ValueError: bad shard 7"),
         "rank 0 never came to allreduce, number 469508", "medium", ISSUES.format("OFA-Sys/OFA", 271)),
    Case("the watchdog's line behind a progress bar", prefixed("", "Epoch 0: 6%|##  | 32040/500150 [6:28:43<94:39:17, 1.37it/s]"
         + watchdog(0, 92, more="") + "Epoch 0: 6%|##  |" + watchdog(2, 92, more="")),
         "rank 1 never came to allreduce, number 92", "medium", ISSUES.format(PYTORCH, 118369)),
    Case("a remote error, after another rank's crash", prefixed("[rank3]: ", traceback("", REMOTE))
         + traceback("[rank5]: ", CUDA_OOM), "rank 5: it raised torch.OutOfMemoryError", "medium",
         ISSUES.format("NVIDIA/nccl", 1928), "sentinel memory"),
    Case("remote errors alone", prefixed("[rank3]: ", traceback("", REMOTE)) + prefixed("[rank2]: ", traceback("", REMOTE)),
         "not known", "none", ISSUES.format("NVIDIA/nccl", 2076)),
    Case("a remote error that surfaces as an internal one", prefixed("[rank0]: ", traceback("", "torch.distributed."
         "DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL "
         "version 2.14.3\nncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer "
         "user<50260>")), "not known", "none", ISSUES.format("NVIDIA/nccl", 1514)),
    Case("the watchdog of torch 1.13 takes the process down", "[E ProcessGroupNCCL.cpp:455] Some NCCL operations have failed "
         "or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on incomplete "
         "data.\n[E ProcessGroupNCCL.cpp:460] To avoid data inconsistency, we are taking the entire process down.\n"
         "terminate called after throwing an instance of 'std::runtime_error'\n  what():  NCCL error: remote process exited "
         "or there was a network error, NCCL version 2.14.3\n", "not known", "none",
         ISSUES.format("tatsu-lab/stanford_alpaca", 207)),
    Case("DETAIL on GPUs", prefixed("[rank1]: ", traceback("", MISMATCH)),
         "as number 101 rank 0 issued allreduce of [51123456], rank 1 issued allreduce of [195812480]", "high",
         "https://github.com/modelscope/ms-swift/pull/9443"),
    Case("Ray, which says the ranks", ray(2, traceback("", CLOSED)) + ray(1, traceback("", "ValueError: bad shard 7"))
         + "ray.exceptions.RayTaskError(ValueError): ray::_RayTrainWorker__execute.get_next() (pid=4001, ip=10.0.0.1)\n",
         "rank 1: it raised ValueError: bad shard 7", "medium", ISSUES.format("ray-project/ray", 40758)),
    Case("Ray, which does not say the ranks", ray(2, traceback("", CLOSED), says=False)
         + ray(1, traceback("", "ValueError: bad shard 7"), says=False), "a process whose rank is not said "
         "((RayTrainWorker pid=4001, ip=10.0.0.1)): it raised ValueError: bad shard 7", "low",
         ISSUES.format("ray-project/ray", 43753)),
    Case("Ray and torch's own prefix", prefixed(RAY.format(92234, 9), prefixed("[rank1]: ", traceback("", REMOTE)) + "mlx5: "
         "got completion with error: [repeated 2x across cluster]") + prefixed(RAY.format(92231, 7), traceback("[rank0]: ",
         "RuntimeError: CUDA error: an illegal memory access was encountered")), "rank 0: it raised RuntimeError: CUDA "
         "error", "medium", ISSUES.format("OpenRLHF/OpenRLHF", 621)),
    Case("Kubernetes: pods, each with its ranks", prefixed("[pod/job-worker-1/pytorch] ", BY_RANK),
         "rank 3: it raised KeyError: 'shard-7'", "medium",
         "https://kubernetes.io/docs/reference/kubectl/generated/kubectl_logs/ (--prefix)"),
    Case("Kubernetes: time stamps of the container runtime", prefixed("2024-02-21T09:30:56.644096000Z stderr F ", BY_RANK),
         "rank 3: it raised KeyError: 'shard-7'", "medium",
         "https://github.com/kubernetes/design-proposals-archive/blob/main/node/kubelet-cri-logging.md"),
    Case("determined: time stamps and a container", prefixed("[2024-02-27T21:35:32.106313Z] fa88a9df || ",
         traceback("[rank=1] ", "ValueError: bad shard 7") + traceback("[rank=0] ", CLOSED)),
         "rank 1: it raised ValueError: bad shard 7", "medium", ISSUES.format("determined-ai/determined", 8915)),
    Case("docker compose: a container a rank or more", prefixed("trainer-1  | ", BY_RANK),
         "rank 3: it raised KeyError: 'shard-7'", "medium", "https://docs.docker.com/reference/cli/docker/compose/logs/"),
    Case("srun --label, a task a rank", prefixed("3: ", traceback("", "ValueError: bad shard 7"))
         + prefixed("0: ", traceback("", CLOSED)) + "srun: error: node-1: task 3: Exited with exit code 1\n",
         "rank 3: it raised ValueError: bad shard 7", "medium", "https://slurm.schedmd.com/srun.html (--label)"),
    Case("srun: tasks that exited, without words", "srun: error: slurm-job-compute-0-0: tasks 2-7: Exited with exit code 1\n"
         "srun: error: slurm-job-compute-0-1: tasks 8-13,15: Exited with exit code 1\n", "rank 2: it exited with status 1",
         "medium", ISSUES.format("facebookresearch/ParlAI", 3084)),
    Case("Slurm: out of memory", "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks "
         "have been OOM Killed.\nsrun: error: node107: task 4: Out Of Memory\nsrun: Terminating StepId=11300781.0\nsrun: "
         "error: node108: task 5: Terminated\n", "rank 4: it was ended by signal 9 (SIGKILL)", "high",
         ISSUES.format("nextflow-io/nextflow", 5932), "--mem"),
    Case("Slurm: the time limit", "step 100 loss 2.1\nslurmstepd: error: *** JOB 4711 ON node-7 CANCELLED AT "
         "2024-01-05T14:27:50 DUE TO TIME LIMIT ***\n", "the scheduler ended the job: time limit", "high",
         ISSUES.format(PYTORCH, 116974), file="slurm-4711.out"),
    Case("mp.spawn: the process's own traceback", SPAWN, "rank 1: it raised ValueError: bad shard 7", "medium",
         "https://github.com/Lightning-AI/pytorch-lightning/pull/20392"),
    Case("mp.spawn: a signal", traceback("", "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
         "signal SIGKILL"), "rank 2: it was ended by signal 9 (SIGKILL)", "high", ISSUES.format(PYTORCH, 116974)),
    Case("Lightning: a child that ended", traceback("[rank: 1] ", "ValueError: bad shard 7") + "[rank: 2] Child process with "
         "PID 77 terminated with code -9. Forcefully terminating all other processes to avoid zombies\n",
         "rank 2: it was ended by signal 9 (SIGKILL)", "medium",
         "lightning/fabric/strategies/launchers/subprocess_script.py (2.6)"),
    Case("DeepSpeed: the command it prints is the last rank's", "[2023-04-14 13:11:27,879] [INFO] [launch.py:428:"
         "sigkill_handler] Killing subprocess 13266\n[2023-04-14 13:11:27,885] [ERROR] [launch.py:434:sigkill_handler] "
         "['/usr/bin/python3', '-u', 'main.py', '--local_rank=7'] exits with return code = -9\n",
         "a process whose rank DeepSpeed does not say: it was ended by signal 9", "low",
         ISSUES.format("deepspeedai/DeepSpeed", 3232)),
    Case("DeepSpeed: the rank's traceback", traceback("[rank4]: ", "ValueError: bad shard 7") + traceback("[rank0]: ", CLOSED)
         + "[2024-03-20 20:31:29,269] [ERROR] [launch.py:321:sigkill_handler] ['python', '-u', 'train.py', '--local_rank=7'] "
         "exits with return code = 1\n", "rank 4: it raised ValueError: bad shard 7", "medium",
         ISSUES.format("deepspeedai/DeepSpeed", 5302)),
    Case("Lightning: a DataLoader worker's bus error", traceback("[rank0]: ", "RuntimeError: DataLoader worker (pid 801) is "
         "killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory."),
         "rank 0: it raised RuntimeError: DataLoader worker (pid 801) is killed by signal: Bus error", "medium",
         ISSUES.format("Lightning-AI/pytorch-lightning", 19302), "--shm-size"),
    Case("mpirun --tag-output", prefixed("[1,5]<stderr>:", traceback("", "ValueError: bad shard 7"))
         + prefixed("[1,0]<stderr>:", traceback("", CLOSED)), "rank 5: it raised ValueError: bad shard 7", "medium",
         "https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html (--tag-output)"),
    Case("the store's host is gone", prefixed("[rank2]: ", traceback("", "torch.distributed.DistBackendError: [2] is setting "
         "up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') "
         "got error: Connection reset by peer")), "not known", "none", ISSUES.format("Lightning-AI/pytorch-lightning", 8130)),
    Case("a footer that is cut off", footer((1, -9, "Signal 9"), (0, -15, TERMINATED))[:420], "not known", "none"),
    Case("nothing but steps", "".join(f"[rank{rank}]: step {rank} loss 2.1\n" for rank in range(4)), "not known", "none"),
]  # fmt: skip
