"""The words for a fault and its healthy twin, which the terminal, the picture and the page share."""

from __future__ import annotations

from sentinel.demo.record import LossCurve
from sentinel.demo.story import number
from sentinel.demo.twins import KINDS, Fault, Twins


def title(twins: Twins) -> str:
    """Return the outcome in one sentence."""
    return {
        "scaler": "The loss says nothing: one of these runs has stopped learning",
        "leak": "The loss is the same: one of these runs will be out of memory",
        "hang": "No error, no exit: one of these runs never goes on",
    }[twins.fault]


def setting(fault: Fault, seed: int, steps: int) -> str:
    """Return what is trained, and what is wrong in one of the two runs."""
    kind = KINDS[fault]
    what = kind.what.format(first=round(steps * kind.begins))
    return f"A small GPT on the bytes of Python's standard library, seed {seed}, twice side by side. {what}"


def verdict(twins: Twins) -> str:
    """Return what Sentinel reported, and when. Needs an alert."""
    alert = twins.alert
    assert alert is not None
    return (
        f"{alert.alert} fired {when(twins)}, {_late(twins)} after the fault began: {alert.cause}. "
        f"To do: {alert.remedy.rstrip('.')}. Sentinel said nothing of the twin."
    )


def when(twins: Twins) -> str:
    """Return where on the x axis the alert is, in words."""
    assert twins.alert is not None
    assert twins.alert_at is not None
    return f"at step {twins.alert.step}" if twins.kind.ends else f"after {twins.alert_at:.0f} s"


def _late(twins: Twins) -> str:
    assert twins.alert_at is not None
    late = twins.alert_at - (twins.begins_at or 0.0)
    return f"{late:.0f} {'steps' if twins.kind.ends else 's'}"


def comparison(twins: Twins) -> list[tuple[str, str, str]]:
    """Return the rows of the table: what is compared, with the fault, healthy twin."""
    curves = twins.faulty.curve, twins.healthy.curve
    early = max(twins.first - 1, 0)

    def row(name: str, *cells: str) -> tuple[str, str, str]:
        return name, cells[0], cells[1]

    value = twins.kind.value
    told = [
        row(f"{value} at step {early}", *(_value(twins, curve, early) for curve in curves)),
        row(f"{value} at the end", *(_value(twins, curve, -1) for curve in curves)),
    ]
    return [
        *(told if twins.kind.ends else []),
        row("loss at the end", *(number(curve.level()) for curve in curves)),
        row("steps done", *(str(len(curve.steps)) for curve in curves)),
        row("alerts", *(", ".join(a.alert for a in side.alerts) or "none" for side in (twins.faulty, twins.healthy))),
        row("time of training", *(f"{curve.seconds:.0f} s" for curve in curves)),
    ]


def _value(twins: Twins, curve: LossCurve, index: int) -> str:
    return twins.kind.format_value(curve.values[index]) if curve.values else "-"
