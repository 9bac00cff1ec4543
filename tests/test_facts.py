"""Each fact is in one place: about a signal in signals.py, about a rule in its file, about a receiver in its module.

So the core names no rule, signal or receiver: it queries them. A module that does name a signal measures it or is
about it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import sentinel
from sentinel.config.settings import list_own_types
from sentinel.signals import SIGNALS
from tests.stock import RULES

HOUSE = Path(sentinel.__file__).parent

MACHINERY = ("engine", "runs", "daemon", "actions", "prometheus", "store", "rulebook", "diagnose/catalogue.py",
             "diagnose/explanations.py")  # fmt: skip

MEASURED = {
    "actions/evidence.py": {"out_of_memory"},
    "daemon/machine.py": {"gpu_lost", "gpu_silent_seconds", "gpu_xid", "gpu_xid_program", "gpu_memory_foreign_bytes"},
    "daemon/ranks/stalls.py": {"stalled_seconds", "stall_limit_seconds", "collectives_differ", "rank_lost"},
    "daemon/run/actions.py": {"snapshot_age_steps", "snapshot_age_limit_steps"},
    "rulebook/observation.py": {"resumed"},  # of a run whose first steps the rules do not see
}
"""Module -> the signals that it measures itself."""

ABOUT = {
    "actions/restart.py": {"stalled_seconds"},  # only ranks that stand still are restarted
    "daemon/frontend/layer_metrics.py": {"layer_grad_norm", "layer_nonfinite"},  # the layers that a scrape shows
    "daemon/frontend/metrics.py": {
        "stalled_seconds",
        "stall_limit_seconds",
    },  # shown as they are now
    "daemon/run/ingest.py": {"out_of_memory"},  # a kind of evidence, of the same name
    "runs/attempt.py": {"step_seconds"},  # `Attempt.step_seconds` is its median
}
"""Module -> the signals that it is about: another signal like these would need another function."""


def texts_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def modules_of(rooms: Iterable[str]) -> list[str]:
    found = [
        path for room in rooms for path in ([HOUSE / room] if room.endswith(".py") else (HOUSE / room).rglob("*.py"))
    ]
    return sorted(str(path.relative_to(HOUSE)) for path in found)


@pytest.mark.parametrize("module", modules_of(MACHINERY))
def test_the_machinery_names_no_rule_and_no_signal(module: str) -> None:
    named = set(texts_in(HOUSE / module)) & (RULES.keys() | SIGNALS.keys())
    assert named == MEASURED.get(module, set()) | ABOUT.get(module, set()), "say it in signals.py, or in the rule file"


@pytest.mark.parametrize("module", modules_of(["notify", "config", "daemon"]))
def test_only_its_own_file_names_a_receiver(module: str) -> None:
    assert not set(texts_in(HOUSE / module)) & set(list_own_types()) - {Path(module).stem}, "say it in its `KIND`"


def test_the_exceptions_are_of_modules_that_exist() -> None:
    assert {*MEASURED, *ABOUT} <= set(modules_of(MACHINERY))
