"""Shared code of the faulty scripts: their arguments, and a log of one JSON line per step."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def arguments(description: str) -> argparse.Namespace:
    """Parse `--data`, `--steps`, `--seed`, `--log`, `--fault` (without it the script is its own healthy twin)."""
    parser = make_parser(description)
    parser.add_argument("--fault", action="store_true", help="have the fault")
    return parser.parse_args()


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all of the scripts take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="file of bytes, read in order")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="write a JSON line a step here")
    return parser


class Log:
    """A log of step, loss, time and the demo's own series. A script that is started again appends to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, step: int, loss: float, value: float) -> None:
        """Write the line of a step."""
        self.note(step=step, loss=loss, time=time.time(), value=value)

    def note(self, **entry: object) -> None:
        """Write a line of any kind."""
        print(json.dumps(entry), file=self._file)
