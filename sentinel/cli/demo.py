"""`sentinel demo`: show how Sentinel saves a run, or reports one that it cannot save."""

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
OF_NODES = ("spike", "kill", "hang", "cut")
"""Faults of one of several nodes, for --nodes."""
STEPS = {"spike": 800, "nan": 800, "scaler": 240, "leak": 2400, "hang": 1000}
LEAST_STEPS = {"spike": 400, "nan": 400, "scaler": 100, "leak": 2000, "hang": 200}
"""Fewest steps with each fault. LossSpike needs a past, and the damage begins at 57 % of the steps; MemoryCreep needs
160 samples, of every 8th step."""
NODE_STEPS = 360
"""Steps with --nodes, and the fewest: with fewer, the loss has not levelled off when the fault comes."""
MOST_NODES = 5
_NEEDED = ("torch", "numpy")
_PACKAGES = {"zenoh": "eclipse-zenoh"}
"""Module -> its package, where that has another name."""


@click.command()
@click.option(
    "--fault",
    type=click.Choice([*SAVED, *REPORTED, "kill", "cut"]),
    default="spike",
    show_default=True,
    help="Fault to inject; with --nodes spike, kill, hang or cut.",
)
@click.option("--nodes", type=click.IntRange(2, MOST_NODES), help="A job over so many nodes instead.")
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
def demo(fault: str, nodes: int | None, seed: int, steps: int | None, out: Path, as_json: bool) -> None:
    """Watch Sentinel save a run.

    A small GPT is trained on the text of Python's standard library, twice side by side, and a stretch of its data is
    damaged (spike, nan). With Sentinel there is an alert and a rollback, and the run goes on; without, it stays
    wrecked. Other faults no rollback fixes (scaler: the loss scale of an fp16 run collapses; leak: memory is not
    released; hang: the loop stops): there Sentinel reports the broken run, with the cause and what to do, and nothing
    about its healthy twin. Takes one to two minutes on 2 cores, downloads nothing, and leaves a picture and a
    page.

    With --nodes one job is trained by torchrun over several nodes, network namespaces of this machine with a daemon in
    each (without root: on one loopback), and one node has the fault: bad data (spike), a rank that dies (kill) or
    stands still (hang), a link that is down for a while (cut, root only). A receiver of alerts gets one page, and all
    nodes are rolled back (spike) or started again together. Takes two to four minutes.

    Exit codes: 0 it was shown, 1 it was not, 2 wrong use.

    \b
    Example:  sentinel demo
              sentinel demo --fault leak
              sentinel demo --fault nan --seed 3 --out /tmp/demo
              sentinel demo --nodes 4 --fault kill
    """
    known = OF_NODES if nodes else (*SAVED, *REPORTED)
    if fault not in known:
        where = "with --nodes" if nodes else "without --nodes"
        raise click.BadParameter(f"{where} there are {', '.join(known)}", param_hint="--fault")
    count = steps or (NODE_STEPS if nodes else STEPS[fault])
    least = NODE_STEPS if nodes else LEAST_STEPS[fault]
    if count < least:
        raise click.BadParameter(f"{count} is too few: {fault} needs {least}", param_hint="--steps")
    _require(*_NEEDED, *(("zenoh",) if nodes else ()))
    # Handle SIGTERM like Ctrl-C: either way all training processes are ended.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    fresh = not out.exists()
    try:
        _show(fault, nodes, seed, count, out, as_json)
    except KeyboardInterrupt:
        if fresh:
            shutil.rmtree(out, ignore_errors=True)
        echo("sentinel: interrupted; all training processes are ended", err=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(fault: Any, nodes: int | None, seed: int, steps: int, out: Path, as_json: bool) -> None:
    from rich.console import Console

    from sentinel.demo import page, report
    from sentinel.demo.course import Course, DemoFailed
    from sentinel.demo.display import PlainDisplay, TerminalDisplay
    from sentinel.demo.job import NodesDemo
    from sentinel.demo.pair import Pair
    from sentinel.demo.rescue import Rescue

    console = Console(quiet=as_json, highlight=False)
    place = out.resolve()
    course: Course = (
        NodesDemo(fault, nodes, seed, steps, place)
        if nodes
        else (Rescue if fault in SAVED else Pair)(fault, seed, steps, place)
    )
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


def _require(*names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        wanted = " ".join(_PACKAGES.get(name, name) for name in missing)
        raise ConfigError(
            f"the demo needs {' and '.join(missing)}, not found by {sys.executable}: pip install {wanted}"
        )
