"""Writes JSON. NaN and infinity, which JSON lacks, are strings spelled as in Prometheus: "NaN", "+Inf"."""

from __future__ import annotations

import json
import math
from typing import Any


def text(content: Any) -> str:
    """Return plain data as indented JSON."""
    return json.dumps(spell_nonfinite(content), indent=2)


def spell_nonfinite(content: Any) -> Any:
    """Return plain data with NaN and infinities as strings."""
    if isinstance(content, float) and not math.isfinite(content):
        return "NaN" if math.isnan(content) else "+Inf" if content > 0 else "-Inf"
    if isinstance(content, dict):
        return {key: spell_nonfinite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [spell_nonfinite(value) for value in content]
    return content
