"""A rank's identity, and that all ranks of a job determine the same run."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from torch.distributed import HashStore

from sentinel import wire
from sentinel.hooks.core import identity
from sentinel.hooks.core.identity import RunIdentity, attempt, script_name
from sentinel.node.run_ids import spell_id

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
SLURM = ("JOB_ID", "RESTART_COUNT", "ARRAY_JOB_ID", "ARRAY_TASK_ID", "STEP_ID", "PROCID", "NTASKS")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, *(f"SLURM_{name}" for name in SLURM)):
        monkeypatch.delenv(name, raising=False)


def resolved(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, ordinal: int = 0) -> wire.Identity:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    who = RunIdentity("train gpt", ordinal).resolve()
    assert who is not None
    return who


@pytest.mark.parametrize(
    ("environment", "run_id"),
    [
        ({"SENTINEL_RUN_ID": "my/run"}, "my-run"),
        ({"SENTINEL_RUN_ID": "a", "SLURM_JOB_ID": "7"}, "a"),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "x"}, "slurm-7-train-gpt"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, "slurm-7-2-train-gpt"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}, "slurm-8_3-train-gpt"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}, "slurm-7-3-train-gpt"),
        ({"TORCHELASTIC_RUN_ID": "fine-tune"}, "fine-tune-train-gpt"),
    ],
)
def test_ids_that_the_environment_gives(
    environment: dict[str, str], run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolved(environment, monkeypatch).run_id == run_id


def test_a_fresh_id_for_a_script_that_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's id is `none` unless one was chosen: all other runs would share it."""
    one, other = (resolved({"TORCHELASTIC_RUN_ID": "none"}, monkeypatch) for _ in range(2))
    assert one.run_id != other.run_id
    assert one.run_id.startswith("train-gpt-")
    assert one.session != other.session
    assert (one.rank, one.world_size, one.attempt) == (0, 1, 0)


def test_each_attach_of_a_process_is_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"SENTINEL_RUN_ID": "x" * 60}
    first, second = (resolved(environment, monkeypatch, ordinal).run_id for ordinal in (0, 1))
    assert first != second
    assert len(first) == len(second) == 40


@pytest.mark.parametrize(
    "names", [("a-long-name-of-a-pretraining-job-20260101-seed1", "a-long-name-of-a-pretraining-job-20260101-seed2"),
              ("実験一", "実験二"), ("taux-é", "taux-è")],
)  # fmt: skip
@pytest.mark.parametrize("variable", ["SENTINEL_RUN_ID", "TORCHELASTIC_RUN_ID"])
def test_names_that_no_id_can_hold_give_different_ids(
    variable: str, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one id, the second run would be taken for a restart of the first."""
    found = [resolved({variable: name}, monkeypatch, ordinal).run_id for name in names for ordinal in (0, 1, 0)]
    assert len({*found}) == 4
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,40}", run_id) for run_id in found)


def test_ranks_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    who = resolved(
        {"SENTINEL_RUN_ID": "r", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"},
        monkeypatch,
    )
    assert (who.rank, who.world_size, who.local_rank, who.attempt) == (5, 8, 1, 2)


def test_attempts_rise_over_requeues() -> None:
    counts = [("0", "0"), ("0", "2"), ("1", "0"), ("1", "1"), ("2", "0")]
    attempts = [attempt({"SLURM_RESTART_COUNT": s, "TORCHELASTIC_RESTART_COUNT": t}) for s, t in counts]
    assert attempts == sorted(set(attempts))
    assert attempt({"SLURM_RESTART_COUNT": "many"}) == 0


def test_ranks_agree_over_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 puts the id into the store; the others look it up, and never wait."""
    store: list[Any] = [None]
    monkeypatch.setattr(identity, "group_store", lambda: store[0])
    monkeypatch.setenv("WORLD_SIZE", "2")

    def of(rank: int, who: RunIdentity) -> wire.Identity | None:
        monkeypatch.setenv("RANK", str(rank))
        return who.resolve()

    first, second = RunIdentity("r", 0), RunIdentity("r", 0)
    assert of(0, first) is of(1, second) is None  # no process group yet
    store[0] = HashStore()
    assert of(1, second) is None  # rank 0 has not put it there
    one, other = of(0, first), of(1, second)
    assert one is not None
    assert other is not None
    assert one.run_id == other.run_id
    # torchrun's store outlives a restart: the restarted ranks are the same run.
    again = of(0, RunIdentity("r", 0))
    assert again is not None
    assert again.run_id == one.run_id


def test_ranks_that_find_no_store_stop_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "STORE_SECONDS", -1.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

    monkeypatch.setattr(identity, "group_store", Gone)
    who = RunIdentity("r", 0).resolve()
    assert who is not None
    assert who.run_id.startswith("r-")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/train.py", "train"),
        ("/a/pkg/__main__.py", "pkg"),
        ("-c", "python"),
        ("", "python"),
        ("<stdin>", "python"),
        ("/dev/stdin", "python"),
        ("/dev/fd/63", "python"),
    ],
)
def test_the_name_of_a_run(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", path, raising=False)
    monkeypatch.setattr(sys, "argv", [path])
    assert script_name() == name
    monkeypatch.setenv("SENTINEL_RUN", "nightly")
    assert RunIdentity(None, 0).name == "nightly"


def test_an_id_has_only_characters_that_names_of_files_may_have() -> None:
    assert spell_id("Größe/1 §") == "Gr-e-1"
    assert spell_id("///") == "run"
