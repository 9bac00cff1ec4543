"""`sentinel grafana push` against a server that enforces the documented API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.errors import ConfigError
from sentinel.node import paths
from sentinel.store import Store
from sentinel.toolkit.grafana.dashboards import DASHBOARDS
from tests.deploy.fake_grafana import TOKEN, VIEWER, FakeGrafana, fake_grafana


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGrafana]:
    with fake_grafana() as server:
        monkeypatch.setenv("GRAFANA_URL", server.url)
        monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
        yield server


def pushed(*arguments: str) -> list[str]:
    result = invoked(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output.splitlines()


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["grafana", "push", *arguments])


def refused(*arguments: str) -> str:
    result = invoked(*arguments)
    assert isinstance(result.exception, ConfigError), result.exception
    assert TOKEN not in str(result.exception)
    assert VIEWER not in str(result.exception)
    return str(result.exception)


def incident(identity: str, **changes: Any) -> None:
    """Put a case into the history."""
    body = {
        "id": identity, "run": "train", "run_id": "t1", "alert": "LossSpike", "severity": "critical", "time": 1000.5,
        "state": "firing", "resolved_time": None, "summary": "loss <b>9</b>", "done": ["rolled back to step 400"],
        "diagnosis": {"cause": "the batch of step 456", "remedy": "skip it"}, **changes,
    }  # fmt: skip
    store = Store(paths.state_directory() / "runs" / "t1.sqlite", run="train", run_id="t1")
    store.records.put_incident(identity, 456, body)
    store.close()


def test_everything_is_created_once_and_unchanged_at_a_second_push(grafana: FakeGrafana) -> None:
    incident("0.1")
    first = pushed("--prometheus", "http://prometheus:9090")
    assert all(line.endswith(": created") for line in first)
    assert len(first) == 1 + 1 + len(DASHBOARDS) + 1
    assert grafana.sources["sentinel-prometheus"]["url"] == "http://prometheus:9090"
    assert grafana.folders["sentinel"]["title"] == "Sentinel"
    assert set(grafana.in_folder.values()) == {"sentinel"}
    assert grafana.dashboards.keys() == {dashboard.uid for dashboard in DASHBOARDS}
    (note,) = grafana.annotations
    assert (note["time"], note["timeEnd"]) == (1000500, 1000500)
    assert "loss &lt;b&gt;9&lt;/b&gt;" in note["text"]
    assert "To do: skip it" in note["text"]
    assert {"sentinel", "run:t1", "incident:t1:0.1"} <= set(note["tags"])
    grafana.writes.clear()
    assert all(line.endswith(": unchanged") for line in pushed("--prometheus", "http://prometheus:9090"))
    assert grafana.writes == []


def test_what_differs_is_written_again(grafana: FakeGrafana) -> None:
    incident("0.1")
    pushed("--prometheus", "http://old:9090")
    grafana.writes.clear()
    grafana.dashboards["sentinel-layers"]["title"] = "Mine"
    incident("0.1", state="resolved", resolved_time=2000.0)
    incident("0.2")
    lines = pushed("--prometheus", "http://new:9090")
    assert [line for line in lines if not line.endswith("unchanged")] == [
        "data source  Sentinel's Prometheus: updated",
        "dashboard    Sentinel / Layers: updated",
        "annotation   LossSpike 0.1 of train: updated",
        "annotation   LossSpike 0.2 of train: created",
    ]
    assert grafana.dashboards["sentinel-layers"]["title"] == "Sentinel / Layers"
    assert grafana.annotations[0]["timeEnd"] == 2000000
    assert len(grafana.writes) == 4


def test_a_dry_run_writes_nothing(grafana: FakeGrafana) -> None:
    incident("0.1")
    lines = pushed("--dry-run", "--prometheus", "http://prometheus:9090")
    assert all(line.endswith(": would be created") for line in lines)
    assert (grafana.writes, grafana.dashboards, grafana.annotations) == ([], {}, [])
    rows = json.loads(invoked("--dry-run", "--json", "--run", "other").output)
    assert [row["what"] for row in rows] == ["folder"] + ["dashboard"] * len(DASHBOARDS)


def test_without_a_prometheus_no_data_source_is_touched(grafana: FakeGrafana) -> None:
    pushed()
    assert grafana.sources == {}


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("glsa_wrong_0123456789", "the token is wrong or has expired"),
        ("nonsense", "the token is wrong or has expired"),
        (VIEWER, "the token may not write folder Sentinel"),
        ("", "GRAFANA_TOKEN is not set"),
        ("two words", "has characters that no token has"),
    ],
)
def test_a_bad_token_is_refused(grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, token: str, said: str) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", token)
    assert said in refused()
    assert grafana.dashboards == {}


def test_a_token_is_read_from_a_file(grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    pushed("--token-file", str(tmp_path / "token"))
    assert grafana.folders
    assert "/none: cannot be read" in refused("--token-file", str(tmp_path / "none"))


def test_an_address_without_a_grafana_is_refused(grafana: FakeGrafana) -> None:
    assert "no Grafana answers there" in refused("--url", "http://127.0.0.1:9")
    assert "no Grafana answers there" in refused("--url", "http://no-such-host.invalid")
    assert "is no Grafana" in refused("--url", f"{grafana.url}/deeper")
    assert "expected http://host:3000" in refused("--url", "grafana:3000")
    said = refused("--url", "http://admin:hunter2@grafana:3000")
    assert "hunter2" not in said


def test_a_grafana_that_is_too_old_is_refused(grafana: FakeGrafana) -> None:
    grafana.version = "9.5.21"
    assert "Grafana 9.5.21 is too old for these dashboards; 10.0 or newer" in refused()
    grafana.version = ""  # Grafana may be configured to hide its version
    pushed()


def test_a_dashboard_that_another_user_saved_meanwhile_is_not_overwritten(grafana: FakeGrafana) -> None:
    pushed()
    grafana.dashboards["sentinel-ranks"]["title"] = "Mine"
    grafana.saved_between.add("sentinel-ranks")
    assert "dashboard Sentinel / Ranks and GPUs was saved by another user meanwhile" in refused()


def test_a_provisioned_dashboard_is_left_alone(grafana: FakeGrafana) -> None:
    grafana.provisioned.add("sentinel-overview")
    assert "comes from files on that server" in refused()


def test_a_taken_name_of_a_data_source_is_reported(grafana: FakeGrafana) -> None:
    grafana.sources["other"] = {"uid": "other", "name": "Sentinel's Prometheus"}
    assert "was not taken: 409 data source with the same name already exists" in refused(
        "--prometheus", "http://p:9090"
    )


def test_dashboards_are_written_into_files(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["grafana", "write", str(tmp_path / "d")])
    assert result.output.splitlines() == [str(tmp_path / "d" / f"{dashboard.uid}.json") for dashboard in DASHBOARDS]
    assert all(json.loads(path.read_text())["panels"] for path in (tmp_path / "d").iterdir())
