"""Measures how long a run of 100,000 steps and 8 ranks takes from its history to the screen.

    python -m bench.page              Chromium must be installed

It makes a report and opens it, and times the frames while the pointer moves over its charts. The history has every
step of every rank; a real one keeps only a few of each 32 steps far behind the newest.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path

from sentinel._version import __version__
from sentinel.report.content import report
from sentinel.report.page import page
from sentinel.store import CHUNK_STEPS, RUN, History
from sentinel.store.layout import Chunk, pack_chunk
from tests.browser import Browser, browser
from tests.report.runs import case, history

DRAWN = "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"
"""JavaScript for the milliseconds from the start of the navigation until the loaded page is painted."""


def write_history(path: Path, steps: int, ranks: int) -> Path:
    """Write a history with every step of every rank; return its path."""
    history(path, steps=256, ranks=ranks, cases=(case(1, 90_000), case(2, 60_000)))
    noise = random.Random(0)
    database = sqlite3.connect(path)
    with database:
        for rank in (RUN, *range(ranks)):
            for first in range(CHUNK_STEPS, steps, CHUNK_STEPS):
                seqs = range(first, min(first + CHUNK_STEPS, steps))
                columns = {
                    "loss": [2 + 6 / (1 + n / 5000) + noise.gauss(0, 0.05) for n in seqs],
                    "grad_norm": [math.exp(noise.gauss(0, 0.2)) for n in seqs],
                    "learning_rate": [3e-4 * min(1.0, n / 2000) for n in seqs],
                    "step_seconds": [0.2 + 0.01 * noise.random() for n in seqs],
                    "data_seconds": [0.002 * noise.random() for n in seqs],
                    "forward_seconds": [0.06 + 0.01 * noise.random() for n in seqs],
                    "backward_seconds": [0.11 + 0.01 * noise.random() for n in seqs],
                    "optimizer_seconds": [0.01 * noise.random() for n in seqs],
                    "rss_bytes": [2e9 + 100.0 * n for n in seqs],
                }
                times = array("d", [1e9 + 0.2 * n for n in seqs]).tobytes()
                packed = {name: (array("d", values).tobytes(), b"") for name, values in columns.items()}
                body = pack_chunk(Chunk(array("q", seqs).tobytes(), times, packed))
                query = "INSERT INTO chunks (attempt, rank, first_seq, last_seq, body) VALUES (0, ?, ?, ?, ?)"
                database.execute(query, (rank, seqs[0], seqs[-1], body))
    database.close()
    return path


def make_report(path: Path) -> tuple[float, float, str]:
    """Make the report from the history; return (seconds, seconds of CPU, HTML)."""
    began, cpu = time.perf_counter(), time.process_time()
    with History(path) as kept:
        text = page([report(kept)], __version__)
    return time.perf_counter() - began, time.process_time() - cpu, text


def draw_file(window: Browser, path: Path) -> float:
    """Open the file; return the seconds until it is painted."""
    window.go(f"file://{path}")
    return float(window.asked(DRAWN)) / 1000


def hover(window: Browser, frames: int = 100) -> float:
    """Move the pointer over a chart, upon which all charts write their values; return the seconds of work per frame."""
    place = "document.querySelector('.u-over')"
    window.asked(f"{place}.scrollIntoView({{block: 'center'}})")
    left, top, width = window.asked(f"(b => [b.left, b.top + 50, b.width])({place}.getBoundingClientRect())")
    before = window.busy_seconds()
    for frame in range(frames):
        window.point(left + width * frame / frames, top)
        window.asked("new Promise(requestAnimationFrame)")
    return (window.busy_seconds() - before) / frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed (Debian package: chromium)")
    with tempfile.TemporaryDirectory() as folder:
        kept = write_history(Path(folder) / "long.sqlite", args.steps, args.ranks)
        file = Path(folder) / "report.html"
        with browser(chromium, Path(folder) / "profile") as window:
            rows = []
            for _ in range(args.repeat):
                making, cpu, text = make_report(kept)
                file.write_text(text)
                rows.append((making, cpu, draw_file(window, file), hover(window)))
    making, cpu, drawing, frame = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"{args.steps:,} steps x {args.ranks} ranks, median of {args.repeat}, {len(text) / 1e3:.0f} kB of HTML:")
    print(f"made in {making:.2f} s ({cpu:.2f} s of CPU), drawn in {drawing:.2f} s; together {making + drawing:.2f} s,")
    print(
        f"at best {min(making + drawing for making, _, drawing, _ in rows):.2f} s; hover {frame * 1e3:.1f} ms a frame"
    )


if __name__ == "__main__":
    main()
