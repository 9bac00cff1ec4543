"""What the faulty scripts share: their arguments, and a log of one JSON line a step."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def arguments(description: str) -> argparse.Namespace:
    """`--data`, `--steps`, `--seed`, `--log`, `--fault` (without it the script is its own healthy twin)."""
    parser = make_parser(description)
    parser.add_argument("--fault", action="store_true", help="have the fault")
    return parser.parse_args()


def make_parser(description: str) -> argparse.ArgumentParser:
    """Of what all of them take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="file of bytes, read in order")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="write a JSON line a step here")
    return parser


class Log:
    """Step, loss, time and the series that the demo is about. A script that is started again goes on with it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, step: int, loss: float, value: float) -> None:
        """One line."""
        self.note(step=step, loss=loss, time=time.time(), value=value)

    def note(self, **entry: object) -> None:
        """A line of another kind."""
        print(json.dumps(entry), file=self._file)
