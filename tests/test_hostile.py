"""Malicious names of runs, paths of the API and files. Those for snapshots and checkpoints are beside their tests."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentinel import wire
from sentinel.errors import ConfigError, LogError
from sentinel.toolkit.logs import jsonl, text
from sentinel.toolkit.plan import configfile
from sentinel.toolkit.postmortem.files import remains
from tests.daemon.simulated import SimulatedRank
from tests.waiting import until
from tests.web.conftest import Served, served, settings
from tests.zygote import DAEMON, run_fork

__all__ = ["served", "settings"]

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>'\"\x1b[2J\x1b]0;owned\x07"
LAYER = "</svg><script>alert(3)</script>\x1b[2J"


def sentinel(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_fork([sys.executable, "-m", "sentinel", *arguments], DAEMON, cwd="/tmp")


@pytest.mark.processes
def test_a_runs_name_injects_nothing_into_pages_and_terminals(served: Served, tmp_path: Path) -> None:
    with SimulatedRank(served.socket) as rank:
        rank.identity = msgspec.structs.replace(rank.identity, run=EVIL)
        rank.say(wire.Hello(version="test", identity=rank.identity, facts={"model": EVIL, "optimizer": EVIL}))
        rank.expect(wire.Welcome)
        rank.say(wire.LayerTable(digest="d", layers=(wire.Layer(name=LAYER, shape=(2,), dtype=EVIL),)))
        rank.steps(0, [1.0, 9.0, float("nan")])
        html = until(lambda: "step 2" in (found := _live(served)) and found, "the steps")
        until(lambda: "<script" not in (found := _whole(served)) and "9" in found, "the history")
        runs = served.get("/runs", headers=served.authorized()).text
        metrics = served.get("/metrics").text
        printed = [
            sentinel(*words.split()) for words in ("status", "incidents", "history", "top --once", "rules status")
        ]
        shown = sentinel("incidents", "show", "0.1", "--run", "r1")
        report = tmp_path / "r.html"
        sentinel("report", "r1", "--output", str(report))
    assert "r1" in runs
    for page in (html, runs, report.read_text()):
        assert "<script>alert" not in page
        assert "<img" not in page
    assert "\x1b" not in metrics
    for done in (*printed, shown):
        assert "NonFinite" in done.stdout or "img" in done.stdout, done
        assert "\x1b" not in done.stdout + done.stderr, done.args


def _live(served: Served) -> str:
    return served.get("/live?run=r1", headers=served.authorized()).text


def _whole(served: Served) -> str:
    return served.get("/whole?run=r1", headers=served.authorized()).text


@pytest.mark.processes
def test_a_runs_id_is_no_path(served: Served, private_places: Path) -> None:
    for identity in ("../../escaped", "/tmp/escaped", "a\0b", ".", "", "x" * 10_000):
        with SimulatedRank(served.socket, run_id=identity) as rank:
            rank.say(wire.Hello(version="test", identity=rank.identity))
            assert rank.expect(wire.Refused).reason, identity
    assert served.get("/-/healthy").status_code == 200
    assert not list(private_places.rglob("*escaped*"))


TRAVERSALS = [
    "/api/../../../etc/passwd", "/api/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/api/..%5c..%5cetc",
    "/api/status/../../etc/passwd", "/page.js%00.html", "/whole?run=../../../etc/passwd",
    "/live?run=%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/whole?run=/etc/passwd", "/api/" + "a" * 50_000, "//etc/passwd", "/..;/etc/passwd",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.processes
def test_no_path_of_the_api_leads_to_files(served: Served) -> None:
    for path in TRAVERSALS:
        answer = served.get(path, headers=served.authorized())
        assert "root:" not in answer.text, path
        assert answer.status_code in (200, 400, 404, 414), path
        assert "Traceback" not in answer.text
    assert served.get("/-/healthy").status_code == 200
    for path in ("/live", "/whole", "/api/status", "/api/incidents"):
        assert served.get(path).status_code == 401


class Executes:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trap}",)


def test_a_flight_recorders_dump_executes_no_code(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [Executes(trap)]}))
    with pytest.raises(ConfigError, match="it would import"):
        remains([tmp_path])
    assert not trap.exists()


def bomb(path: Path, size: int, line: bytes = b"") -> Path:
    """Write a gzipped file of one line that is a thousand times as long as the file."""
    with gzip.open(path, "wb") as file:
        file.write(line)
        for _ in range(size >> 20):
            file.write(b" " * (1 << 20))
    return path


def test_a_log_that_unpacks_to_one_endless_line_is_refused(tmp_path: Path) -> None:
    path = bomb(tmp_path / "log.jsonl.gz", 2 * text.LONGEST_LINE)
    assert path.stat().st_size < text.LONGEST_LINE / 100
    with pytest.raises(LogError, match="line 1 is longer than 16 MiB"):
        list(text.lines(path))


def test_a_dump_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.toolkit.postmortem.files.LARGEST", 1 << 20)  # else the test itself unpacks 256 MiB
    with pytest.raises(ConfigError, match="over 1 MiB"):
        remains([bomb(tmp_path / "rank_0.log.gz", 8 << 20)])


def test_a_dump_whose_packed_bytes_are_damaged_is_a_sentence(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(json.dumps(list(range(5000))).encode()))
    packed[len(packed) // 2 :: 50] = bytes(len(packed[len(packed) // 2 :: 50]))
    (tmp_path / "rank_0.json.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"rank_0\.json\.gz: cannot be read \("):
        remains([tmp_path / "rank_0.json.gz"])


NESTED = "[" * 500_000


@pytest.mark.parametrize(
    "content", [NESTED, '{"a":' * 200_000, json.dumps({"x": "y" * 5_000_000}), "1" * 5_000_000, '{"n_layer": 1e999}'],
    ids=["lists", "objects", "5 MB", "a number of 5 MB", "infinity"],
)  # fmt: skip
def test_json_that_is_huge_is_a_sentence(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        configfile.read(path)
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 0, "loss": 1.0}\n' + content + "\n")
    assert len(jsonl.read(log)) >= 1  # the good lines are read
