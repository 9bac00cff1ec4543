"""A run from its history, for the page: what a daemon lends to HTTP (`sentinel.web.http.Backend`), without a daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel._version import __version__
from sentinel.errors import ConfigError
from sentinel.report import live_page
from sentinel.report.chart import STYLE
from sentinel.report.content import Report, report
from sentinel.store import History

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class StoredRun:
    """The run of one history file, which is read for each request. Raises ConfigError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with History(path) as history:
            self.name, self.run_id = history.run, history.run_id

    def unhealthy(self) -> str:
        return ""

    def unready(self) -> str:
        return ""

    def reload(self) -> tuple[str, ...]:
        return (f"{self.name} has ended: no rule judges it any more",)

    def view(self, what: str) -> Any:
        content = self._read()
        if what == "incidents":
            return list(content.incidents)
        return {"version": __version__, "pid": os.getpid(), "runs": [self._status(content)]}

    def style(self) -> str:
        return STYLE

    def live(self, run_id: str) -> Callable[[], str]:
        return self._make_fragment

    def whole(self, run_id: str) -> Callable[[], str]:
        return lambda: live_page.whole(self._path, over=True)

    def families(self) -> Iterator[Metric]:
        return iter(())

    def _make_fragment(self) -> str:
        try:
            content = self._read()
        except ConfigError as error:
            return live_page.trouble(error)
        return live_page.fragment(content, self._status(content), [])

    def _read(self) -> Report:
        with History(self._path) as history:
            return report(history, over=True)

    def _status(self, content: Report) -> dict[str, Any]:
        """What is kept of a daemon's `status` of a run; nobody is connected."""
        values = {line.name: line.values[-1] for panel in content.panels for line in panel.lines}
        return {
            "run": self.name,
            "run_id": self.run_id,
            "attempt": content.attempts - 1,
            "step": content.last,
            "judged_as": content.facts.get("judged_as", ""),
            "values": values,
            "ranks": [],
            "rules": [],
            "open_incidents": 0,
            "incidents": len(content.incidents),
            "rollback": {"armed": False},
            "history": str(self._path),
        }
