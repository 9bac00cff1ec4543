"""Load the rules that a daemon applies: the stock files, and the user's beside them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path

import msgspec

from sentinel.engine import Rule, RuleFile, load_rules
from sentinel.errors import RuleError
from sentinel.node import small_files
from sentinel.text import did_you_mean
from sentinel.wire.evidence import KINDS

ACTIONS = ("evidence", "restart", "rollback", "stacks", "stop", *sorted(entry_points(group="sentinel.actions").names))
"""What a rule may name under `actions`. `evidence` changes nothing, as it is collected for every incident; it is
allowed so that a rule can be read by itself."""
EVIDENCE = tuple(sorted(KINDS))
"""What a rule may name under `evidence`: what ranks can be asked for."""


class Rulebook(msgspec.Struct, frozen=True):
    """The rules that were loaded, and notes on files that were not."""

    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()
    """Files that could not be used, each with file, line and fix. The other files are used all the same."""


class Reloads:
    """The results of reading the rule files."""

    def __init__(self) -> None:
        self.mistakes: tuple[str, ...] = ()
        """Mistakes of the last reading."""
        self.succeeded_at = 0.0
        """Unix seconds of the last success; 0 before the first."""

    def read(self, mistakes: Sequence[str]) -> None:
        """Record that the files were read, with these mistakes."""
        self.mistakes = tuple(mistakes)
        self.succeeded_at = self.succeeded_at if mistakes else time.time()


def stock() -> list[tuple[str, str]]:
    """Return (file, text) of the rule files that come with Sentinel."""
    folder = resources.files("sentinel.rules")
    names = sorted(entry.name for entry in folder.iterdir() if _is_rules(entry.name))
    return [(f"sentinel/rules/{name}", (folder / name).read_text(encoding="utf-8")) for name in names]


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the rule files that paths name; a folder names all in it. Raises RuleError where a path does not exist."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(entry for entry in path.iterdir() if _is_rules(entry.name))
        elif path.exists():
            found.append(path)
        else:
            raise RuleError("no such rule file or folder", file=str(path), line=0)
    return found


@functools.cache
def stock_rules() -> tuple[Rule, ...]:
    """Return the stock rules, compiled."""
    return tuple(
        rule for file, text in stock() for rule in load_rules(text, file, actions=ACTIONS, evidence=EVIDENCE).rules
    )


def read(path: Path, base: Iterable[Rule]) -> RuleFile:
    """Load one file, which may override the rules in `base`. Raises RuleError, also where it cannot be read."""
    try:
        text = small_files.text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"cannot be read: {_why(error)}", file=str(path), line=0) from None
    return load_rules(text, str(path), base=base, actions=ACTIONS, evidence=EVIDENCE)


def _why(error: OSError | UnicodeDecodeError) -> str:
    return f"it is not text: {error.reason}" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)


def load(paths: Iterable[Path] = ()) -> Rulebook:
    """Load the stock rules and the user's: a user's rule of the same name replaces the stock one; an override changes
    or disables it.

    A bad file becomes a note.
    """
    rules = {rule.name: rule for rule in stock_rules()}
    base = tuple(rules.values())
    owner: dict[str, str] = {}
    notes: list[str] = []
    try:
        named = files(paths)
    except RuleError as error:
        named, notes = [], [f"rules not loaded: {error}"]
    for path in named:
        try:
            loaded = read(path, base)
        except RuleError as error:
            all_mistakes = f"all mistakes of it: sentinel rules check {path}"
            notes.append(f"rules not loaded: {error}; all other rules apply ({all_mistakes})")
            continue
        names = [*(rule.name for rule in loaded.rules), *loaded.disabled]
        if twice := [name for name in names if name in owner]:
            clash = RuleError(f"alert {twice[0]} is in {owner[twice[0]]} too; rename one", file=str(path))
            notes.append(f"rules not loaded: {clash}; all other rules apply")
            continue
        owner |= dict.fromkeys(names, str(path))
        rules |= {rule.name: rule for rule in loaded.rules}
        for name in loaded.disabled:
            del rules[name]
    return Rulebook(tuple(rules.values()), tuple(notes))


def add_action(rules: Iterable[Rule], alerts: Iterable[str], action: str) -> tuple[Rule, ...]:
    """Return the rules, with one action more for those that raise `alerts`, also where they are downgraded."""
    named = frozenset(alerts)
    return tuple(_with_action(rule, action) if rule.name in named else rule for rule in rules)


def _with_action(rule: Rule, action: str) -> Rule:
    less = rule.downgrade
    if less is not None:
        less = dataclasses.replace(less, actions=tuple(dict.fromkeys((*less.actions, action))))
    actions = tuple(dict.fromkeys((*rule.actions, action)))
    return dataclasses.replace(rule, actions=actions, downgrade=less, text=f"{rule.text}\n{action}")


def explain_unknown(rules: Iterable[Rule], alerts: Iterable[str]) -> str:
    """Return words for the alerts that no rule raises, with what may have been meant; empty where there is a rule for
    each."""
    known = sorted(rule.name for rule in rules)
    return "; ".join(f"there is no alert {name!r}{did_you_mean(name, known)}" for name in alerts if name not in known)


def _is_rules(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and not name.startswith(".") and "_test." not in name
