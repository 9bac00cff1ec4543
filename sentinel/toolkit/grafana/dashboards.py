"""The dashboards, in the order in which a user sees them."""

from __future__ import annotations

import json
from typing import Any

from sentinel.toolkit.grafana import itself, layers, overview, ranks

DASHBOARDS = (overview.DASHBOARD, layers.DASHBOARD, ranks.DASHBOARD, itself.DASHBOARD)


def files() -> dict[str, str]:
    """Return the text of each dashboard by file name, for provisioning."""
    return {f"{dashboard.uid}.json": text(dashboard.json()) for dashboard in DASHBOARDS}


def text(content: dict[str, Any]) -> str:
    """Return a dashboard as JSON text, as in its file."""
    return json.dumps(content, indent=2) + "\n"
