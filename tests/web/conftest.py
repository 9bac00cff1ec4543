"""Fixtures: a real daemon with HTTP, and the content of its state file; screenshots.

`make pictures` (WRITE_PICTURES=1) takes the screenshots of docs/images.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from sentinel.node import paths
from sentinel.report.stored_runs import StoredRuns
from sentinel.web import http
from tests.browser import Browser
from tests.daemon.simulated import daemon_process
from tests.waiting import until

ROOT = Path(__file__).parents[2]


class Served(msgspec.Struct):
    """A running daemon, and the content of its state file."""

    socket: Path
    process: subprocess.Popen[bytes]
    state: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.state["http"])

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return httpx2.get(self.url + path, **options)

    def authorized(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.state['token']}"}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let daemons find a fake driver with two GPUs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT / "tests" / "collect" / "driver", ROOT))))


@pytest.fixture
def settings(private_places: Path) -> Path:
    """The settings file that this test's daemons read."""
    file = private_places / "config" / "sentinel" / "sentinel.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[daemon]\nhttp = 0\n")
    return file


@pytest.fixture
def served(settings: Path) -> Iterator[Served]:
    """A daemon with `--stay` and one rule."""
    with daemon_process("--stay", "--rules", str(_rules(settings.parent))) as (socket, process):
        file = paths.run_directory("r1") / paths.STATE
        until(file.exists, "the state file")
        yield Served(socket, process, json.loads(file.read_text()))


@contextmanager
def served_here(stored: StoredRuns, port: int = 0, token: str = "token") -> Iterator[str]:
    """Serve the page of stored runs from this process; yield its address."""
    server = http.HttpServer(http.application(stored, token))
    listening = http.listener(port)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(listening),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.end)
        thread.join()
        loop.close()


def keep_picture(page: Browser, name: str, **manner: str) -> None:
    """Take a picture for the docs, if WRITE_PICTURES is set."""
    if os.environ.get("WRITE_PICTURES"):
        page.seen_with(**manner)
        page.picture(ROOT / "docs" / "images" / f"{name}.png")
        page.seen_with()


def _rules(folder: Path) -> Path:
    file = folder / "rules" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("group: mine\nrules:\n  - {alert: High, expr: loss > 5, severity: warning}\n")
    return file
