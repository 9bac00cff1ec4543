"""Uploads a data source, a folder, the dashboards and annotations of incidents to a Grafana server.

What is there already and has not changed is left alone: a second push writes nothing.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from sentinel.text import in_words
from sentinel.toolkit.grafana.client import Grafana
from sentinel.toolkit.grafana.dashboards import DASHBOARDS
from sentinel.toolkit.grafana.panels import TAG, Dashboard

SOURCE_UID, SOURCE_NAME = "sentinel-prometheus", "Sentinel's Prometheus"
FOLDER_UID, FOLDER_TITLE = "sentinel", "Sentinel"
ANNOTATIONS_LIMIT = 5000
TEXT_LIMIT = 2000
"""Most characters of an annotation: it is shown in a box beside the line."""
THEIRS = ("id", "version", "iteration")
"""Keys of a dashboard that the server sets."""

Done = Literal["created", "updated", "unchanged"]


class Pushed(msgspec.Struct, frozen=True):
    """What was done, or would be done, with one thing."""

    what: str
    name: str
    done: Done


def push(
    grafana: Grafana, incidents: Iterable[dict[str, Any]], *, prometheus: str = "", dry_run: bool = False
) -> Iterator[Pushed]:
    """Push everything, one thing after the other.

    `prometheus`: the address at which Grafana reaches it; empty: the data source is left alone. Raises ConfigError at
    the first thing that the server refuses.
    """
    grafana.version()
    put = _nothing if dry_run else grafana.put
    if prometheus:
        yield _data_source(grafana, put, prometheus)
    yield _folder(grafana, put)
    for dashboard in DASHBOARDS:
        yield _dashboard(grafana, put, dashboard)
    yield from _annotations(grafana, put, list(incidents))


Put = Callable[[str, str, dict[str, Any], str], None]


def _nothing(method: str, path: str, body: dict[str, Any], what: str) -> None:
    """Write nothing, in a dry run."""


def _data_source(grafana: Grafana, put: Put, url: str) -> Pushed:
    what = f"data source {SOURCE_NAME}"
    wanted: dict[str, Any] = {
        "uid": SOURCE_UID, "name": SOURCE_NAME, "type": "prometheus", "access": "proxy", "url": url,
        "jsonData": {"httpMethod": "POST", "timeInterval": "15s"},
    }  # fmt: skip
    there = grafana.find(f"/api/datasources/uid/{SOURCE_UID}", what)
    if there is None:
        put("POST", "/api/datasources", wanted, what)
        return Pushed("data source", SOURCE_NAME, "created")
    if all(there.get(key) == value for key, value in wanted.items()):
        return Pushed("data source", SOURCE_NAME, "unchanged")
    put("PUT", f"/api/datasources/uid/{SOURCE_UID}", wanted, what)
    return Pushed("data source", SOURCE_NAME, "updated")


def _folder(grafana: Grafana, put: Put) -> Pushed:
    what = f"folder {FOLDER_TITLE}"
    if grafana.find(f"/api/folders/{FOLDER_UID}", what) is not None:
        return Pushed("folder", FOLDER_TITLE, "unchanged")
    put("POST", "/api/folders", {"uid": FOLDER_UID, "title": FOLDER_TITLE}, what)
    return Pushed("folder", FOLDER_TITLE, "created")


def _dashboard(grafana: Grafana, put: Put, dashboard: Dashboard) -> Pushed:
    what, content = f"dashboard {dashboard.title}", dashboard.json()
    there = grafana.find(f"/api/dashboards/uid/{dashboard.uid}", what)
    theirs = {} if there is None else there["dashboard"]
    if there is not None:
        same = {key: value for key, value in theirs.items() if key not in THEIRS} == content
        if same and there.get("meta", {}).get("folderUid") == FOLDER_UID:
            return Pushed("dashboard", dashboard.title, "unchanged")
        content["version"] = theirs.get("version", 0)  # status 412 if another user saves it between our two calls
    body = {
        "dashboard": {"id": theirs.get("id"), **content}, "folderUid": FOLDER_UID, "message": "sentinel grafana push",
        "overwrite": False,
    }  # fmt: skip
    put("POST", "/api/dashboards/db", body, what)
    return Pushed("dashboard", dashboard.title, "created" if there is None else "updated")


def _annotations(grafana: Grafana, put: Put, incidents: Sequence[dict[str, Any]]) -> Iterator[Pushed]:
    there: dict[str, dict[str, Any]] = {}
    for run in dict.fromkeys(str(incident["run_id"]) for incident in incidents):
        query = f"tags={TAG}&tags={quote('run:' + run)}&limit={ANNOTATIONS_LIMIT}&type=annotation"
        for annotation in grafana.list_all(f"/api/annotations?{query}", f"annotations of run {run}"):
            there |= {tag: annotation for tag in annotation.get("tags", ()) if tag.startswith("incident:")}
    for incident in incidents:
        wanted, name = _annotation(incident), f"{incident['alert']} {incident['id']} of {incident['run']}"
        known = there.get(wanted["tags"][-1])
        if known is None:
            put("POST", "/api/annotations", wanted, f"annotation {name}")
            yield Pushed("annotation", name, "created")
        elif any(known.get(key) != wanted[key] for key in ("time", "timeEnd", "text")):
            put("PATCH", f"/api/annotations/{known['id']}", wanted, f"annotation {name}")
            yield Pushed("annotation", name, "updated")
        else:
            yield Pushed("annotation", name, "unchanged")


def _annotation(incident: dict[str, Any]) -> dict[str, Any]:
    """Return an incident as an annotation: a region from when it fired to its end. The last tag identifies it."""
    began, ended = incident["time"], incident.get("resolved_time") or incident["time"]
    lines = [f"{incident['alert']} ({incident['severity']}, {in_words(incident['state'])}): {incident['summary']}"]
    diagnosis = incident.get("diagnosis") or {}
    lines += [f"Cause: {diagnosis['cause']}"] if diagnosis.get("cause") else []
    lines += [f"To do: {diagnosis['remedy']}"] if diagnosis.get("remedy") else []
    lines += [f"Done: {done}" for done in incident.get("done", ())]
    run = str(incident["run_id"])
    return {
        "time": int(began * 1000), "timeEnd": int(max(began, ended) * 1000),
        "text": html.escape("\n".join(lines)[:TEXT_LIMIT]),
        "tags": [TAG, f"run:{run}", f"alert:{incident['alert']}", f"severity:{incident['severity']}",
                 f"incident:{run}:{incident['id']}"],
    }  # fmt: skip
