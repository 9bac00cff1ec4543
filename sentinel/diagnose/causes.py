"""The words of the catalogue (`causes.yaml`): causes, remedies, ways to confirm them, and their sources."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec
import yaml

from sentinel.diagnose.evidence import Confidence, Finding


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cause of an alert. `{names}` in its words are filled from the evidence."""

    cause: str
    confidence: Confidence
    """The highest confidence, which holds where the evidence that the cause asks for is there."""
    remedy: str
    confirm: str
    """How a person can verify it."""
    missing: tuple[str, ...] = ()
    """What is not known even then."""
    source: str
    problem: str = ""
    """As `Finding.problem`."""


@functools.cache
def causes() -> Mapping[str, Mapping[str, Cause]]:
    """Return alert -> name of the cause -> its words."""
    text = (resources.files("sentinel.diagnose") / "causes.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, dict[str, Cause]])


def finding(
    alert: str, name: str, evidence: tuple[str, ...] = (), missing: tuple[str, ...] = (), **facts: Any
) -> Finding:
    """Return a finding in the catalogue's words."""
    known = causes()[alert][name]
    return Finding(
        known.cause.format(**facts),
        known.confidence,
        known.remedy.format(**facts),
        (*known.missing, *missing),
        evidence,
        known.confirm.format(**facts),
        known.problem,
    )
