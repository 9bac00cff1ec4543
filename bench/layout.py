"""Measures the code base: how many modules it has, how they are named, how they depend on each other.

    python -m bench.layout           print a table, as docs/architecture.md shows it
    python -m bench.layout --json    print the same, with the names behind each figure

Only the text of the sources is read; no module is imported.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("hooks", "sentinel", "examples", "bench")
IRREGULAR = re.compile(
    "asked|begun|bound|brought|built|chosen|done|drawn|driven|fed|felt|found|frozen|given|gone|got|grown|heard|held|hidden|"
    "kept|known|laid|led|left|lost|made|meant|met|paid|said|seen|sent|shown|spent|spoken|stood|swept|taken|taught|thawed|"
    "thrown|told|torn|understood|woken|won|worn|written"
)
"""Participles that do not end in -ed, without those that are also the verb's imperative, such as read."""
PREPOSITIONS = {"of", "over", "within", "by", "at", "from", "into", "on", "under", "with", "beside", "between", "since"}
OF_PYTHON = {"_asdict", "_exit", "_getframe", "_replace"}
"""Names that begin with an underscore but are public: those of named tuples, os and sys."""
IMPERATIVES = {"embed", "feed", "seed", "need", "proceed", "exceed", "succeed", "speed", "bleed", "shed"}


def list_sources(*folders: str) -> list[Path]:
    """Return the Python files of these folders, without links: those in sentinel/ lead to folders listed elsewhere."""
    found: list[Path] = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT))
            if not linked and "__pycache__" not in path.parts:
                found.append(path)
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def list_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_bare_participle(name: str) -> bool:
    """Return whether a function's name is a participle or a preposition alone: `told`, `asked`, `gathered`, `of`."""
    word = name.strip("_")
    if "_" in word or name.startswith("__"):
        return False
    return (
        IRREGULAR.fullmatch(word) is not None
        or word in PREPOSITIONS
        or (word.endswith("ed") and word not in IMPERATIVES)
    )


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a property: these are named by nouns and adjectives, as attributes are."""
    return any(re.search(r"property|\.setter", ast.unparse(decorator)) for decorator in function.decorator_list)


def count_statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def list_injected_functions(tree: ast.AST) -> Iterator[str]:
    """Yield the parameters of constructors that take a function: objects that are wired by closures."""
    for function in list_functions(tree):
        if function.name == "__init__":
            arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            yield from (one.arg for one in arguments if "Callable[" in ast.unparse(one.annotation or ast.Constant("")))


def list_private_names(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of functions, classes, attributes and variables that begin with one underscore."""
    found = set[str]()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - OF_PYTHON


def measure() -> dict[str, tuple[object, list[str]]]:
    """Return what is measured -> (the figure, the names behind it). A package's `__init__` that only says what the
    package is for is no module here."""
    product = {path: parse(path) for path in list_sources(*PRODUCT)}
    own = {path: tree for path, tree in product.items() if path.relative_to(ROOT).parts[0] in ("hooks", "sentinel")}
    modules = [path for path, tree in own.items() if len(tree.body) > 1 or ast.get_docstring(tree) is None]
    hooks = [path for path in modules if path.relative_to(ROOT).parts[0] == "hooks"]
    folders = collections.Counter(str(path.parent.relative_to(ROOT)) for path in own if path.name != "__init__.py")
    hooks_folders = {name: n for name, n in folders.items() if name.startswith("hooks")}
    loose = [path for path in own if path.parent == ROOT / "sentinel"]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in own}
    participles = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path, tree in own.items()
        for function in list_functions(tree)
        if is_bare_participle(function.name) and not is_property(function)
    ]
    classes = collections.defaultdict(list)
    for path, tree in own.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path.relative_to(ROOT)))
    twice = [f"{name}: {', '.join(paths)}" for name, paths in sorted(classes.items()) if len(paths) > 1]
    texts = {path: path.read_text(encoding="utf-8") for path in own}
    callables = [f"{path.relative_to(ROOT)} {text.count('Callable[')}" for path, text in texts.items()]
    injected = [
        f"{path.relative_to(ROOT)} {name}" for path, tree in own.items() for name in list_injected_functions(tree)
    ]
    tests = [path.read_text(encoding="utf-8") for path in list_sources("tests")]
    named = [name for text in tests for name in re.findall(r"(?<!self)(?<!cls)(?<!super\(\))\.(_[a-z]\w*)", text)]
    ours = list_private_names(own.values())
    private = sum(name in ours for name in named)
    imports = sum(len(re.findall(r"^\s*(?:from|import) sentinel\.\S+", text, re.MULTILINE)) for text in tests)
    c_lines = sum(len(path.read_text().splitlines()) for path in (ROOT / "hooks").rglob("*.[ch]"))
    return {
        "modules in hooks/": (len(hooks), []),
        "largest folder of hooks/": (max(hooks_folders.values()), [f"{name} {n}" for name, n in hooks_folders.items()]),
        "largest folder of sentinel/, after its commands": (
            max(n for name, n in folders.items() if name != "sentinel/cli"),
            [f"{name} {n}" for name, n in folders.most_common()],
        ),
        "loose modules on top of sentinel/": (len(loose), [path.stem for path in loose]),
        "lines of a module, median": (median(lines[path] for path in modules), []),
        "lines of the longest module": (
            max(lines.values()),
            [f"{path.relative_to(ROOT)} {n}" for path, n in sorted(lines.items(), key=lambda item: -item[1])[:10]],
        ),
        "functions named by a bare participle or preposition": (len(participles), participles),
        "public class names defined twice or more": (len(twice), twice),
        "Callable[ annotations": (sum(text.count("Callable[") for text in texts.values()), callables),
        "parameters of constructors that take a function": (len(injected), injected),
        "lines of C": (c_lines, []),
        "statements in hooks, sentinel, examples, bench": (sum(map(count_statements, product.values())), []),
        "uses of private attributes of ours in tests": (private, []),
        "import lines of modules of ours in tests": (imports, []),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    measured = measure()
    if parser.parse_args().json:
        print(json.dumps({name: {"figure": figure, "names": names} for name, (figure, names) in measured.items()}))
        return 0
    print("| measured | figure |\n| --- | --- |")
    for name, (figure, _) in measured.items():
        print(f"| {name} | {figure:g} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
