"""The first failure in the logs of real launchers: right, or "not known" and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.diagnose.evidence import SURENESS
from sentinel.toolkit.postmortem.files import remains
from sentinel.toolkit.postmortem.verdict import verdict
from tests.hang.logs import CASES, REAL, Case

NAMES = [case.name for case in CASES]


def test_there_are_at_least_40_logs_from_20_sources() -> None:
    assert len(CASES) >= 40
    assert len({case.source for case in CASES}) >= 20


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_first_failure(case: Case, tmp_path: Path) -> None:
    (tmp_path / case.file).write_text(case.text, encoding="utf-8")
    found = verdict(remains([tmp_path / case.file]))
    assert case.cause in found.cause
    assert SURENESS[found.confidence] <= SURENESS[case.most]  # type: ignore[index]
    assert case.remedy in found.remedy
    assert found.cause != "not known" or found.missing, "it does not say why"


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_log_collectors_prefix_does_not_change_the_cause(case: Case, tmp_path: Path) -> None:
    """Log collectors put a prefix of their own before each line, which must not change the cause that is found."""
    if "srun" in case.name or "mpirun" in case.name or case.file != "job.out":
        return
    for prefix in ("2024-02-21T09:30:56.644Z ", "[pod/job-worker-0/pytorch] ", "node-7  | "):
        text = "".join(f"{prefix}{line}\n" for line in case.text.splitlines())
        (tmp_path / "job.out").write_text(text, encoding="utf-8")
        found = verdict(remains([tmp_path / "job.out"]))
        assert case.cause.partition(" (after")[0].partition("not said")[0] in found.cause, prefix


def test_error_files_and_the_log_of_one_run() -> None:
    found = verdict(remains([REAL / "attempt_0"]))
    assert (
        found.cause == "the first to fail was rank 2: it raised ValueError: bad shard 7, at /home/me/rec.py:9 in main"
    )


def test_the_victims_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text((REAL / "raise.log").read_text())
    output = CliRunner().invoke(cli, ["hang", str(tmp_path)]).output
    said = " ".join(output.split())
    assert "ranks 0, 2 failed after that: they waited for another rank" in said
    assert "torchrun: rank 1 was the first to fail; it exited with status 1" in said


def test_a_rank_whose_log_is_there_and_has_no_exception_is_named(tmp_path: Path) -> None:
    log = (REAL / "raise.log").read_text()
    victim = "".join(f"{line}\n" for line in log.splitlines() if line.startswith("[rank0]"))
    (tmp_path / "rank_0.log").write_text(victim)
    for quiet, said in ((None, "only waited for another rank, of which nothing is here"),
                        ("step 3\n", "only waited for another rank; rank 1 left no exception")):  # fmt: skip
        if quiet is not None:
            (tmp_path / "rank_1.log").write_text(quiet)
        found = verdict(remains([tmp_path]))
        assert found.missing[0] == f"who failed first: rank 0 {said}"


def attempts(*errors: str) -> list[str]:
    """Return what torchrun wrote about its attempts, the last with the footer: rank 1 raised each of the errors."""
    whole = (REAL / "raise.log").read_text()
    end = whole.index("Traceback", whole.index("failed (exitcode"))  # torchrun's own
    return [*(whole[:end].replace("bad shard 7", error) for error in errors[:-1]),
            whole.replace("bad shard 7", errors[-1])]  # fmt: skip


def test_of_a_job_that_torchrun_started_again_the_last_attempt_is_judged(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text("".join(attempts("no route", "bad link", "bad shard 7")))
    found = verdict(remains([tmp_path]))
    assert "rank 1: it raised ValueError: bad shard 7, at " in found.cause
    assert "no route" not in str(found)
    before = "an earlier attempt, before torchrun started the ranks again: rank 1: it raised ValueError: bad link, at "
    assert any(fact.startswith(before) for fact in found.evidence)


def test_the_logs_of_two_jobs_in_one_file_are_no_attempts(tmp_path: Path) -> None:
    """In containers the torchrun of each node may have the same number."""
    (tmp_path / "job.out").write_text(attempts("no route")[-1] + attempts("bad shard 7")[-1])
    assert "ValueError: no route" in verdict(remains([tmp_path])).cause


def test_of_torchruns_folders_the_last_attempt_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    for number, error in enumerate(("no route", "bad shard 7")):
        folder = tmp_path / "logs" / f"attempt_{number}" / "1"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"Traceback (most recent call last):\n  f()\nValueError: {error}\n")
    found = remains([tmp_path / "logs"])
    assert verdict(found).cause == "the first to fail was rank 1: it raised ValueError: bad shard 7"
    assert found.unread == [f"{tmp_path}/logs/attempt_0: an earlier attempt; to judge it, name this folder alone"]
    assert "no route" in verdict(remains([tmp_path / "logs" / "attempt_0"])).cause


def test_the_number_of_a_slurm_job_is_no_rank(tmp_path: Path) -> None:
    (tmp_path / "slurm-4711.out").write_text((REAL / "raise.log").read_text())
    assert remains([tmp_path]).ranks == [0, 1, 2]


FAILING = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    {fault}
dist.all_reduce(torch.ones(3))
"""
FAULTS = {
    "os._exit(7)": "the first to fail was rank 1: it exited with status 7",
    "os.kill(os.getpid(), 9)": "the first to fail was rank 1: it was ended by signal 9 (SIGKILL)",
    "raise ValueError('bad shard')": "the first to fail was rank 1: it raised ValueError: bad shard, at ",
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("fault", list(FAULTS))
def test_torchrun_as_it_is_installed(fault: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING.format(fault=fault))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with (tmp_path / "job.out").open("w") as file:
        subprocess.run(command, stdout=file, stderr=file, timeout=120)
    found = verdict(remains([tmp_path / "job.out"]))
    assert found.cause.startswith(FAULTS[fault])
    assert found.confidence == "high"
