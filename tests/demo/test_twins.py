"""The demos of faults that Sentinel tells of: words, picture, page, and one whole run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sentinel.cli.demo import demo
from sentinel.demo import story, twinstory
from sentinel.demo.record import Alert, Curve
from sentinel.demo.shard import ROW_BYTES, SMALL_ROWS, write_padded
from sentinel.demo.twins import FAULTY, HEALTHY, KINDS, Fault, Side, Twins, failing
from tests.demo.test_page import FLAGS
from tests.demo.test_picture import pixels

STEPS = 200


def curve(values: list[float]) -> Curve:
    steps = list(range(len(values)))
    return Curve(
        steps=steps, losses=[5.0 - step / 100 for step in steps], times=[100.0 + s for s in steps], values=values
    )


def twins_of(fault: Fault) -> Twins:
    faulty = (
        [6e8 + 1e6 * s for s in range(STEPS)]
        if fault == "leak"
        else [2.0 ** (16 - max(s - 99, 0)) for s in range(STEPS)]
    )
    healthy = [6e8 if fault == "leak" else 65536.0] * STEPS
    alert = Alert(
        id="0.1", alert=KINDS[fault].alert, severity="warning", state="firing", first_step=107, step=107, summary="s",
        cause="<its cause>", remedy="mend it.",
    )  # fmt: skip
    return Twins(
        fault=fault, seed=0, steps=STEPS, faulty=Side(FAULTY, "demo-x", curve(faulty), [alert]),
        healthy=Side(HEALTHY, "demo-x-twin", curve(healthy)), python="3.11", torch="2.13", seconds=60.0,
    )  # fmt: skip


@pytest.fixture(params=["scaler", "leak"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return twins_of(request.param)


def test_what_must_be_shown(twins: Twins) -> None:
    assert failing(twins) == ""
    (alert,) = twins.faulty.alerts
    twins.healthy.alerts = [alert]
    assert failing(twins).endswith("for the healthy twin")
    twins.faulty.alerts = [Alert(**{name: getattr(alert, name) for name in alert.__struct_fields__} | {"step": 190})]
    assert "came at step 190" in failing(twins)
    twins.faulty.alerts = []
    assert "did not raise" in failing(twins)


def test_words(twins: Twins) -> None:
    assert "<its cause>. To do: mend it. Sentinel said nothing of the twin." in twinstory.verdict(twins)
    rows = {row[0]: row[1:] for row in twinstory.comparison(twins)}
    assert rows["alerts"] == (twins.kind.alert, "none")
    assert rows[f"{twins.kind.value} at the end"] == (
        ("799", "600") if twins.fault == "leak" else ("5.17e-26", "65536")
    )
    assert json.dumps(twins.summary())


def test_picture(twins: Twins, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'training-sentinel[demo]'")
    from matplotlib.image import imread

    from sentinel.demo import twinpicture

    twinpicture.draw(twins, tmp_path / "demo.png")
    image = imread(tmp_path / "demo.png")
    for colour in (story.WATCHED_COLOUR, story.ALONE_COLOUR):
        assert pixels(image, colour) > 1000, colour


@pytest.mark.browser
def test_page(twins: Twins, chromium: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'training-sentinel[demo]'")
    from sentinel.demo import twinpage

    twinpage.write(twins, "\u250f SENTINEL <b>", tmp_path / "demo.html")
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [chromium, *FLAGS, profile, (tmp_path / "demo.html").as_uri()], capture_output=True, text=True, timeout=90
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    assert f"{twins.kind.alert}</tspan>, step 107" in shown.stdout
    assert "SENTINEL &lt;b&gt;" in shown.stdout
    assert "&lt;its cause&gt;" in shown.stdout
    assert len(re.findall(r'class="js-line"', shown.stdout)) == 6, "two series of two runs, and their legend"


def test_padding_begins_where_it_should(tmp_path: Path) -> None:
    write_padded(tmp_path / "shard", batches=5, seed=0, first=3)
    data, row = (tmp_path / "shard").read_bytes(), ROW_BYTES
    rows = [data[at : at + row] for at in range(0, len(data), row)]
    assert [not any(one) for one in rows] == [False] * 15 + [True] + [False] * 3 + [True]
    assert len(rows) == 5 * SMALL_ROWS


def test_too_few_steps_are_wrong_use() -> None:
    result = CliRunner().invoke(demo, ["--fault", "leak", "--steps", "100"])
    assert (result.exit_code, "needs 2000" in result.output) == (2, True)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_scaler_demo_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'training-sentinel[demo]'")
    command = [sys.executable, "-m", "sentinel", "demo", "--fault", "scaler", "--steps", "100", "--seed", "1", "--json"]
    done = subprocess.run([*command, "--out", "out"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown: dict[str, Any] = json.loads(done.stdout)
    assert (shown["alert"]["alert"], shown["alert"]["step"]) == ("ScalerCollapse", 57)
    assert shown["alerts_of_the_twin"] == []
    assert shown["loss_scale"]["faulty"] < 1 < shown["loss_scale"]["healthy"]
    assert Path(shown["picture"]).exists()
    assert "lift.weight" in (tmp_path / "out/faulty/stderr.txt").read_text()
