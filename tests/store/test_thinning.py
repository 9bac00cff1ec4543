"""Which of the steps far behind the newest are kept."""

from __future__ import annotations

import math
import random
import sqlite3
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.runs.steps import LayerStats, RunStep
from sentinel.store import CHUNK_STEPS, History, Store, thinning
from sentinel.store.thinning import thin_rows
from sentinel.toolkit import logs
from sentinel.toolkit.backtest import Terms, backtest_logs
from sentinel.toolkit.logs import LogFile


def test_the_first_and_the_most_extreme_steps_of_a_bucket_stay() -> None:
    rows = [(seq, float(seq), {"loss": 1.0, "grad_norm": 1.0}) for seq in range(100)]
    rows[40] = (40, 40.0, {"loss": 9.0, "grad_norm": 1.0})
    rows[50] = (50, 50.0, {"loss": 1.0, "grad_norm": math.nan})
    rows[70] = (70, 70.0, {"loss": -math.inf})
    assert [seq for seq, *_ in thin_rows(rows, 32)] == [0, 32, 40, 50, 64, 70, 96]
    assert [seq for seq, *_ in thin_rows(rows, 32, [range(10, 13)])] == [0, 10, 11, 12, 32, 40, 50, 64, 70, 96]
    assert thin_rows([], 32) == []


def test_a_spike_of_a_negative_loss_stays() -> None:
    """As of a log-likelihood: the loss nearest to 0 is the highest."""
    rows = [(seq, float(seq), {"loss": -5.0 - (seq == 20)}) for seq in range(32)]
    rows[11] = (11, 11.0, {"loss": -1.0})
    assert [seq for seq, *_ in thin_rows(rows, 32)] == [0, 11]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the levels small enough for a test to fill."""
    monkeypatch.setattr(thinning, "LEVELS", ((1024, 16), (4096, 128)))
    monkeypatch.setattr(thinning, "GROUP", 2)


@pytest.mark.usefixtures("small")
def test_a_long_run_is_whole_at_its_end_and_thin_at_its_beginning(tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "r.sqlite"
    losses = [draw.random() for _ in range(8192)]
    losses[777], losses[2000] = 50.0, math.nan
    store = Store(path, run="train", run_id="r")
    store.records.begin_attempt(0, b"\x80")
    store.records.put_incident("0.1", 500, {"id": "0.1", "attempt": 0, "first_seq": 500})
    layers = LayerStats(("a",), {"layer_grad_norm": array("f", [1.0])}, b"\x01")
    for seq, loss in enumerate(losses):
        ranks = {0: {"loss": loss}, **({1: {"loss": 2 * loss}} if seq % 100 else {})}  # rank 1 is silent now and then
        store.records.add_step(0, RunStep(seq, float(seq), ranks, {"loss": loss}, layers if seq % 8 == 0 else None))
        if seq % 200 == 0:
            store.write()
    for seq in range(8192, 8192 + 40):  # each flush thins one stretch of what is due
        store.records.add_step(0, RunStep(seq, float(seq), {0: {"loss": 1.0}, 1: {"loss": 2.0}}, {"loss": 1.0}))
        store.write()
    store.close()
    assert store.trouble == ""
    with History(path) as history:
        loss, other = history.series("loss"), history.series("loss", rank=1)
        sampled = [seq for seq, _ in history.layers()]
        steps = list(history.steps(after=7000))
    seqs = list(loss.seqs)
    assert seqs == sorted(set(seqs))
    newest = 8192 + 39
    assert [seq for seq in seqs if seq > newest - 1024] == list(range(newest - 1023, newest + 1))
    assert len(seqs) < 2700
    assert {777, 2000} <= set(seqs)
    assert set(range(300, 701)) <= set(seqs)
    kept_losses = dict(zip(seqs, loss.values, strict=True))
    assert math.isnan(kept_losses.pop(2000))
    assert all(value == losses[seq] for seq, value in kept_losses.items() if seq < 8192)
    both = {seq: value for seq, value in zip(other.seqs, other.values, strict=True) if seq < 8192 and seq != 2000}
    assert all(value == 2 * losses[seq] for seq, value in both.items())
    # At each level, one chunk of a rank that reaches beyond a stretch waits for the next stretch.
    assert len(set(other.seqs) - set(seqs)) <= 2 * CHUNK_STEPS
    assert len(other.seqs) > 0.9 * len(seqs)
    assert [seq for seq in sampled if seq > newest - 1024]
    assert len([seq for seq in sampled if seq < 4000 and not 300 <= seq <= 700]) < 40
    assert all(step.ranks[0]["loss"] == step.run["loss"] or math.isnan(step.run["loss"]) for step in steps)


@pytest.mark.usefixtures("small")
def test_former_attempts_are_thinned_as_if_the_later_ones_continued_them(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    store = Store(path, run="train", run_id="r")
    for attempt in range(4):
        store.records.begin_attempt(attempt, b"\x80")
        for seq in range(1024):
            store.records.add_step(attempt, RunStep(seq, float(seq), {0: {"loss": 1.0}}, {"loss": 1.0}))
            if seq % 64 == 0:
                store.write()  # thins one stretch of what is due
    store.close()
    assert store.trouble == ""
    with History(path) as history:
        kept = [len(history.series("loss", attempt=attempt).seqs) for attempt in range(4)]
    assert kept == [64, 64, 32 + 512, 1024], "the newest 1,024 steps are those of the last attempt"


def test_a_history_of_schema_2_is_thinned_further(tmp_path: Path, small: None) -> None:
    path = tmp_path / "r.sqlite"
    store = Store(path, run="train", run_id="r")
    for seq in range(4 * CHUNK_STEPS):
        store.records.add_step(0, RunStep(seq, float(seq), {0: {"loss": 1.0}}, {"loss": 1.0}))
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE meta SET value = '2' WHERE key = 'schema'")
        database.execute("ALTER TABLE chunks DROP COLUMN level")
    database.close()
    with History(path) as history:
        assert len(history.series("loss").seqs) == 4 * CHUNK_STEPS
    store = Store(path, run="train", run_id="r")
    for seq in range(4 * CHUNK_STEPS, 10 * CHUNK_STEPS):
        store.records.add_step(0, RunStep(seq, float(seq), {0: {"loss": 1.0}}, {"loss": 1.0}))
        if seq % 64 == 0:
            store.write()
    store.close()
    with History(path) as history:
        seqs = list(history.series("loss").seqs)
    assert seqs[:3] == [0, 16, 32]
    assert seqs[-1024:] == list(range(10 * CHUNK_STEPS - 1024, 10 * CHUNK_STEPS))


@pytest.mark.usefixtures("small")
def test_a_backtest_judges_the_steps_that_are_all_kept(tmp_path: Path) -> None:
    """Of the others the loudest are kept, which rules would take for usual: a wait at each 16th step for a constant
    one."""
    store = Store(tmp_path / "r.sqlite", run="train", run_id="r")
    store.records.begin_attempt(0, b"\x80")
    for seq in range(4096):
        waits = seq % 16 == 8
        values = {"loss": 1.0, "step_seconds": 1.0 + waits, "data_seconds": 1.0 if waits else 0.01}
        store.records.add_step(0, RunStep(seq, float(seq), {0: values}, values))
        if seq % 256 == 255:
            store.write()
    store.close()
    (whole,) = backtest_logs([LogFile(tmp_path / "r.sqlite", "r", True)], Terms(alerts=("InputBound",)), 1)
    (result,) = whole
    assert result.alerts == ()
    assert result.judged_from is not None
    assert (result.rows, result.judged_from % 256) == (4096 - result.judged_from, 0)
    assert 1024 <= result.rows < 2048
    said = CliRunner().invoke(cli, ["rules", "backtest", str(tmp_path / "r.sqlite")]).output
    assert f"judged from step {result.judged_from:,} on" in said
    (recording,) = logs.read(tmp_path / "r.sqlite")
    assert recording.series("loss")[0][:3] == [0, 8, 16], "a picture shows them"


def test_steps_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    """A history of days does not fit into memory at once, with the values of all ranks."""
    store = Store(tmp_path / "r.sqlite", run="train", run_id="r")
    for seq in range(2 * CHUNK_STEPS):
        ranks = {rank: {"loss": float(rank)} for rank in range(2)}
        store.records.add_step(0, RunStep(seq, float(seq), ranks, {"loss": 0.5}))
    store.close()
    with sqlite3.connect(tmp_path / "r.sqlite") as database:
        database.execute("UPDATE chunks SET body = X'00' WHERE rank = 1 AND first_seq > 0")
    database.close()
    with History(tmp_path / "r.sqlite") as history:
        steps = history.steps()
        for _ in range(CHUNK_STEPS):
            assert next(steps).ranks == {0: {"loss": 0.0}, 1: {"loss": 1.0}}
        with pytest.raises(ValueError, match="cut off"):
            next(steps)
