"""Plots the curves of a demo, for its picture and its page."""

from __future__ import annotations

from sentinel.demo import jobstory, story, twinstory
from sentinel.demo.jobrecord import JobRecord, count_kept_steps
from sentinel.demo.record import SMOOTH_STEPS, DemoRecord, LossCurve
from sentinel.demo.twins import Twins
from sentinel.report.chart import Band, Drawn, Mark, Plot
from sentinel.report.content import ChartLine

_WATCHED, _ALONE = 0, 1
"""Styles of the two runs: `--s0` and `--s1` in the report's CSS."""
_BEFORE, _AFTER = 14, 26
"""Steps before and after the first bad batch that the near view shows."""


def plot_rescue(record: DemoRecord) -> list[Plot]:
    """Plot both losses over the whole run and around the incident, and the watched run's gradient norm."""
    damage, alert, rollback = record.damage, record.alert, record.rollback
    assert alert is not None
    assert rollback is not None
    bands = [Band(damage.first - 0.5, damage.last + 0.5, f"bad batches: {damage.description}")]
    marks = [
        Mark(alert.step, alert.alert, "critical", linked=False),
        Mark(rollback.at, "rollback", "done", linked=False),
    ]
    words = f"rolled back at step {rollback.at}, to the state of step {rollback.to}"
    near_marks = [
        Mark(alert.step, f"{alert.alert}, step {alert.step}", "critical", linked=False),
        Mark(rollback.at, words, "done", linked=False),
    ]
    sides = [(record.alone, story.ALONE, _ALONE), (record.watched, story.WATCHED, _WATCHED)]
    whole = [
        drawn
        for curve, name, style in sides
        for drawn in (
            Drawn(ChartLine(name, curve.steps, curve.losses), "", style, "faint"),
            Drawn(ChartLine(name, curve.steps, curve.smooth_losses()), name, style, "bold"),
        )
    ]
    span = (damage.first - _BEFORE, damage.first + _AFTER)
    near = [Drawn(_cut(name, curve, span), name, style, "bold") for curve, name, style in sides]
    norm = ChartLine("grad_norm", record.grad_norm.steps, record.grad_norm.values)
    loss = f"{story.LOSS_LABEL}, and its median of {SMOOTH_STEPS} steps"
    return [
        Plot(loss, "1", whole, (0, record.steps), marks, bands, story.STEP_LABEL),
        Plot("loss, near the incident", "1", near, span, near_marks, bands, story.STEP_LABEL),
        Plot(f"gradient norm (L2), {story.WATCHED}", "1", [Drawn(norm, "", _WATCHED)], (0, record.steps), marks, bands),
    ]


def plot_twins(twins: Twins) -> list[Plot]:
    """Plot the series in which the runs differ, above the loss, in which they do not."""
    marks, x_name, span = [], twins.x_label, (0.0, twins.span)
    if twins.begins_at is not None:
        marks.append(Mark(twins.begins_at, "the fault begins", "info", linked=False))
    if twins.alert is not None and twins.alert_at is not None:
        words = f"{twins.alert.alert}, {twinstory.when(twins)}"
        marks.append(Mark(twins.alert_at, words, twins.alert.severity, linked=False))
    value, losses = [], []
    for side, style in ((twins.faulty, _ALONE), (twins.healthy, _WATCHED)):
        x, y = twins.telling(side)
        value.append(Drawn(ChartLine(side.name, x, y), side.name, style, "bold"))
        smooth = side.curve.smooth_losses()
        losses.append(Drawn(ChartLine(side.name, twins.places(side), smooth), side.name, style, "bold"))
    return [
        Plot(twins.kind.value, "1", value, span, marks, x_name=x_name),
        Plot(f"{story.LOSS_LABEL}, median of {SMOOTH_STEPS} steps", "1", losses, span, marks, x_name=x_name),
    ]


def plot_job(job: JobRecord) -> list[Plot]:
    """Plot the progress of each node, and its loss, over time: they stop together, and go on together."""
    page, back = job.page, job.back_at
    assert page is not None
    marks = [Mark(job.fault_at, "the fault", "info", linked=False)]
    marks.append(Mark(page.time - job.began_at, f"{page.alert}: one page", page.severity, linked=False))
    if back is not None:
        marks.append(Mark(back, f"all nodes {jobstory.word_return(job)}", "done", linked=False))
    steps, losses = [], []
    for node, curve in enumerate(job.curves):
        name, x = f"node {node}", [moment - job.began_at for moment in curve.times]
        steps.append(Drawn(ChartLine(name, x, count_kept_steps(curve)), name, node, "bold"))
        losses.append(Drawn(ChartLine(name, x, curve.losses), "", node, "faint"))
        losses.append(Drawn(ChartLine(name, x, curve.smooth_losses()), name, node, "bold"))
    span, words = (0.0, job.span), "seconds since the first step"
    return [
        Plot("steps of training, less those given up", "1", steps, span, marks, x_name=words),
        Plot(f"{story.LOSS_LABEL}, and its median of {SMOOTH_STEPS} steps", "1", losses, span, marks, x_name=words),
    ]


def _cut(name: str, curve: LossCurve, span: tuple[int, int]) -> ChartLine:
    """Return the part of a loss within `span`."""
    kept = [at for at, step in enumerate(curve.steps) if span[0] <= step <= span[1]]
    return ChartLine(name, [curve.steps[at] for at in kept], [curve.losses[at] for at in kept])
