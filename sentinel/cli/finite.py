"""The type of options that are finite numbers."""

from __future__ import annotations

import math
from typing import Any

import click


class Finite(click.FloatRange):
    """A finite number within bounds. click alone accepts `nan` within any bounds, and `1e400` within open ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number
