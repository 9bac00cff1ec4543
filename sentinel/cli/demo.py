"""`sentinel demo`: watch Sentinel save a run, or report one that it cannot save."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import click

from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.errors import ConfigError

SAVED, REPORTED = ("spike", "nan"), ("scaler", "leak", "hang")
"""Faults that a rollback fixes, and faults that are reported."""
STEPS = {"spike": 800, "nan": 800, "scaler": 240, "leak": 2400, "hang": 1000}
LEAST_STEPS = {"spike": 400, "nan": 400, "scaler": 100, "leak": 2000, "hang": 200}
"""LossSpike needs a past, and the damage begins at 57 % of the steps; MemoryCreep needs 160 samples, of every 8th
step."""
_NEEDED = ("torch", "numpy")


@click.command()
@click.option(
    "--fault", type=click.Choice([*SAVED, *REPORTED]), default="spike", show_default=True, help="Fault to inject."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the weights and the data.")
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps of each run.  [default: 240 to 2400]")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-output"),
    show_default=True,
    help="Directory for logs, picture and page.",
)
@json_option("Print one JSON object on stdout, and nothing else.")
def demo(fault: str, seed: int, steps: int | None, out: Path, as_json: bool) -> None:
    """Watch Sentinel save a run.

    A small GPT is trained on the text of Python's standard library, twice side by side, and a stretch of its data is
    damaged (spike, nan). With Sentinel there is an alert and a rollback, and the run goes on; without, it stays
    wrecked. Other faults no rollback fixes (scaler: the loss scale of an fp16 run collapses; leak: memory is not
    released; hang: the loop stops): there Sentinel reports the broken run, with the cause and what to do, and nothing
    about its healthy twin. Takes one to two minutes on 2 cores, downloads nothing, and leaves a picture and a
    page.

    Exit codes: 0 it was shown, 1 it was not, 2 wrong use.

    \b
    Example:  sentinel demo
              sentinel demo --fault leak
              sentinel demo --fault nan --seed 3 --out /tmp/demo
    """
    count = steps or STEPS[fault]
    if count < LEAST_STEPS[fault]:
        raise click.BadParameter(f"{count} is too few: {fault} needs {LEAST_STEPS[fault]}", param_hint="--steps")
    _require()
    # SIGTERM as Ctrl-C: either way both training processes are ended.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    fresh = not out.exists()
    try:
        _show(fault, seed, count, out, as_json)
    except KeyboardInterrupt:
        if fresh:
            shutil.rmtree(out, ignore_errors=True)
        echo("sentinel: interrupted; both training processes are ended", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(fault: Any, seed: int, steps: int, out: Path, as_json: bool) -> None:
    from rich.console import Console

    from sentinel.demo import page, report
    from sentinel.demo.course import DemoFailed
    from sentinel.demo.display import PlainDisplay, TerminalDisplay
    from sentinel.demo.pair import Pair
    from sentinel.demo.rescue import Rescue

    console = Console(quiet=as_json, highlight=False)
    course = (Rescue if fault in SAVED else Pair)(fault, seed, steps, out.resolve())
    report.introduce(console, course)
    try:
        with course:
            with TerminalDisplay(console, steps) if console.is_terminal else PlainDisplay(console, steps) as display:
                course.follow(display)
            outcome = course.conclude()
    except DemoFailed as failure:
        echo(f"sentinel: the demo failed: {failure}", err=True)
        sys.exit(1)
    files = {"picture": course.out / "demo.svg", "page": course.out / "demo.html"}
    page.draw_picture(outcome, files["picture"])
    page.write_page(outcome, "\n".join(course.said), files["page"])
    report.conclude(console, outcome, files)
    if as_json:
        echo(json.dumps(outcome.summary | {name: str(path) for name, path in files.items()}, indent=2))


def _require() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}, not found by {sys.executable}: pip install {' '.join(missing)}"
        )
