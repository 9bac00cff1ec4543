"""Dashboards: Grafana's own model accepts them, and a real Prometheus has data for them."""

from __future__ import annotations

import functools
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanasDashboard

from sentinel.node import paths
from sentinel.toolkit.grafana.dashboards import DASHBOARDS
from sentinel.toolkit.grafana.panels import COLUMNS, Dashboard
from tests.daemon.simulated import daemon_process
from tests.deploy.cluster import gpu_node, served_prometheus, training
from tests.waiting import until
from tests.web.test_metrics import asked

DEPLOY = Path(__file__).parent.parent.parent / "deploy" / "grafana"
NOT_IN_THE_MODEL = re.compile(
    r"\.templating\.list\[1\]\.definition|\.annotations\.list\[1\]\.(step|titleFormat|textFormat|tagKeys|useValueForTime)"
)
"""Keys of Grafana's Prometheus plugin, which the published model leaves open (public/app/plugins/datasource/prometheus;
grafana.com/docs/grafana/latest/datasources/prometheus/annotations)."""

each = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)


@each
def test_grafanas_own_model_knows_every_key(dashboard: Dashboard) -> None:
    """Grafana 11.6's model (grafana-foundation-sdk), generated from its schema, drops keys that it does not know."""
    assert not [path for path in _lost_on_the_way(dashboard.json()) if not NOT_IN_THE_MODEL.fullmatch(path)]


@pytest.mark.parametrize("key", ["options", "fieldConfig", "gridPos"])
def test_a_key_that_grafana_does_not_know_is_found(key: str) -> None:
    content = DASHBOARDS[0].json()
    content["panels"][0][key]["colour"] = 1
    assert f".panels[0].{key}.colour" in _lost_on_the_way(content)


def _lost_on_the_way(content: dict[str, Any]) -> list[str]:
    register_default_plugins()
    back = json.loads(json.dumps(GrafanasDashboard.from_json(content), cls=JSONEncoder))

    def lost(ours: Any, theirs: Any, path: str) -> Iterator[str]:
        if isinstance(ours, dict) and isinstance(theirs, dict):
            for key, value in ours.items():
                yield from lost(value, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key}"]
        elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                yield from lost(one, other, f"{path}[{index}]")
        elif ours != theirs:
            yield path

    return list(lost(content, back, ""))


@each
def test_panels_have_their_place(dashboard: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    content = dashboard.json()
    for panel in content["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= COLUMNS
        taken |= cells
    identities = [panel["id"] for panel in content["panels"]]
    assert len(set(identities)) == len(identities)
    assert re.fullmatch(r"[a-z-]{1,40}", content["uid"])
    assert len({panel["title"] for panel in content["panels"]}) > 5


def test_dashboards_do_not_share_an_id_and_provisioning_names_their_folder() -> None:
    assert len({dashboard.uid for dashboard in DASHBOARDS}) == len({d.title for d in DASHBOARDS}) == 4
    provider = yaml.safe_load((DEPLOY / "provisioning" / "dashboards" / "sentinel.yaml").read_text())["providers"][0]
    source = yaml.safe_load((DEPLOY / "provisioning" / "datasources" / "sentinel.yaml").read_text())["datasources"][0]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/")
    assert source["type"] == "prometheus"
    assert source["jsonData"]["timeInterval"] == "15s"


# Against a real Prometheus that scraped a real daemon, whose ranks are simulated.


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the API of a Prometheus that has seen a run of four ranks, on GPUs of another node, with dcgm-exporter."""
    root = tmp_path_factory.mktemp("g")
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in (("RUNTIME", "run"), ("STATE", "state"), ("CONFIG", "c.toml")):
            patch.setenv(f"SENTINEL_{name}", str(root / folder))
        (root / "c.toml").write_text(_SETTINGS.format(root=root))
        (root / "high.yaml").write_text("group: g\nrules:\n  - {alert: High, expr: loss > 5, severity: warning}\n")
        with gpu_node() as exporter, daemon_process("--stay", "--rules", str(root / "high.yaml")) as (path, _):
            state = paths.run_directory("r1") / paths.STATE
            until(state.exists, "the state file")
            daemon = json.loads(state.read_text())["http"].removeprefix("http://")
            with training(path), served_prometheus(root, daemon, exporter) as api:
                rising = 'rate(sentinel_run_steps_total{run="r1"}[1m]) > 0 and on (run) sentinel_incidents_firing'
                until(lambda: asked(api, rising), "a run that goes on, with an incident", 60)
                failed = "sum(sum_over_time(sentinel_notifications_failed_total[1m]))"
                until(lambda: asked(api, f"{failed} > 1"), "a message that failed", 60)
                until(lambda: asked(api, "count_over_time(DCGM_FI_DEV_XID_ERRORS[1m]) > 1"), "DCGM", 60)
                yield api


_SETTINGS = """
[daemon]
http = 0
[grouping]
wait = "100ms"
interval = "200ms"
[[receivers]]
name = "nobody"
type = "webhook"
url = "http://127.0.0.1:9/hook"
timeout = "500ms"
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@each
def test_every_query_of_every_panel_has_data(prometheus: str, dashboard: Dashboard) -> None:
    content = dashboard.json()
    asked_for = [(panel["title"], target["expr"]) for panel in content["panels"] for target in panel.get("targets", ())]
    asked_for += [(note["name"], note["expr"]) for note in content["annotations"]["list"] if "expr" in note]
    assert len(asked_for) > 15
    for title, expr in asked_for:  # one scrape that is late empties them all for a moment
        until(functools.partial(asked, prometheus, expr.replace("$run", "r1")), f"{title}: {expr}")


@pytest.mark.slow
@pytest.mark.processes
def test_the_memory_of_a_host_without_a_gpu_is_shown(prometheus: str) -> None:
    ranks = next(dashboard.json() for dashboard in DASHBOARDS if dashboard.uid == "sentinel-ranks")
    (panel,) = (panel for panel in ranks["panels"] if panel["title"] == "Host memory that can be had")
    expr = panel["targets"][0]["expr"].replace("$run", "r1")
    found = until(lambda: asked(prometheus, expr), "the host that the daemon reads")
    assert [one["metric"]["hostname"] for one in found] == [socket.gethostname()]


@pytest.mark.processes
def test_the_run_is_found_by_its_variable(prometheus: str) -> None:
    answer = httpx2.get(f"{prometheus}/label/run/values", params={"match[]": "sentinel_run_info"}).json()
    assert answer["data"] == ["r1"]
