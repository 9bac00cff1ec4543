"""Panels and dashboards, and the JSON that Grafana 10 to 13 reads (the classic model, schema version 39).

The model: grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model. A panel has no place
of its own: panels are laid out from left to right, 24 columns wide, in the order of the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

SCHEMA_VERSION = 39
COLUMNS = 24
HEIGHT = 8
TAG = "sentinel"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OWN_SOURCE = {"type": "grafana", "uid": "-- Grafana --"}

Kind = Literal["timeseries", "stat", "table", "heatmap", "status-history", "bargauge", "row"]
Calm, Bad = "green", "red"


class PanelQuery(msgspec.Struct, frozen=True):
    """A query that gives one or several lines of a panel."""

    expr: str
    """PromQL, with Grafana's variables."""
    legend: str = ""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """A panel of a dashboard."""

    title: str
    kind: Kind = "timeseries"
    queries: tuple[PanelQuery, ...] = ()
    unit: str = "short"
    """Grafana's name of the unit: `s`, `bytes`, `percentunit`, `short`, ..."""
    width: int = 8
    height: int = HEIGHT
    description: str = ""
    logarithmic: bool = False
    stacked: bool = False
    least: float | None = None
    """Least value of the axis."""
    limits: tuple[tuple[str, float | None], ...] = ()
    """Colours, and the values from which on they apply; the first has none."""
    hidden: tuple[str, ...] = ()
    """Labels that a table does not show."""


class Dashboard(msgspec.Struct, frozen=True, kw_only=True):
    """A dashboard and its panels."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]
    by_run: bool = True
    """Whether it shows one run, which the user chooses."""

    def json(self) -> dict[str, Any]:
        """Return the dashboard in Grafana's model."""
        return {
            "uid": self.uid, "title": self.title, "description": self.description, "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION, "editable": True, "graphTooltip": 1, "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
            "templating": {"list": list(_variables(self.by_run))},
            "annotations": {"list": list(_annotations(self.by_run))},
            "links": [{
                "title": "Sentinel", "type": "dashboards", "tags": [TAG], "asDropdown": False, "includeVars": True,
                "keepTime": True, "targetBlank": False, "icon": "external link", "tooltip": "", "url": "",
            }],
            "panels": list(_place_panels(self.panels)),
        }  # fmt: skip


def make_queries(*pairs: tuple[str, str]) -> tuple[PanelQuery, ...]:
    """Return queries from pairs of (expression, legend)."""
    return tuple(PanelQuery(*pair) for pair in pairs)


def row(title: str) -> Panel:
    """Return a headline over the panels that follow."""
    return Panel(title=title, kind="row", width=COLUMNS, height=1)


def number(
    title: str,
    expr: str,
    *,
    unit: str = "short",
    description: str = "",
    limits: tuple[tuple[str, float | None], ...] = (),
) -> Panel:
    """Return a panel that shows the newest value as a number, in front of its past."""
    return Panel(
        title=title,
        kind="stat",
        queries=make_queries((expr, "")),
        unit=unit,
        width=4,
        height=4,
        description=description,
        limits=limits,
    )  # fmt: skip


def alarming(*, above: float) -> tuple[tuple[str, float | None], ...]:
    """Return limits: green, and red from a value on."""
    return ((Calm, None), (Bad, above))


def _variables(by_run: bool) -> Iterator[dict[str, Any]]:
    yield {
        "name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1,
        "hide": 0, "includeAll": False, "multi": False, "regex": "", "current": {}, "options": [],
    }  # fmt: skip
    if by_run:
        query = "label_values(sentinel_run_info, run)"
        yield {
            "name": "run", "label": "Run", "type": "query", "datasource": SOURCE, "definition": query,
            "query": {"query": query, "refId": "run"}, "refresh": 2, "sort": 2, "hide": 0, "includeAll": False,
            "multi": False, "regex": "", "current": {}, "options": [],
        }  # fmt: skip


def _annotations(by_run: bool) -> Iterator[dict[str, Any]]:
    yield {
        "name": "Annotations & Alerts", "type": "dashboard", "builtIn": 1, "datasource": _OWN_SOURCE, "enable": True,
        "hide": True, "iconColor": "rgba(0, 211, 255, 1)",
    }  # fmt: skip
    chosen = '{run="$run"}' if by_run else ""
    yield {
        "name": "Incidents", "datasource": SOURCE, "enable": True, "hide": False, "iconColor": "red",
        "expr": f"sentinel_incidents_firing{chosen} > 0", "step": "15s", "titleFormat": "{{alert}}",
        "textFormat": "{{severity}} in run {{run}}", "tagKeys": "severity", "useValueForTime": False,
    }  # fmt: skip
    yield {
        "name": "Incidents, pushed", "datasource": _OWN_SOURCE, "enable": True, "hide": False, "iconColor": "orange",
        "target": {"type": "tags", "tags": [TAG, *(["run:$run"] if by_run else [])], "matchAny": False, "limit": 100},
    }  # fmt: skip


def _place_panels(panels: Sequence[Panel]) -> Iterator[dict[str, Any]]:
    across = down = tallest = 0
    for identity, panel in enumerate(panels, start=1):
        if across + panel.width > COLUMNS:
            across, down, tallest = 0, down + tallest, 0
        yield _json(panel, identity, {"h": panel.height, "w": panel.width, "x": across, "y": down})
        across, tallest = across + panel.width, max(tallest, panel.height)


def _json(panel: Panel, identity: int, place: Mapping[str, int]) -> dict[str, Any]:
    if panel.kind == "row":
        return {"id": identity, "type": "row", "title": panel.title, "collapsed": False, "panels": [], "gridPos": place}
    return {
        "id": identity, "type": panel.kind, "title": panel.title, "description": panel.description, "gridPos": place,
        "datasource": SOURCE, "targets": [_target(panel, at, query) for at, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []}, "options": _options(panel),
        **({"transformations": _table_columns(panel)} if panel.kind == "table" else {}),
    }  # fmt: skip


def _target(panel: Panel, at: int, query: PanelQuery) -> dict[str, Any]:
    formats = {"table": "table", "heatmap": "heatmap"}
    newest = panel.kind in ("table", "bargauge")
    return {
        "refId": chr(ord("A") + at), "datasource": SOURCE, "expr": query.expr,
        "legendFormat": "{{le}}" if panel.kind == "heatmap" else query.legend or "__auto",
        "format": formats.get(panel.kind, "time_series"), "instant": newest, "range": not newest,
        "editorMode": "code",
    }  # fmt: skip


def _defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"color": colour, "value": value} for colour, value in panel.limits or ((Calm, None),)]
    found: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}, "mappings": []}
    if panel.least is not None:
        found["min"] = panel.least
    if panel.kind == "timeseries":
        found["color"] = {"mode": "palette-classic"}
        found["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 20 if panel.stacked else 0, "showPoints": "never",
            "spanNulls": 120_000, "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "scaleDistribution": {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"},
        }  # fmt: skip
    elif panel.kind == "status-history":
        found["color"] = {"mode": "continuous-BlYlRd"}
    else:
        found["color"] = {"mode": "thresholds"}
    return found


def _options(panel: Panel) -> dict[str, Any]:
    newest = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    match panel.kind:
        case "timeseries":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "stat":
            return {
                "reduceOptions": newest, "graphMode": "area", "colorMode": "value", "justifyMode": "auto",
                "orientation": "auto", "textMode": "auto",
            }  # fmt: skip
        case "bargauge":
            return {
                "reduceOptions": newest, "displayMode": "gradient", "orientation": "horizontal", "showUnfilled": True,
                "minVizHeight": 10, "minVizWidth": 0, "valueMode": "color",
            }  # fmt: skip
        case "heatmap":
            return {
                "calculate": False, "cellGap": 1, "showValue": "never",
                "tooltip": {"mode": "single", "yHistogram": True},
                "color": {"mode": "scheme", "scheme": "Spectral", "reverse": True, "exponent": 0.5, "steps": 64,
                          "fill": "dark-orange", "scale": "exponential"},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit}, "rowsFrame": {"layout": "auto"},
                "legend": {"show": True}, "filterValues": {"le": 1e-9}, "exemplars": {"color": "rgba(255,0,255,0.7)"},
            }  # fmt: skip
        case "status-history":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []}
            tooltip = {"mode": "single", "sort": "none"}
            return {"showValue": "never", "rowHeight": 0.9, "colWidth": 0.9, "legend": legend, "tooltip": tooltip}
        case _:
            return {"showHeader": True, "cellHeight": "sm"}


def _table_columns(panel: Panel) -> list[dict[str, Any]]:
    """Return the transformation that makes labels columns, without those of the scrape."""
    excluded = dict.fromkeys(("Time", "__name__", "instance", "job", *panel.hidden), True)
    return [{"id": "organize", "options": {"excludeByName": excluded, "indexByName": {}, "renameByName": {}}}]
