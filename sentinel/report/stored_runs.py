"""Serves the page with this user's runs from their histories: those that this process' daemon does not watch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentinel._version import __version__
from sentinel.errors import ConfigError, ProtocolError
from sentinel.node import paths
from sentinel.node.question import ask_daemon
from sentinel.report import live_page
from sentinel.report.content import Report, report
from sentinel.report.outcomes import describe_run, describe_unkept, list_going_on
from sentinel.report.run_list import run_list
from sentinel.store import History
from sentinel.store.retention import StoredHistory, list_kept

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LISTED = 200
"""Most runs in the list, the newest ones."""
PATIENCE_SECONDS = 1.0
"""Seconds to wait for the daemon of another run."""
_OF_ANOTHER = (
    "<p class='muted' data-stored>Another daemon watches this run. Its history is read every ten seconds; "
    "<code>sentinel page RUN</code> prints the address of the daemon's own page.</p>"
)


class StoredRuns:
    """The histories of this node, each read on request.

    `file`: another history, in any place. `watched`: ids of runs that this process watches.
    """

    def __init__(self, file: Path | None = None, watched: Collection[str] = ()) -> None:
        self._file, self._watched = file, watched
        self._known: dict[Path, tuple[StoredHistory, dict[str, Any]]] = {}
        """Rows of runs that have ended, as long as their files do not change."""

    def find_path(self, run_id: str) -> Path:
        """Return the path of a run's history. Raises ConfigError if there is none."""
        if self._file is not None:
            with History(self._file) as history:
                if history.run_id == run_id:
                    return self._file
        for one in list_kept():
            if one.path.name == f"{run_id}.sqlite":
                return one.path
        raise ConfigError(f"no run of the id {run_id} is watched or kept on this node")

    def make_list(self, watched: Iterable[dict[str, Any]]) -> str:
        """Return the list of runs as HTML. `watched`: status of runs known to be live; other daemons are asked."""
        live = list_going_on([*_find_live().values(), *watched])
        kept = list_kept()
        rows, damaged = list[dict[str, Any]](), list[str]()
        known = dict[Path, tuple[StoredHistory, dict[str, Any]]]()
        for one in kept[-LISTED:]:
            try:
                row = self._row(one, live)
            except ConfigError as error:
                damaged.append(str(error))
                continue
            rows.append(row)
            if row["run_id"] not in live:
                known[one.path] = one, row
        self._known = known
        listed = {row["run_id"] for row in rows}
        rows += [describe_unkept(run) for run_id, run in live.items() if run_id not in listed]
        return run_list(rows, max(0, len(kept) - LISTED), damaged)

    def _row(self, one: StoredHistory, live: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        known = self._known.get(one.path)
        if known is not None and known[0] == one and known[1]["run_id"] not in live:
            return known[1]
        with History(one.path) as history:
            run = live.get(history.run_id)
            return describe_run(history, one, history.incidents() if run else history.final_incidents(), run)

    # web.http.Backend, without a daemon

    def unhealthy(self) -> str:
        return ""

    def unready(self) -> str:
        return ""

    def reload(self) -> tuple[str, ...]:
        return ("no daemon is here: this page is served from histories",)

    def view(self, what: str) -> Any:
        if what == "incidents":
            return list(self._read(self._file).incidents) if self._file else []
        runs = [_status(self._read(self._file))] if self._file else []
        return {"version": __version__, "pid": os.getpid(), "runs": runs}

    async def render_list(self) -> str:
        return await asyncio.to_thread(self.make_list, ())

    async def render_live(self, run_id: str) -> str:
        return await asyncio.to_thread(self._make_fragment, run_id)

    async def render_whole(self, run_ids: Sequence[str], zoom: tuple[float, float] | None) -> str:
        return await asyncio.to_thread(self._make_whole, run_ids, zoom)

    def families(self) -> Iterator[Metric]:
        return iter(())

    def _make_fragment(self, run_id: str) -> str:
        try:
            path, run = self.find_path(run_id), _find_live().get(run_id)
            content = self._read(path, over=run is None)
        except ConfigError as error:
            return live_page.trouble(error)
        return (_OF_ANOTHER if run else "") + live_page.fragment(content, run or _status(content), "highest")

    def _make_whole(self, run_ids: Sequence[str], zoom: tuple[float, float] | None) -> str:
        try:
            live = {*_find_live(), *self._watched}
            reports = [self._read(self.find_path(run), over=run not in live) for run in run_ids or [""]]
        except ConfigError as error:
            return live_page.trouble(error)
        return live_page.whole(reports, zoom)

    def _read(self, path: Path, *, over: bool = True) -> Report:
        with History(path) as history:
            return report(history, over=over)


def _find_live() -> dict[str, dict[str, Any]]:
    """Return by id the status of the runs that this user's daemons watch; slow daemons are left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths.live_sockets():
        try:
            answer = ask_daemon(path, "status", timeout=PATIENCE_SECONDS)
        except (ConfigError, ProtocolError):
            continue
        found |= {run["run_id"]: run for run in answer["runs"]}
    return found


def _status(content: Report) -> dict[str, Any]:
    """Return the status of an ended run as a daemon would give it: no rank is connected."""
    values = {line.name: line.values[-1] for panel in content.panels for line in panel.lines}
    return {
        "run": content.run, "run_id": content.run_id, "step": content.reached, "values": values, "ranks": [],
        "rules": [], "rollback": {"armed": False},
    }  # fmt: skip
