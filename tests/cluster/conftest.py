"""Fixtures: a receiver of alerts, and a daemon's options with one rule that fires easily."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notify.consumer import Consumer, consumer


@pytest.fixture
def ops() -> Iterator[Consumer]:
    with consumer() as made:
        yield made


@pytest.fixture
def options(ops: Consumer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Options of a daemon with one rule that fires easily, and one receiver."""
    monkeypatch.setenv("OPS", ops.url)
    (tmp_path / "rules.yaml").write_text(
        "group: mine\nrules:\n  - alert: TooHigh\n    scope: run\n    expr: loss > 100\n    severity: warning\n"
    )
    settings = tmp_path / "sentinel.toml"
    settings.write_text(
        "[daemon]\nhttp = 'off'\n[grouping]\nwait = '0s'\ninterval = '0s'\n"
        "[[receivers]]\nname = 'ops'\ntype = 'webhook'\nurl_env = 'OPS'\n"
    )
    return ("--config", str(settings), "--rules", str(tmp_path / "rules.yaml"))
