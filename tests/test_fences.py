"""Rules about imports and code that import-linter cannot check.

No torch where it may be missing, no code that is run from a rule's text, no file too long to be read.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def modules() -> dict[str, Path]:
    """Return every module of ours, by its import name."""
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


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.startswith("sentinel.engine")))
def test_the_engine_runs_no_text_and_opens_nothing(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    # `generation` runs what `operators` wrote, which has nothing of a rule's text in it except the names of metrics.
    allowed = {"eval", "exec"} if name == "sentinel.engine.expressions.generation" else set[str]()
    assert not called & {"open", "eval", "exec", "print", "__import__"} - allowed


def test_files_stay_readable() -> None:
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert {name: count for name, count in lines.items() if count > 600} == {}


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
    assert sorted(ast.literal_eval(loaded)) == ["sentinel", "sentinel._version"]


ELSEWHERE = {
    "sentinel.hooks.core.identity": {"dist.distributed_c10d._get_default_store"},  # below torch_interop
    "sentinel.hooks.loop.forward_passes": {"compiler._is_compiling_flag"},  # a constant in compiled code
    "sentinel.launch.sitecustomize": {"torch._compile"},  # before anything of ours is imported
    "sentinel.toolkit.plan.tracing": {  # not part of the hooks
        "torch._subclasses.fake_tensor",
        "torch.utils._python_dispatch",
        "torch.utils._pytree",
    },
}


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def list_private_torch_names(tree: ast.Module) -> set[str]:
    """Return names of torch with an underscore: modules, what is imported from them, attributes of what is imported."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    found, torchs = set(), set()
    for node in imports:
        source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            path = f"{source}.{alias.name}" if source else alias.name
            if path.split(".")[0] == "torch":
                torchs.add(alias.asname or alias.name.split(".")[0])
                found |= {source if is_private(source) else path} if is_private(path) else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            path = ast.unparse(node)
            found |= {path} if path.split(".")[0] in torchs and path.replace(".", "").isidentifier() else set()
    return found


def test_private_names_of_torch_stay_in_torch_interop() -> None:
    found = {
        name: list_private_torch_names(ast.parse(path.read_text(encoding="utf-8")))
        for name, path in MODULES.items()
        if not name.startswith(("sentinel.examples", "sentinel.hooks.torch_interop."))
    }
    assert {name: names for name, names in found.items() if names} == ELSEWHERE
