"""The demos of faults that Sentinel finds: texts, picture, page, and one whole run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.demo import twinstory
from sentinel.demo.outcome import describe_twins
from sentinel.demo.page import draw_picture, write_page
from sentinel.demo.record import LossCurve, RecordedAlert
from sentinel.demo.shard import ROW_BYTES, SMALL_ROWS, blanks, write_blanked
from sentinel.demo.twins import FAULTY, HEALTHY, KINDS, Fault, Side, Twins, failing
from tests.demo.test_page import FLAGS
from tests.demo.test_plots import count_curves, read_texts

STEPS = 200


def curve(values: list[float]) -> LossCurve:
    steps = list(range(len(values)))
    return LossCurve(
        steps=steps, losses=[5.0 - step / 100 for step in steps], times=[100.0 + s for s in steps], values=values
    )


def twins_of(fault: Fault) -> Twins:
    steps = range(STEPS)
    faulty, healthy, step = {
        "leak": ([6e8 + 1e6 * s for s in steps], [6e8] * STEPS, 107),
        "scaler": ([2.0 ** (16 - max(s - 99, 0)) for s in steps], [65536.0] * STEPS, 107),
        "hang": ([float(s) for s in range(60)], [float(s) for s in steps], 59),
    }[fault]
    alert = RecordedAlert(
        id="0.1", alert=KINDS[fault].alert, severity="warning", state="firing", first_step=step, step=step, summary="s",
        cause="<waits at hang.py:45>", remedy="mend it.", time=170.0,
    )  # fmt: skip
    return Twins(
        fault=fault, seed=0, steps=STEPS, faulty=Side(FAULTY, "demo-x", curve(faulty), [alert]),
        healthy=Side(HEALTHY, "demo-x-twin", curve(healthy)), python="3.11", torch="2.13", seconds=60.0,
    )  # fmt: skip


@pytest.fixture(params=["scaler", "leak", "hang"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return twins_of(request.param)


def test_what_must_be_shown(twins: Twins) -> None:
    assert failing(twins) == ""
    (alert,) = twins.faulty.alerts
    twins.healthy.alerts = [alert]
    assert failing(twins).endswith("for the healthy twin")
    twins.faulty.alerts = [msgspec.structs.replace(alert, step=190)]
    assert "came at step 190" in failing(twins)
    twins.faulty.alerts = []
    assert "did not raise" in failing(twins)


def test_words(twins: Twins) -> None:
    assert "<waits at hang.py:45>. To do: mend it. Sentinel said nothing of the twin." in twinstory.verdict(twins)
    rows = {row[0]: row[1:] for row in twinstory.comparison(twins)}
    assert rows["alerts"] == (twins.kind.alert, "none")
    end = {"leak": ("799", "600"), "scaler": ("5.17e-26", "65536"), "hang": None}[twins.fault]
    assert rows.get(f"{twins.kind.value} at the end") == end
    assert rows["steps done"] == ("60" if twins.fault == "hang" else "200", "200")
    assert json.dumps(twins.summary())


def test_a_hang_is_shown_over_time_and_with_its_line() -> None:
    twins = twins_of("hang")
    assert (twins.begins_at, twins.alert_at, twins.span) == (59.0, 70.0, 199.0 * 1.04)
    assert twinstory.verdict(twins).startswith("Hang fired after 70 s, 11 s after the fault began: ")
    twins.faulty.alerts = [msgspec.structs.replace(twins.faulty.alerts[0], cause="waits for a lock")]
    assert failing(twins).startswith("Hang came without the line")


def test_picture(twins: Twins, tmp_path: Path) -> None:
    draw_picture(describe_twins(twins), tmp_path / "demo.svg")
    assert {FAULTY, HEALTHY, f"{twins.kind.alert}, {twinstory.when(twins)}"} <= set(read_texts(tmp_path / "demo.svg"))
    assert [count_curves(tmp_path / "demo.svg", style) for style in ("s0", "s1")] == [2, 2]


@pytest.mark.browser
def test_page(twins: Twins, chromium: str, tmp_path: Path) -> None:
    write_page(describe_twins(twins), "\u250f SENTINEL <b>", tmp_path / "demo.html")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [chromium, *FLAGS, profile, (tmp_path / "demo.html").as_uri()], capture_output=True, text=True, timeout=90
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert f"{twins.kind.alert}, {twinstory.when(twins)}" in shown.stdout
    assert "SENTINEL &lt;b&gt;" in shown.stdout
    assert "&lt;waits at hang.py:45&gt;" in shown.stdout
    assert len(re.findall(r'class="curve s\d bold"', shown.stdout)) == 8, "two series of two runs, and their legends"


@pytest.mark.parametrize(("fault", "blank"), [("scaler", [15, 19]), ("hang", [12, 13, 14, 15]), ("leak", [])])
def test_only_the_chosen_rows_are_blank(fault: Fault, blank: list[int], tmp_path: Path) -> None:
    write_blanked(tmp_path / "shard", batches=5, seed=0, blank=blanks(fault, 3, 5))
    data, row = (tmp_path / "shard").read_bytes(), ROW_BYTES
    rows = [data[at : at + row] for at in range(0, len(data), row)]
    assert [n for n, one in enumerate(rows) if not any(one)] == blank
    assert len(rows) == 5 * SMALL_ROWS


def test_too_few_steps_are_wrong_use() -> None:
    result = CliRunner().invoke(cli, ["demo", "--fault", "leak", "--steps", "100"])
    assert (result.exit_code, "needs 2000" in result.output) == (2, True)


def demonstrated(fault: Fault, steps: int, folder: Path) -> dict[str, Any]:
    pytest.importorskip("torch", reason="torch is not installed")
    command = [
        sys.executable,
        "-m",
        "sentinel",
        "demo",
        "--fault",
        fault,
        "--steps",
        str(steps),
        "--seed",
        "1",
        "--json",
    ]
    done = subprocess.run([*command, "--out", "out"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert shown["alert"]["alert"] == KINDS[fault].alert
    assert shown["alerts_of_the_twin"] == []
    assert Path(shown["picture"]).exists()
    return shown


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_scaler_demo_whole(tmp_path: Path) -> None:
    shown = demonstrated("scaler", 100, tmp_path)
    assert shown["alert"]["step"] == 57
    assert shown["loss_scale"]["faulty"] < 1 < shown["loss_scale"]["healthy"]
    assert "lift.weight" in (tmp_path / "out/faulty/stderr.txt").read_text()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_hang_demo_whole_ends_what_is_stuck(tmp_path: Path) -> None:
    shown = demonstrated("hang", 200, tmp_path)
    assert shown["steps_done"] == {"faulty": 59.0, "healthy": 199.0}
    line = next(n for n, text in enumerate((tmp_path / "out/hang.py").read_text().splitlines(), 1) if ".get()" in text)
    assert f"{tmp_path}/out/hang.py:{line} in __iter__" in shown["alert"]["cause"]
    assert not any(
        str(tmp_path) in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )
