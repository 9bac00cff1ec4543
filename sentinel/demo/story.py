"""The words and colours of the demos, which the terminal, the picture and the page share."""

from __future__ import annotations

import math
from typing import Literal

from sentinel.demo.record import SAVED_NATS, SMOOTH_STEPS, DemoRecord, LossCurve
from sentinel.demo.shard import Damage
from sentinel.text import format_count

State = Literal[
    "starting", "training", "bad batches", "wrecked", "NaN", "rolled back", "recovered",  # of runs that are saved
    "faulty", "alert", "stuck", "ended", "done",  # of twins
    "started again",  # of nodes
]  # fmt: skip

WATCHED, ALONE = "with Sentinel", "without Sentinel"
WATCHED_COLOUR, ALONE_COLOUR = "#0072B2", "#D55E00"
"""Blue and vermillion of Okabe and Ito's set, which colour-blind eyes can distinguish (jfly.uni-koeln.de/color)."""
LOSS_LABEL = "loss (nats per byte)"
STEP_LABEL = "step (attempted optimizer steps)"


def title(record: DemoRecord) -> str:
    """Return the outcome in one sentence."""
    ending = "is NaN" if math.isnan(record.alone.level()) else "never came back"
    return f"Same script, same seed, same bad data: one run was rolled back, the other {ending}"


def setting(record: DemoRecord) -> str:
    """Return what was trained on which data, and what was wrong with them."""
    return (
        f"A small GPT on the bytes of Python {record.python}'s standard library, seed {record.seed}. "
        f"Batches {record.damage.first} to {record.damage.last} are {record.damage.description}."
    )


def verdict(record: DemoRecord) -> str:
    """Return what Sentinel achieved, in numbers. Needs an alert and a rollback."""
    watched, alone = record.watched.level(), record.alone.level()
    before = record.watched.level(record.damage.first)
    rollback, alert = record.rollback, record.alert
    assert rollback is not None
    assert alert is not None
    late = alert.step - record.damage.first
    sign = alert.signs[0] if alert.signs else f"step {alert.first_step}"
    when = f"{format_count(late, 'step')} after" if late else "at"
    end = "is NaN and stays so" if math.isnan(alone) else f"ends at {alone:.2f}"
    return (
        f"{alert.alert} fired {when} the first bad batch: first sign {sign}, "
        f"most in layers {', '.join(alert.layers[:3]) or 'not known'}. The run gave up {rollback.lost_steps} steps; "
        f"its loss was {before:.2f} before and is {watched:.2f} at the end. Without Sentinel it {end}."
    )


def number(value: float) -> str:
    """Return a loss with two decimals, or NaN."""
    return f"{value:.2f}" if math.isfinite(value) else "NaN"


def loss(curve: LossCurve) -> str:
    """Return the present loss, in a fixed width."""
    return f"loss {number(curve.losses[-1]):>5}" if curve.steps else "loss     -"


def state(curve: LossCurve, damage: Damage) -> State:
    """Return the present state of a run."""
    if not curve.steps:
        return "starting"
    step, loss = curve.steps[-1], curve.losses[-1]
    if not math.isfinite(loss):
        return "NaN"
    if step < damage.first:
        return "training"
    if curve.rollbacks and step < curve.rollbacks[-1].at + SMOOTH_STEPS:
        return "rolled back"
    if not curve.rollbacks and step <= damage.last:
        return "bad batches"
    lost = curve.level() - curve.level(damage.first) > SAVED_NATS
    return "wrecked" if lost else "recovered" if curve.rollbacks else "training"


def comparison(record: DemoRecord) -> list[tuple[str, str, str]]:
    """Return the rows of the final table: what is compared, with Sentinel, without."""
    first, stop = record.damage.first, record.damage.last + 1
    curves = (record.watched, record.alone)

    def row(name: str, *cells: str) -> tuple[str, str, str]:
        return name, cells[0], cells[1]

    return [
        row(f"loss before the fault (step {first - 1})", *(number(curve.level(first)) for curve in curves)),
        row("worst loss at the fault", *(number(curve.worst(first, stop)) for curve in curves)),
        row(f"loss at the end (step {record.steps - 1})", *(number(curve.level()) for curve in curves)),
        row("steps given up by rollback", *(str(_count_lost_steps(curve)) for curve in curves)),
        row("bad batches trained on", *(str(curve.count_damaged(record.damage)) for curve in curves)),
        row("same as the other, to the bit", *([_until(record.parted)] * 2)),
        row("time of training", *(f"{curve.seconds:.0f} s" for curve in curves)),
    ]


def _until(step: int | None) -> str:
    return "throughout" if step is None else "nowhere" if step == 0 else f"to step {step - 1}"


def _count_lost_steps(curve: LossCurve) -> int:
    return sum(rollback.lost_steps for rollback in curve.rollbacks)
