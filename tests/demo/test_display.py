from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from sentinel.demo import report
from sentinel.demo.display import PlainDisplay, Row, TerminalDisplay
from sentinel.demo.outcome import describe_rescue
from sentinel.demo.record import DemoRecord, LossCurve
from sentinel.demo.rescue import Rescue
from sentinel.demo.story import loss, state


def until(curve: LossCurve, step: int) -> LossCurve:
    return LossCurve(steps=curve.steps[:step], losses=curve.losses[:step], rollbacks=curve.rollbacks)


def row(name: str, record: DemoRecord, curve: LossCurve, step: int | None = None) -> Row:
    curve = until(curve, record.steps if step is None else step)
    return Row(name, "#000000", curve, state(curve, record.damage), loss(curve))


def test_plain_lines_print_each_state_once(nan: DemoRecord) -> None:
    console = Console(file=io.StringIO(), width=80)
    lines = PlainDisplay(console, nan.steps)
    for step in range(0, nan.steps + 1, 4):
        lines.progress(row("with Sentinel", nan, nan.watched, step), row("without Sentinel", nan, nan.alone, step))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("loss   NaN  NaN") == 4, "when it turns NaN, and at steps 250, 300 and 350"
    assert "recovered" in shown
    assert "\x1b" not in shown


def test_live_lines_fit_80_columns(nan: DemoRecord) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with TerminalDisplay(console, nan.steps) as display:
        display.show_line("[sentinel] said [bold]as it is[/bold]")
        display.progress(row("with Sentinel", nan, nan.watched), row("without Sentinel", nan, nan.alone))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[bold]as it is[/bold]" in shown
    last = next(line for line in shown.splitlines() if "without Sentinel" in line)
    assert "step 400/400  loss   NaN  NaN" in last
    assert len(last.rstrip()) <= 80


def test_the_introduction_shows_the_lines_of_the_script(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    report.introduce(console, Rescue("spike", 0, 800, tmp_path))
    assert isinstance(console.file, io.StringIO)
    shown = " ".join(console.file.getvalue().split())
    assert "Batches 456 to 495 are text that was never decompressed" in shown
    assert "monitor = sentinel.attach(model, optimizer" in shown


def test_the_conclusion_has_both_columns_and_the_paths(spike: DemoRecord, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    report.conclude(console, describe_rescue(spike), {"picture": tmp_path / "demo.png"})
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "with Sentinel" in shown
    assert str(tmp_path / "demo.png") in shown
    assert "LossSpike fired 1 step after the first bad batch" in shown
