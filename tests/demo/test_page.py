from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sentinel.demo import story
from sentinel.demo.record import Record

pytest.importorskip("plotly", reason="plotly is not installed: pip install 'training-sentinel[demo]'")

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
    *("--virtual-time-budget=10000", "--window-size=1180,1600", "--dump-dom"),
]


def rgb(colour: str) -> str:
    """As Chromium writes `#RRGGBB`."""
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"


@pytest.fixture
def page(record: Record, tmp_path: Path) -> Path:
    from sentinel.demo import page

    path = tmp_path / "demo.html"
    page.write(record, "\u250f SENTINEL CRITICAL <b>\n\u2503 what", path)
    return path


def test_page_needs_no_network_and_escapes_what_the_run_said(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)\s*=\s*[\"']?(?:https?:)?//", text)
    assert "SENTINEL CRITICAL &lt;b&gt;" in text


@pytest.mark.browser
def test_page_draws_both_curves_without_an_error(page: Path, record: Record, chromium: str, tmp_path: Path) -> None:
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [chromium, *FLAGS, profile, page.as_uri()], capture_output=True, text=True, timeout=90, check=False
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    dom = shown.stdout
    traces = re.findall(r'<g class="trace scatter.*?(?=<g class="trace scatter|$)', dom, re.DOTALL)
    for colour in (story.WATCHED_COLOUR, story.ALONE_COLOUR):
        drawn = [trace for trace in traces if f"stroke: {rgb(colour)}" in trace and 'class="js-line"' in trace]
        assert len(drawn) >= 2, f"a curve and its median are drawn in {colour}"
    assert record.alert is not None
    assert record.rollback is not None
    assert f"{record.alert.alert}</tspan>, step {record.alert.step}" in dom
    assert f"at step {record.rollback.at}, to the state of step {record.rollback.to}" in dom
