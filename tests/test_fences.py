"""The fences between the houses, read from the imports of what is installed."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAVES = {
    "sentinel",
    "sentinel.errors",
    "sentinel.signals",
    "sentinel.steps",
    "sentinel.wire",
    "sentinel.places",
    "sentinel.series",
    "sentinel.tenancy",
    "sentinel.heartbeat",
    "sentinel.flight",
    "sentinel.collected",
    "sentinel.replicas",
    "sentinel.devices",
    "sentinel.snapshots",
    "sentinel.plain_text",
    "sentinel.enumeration",
    "sentinel.incident_states",
}
"""`sentinel` itself is __init__: the version, and names that load late."""

MAY_IMPORT = {
    "sentinel.hooks": {"sentinel.hooks", *LEAVES},
    "sentinel.engine": {"sentinel.errors", "sentinel.signals", "sentinel.engine", "sentinel.enumeration"},
    "sentinel.wire": {"sentinel.errors", "sentinel.wire"},
    "sentinel.alignment": set(),
    "sentinel.runs": {"sentinel.alignment", "sentinel.runs", *LEAVES},
    "sentinel.store": {"sentinel.store", *LEAVES},
    "sentinel.config": {"sentinel.recipients", "sentinel.units", *LEAVES},
    "sentinel.recipients": {"sentinel.errors", "sentinel.units"},
    "sentinel.units": set(),
    "sentinel.observed": {"sentinel.engine", *LEAVES},
    "sentinel.logs": {"sentinel.logs", "sentinel.engine", "sentinel.observed", "sentinel.store", *LEAVES},
    "sentinel.backtesting": {"sentinel.engine", "sentinel.logs", "sentinel.rulebook", *LEAVES},
    "sentinel.promql": {"sentinel.engine", *LEAVES},
    "sentinel.alerting_rules": {"sentinel.engine", "sentinel.promql", *LEAVES},
    "sentinel.grafana": {"sentinel.grafana", "sentinel.config", *LEAVES},
    "sentinel.rulebook": {"sentinel.engine", *LEAVES},
    "sentinel.diagnose": {"sentinel.diagnose", "sentinel.engine", "sentinel.runs", *LEAVES},
    "sentinel.actions": {"sentinel.actions", "sentinel.diagnose", "sentinel.engine", "sentinel.runs", *LEAVES},
    "sentinel.allocator": {"sentinel.allocator", "sentinel.plain_pickle", "sentinel.errors"},
    "sentinel.doctor": {"sentinel.collect", "sentinel.doctor", "sentinel.enumeration", "sentinel.errors"},
    "sentinel.report": {"sentinel.report", "sentinel.runs", "sentinel.store", *LEAVES},
    "sentinel.plain_pickle": {"sentinel.errors"},
    "sentinel.aftermath": {"sentinel.aftermath", "sentinel.diagnose", "sentinel.plain_pickle", *LEAVES},
    "sentinel.precision": {"sentinel.precision", "sentinel.store", *LEAVES},
    "sentinel.planning": {"sentinel.errors", "sentinel.planning"},
    "sentinel.notify": {
        "sentinel.notify",
        "sentinel.diagnose",
        "sentinel.config",
        "sentinel.recipients",
        "sentinel.units",
        *LEAVES,
    },
    "sentinel.collect": {"sentinel.collect", *LEAVES},
    "sentinel.layer_metrics": {"sentinel.daemon.watched_run", "sentinel.runs", *LEAVES},
    "sentinel.metrics": {
        "sentinel.layer_metrics",
        "sentinel.daemon.faults",
        "sentinel.daemon.watched_run",
        "sentinel.rulebook",
        "sentinel.runs",
        *LEAVES,
    },
    "sentinel.supervise": {"sentinel.supervise", *LEAVES},
    "sentinel.web": {"sentinel.plain_json", "sentinel.web"},
    "sentinel.plain_json": set(),
    "sentinel.examples": {
        "sentinel",
        "sentinel.hooks.accelerate",
        "sentinel.hooks.deepspeed",
        "sentinel.hooks.lightning",
        "sentinel.hooks.transformers",
    },
}
"""House -> what of ours it may import. daemon, cli and demo may import all; nothing may import them but cli."""

NO_IO = {
    "asyncio",
    "http",
    "io",
    "logging",
    "multiprocessing",
    "numpy",
    "os",
    "pathlib",
    "selectors",
    "socket",
    "sqlite3",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
    "urllib",
}


def modules() -> dict[str, Path]:
    """Every module of ours, by its import name."""
    found: dict[str, Path] = {}
    for package in ("sentinel", "sentinel.hooks", "sentinel.rules", "sentinel.examples"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        for root in map(Path, spec.submodule_search_locations):
            for path in root.rglob("*.py"):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join([package, *parts]).removesuffix(".__init__")
                found[name] = path
    return found


MODULES = modules()


def imports(name: str) -> Iterator[str]:
    """Modules that a module imports when it is loaded or later, TYPE_CHECKING blocks left out."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in _statements(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).strip(".")
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from _statements(node)


def house(name: str) -> str:
    return next((key for key in MAY_IMPORT if name == key or name.startswith(key + ".")), name)


def ours(name: str) -> set[str]:
    return {target for target in imports(name) if target.split(".")[0] == "sentinel"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_house_imports_only_what_it_may(name: str) -> None:
    allowed = MAY_IMPORT.get(house(name))
    if allowed is None:
        return
    for target in ours(name):
        assert any(target == a or (a != "sentinel" and target.startswith(a + ".")) for a in allowed), (
            f"{name} imports {target}"
        )


@pytest.mark.parametrize(
    "name", sorted(name for name in MODULES if not name.startswith(("sentinel.cli", "sentinel.__m")))
)
def test_nothing_imports_the_composing_module_but_the_command_line(name: str) -> None:
    assert not {t for t in ours(name) if t == "sentinel.daemon.app" or t.startswith("sentinel.cli")}


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("sentinel.engine")))
def test_the_engine_does_no_io_and_has_no_clock(name: str) -> None:
    assert not {target.split(".")[0] for target in imports(name)} & NO_IO
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    # What `generation` runs, `operators` wrote: there is nothing of a rule's text in it but the names of metrics.
    allowed = {"eval", "exec"} if name == "sentinel.engine.generation" else set[str]()
    assert not called & {"open", "eval", "exec", "print", "__import__"} - allowed


def test_there_is_no_cycle() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        # `sentinel` itself imports attach and its kin only when they are asked for, which is why it does.
        for target in sorted(ours(name) & MODULES.keys() if name != "sentinel" else ()):
            visit(target, (*path, name))
        done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


@pytest.mark.parametrize("name", sorted(MODULES))
def test_files_stay_readable(name: str) -> None:
    assert len(MODULES[name].read_text(encoding="utf-8").splitlines()) <= 600


@pytest.mark.parametrize(
    "statement",
    [
        "import sentinel",
        "import sentinel.daemon.app",
        "import sentinel.cli, sentinel.cli.status",
        "import sentinel.wire",
    ],
)
def test_no_torch_outside_the_training_process(statement: str) -> None:
    code = f"import sys; {statement}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0


def test_import_sentinel_is_only_the_version_and_late_names() -> None:
    code = (
        "import sys, typing, __future__; before = set(sys.modules); import sentinel; print(set(sys.modules) - before)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True).stdout
    assert loaded.strip() == "{'sentinel'}"
