"""`sentinel rules check` and `sentinel rules test`; `backtest` and `status` have files of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path

import click
import msgspec

from sentinel.cli.backtest import backtest
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo
from sentinel.cli.rule_export import export
from sentinel.cli.rule_status import status
from sentinel.engine import RuleFile, load_rules, rules_of
from sentinel.engine.ruletest import RuleTest, load_tests
from sentinel.engine.source import Source
from sentinel.errors import RuleError
from sentinel.node import small_files
from sentinel.rulebook import loader
from sentinel.web import json

_FILES = click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(exists=True, path_type=Path))


class RuleFault(msgspec.Struct):
    """A mistake in a file, or an expectation that a test did not meet."""

    message: str
    line: int
    """Line of the file, from 1; 0: the file as a whole."""
    column: int = 1

    def format(self, file: str) -> str:
        """Return the text of the error as RuleError prints it."""
        return str(RuleError(self.message, file=file, line=self.line, column=self.column))


class Checked(msgspec.Struct, kw_only=True):
    """The result of checking one file."""

    file: str
    ok: bool = True
    alerts: list[str] = []
    tests: int = 0
    error: RuleFault | None = None
    others: list[RuleFault] = []
    """Further mistakes, in the file's order."""


class CheckOutcome(msgspec.Struct):
    """The result of one test."""

    name: str
    ok: bool
    failures: list[RuleFault]


class Tested(msgspec.Struct, kw_only=True):
    """The results of one test file."""

    file: str
    ok: bool = True
    tests: list[CheckOutcome] = []
    error: RuleFault | None = None
    others: list[RuleFault] = []
    """Further mistakes, in the file's order."""


@click.group()
def rules() -> None:
    """Check and test rule files, replay recorded runs through them, and see where they stand.

    \b
    Example:  sentinel rules check my-rules.yaml
              sentinel rules test my-rules_test.yaml
              sentinel rules backtest runs/*.jsonl --rules my-rules.yaml
              sentinel rules status
              sentinel rules export prometheus > sentinel-rules.yaml
    """


rules.add_command(backtest)
rules.add_command(status)
rules.add_command(export)


@rules.command()
@_FILES
@json_option()
@click.pass_context
def check(ctx: click.Context, files: tuple[Path, ...], as_json: bool) -> None:
    """Find mistakes in rule files, and in test files (*_test.yaml).

    FILE may be a folder. Files that are checked together must not define the same alert.

    Exit code 0: no mistake; 1: a mistake; 2: wrong use.

    \b
    Example:  sentinel rules check my-rules.yaml
    """
    report, loaded = list[Checked](), list[RuleFile]()
    for path in _list_files(files, "rule file (*.yaml, *.yml)"):
        report.append(_check_file(path, loaded))
    if as_json:
        echo(json.text(msgspec.to_builtins({"files": report})))
    else:
        for row in report:
            echo(_describe_row(row))
    ctx.exit(0 if report and all(row.ok for row in report) else 1)


@rules.command()
@_FILES
@json_option()
@click.pass_context
def test(ctx: click.Context, files: tuple[Path, ...], as_json: bool) -> None:
    """Run rule tests: written series in, expected alerts out.

    FILE is a test file, or a folder with test files (*_test.yaml). docs/rule-language.md says how they are written.

    Exit code 0: all passed; 1: one did not, or a file is wrong; 2: wrong use.

    \b
    Example:  sentinel rules test my-rules_test.yaml
    """
    named = _list_files(files, "test file (*_test.yaml, *_test.yml)", only=_is_test)
    report = [_test_file(path) for path in named]
    if as_json:
        echo(json.text(msgspec.to_builtins({"files": report})))
    else:
        for row in report:
            _show(row)
        outcomes = [test.ok for row in report for test in row.tests]
        echo(f"{sum(outcomes)} passed, {len(outcomes) - sum(outcomes)} failed")
    ctx.exit(0 if report and all(row.ok for row in report) else 1)


@rules.command(short_help="Print the JSON Schema of rule files.")
@click.option("--json", is_flag=True, expose_value=False, help="Accepted for uniformity; the output is always JSON.")
def schema() -> None:
    """Print the JSON Schema of rule files, with which an editor completes and underlines.

    Exit code 0; 2: wrong use.

    \b
    Example:  sentinel rules schema > rules.schema.json
              # yaml-language-server: $schema=rules.schema.json      (first line of a rule file)
    """
    from sentinel.engine.rules.schema import schema as schema_of

    echo(json.text(schema_of(loader.ACTIONS, loader.EVIDENCE)))


def _list_files(files: Iterable[Path], what: str, only: Callable[[Path], bool] = lambda _: True) -> list[Path]:
    """Return the files, and for a folder its YAML files for which `only` is true; `what` names them in an error."""
    found: list[Path] = []
    for path in list(files) or [Path(str(resources.files("sentinel.rules")))]:
        if not path.is_dir():
            found.append(path)
        elif inside := sorted(entry for entry in path.iterdir() if _is_yaml(entry) and only(entry)):
            found += inside
        else:
            raise click.UsageError(f"{path}: no {what} in this folder", click.get_current_context())
    return found


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and not path.name.startswith(".")


def _is_test(path: Path) -> bool:
    return path.stem.endswith("_test")


def _check_file(path: Path, loaded: list[RuleFile]) -> Checked:
    try:
        if _is_test(path):
            return Checked(file=str(path), tests=len(_tests(path)))
        rule_file = load_rules(
            _text(path), str(path), base=loader.stock_rules(), actions=loader.ACTIONS, evidence=loader.EVIDENCE
        )
        rules_of([*loaded, rule_file])
    except RuleError as error:
        first, *others = _list_faults(error)
        return Checked(file=error.file, ok=False, error=first, others=others)
    loaded.append(rule_file)
    alerts = [rule.name for rule in rule_file.rules] + [f"{name} (disabled)" for name in rule_file.disabled]
    return Checked(file=str(path), alerts=alerts)


def _test_file(path: Path) -> Tested:
    try:
        tests = _tests(path)
    except RuleError as error:
        first, *others = _list_faults(error)
        return Tested(file=error.file, ok=False, error=first, others=others)
    outcomes = [_outcome(test) for test in tests]
    return Tested(file=str(path), ok=all(outcome.ok for outcome in outcomes), tests=outcomes)


def _list_faults(error: RuleError) -> list[RuleFault]:
    return [RuleFault(one.message, one.line, one.column) for one in (error, *error.others)]


def _outcome(test: RuleTest) -> CheckOutcome:
    failures = [RuleFault(failure.message, failure.line) for failure in test.run()]
    return CheckOutcome(test.name, not failures, failures)


def _tests(path: Path) -> list[RuleTest]:
    def read(name: str) -> str:
        return small_files.text(path.parent / name)

    text = _text(path)
    if not _is_test(path) and _holds_rules(path, text):
        names = [f"{path.stem}_test{suffix}" for suffix in (".yaml", ".yml")]
        there = next((name for name in names if path.with_name(name).exists()), None)
        tests = f"its tests are in {there}" if there else f"its tests belong in a file {names[0]} beside it"
        raise RuleError(f"this is a rule file; {tests}", file=str(path), line=0)
    return load_tests(text, str(path), read, loader.stock_rules())


def _holds_rules(path: Path, text: str) -> bool:
    keys = {key.word() for key, _ in Source(text, str(path)).root.items("a test file")}
    return "tests" not in keys and not keys.isdisjoint({"group", "rules"})


def _text(path: Path) -> str:
    try:
        return small_files.text(path)
    except UnicodeDecodeError as error:
        raise RuleError(f"not text: {error.reason} at byte {error.start}", file=str(path)) from None
    except OSError as error:
        raise RuleError(f"cannot be read: {error.strerror}", file=str(path), line=0) from None


def _describe_row(row: Checked) -> str:
    if row.error is not None:
        return _describe_mistakes(row.file, row.error, *row.others)
    return f"{row.file}: ok, " + (f"{row.tests} tests" if _is_test(Path(row.file)) else ", ".join(row.alerts))


def _describe_mistakes(file: str, *faults: RuleFault) -> str:
    return "\n".join(fault.format(file) for fault in faults)


def _show(row: Tested) -> None:
    if row.error is not None:
        echo(_describe_mistakes(row.file, row.error, *row.others))
    for outcome in row.tests:
        echo(f"{'ok  ' if outcome.ok else 'FAIL'}  {row.file}: {outcome.name}")
        for failure in outcome.failures:
            echo(f"      {row.file}:{failure.line}: {failure.message}")
