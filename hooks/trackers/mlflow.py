"""MLflow: writes into the run that is active on the training thread. Each metric has its own steps there."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from sentinel.hooks.trackers import NAMESPACE, IncidentMark, Summary

NAME = "mlflow"

BATCH = 90
"""Most marks of one write: MLflow's REST API takes 100 tags in a batch."""


class MlflowRun:
    """Writes into MLflow's run. See `Tracker`."""

    def __init__(self) -> None:
        self._run: tuple[str, str] | None = None
        """Id of the run, and where it is kept. It can be written to after its end."""

    def look(self) -> None:
        """Note the active run: `active_run` knows those of the calling thread."""
        mlflow: Any = sys.modules.get("mlflow")
        active_run = getattr(mlflow, "active_run", None)  # an import may be under way
        run = active_run() if active_run is not None else None
        if run is not None:
            self._run = run.info.run_id, mlflow.get_tracking_uri()

    @property
    def open(self) -> bool:
        """Whether the script has had a run open."""
        return self._run is not None

    def write(self, marks: Sequence[IncidentMark], summary: Summary | None) -> int:
        """Write, in one request, a metric for each mark and a tag with the last text of each alert."""
        assert self._run is not None
        mlflow: Any = sys.modules["mlflow"]
        run_id, uri = self._run
        now, marks = int(time.time() * 1000), marks[:BATCH]
        numbers = [(mark.key, mark.level, mark.step) for mark in marks]
        texts = {mark.key: mark.text for mark in marks}
        if summary is not None:
            numbers += [(key, count, summary.step) for key, count in summary.counts.items()]
            texts[f"{NAMESPACE}summary"] = summary.text
        mlflow.MlflowClient(tracking_uri=uri).log_batch(
            run_id,
            metrics=[mlflow.entities.Metric(key, value, now, step) for key, value, step in numbers],
            tags=[mlflow.entities.RunTag(key, text) for key, text in texts.items()],
            synchronous=True,
        )
        return len(marks)

    def close(self) -> None:
        """Do nothing: `look` puts nothing in place."""
