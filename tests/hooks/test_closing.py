"""The line at the end of a run: printed once, by the first rank, and about no more than was judged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.text import describe_incidents, format_duration, name_reached
from tests.hooks.conftest import FakeDaemon
from tests.programs import contained
from tests.zygote import TRAINING, run_fork

SCRIPT = """
import os, sys, torch, sentinel
from torch.utils.data import DataLoader, TensorDataset

def train(steps=150, bad=None, watch=None, workers=0, **options):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    monitor = sentinel.attach(model, optimizer, run="short", **options)
    while monitor.state in ("looking for the daemon", "saying hello"):
        if watch is None:
            break
    loader = DataLoader(TensorDataset(torch.randn(steps * 4, 8)), batch_size=4, num_workers=workers)
    for step, (batch,) in enumerate(loader):
        loss = model(batch).pow(2).mean() * (float("nan") if step == bad else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer, monitor

kept = []
"""


TIMED = ("InputBound", "SlowStep", "LowUtilization")
"""Alerts that may fire because the machine is busy."""


@pytest.fixture(autouse=True)
def _untimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tmp_path / "untimed.yaml"
    rules.write_text(
        "group: untimed\nrules:\n" + "".join(f"  - {{override: {name}, disable: true}}\n" for name in TIMED)
    )
    monkeypatch.setenv("SENTINEL_RULES", str(rules))


def said(end: str, **environment: str) -> list[str]:
    """Return the lines on how the run ended."""
    return said_by("-c", SCRIPT + end, **environment)


def said_by(*program: str | Path, **environment: str) -> list[str]:
    done = run_fork([sys.executable, *program], TRAINING, env={**os.environ, **environment})
    return re.findall(r"^sentinel: (run 'short' .*ended.*|.*ended.*run 'short'.*)$", done.stderr, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "words"),
    [
        (
            "kept = train(watch=True, workers=1)",
            "after 150 steps in .* s: no incidents. Details: sentinel last short-",
        ),
        ("kept = train(bad=100, watch=True)", r"150 steps in .*: \d critical \(NonFiniteLoss at step 100\)"),
        ("train(watch=True, step=1000)", "ended at step 1,149 in .*: no incidents"),
        ("kept = train(watch=True); kept[2].detach(); kept[2].detach()", "150 steps in .*: no incidents"),
        ("kept = train(watch=True)\nif os.fork() == 0: sys.exit()\nos.wait()", "150 steps in .*: no incidents"),
        ("kept = train(watch=True); raise ValueError('a')", "150 steps in .*, by ValueError: no incidents"),
    ],
)
def test_a_run_that_was_judged(end: str, words: str) -> None:
    (line,) = said(end)
    assert re.search(words, line), line


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("prefix", [(), ("-m", "sentinel", "run", "--", sys.executable)])
def test_the_history_and_the_report_have_the_same_duration(prefix: tuple[str, ...]) -> None:
    (line,) = said_by(*prefix, "-c", SCRIPT + "kept = train(watch=True)")
    found = []
    for command in ("last", "report"):
        asked = [sys.executable, "-m", "sentinel", command, "short", "--json"]
        found += json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    assert [format_duration(one["seconds"]) for one in found] == [re.findall(" in (.*?)[:,]", line)[0]] * 2


@pytest.mark.slow
@pytest.mark.processes
def test_the_newest_snapshot_on_disk_is_named(tmp_path: Path) -> None:
    rollback = f"sentinel.Rollback(every=20, keep=4, margin=10, directory={str(tmp_path / 'kept')!r})"
    # a daemon on a machine with a slow disk writes snapshots for longer than the end of a run waits
    patience = "from sentinel.hooks.session import registry; registry.GOODBYE_SECONDS = 60.0"
    (line,) = said(f"{patience}\nkept = train(steps=2000, watch=True, rollback={rollback})")
    newest = re.search(r"newest snapshot on disk: step ([\d,]+)\.", line)
    assert newest is not None, line
    assert any(newest[1].replace(",", "") in path.name for path in (tmp_path / "kept").rglob("*")), line


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.namespaces
def test_without_a_history_no_command_is_named_that_reads_it(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    full = f"mkdir {disk}; mount -t tmpfs -o size=64k tmpfs {disk}; mkdir {disk}/state; ! cat /dev/zero > {disk}/rest"
    script = tmp_path / "run.py"
    script.write_text(SCRIPT + "kept = train(watch=True)")
    (line,) = said_by(contained.__file__, full, script, SENTINEL_STATE=str(disk / "state"))
    assert re.search("150 steps in .* s: no incidents; no history of it could be written$", line), line


@pytest.mark.slow
@pytest.mark.processes
def test_a_daemon_that_does_not_answer_in_time_is_reported(daemon: FakeDaemon) -> None:
    (line,) = said("kept = train(watch=True)")
    assert re.search("150 steps in .*: its daemon did not say in time what it found. Details: ", line), line


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
def test_a_daemon_that_has_yet_to_answer_is_one(daemon: FakeDaemon) -> None:
    daemon.answer = lambda _: b""
    (line,) = said("kept = train()\nwhile kept[2].state == 'looking for the daemon': pass")
    assert "no daemon took part" not in line, line


@pytest.mark.slow
@pytest.mark.processes
def test_a_daemon_that_answered_and_is_gone_at_the_end_took_part(daemon: FakeDaemon) -> None:
    def leave_early() -> None:
        daemon.wait(lambda: daemon.of(wire.Batch))
        daemon.close()

    leaving = threading.Thread(target=leave_early)
    leaving.start()
    (line,) = said("kept = train(watch=True)\nwhile kept[2].state == 'streaming': pass")
    leaving.join()
    assert re.search("150 steps in .*: its daemon did not say in time what it found. Details: ", line), line


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("answers", [True, False])
def test_a_daemon_that_comes_as_the_run_ends_took_part(private_places: Path, answers: bool) -> None:
    path = private_places / "d.sock"
    late = f"""
import pathlib, time, sentinel.testing
kept = train()
time.sleep(3)  # by then the sender makes long pauses, and looks once more at the end
daemon = sentinel.testing.FakeDaemon(pathlib.Path({str(path)!r}))
if not {answers}: daemon.answer = lambda _: b""
"""
    (line,) = said(late, SENTINEL_ADDRESS=f"unix:{path}")
    assert re.search("150 steps in .*: its daemon did not say in time what it found. Details: ", line), line


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SENTINEL_ADDRESS", "unix:{}/none.sock", r"150 steps in .*: not judged, as no daemon took part$"),
        ("SENTINEL_RECORD", "{}/record", r"150 steps in .*: recorded and not judged; sentinel replay .*/record$"),
    ],
)
def test_without_a_daemon_nothing_is_claimed(tmp_path: Path, name: str, value: str, words: str) -> None:
    (line,) = said("kept = train()", **{name: value.format(tmp_path)})
    assert re.search(words, line), line


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.parametrize("variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"SENTINEL_SUPERVISOR": "mark"}])
def test_other_ranks_and_supervised_ones_say_nothing(tmp_path: Path, variables: dict[str, str]) -> None:
    assert said("kept = train()", SENTINEL_RECORD=str(tmp_path / "record"), **variables) == []


def test_steps_that_were_not_seen_are_reported() -> None:
    summary = wire.RunSummary(steps=900, step=899, lost=300, incidents={"warning": 2, "info": 1}, worst="A at step 4")
    assert summary.text == "2 warnings (A at step 4), 1 info; 300 of the steps were not seen"
    assert describe_incidents({"critical": 0}) == "no incidents"


def test_numbers_in_words() -> None:
    seconds = (0.04, 9.9, 12, 60, 185, 3600, 4350, 93600)
    assert [format_duration(one) for one in seconds] == [
        "0.0 s", "9.9 s", "12 s", "1 min", "3 min 5 s", "1 h", "1 h 12 min", "1 d 2 h",
    ]  # fmt: skip
    assert name_reached(0, -1) == "without a step"
    assert name_reached(1, 0) == "after 1 step"
    assert name_reached(12_400, 12_399, cut=True) == "after at least 12,400 steps"
    assert name_reached(10, 1009, cut=True) == "at step 1,009 or later"
