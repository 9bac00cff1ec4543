"""No secret of a settings file is in a log, an error, an answer, a metric, a database or any other file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sentinel import wire
from sentinel.node import paths
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.daemon.test_daemon import sentinel
from tests.notify.vendors import Reply, Vendor, serving

pytestmark = pytest.mark.processes

MARK = "s3cr3t"
"""Part of each secret."""
TOKEN = f"xoxb-{MARK}-0123456789abcdef"
KEY = f"{MARK}0123456789abcdef0123456789"

SETTINGS = """
[grouping]
wait = "0s"
[heartbeat]
url_env = "BEAT"
interval = "200ms"
[[receivers]]
name = "hook"
type = "slack"
url_env = "SLACK"
[[receivers]]
name = "bot"
type = "slack"
token_file = "token"
url = "{url}/api"
channel = "#training"
[[receivers]]
name = "pager"
type = "pagerduty"
token_env = "KEY"
url = "{url}"
[[receivers]]
name = "am"
type = "alertmanager"
url_env = "AM"
token_env = "KEY"
[[receivers]]
name = "ops"
type = "webhook"
url_file = "ops.url"
token_env = "HEADER"
[[receivers]]
name = "refused"
type = "webhook"
url_env = "REFUSED"
[[receivers]]
name = "tls"
type = "webhook"
url_env = "TLS"
[[receivers]]
name = "nowhere"
type = "webhook"
url_env = "NOWHERE"
[[receivers]]
name = "nonsense"
type = "webhook"
url_env = "NONSENSE"
[[receivers]]
name = "otel"
type = "opentelemetry"
url_env = "AM"
token_env = "HEADER"
[otlp]
url_env = "AM"
interval = "200ms"
[[receivers]]
name = "rest"
type = "apprise"
url_env = "REST"
"""


class Echo(Vendor):
    """Answers in every bad way, in turn, with all that it got: code that repeats an answer reveals its secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def answer(self, path: str, headers: dict[str, str], body: bytes) -> Reply:
        self.seen += 1
        said = f"{path} {headers} {TOKEN} {KEY}".encode() + body
        error = json.dumps({"ok": False, "error": f"invalid {TOKEN}", "errors": [KEY]}).encode()
        bad: list[Reply] = [
            (200, {}, error), (500, {}, said), (429, {"Retry-After": "1"}, said), (400, {}, error),
            (302, {"Location": f"http://{MARK}.invalid/{path}"}, said), (200, {"Content-Length": "9"}, said),
            (401, {}, said),
        ]  # fmt: skip
        return bad[self.seen % len(bad)]


@pytest.mark.slow
def test_a_secret_is_nowhere(tmp_path: Path, private_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("apprise", reason="Apprise is not installed (pip install 'training-sentinel[apprise]')")
    settings, rules, server = tmp_path / "s.toml", tmp_path / "rules.yaml", Echo()
    rules.write_text("group: mine\nrules:\n" + "".join(
        f"  - {{alert: High{number}, scope: run, expr: loss > 100, severity: critical}}\n" for number in range(9)
    ))  # fmt: skip
    with serving(server):
        plain = server.url.removeprefix("http://")
        for name, value in {
            "SLACK": f"{server.url}/services/T/B/{MARK}", "KEY": KEY, "HEADER": f"Basic {MARK}",
            "BEAT": f"{server.url}/{MARK}", "AM": f"http://user:{MARK}@{plain}", "NONSENSE": f"no url {MARK}",
            "REFUSED": f"http://127.0.0.1:1/{MARK}", "TLS": f"https://{plain}/{MARK}",
            "NOWHERE": f"http://{MARK}.invalid/{MARK}", "REST": f"json://u:{MARK}@{plain}/{MARK}",
            "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={MARK}",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        (tmp_path / "token").write_text(TOKEN)
        (tmp_path / "ops.url").write_text(f"{server.url}/{MARK}")
        settings.write_text(SETTINGS.format(url=server.url))
        options = ("--config", str(settings), "--rules", str(rules), "--stay")
        with daemon_process(*options) as (path, process), SimulatedRank(path) as rank:
            rank.hello()
            rank.steps(0, [1.0, 200.0])
            shown = all_failed()
            state = json.loads((path.parent / paths.STATE).read_text())
            token = {"Authorization": f"Bearer {state['token']}"}
            answers = [httpx2.get(state["http"] + "/metrics").text]
            answers += [
                httpx2.get(f"{state['http']}/api/{what}", headers=token).text for what in ("status", "incidents")
            ]
            rank.steps(2, [1.0])
            rank.expect(wire.Notice)
            said = [shown, *answers]
            for command in (["status"], ["incidents", "--json"], ["incidents"]):
                said.append(sentinel(*command).stdout)
            tested = sentinel("alerts", "test", "--config", str(settings))
            assert tested.returncode == 1
            said += [tested.stdout, tested.stderr]
            process.terminate()
            process.wait()
            assert process.stderr is not None
            log = process.stderr.read().decode()
    bad = tmp_path / "bad.toml"
    for wrong in (f"url = 'http://h/{KEY}'", f"token = '{KEY}'", f"url = '{KEY}'", f"severities = '{KEY}'"):
        bad.write_text(f"[[receivers]]\nname = 'a'\ntype = 'webhook'\n{wrong}\n")
        refused = sentinel("alerts", "test", "--config", str(bad))
        assert refused.returncode == 2
        said += [refused.stdout, refused.stderr]
    assert "is sent later" in log
    assert MARK not in log
    for one in said:
        assert one == "" or MARK not in one
    kept = {file: file.read_bytes() for file in private_places.rglob("*") if file.is_file()}
    assert any(file.suffix == ".sqlite" for file in kept)
    for file, content in kept.items():
        assert MARK.encode() not in content, file


def all_failed() -> str:
    """Return `sentinel status --json` once every receiver and the heartbeat have failed."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown = sentinel("status", "--json").stdout
        (run,) = json.loads(shown)
        rows: list[dict[str, Any]] = run["notifications"]
        if len(rows) == SETTINGS.count("[[receivers]]") and all(sum(row["failed"].values()) >= 1 for row in rows):
            return shown
    raise AssertionError(shown)
