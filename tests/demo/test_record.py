from __future__ import annotations

import json
import math
from pathlib import Path

from sentinel.demo.record import DemoRecord, LossCurve, RecordedRollback, load, save
from sentinel.demo.rescue import failing
from sentinel.demo.shard import Damage
from sentinel.demo.story import comparison, state, verdict
from sentinel.demo.trainee import Tail


def curve(*losses: float, rollbacks: list[RecordedRollback] | None = None) -> LossCurve:
    steps = list(range(len(losses)))
    return LossCurve(steps=steps, losses=list(losses), times=[float(step) for step in steps], rollbacks=rollbacks or [])


def test_curve_reads_the_log_of_the_script() -> None:
    read = LossCurve()
    read.add('{"step": 0, "loss": 5.5, "time": 10.0}')
    read.add('{"rollback": {"to": 0, "at": 3}}')
    read.add('{"step": 1, "loss": NaN, "time": 12.5}')
    assert read.steps == [0, 1]
    assert math.isnan(read.losses[1])
    assert read.rollbacks == [RecordedRollback(at=3, to=0)]
    assert read.rollbacks[0].lost_steps == 3
    assert read.seconds == 2.5


def test_level_is_a_median_and_nan_where_a_loss_is() -> None:
    read = curve(9.0, 1.0, 2.0, 30.0)
    assert read.level(steps=3) == 2.0
    assert read.level(stop=3, steps=2) == 1.5
    assert read.worst(1, 3) == 2.0
    assert math.isnan(curve(1.0, math.nan).level())
    assert math.isnan(curve(1.0, math.nan).worst(0, 2))


def test_smoothing_does_not_reach_over_a_rollback_or_nan() -> None:
    assert curve(9.0, 9.0, 1.0, 1.0, rollbacks=[RecordedRollback(at=1, to=0)]).smooth_losses() == [9.0, 9.0, 1.0, 1.0]
    smooth = curve(9.0, math.nan, 1.0).smooth_losses()
    assert math.isnan(smooth[1])
    assert smooth[2] == 1.0


def test_states_follow_the_run() -> None:
    damage = Damage(fault="spike", first=30, batches=5)
    good, bad = [2.0] * 30, [6.0] * 5
    rolled = [RecordedRollback(at=32, to=10)]
    assert state(LossCurve(), damage) == "starting"
    assert state(curve(*good), damage) == "training"
    assert state(curve(*good, *bad), damage) == "bad batches"
    assert state(curve(*good, *bad, *[3.2] * 20), damage) == "wrecked"
    assert state(curve(*good, math.nan), damage) == "NaN"
    assert state(curve(*good, *bad, rollbacks=rolled), damage) == "rolled back"
    assert state(curve(*good, *bad, *[2.0] * 20, rollbacks=rolled), damage) == "recovered"


def test_a_real_run_was_saved(record: DemoRecord) -> None:
    assert failing(record) == ""
    assert record.alert is not None
    assert record.rollback is not None
    assert record.damage.first <= record.alert.step <= record.damage.first + 4
    assert record.parted == record.rollback.at + 1, "Sentinel touched the run before the rollback"
    assert record.watched.count_damaged(record.damage) == record.rollback.at - record.damage.first + 1
    assert record.alone.count_damaged(record.damage) == record.damage.batches
    assert f"gave up {record.rollback.lost_steps} steps" in verdict(record)
    assert ("steps given up by rollback", str(record.rollback.lost_steps), "0") in comparison(record)


def test_summary_is_strict_json(nan: DemoRecord) -> None:
    text = json.dumps(nan.summary(), allow_nan=False)
    assert json.loads(text)["runs"]["without"]["loss_at_end"] is None


def test_the_failure_says_what_sentinel_did_not_do(spike: DemoRecord) -> None:
    spike.watched.losses = spike.alone.losses
    assert "did not part" in failing(spike)
    spike.watched.rollbacks.clear()
    assert failing(spike, ["rank 0 left"]).endswith("not rolled back (rank 0 left)")
    spike.alerts.clear()
    assert "no critical alert from step 228" in failing(spike)


def test_an_alert_before_the_fault_does_not_count(spike: DemoRecord) -> None:
    spike.damage = Damage(fault="spike", first=300, batches=40)
    assert spike.alert is None


def test_a_record_survives_the_disk(nan: DemoRecord, tmp_path: Path) -> None:
    save(nan, tmp_path / "record.json")
    assert repr(load(tmp_path / "record.json")) == repr(nan)


def test_a_tail_gives_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    with path.open("a", buffering=1) as log:
        log.write("one\ntw")
        log.flush()
        assert tail.lines() == ["one"]
        log.write("o\n")
        assert tail.lines() == ["two"]
        assert tail.lines() == []
