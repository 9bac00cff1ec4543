"""The outcome of a demo, as the terminal, the picture and the page show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sentinel.demo import jobstory, plots, story, twinstory
from sentinel.demo.jobrecord import JobRecord
from sentinel.demo.record import DemoRecord
from sentinel.demo.twins import FAULTY, HEALTHY, Twins
from sentinel.report.chart import Plot


class DemoOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Words and curves of runs, or of a job's nodes, side by side."""

    title: str
    setting: str
    verdict: str
    columns: Sequence[tuple[str, str]]
    """Name and colour of each run or node."""
    rows: Sequence[tuple[str, ...]]
    """Rows of the table: what is compared, and the value of each."""
    plots: Sequence[Plot]
    run_id: str
    show: str = "sentinel incidents show"
    """The command that shows the whole incident."""
    versions: str
    summary: dict[str, Any]
    """What `--json` prints, without the paths of the files."""


def describe_rescue(record: DemoRecord) -> DemoOutcome:
    """Return the outcome of a run that was rolled back and of its twin that was not. Needs an alert and a rollback."""
    return DemoOutcome(
        title=story.title(record),
        setting=story.setting(record),
        verdict=story.verdict(record),
        columns=((story.WATCHED, story.WATCHED_COLOUR), (story.ALONE, story.ALONE_COLOUR)),
        rows=story.comparison(record),
        plots=plots.plot_rescue(record),
        run_id=record.run_id,
        versions=f"Python {record.python}, torch {record.torch}",
        summary=record.summary(),
    )


def describe_twins(twins: Twins) -> DemoOutcome:
    """Return the outcome of a fault and its healthy twin. Needs an alert."""
    return DemoOutcome(
        title=twinstory.title(twins),
        setting=twinstory.setting(twins.fault, twins.seed, twins.steps),
        verdict=twinstory.verdict(twins),
        columns=((FAULTY, story.ALONE_COLOUR), (HEALTHY, story.WATCHED_COLOUR)),
        rows=twinstory.comparison(twins),
        plots=plots.plot_twins(twins),
        run_id=twins.faulty.run_id,
        versions=f"Python {twins.python}, torch {twins.torch}",
        summary=twins.summary(),
    )


def describe_job(job: JobRecord) -> DemoOutcome:
    """Return the outcome of a job over several nodes. Needs a page."""
    return DemoOutcome(
        title=jobstory.title(job),
        setting=jobstory.setting(job.fault, job.nodes, job.first, job.apart),
        verdict=jobstory.verdict(job),
        columns=jobstory.name_columns(job.nodes),
        rows=jobstory.comparison(job),
        plots=plots.plot_job(job),
        run_id=job.run_id,
        show=f"SENTINEL_STATE={job.state} sentinel incidents show",
        versions=f"Python {job.python}, torch {job.torch}",
        summary=job.summary(),
    )
