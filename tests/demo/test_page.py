from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sentinel.demo.outcome import describe_rescue
from sentinel.demo.page import write_page
from sentinel.demo.record import DemoRecord

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
    *("--virtual-time-budget=10000", "--window-size=1180,1600", "--dump-dom"),
]


@pytest.fixture
def page(record: DemoRecord, tmp_path: Path) -> Path:
    path = tmp_path / "demo.html"
    write_page(describe_rescue(record), "\u250f SENTINEL CRITICAL <b>\n\u2503 what", path)
    return path


def test_page_needs_no_network_and_escapes_what_the_run_said(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)\s*=\s*[\"']?(?:https?:)?//", text)
    assert "SENTINEL CRITICAL &lt;b&gt;" in text


@pytest.mark.slow
@pytest.mark.browser
def test_page_draws_both_curves_without_an_error(page: Path, record: DemoRecord, chromium: str, tmp_path: Path) -> None:
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    shown = subprocess.run(
        [chromium, *FLAGS, profile, page.as_uri()], capture_output=True, text=True, timeout=90, check=False
    )
    assert "CONSOLE" not in shown.stderr, shown.stderr
    dom = shown.stdout
    assert "<script" not in dom
    for style in ("s0", "s1"):
        assert {f'class="curve {style} faint"', f'class="curve {style} bold"'} <= set(
            re.findall(r'class="curve[^"]+"', dom)
        )
    assert record.alert is not None
    assert record.rollback is not None
    assert f"{record.alert.alert}, step {record.alert.step}" in dom
    assert f"at step {record.rollback.at}, to the state of step {record.rollback.to}" in dom
