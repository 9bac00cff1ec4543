"""What a hung job left: dumps, error files, logs; some of it malicious."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.errors import ConfigError
from sentinel.toolkit.postmortem.files import remains
from sentinel.toolkit.postmortem.verdict import verdict
from tests.diagnose.test_collectives import entry
from tests.hang.logs import timeouts

RECORDED = Path(os.environ.get("SENTINEL_RECORDED_RUNS", "/nowhere"))


def dump(last: int, *more: dict[str, Any]) -> dict[str, Any]:
    return {"version": "2.10", "entries": [*(entry(seq) for seq in range(1, last + 1)), *more]}


def test_dumps_of_a_folder_pickled_and_as_json(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump(8, entry(9, done=False))))
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps(dump(8)))
    (tmp_path / "rank2.json").write_text(json.dumps(dump(8, entry(9, done=False))))
    found = verdict(remains([tmp_path]))
    assert found.cause == "rank 1 never came to all_reduce of 5, number 9, in which ranks 0, 2 waited"
    assert found.confidence == "medium"


@pytest.mark.slow
def test_a_damaged_rank_number_does_not_slow_the_verdict(tmp_path: Path) -> None:
    """A damaged line makes a million ranks of a few; missing ones must not be looked up in a list of that length."""
    (tmp_path / "job.out").write_text(timeouts(0, 1, 2, 4) + "[rank999999]: RuntimeError: bad shard\n")
    found = verdict(remains([tmp_path]))
    assert found.cause.startswith(
        "ranks 3, 5, 6, 7, 8, 9, 10, 11 and 999988 more never came to allreduce of 8, number 808"
    )
    assert found.confidence == "low"


def test_an_error_file_says_why(tmp_path: Path) -> None:
    for rank, more in enumerate([[entry(9, done=False)], []]):
        (tmp_path / f"rank_{rank}.pickle").write_bytes(pickle.dumps(dump(8, *more)))
    folder = tmp_path / "attempt_0" / "1"
    folder.mkdir(parents=True)
    error = {"message": {"message": "RuntimeError: no such file: shard-7", "extraInfo": {"timestamp": "1"}}}
    (folder / "error.json").write_text(json.dumps(error))
    found = verdict(remains([tmp_path]))
    assert found.cause.endswith("before that, on rank 1 it raised RuntimeError: no such file: shard-7")
    assert found.confidence == "high"


LOG = """\
[rank0]: [E1003 ProcessGroupNCCL.cpp:633] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=92, \
OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600011 milliseconds before timing out.
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 12, in main
[rank1]:     step()
[rank1]:   File "/usr/lib/python3.12/queue.py", line 179, in get
[rank1]:     raise KeyError
[rank1]: KeyError: 'shard'
"""


def test_logs_name_the_place_in_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(LOG)
    found = verdict(remains([tmp_path]))
    assert "rank 1 it raised KeyError: 'shard', at /home/me/train.py:12 in main" in found.cause


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("train-2026-11-27.log", []),
        ("train_20261127_101500.log", []),
        ("2026.11.27.log", []),
        ("pretrain-471182.out", []),
        ("rank_3_2026-11-27T10:15:00.log", [3]),
        ("2026-11-27_worker-12.log", [12]),
        ("slurm-471182-3.out", [3]),
    ],
)
def test_a_date_or_the_number_of_a_job_in_a_files_name_is_no_rank(name: str, ranks: list[int], tmp_path: Path) -> None:
    (tmp_path / name).write_text(LOG[LOG.index("[rank1]: Traceback") :].replace("[rank1]: ", ""))
    assert remains([tmp_path]).ranks == ranks


def test_a_rank_without_a_record_is_reported_as_missing_with_low_confidence(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(dump(8, entry(9, done=False))))
    (tmp_path / "rank_2").write_bytes(pickle.dumps(dump(8, entry(9, done=False))))
    found = verdict(remains([tmp_path]))
    assert found.confidence == "low"
    assert "what rank 1 did: nothing of it is here" in found.missing


def test_the_log_of_one_rank_says_nothing_of_all(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(LOG.splitlines()[0])
    found = verdict(remains([tmp_path]))
    assert (
        found.cause == "all ranks that left a record were in allreduce of 1, number 92, and it did not come to its end"
    )
    assert found.confidence == "low"
    assert "network" not in found.remedy
    assert found.missing == ("or the job had more ranks, and one of them never came: the size of the group decides",)


def test_the_recorded_hang_of_eight_ranks() -> None:
    """A CUDA OOM swallowed in rank 7's loader thread is named as the cause, although that rank does not time out.

    The dumps are of mlcommons/training_results_v5.1, in the folder that SENTINEL_RECORDED_RUNS names; without such a
    folder nothing is checked.
    """
    if not (RECORDED / "hangs").is_dir():
        return
    found = verdict(remains([RECORDED / "hangs"]))
    assert found.cause.startswith("rank 7 never came to allreduce of 1, number 92, in which ranks 0 to 6 waited")
    assert "(EmbedThread) ended with torch.OutOfMemoryError: CUDA out of memory" in found.cause
    assert found.confidence == "high"


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/sentinel-was-here",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(Command()))
    with pytest.raises(ConfigError, match=r"it would import (posix|os)\.system"):
        remains([tmp_path])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04",
        b"\x80\x04]\x94" + b"h\x00" * 5000,
        b'{"entries": 3}',
        b'{"entries": [{"process_group": 3}]}',
        b'{"entries": [{"collective_seq_id": "x"}]}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        gzip.compress(b"0" * 10_000_000),
        b"\xff\xfe\x00",
        b"",
    ],
    ids=range(10),
)
def test_what_is_damaged_or_hostile_ends_in_words(content: bytes, tmp_path: Path) -> None:
    name = "rank_0.gz" if content[:2] == b"\x1f\x8b" else "rank_0"
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(cli, ["hang", str(tmp_path)])
    assert isinstance(result.exception, ConfigError | SystemExit), result.exception


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret_0"
    secret.write_text(LOG)
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "rank_0").symlink_to(secret)
    with pytest.raises(ConfigError, match="nothing of a rank"):
        remains([folder])
