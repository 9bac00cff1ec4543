"""What the faulty scripts share: their arguments, and a log of one JSON line a step."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path


def arguments(description: str) -> argparse.Namespace:
    """`--data`, `--steps`, `--seed`, `--log`, `--fault` (without it the script is its own healthy twin)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, required=True, help="file of bytes, read in order")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="write a JSON line a step here")
    parser.add_argument("--fault", action="store_true", help="have the fault")
    return parser.parse_args()


class Log:
    """Step, loss, time and the series that the demo is about."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def write(self, step: int, loss: float, value: float) -> None:
        """One line."""
        print(json.dumps({"step": step, "loss": loss, "time": time.time(), "value": value}), file=self._file)
