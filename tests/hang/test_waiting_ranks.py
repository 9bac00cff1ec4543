"""Real DDP jobs under torchrun in which a rank does not come: who is missing, in which collective, and why."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from sentinel import places
from sentinel.cli import cli
from sentinel.store import History
from tests.hang.processes import SOON, ask, until

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).parent.parent / "programs" / "waiting_ranks.py"


@contextlib.contextmanager
def job(kind: str, folder: Path, rules: str = SOON) -> Iterator[subprocess.Popen[str]]:
    """A job of two ranks, one of which stalls by now; its id is `h-ranks`."""
    file, release = folder / "soon.yaml", folder / "go-on"
    file.write_text(rules)
    environment = {**os.environ, "SENTINEL_RUN_ID": "h-ranks", "SENTINEL_RULES": str(file)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [*torchrun, str(PROGRAM), kind, str(release)]
    with subprocess.Popen(command, env=environment, cwd="/", **pipes) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                if line == "stalling\n":
                    break
            else:
                pytest.fail("".join(seen))
            yield process
        finally:
            release.touch()
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.kill()  # ranks are sessions of their own


def alert(words: str) -> dict[str, Any]:
    """Once all that is known of its ranks is in."""

    def found() -> list[dict[str, Any]]:
        return [each for each in ask("h-ranks", "incidents") if words in cause(each)]

    return dict(until(found, words)[0])


def cause(case: dict[str, Any]) -> str:
    return str(case["diagnosis"]["cause"])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("uneven", "rank 1 came to the end of its loader, after 200 batches"),
        ("user-code", "in wait_for_the_file"),
        ("gil", "rank 1 holds the GIL"),
    ],
)
def test_the_rank_that_never_came_is_named_and_why(private_places: Path, kind: str, words: str) -> None:
    with job(kind, private_places):
        case = alert(words)
        if kind == "user-code":
            shown = CliRunner().invoke(cli, ["hang"])
            assert shown.exit_code == 1
            assert "rank 1      waits, and uses no processor" in shown.output
            assert "cause       rank 1 never came to all_reduce" in shown.output
    assert cause(case).startswith("rank 1 never came to all_reduce of")
    assert "in which rank 0 waits" in cause(case)
    assert case["diagnosis"]["confidence"] == "high"
    assert "rank 0 waits in all_reduce" in case["diagnosis"]["evidence"][0]
    if kind == "uneven":
        assert "drop_last" in case["diagnosis"]["remedy"]
        assert "Join" in case["diagnosis"]["remedy"]


def test_mismatched_collectives_are_told_apart(private_places: Path) -> None:
    with job("mismatch", private_places):
        case = alert("mismatched collectives")
    assert cause(case).startswith("mismatched collectives: as number ")
    assert "rank 0 issued all_reduce of" in cause(case)
    assert "rank 1 broadcast of 3" in cause(case)


def test_an_evaluation_of_one_rank_is_no_hang_of_the_others(private_places: Path) -> None:
    with job("evaluation", private_places, SOON.replace("> 3", "> 8")):

        def waits() -> bool:
            ranks = [rank for run in ask("h-ranks", "status")["runs"] for rank in run["ranks"]]
            return any(rank["stall"]["quiet_seconds"] > 15 for rank in ranks if rank["rank"] == 1)

        until(waits, "fifteen quiet seconds")
        assert not ask("h-ranks", "incidents")


def test_a_rank_that_was_killed_is_told_of(private_places: Path) -> None:
    with job("killed", private_places):
        case = until(lambda: [each for each in _known() if each["alert"] == "RankLost"], "RankLost")[0]
    assert cause(case) == "rank 1 was ended by SIGKILL"
    assert case["members"][0]["name"] == "1"
    assert "reported step" in case["diagnosis"]["evidence"][0]


def _known() -> list[dict[str, Any]]:
    """By the daemon while it is there, which is as long as its run, and then by the history."""
    if cases := ask("h-ranks", "incidents"):
        return list(cases)
    files = places.histories()
    if not files:
        return []
    with History(files[0]) as history:
        return history.incidents()
