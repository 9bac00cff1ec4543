"""Draws public training logs from snapshots of repositories, before any rule sees them: writes bench/public_runs.csv.

    python -m bench.public_draw --snapshots FOLDER --out FOLDER

The rule, in full; docs/detection.md says where the snapshots come from:

- SNAPSHOTS/OWNER+NAME/repo is a bare git repository; its newest commit counts. Its root has a licence file whose text
  is that of MIT, Apache-2.0, BSD or CC-BY 4.0.
- A candidate is named like a log (`FORMATS`), has 2 kB to 4 MB, and is in no folder of tests, samples or packages. By
  `count_rows`, which is independent of Sentinel's readers, it has at least 50 rows with a loss. Of a folder's
  `trainer_state.json` and those of its checkpoints only the largest counts; of files with the same content only one.
- Of each repository only one format counts, because two formats often log the same run, and of it at most
  `PER_REPOSITORY` files. The format, the files and the 300 that are drawn are those whose SHA-256 of the seed and the
  name is smallest.
- What is listed stays listed: a later draw adds runs of other repositories, with other contents, until there are 300.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from bench.pages import ROOT

LISTED = ROOT / "bench" / "public_runs.csv"
SEED = "sentinel, public runs, 1"
WANTED, PER_REPOSITORY, LEAST_ROWS = 300, 5, 50
SIZES = range(2_000, 4_000_000)

FORMATS = {
    "trainer state": ("trainer_state.json",),
    "event file": ("events.out.tfevents.*",),
    "CSV": ("*metrics*.csv", "*results*.csv", "*progress*.csv", "*log*.csv", "*history*.csv", "*loss*.csv"),
    "JSON lines": ("*.jsonl", "*.log.json", "metrics.json"),
    "text": ("*.log", "*log*.txt", "*train*.txt", "*progress*.txt", "*result*.txt", "*.out"),
}
LICENCES = {
    "MIT": rb"Permission is hereby granted, free of charge",
    "Apache-2.0": rb"Apache License\s+Version 2\.0",
    "BSD": rb"Redistributions of source code must retain",
    "CC-BY-4.0": rb"\A(?!.*(NonCommercial|ShareAlike|NoDerivatives)).*Attribution 4\.0 International",
}
ELSEWHERE = re.compile(r"(^|/)(tests?|testdata|fixtures?|mocks?|samples?|node_modules|site-packages|\.?venv)/", re.I)
LOSS, STEP = re.compile(rb"loss", re.I), re.compile(rb"step|epoch|iter", re.I)
NUMBER = re.compile(rb"loss[\w/.'\")\]]*[\s,]*(\"value\")?[\s:=(\[,]*[-+]?(\d|nan|inf)", re.I)


class Drawn(msgspec.Struct, frozen=True):
    """A file of a repository, as bench/public_runs.csv lists it."""

    repo: str
    commit: str
    path: str
    licence: str
    format: str
    bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The file's name in the folder of drawn files."""
        return f"{self.sha256[:12]}-{PurePosixPath(self.path).name}"


def order(*names: str) -> str:
    """Return the hash that decides a draw: the smallest comes first."""
    return hashlib.sha256("\n".join((SEED, *names)).encode()).hexdigest()


def read_list() -> list[Drawn]:
    """Return the runs that were drawn, from bench/public_runs.csv."""
    with LISTED.open(newline="") as file:
        return [msgspec.convert(row, Drawn, strict=False) for row in csv.DictReader(file)]


def git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(repository), *arguments], check=True, capture_output=True).stdout


def name_licence(text: bytes) -> str | None:
    return next((name for name, mark in LICENCES.items() if re.search(mark, text, re.DOTALL)), None)


def name_format(path: str) -> str | None:
    name = PurePosixPath(path).name.lower()
    return next((f for f, patterns in FORMATS.items() if any(fnmatch(name, pattern) for pattern in patterns)), None)


def count_rows(kind: str, content: bytes) -> int:
    """Return roughly how many rows have a loss.

    CSV: the lines under a header that names a loss and a step. Text: the lines with a loss and a number. Other formats:
    how often the commonest name that contains `loss` occurs.
    """
    lines = content.splitlines() or [b""]
    if kind == "CSV":
        return len(lines) - 1 if LOSS.search(lines[0]) and STEP.search(lines[0]) else 0
    if kind == "text":
        return sum(bool(NUMBER.search(line)) for line in lines)
    names: defaultdict[bytes, int] = defaultdict(int)
    for name in re.findall(rb"[\w/.-]*loss[\w/.-]*", content, re.I):
        names[name] += 1
    return max(names.values(), default=0)


def list_candidates(repository: Path) -> Iterator[Drawn]:
    name = repository.parent.name.replace("+", "/", 1)
    commit = git(repository, "rev-parse", "HEAD").decode().strip()
    files: dict[str, int] = {}
    for line in git(repository, "ls-tree", "-r", "-l", "-z", "HEAD").decode("utf-8", "replace").split("\0"):
        facts, _, path = line.partition("\t")
        if path and (size := facts.split()[3]).isdigit():  # leaves out submodules, and blobs that the snapshot lacks
            files[path] = int(size)
    roots = [path for path in files if re.match(r"(licen[cs]e|copying)[^/]*$", path, re.I)]
    licence = next(filter(None, (name_licence(git(repository, "show", f"HEAD:{path}")) for path in roots)), None)
    if licence is None:
        return
    largest: dict[str, str] = {}
    for path, size in files.items():
        if name_format(path) and size in SIZES and not ELSEWHERE.search(path):
            run = re.sub(r"(checkpoint-\d+/)?trainer_state\.json$", "", path)
            largest[run] = max(largest.get(run, path), path, key=files.__getitem__)
    for path in largest.values():
        kind, content = name_format(path), git(repository, "show", f"HEAD:{path}")
        if kind and count_rows(kind, content) >= LEAST_ROWS:
            yield Drawn(name, commit, path, licence, kind, len(content), hashlib.sha256(content).hexdigest())


def draw(candidates: list[Drawn], listed: Sequence[Drawn] = ()) -> list[Drawn]:
    """Return the listed runs and those drawn of the candidates, `WANTED` in all.

    Of each repository at most `PER_REPOSITORY` are drawn, all of one format.
    """
    repos, contents = {each.repo for each in listed}, {each.sha256 for each in listed}
    others = [each for each in candidates if each.repo not in repos and each.sha256 not in contents]
    repositories: defaultdict[str, list[Drawn]] = defaultdict(list)
    in_order = sorted(others, key=lambda each: order(each.repo, each.path))
    for each in {each.sha256: each for each in in_order}.values():
        repositories[each.repo].append(each)
    kept: list[Drawn] = []
    for repo, mine in repositories.items():
        kind = min({each.format for each in mine}, key=lambda kind: order(repo, kind))
        same = [each for each in mine if each.format == kind]
        kept += sorted(same, key=lambda each: order(repo, each.path))[:PER_REPOSITORY]
    drawn = sorted(kept, key=lambda each: order(each.repo, each.path))[: WANTED - len(listed)]
    return sorted((*listed, *drawn), key=lambda each: (each.repo, each.path))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws public training logs.")
    parser.add_argument("--snapshots", type=Path, required=True, help="folder with OWNER+NAME/repo")
    parser.add_argument("--out", type=Path, required=True, help="folder for the drawn files")
    options: Any = parser.parse_args()
    snapshots = sorted(options.snapshots.glob("*+*/repo"))
    candidates = [each for snapshot in snapshots for each in list_candidates(snapshot)]
    drawn = draw(candidates, read_list())
    with LISTED.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Drawn.__struct_fields__)
        table.writerows(msgspec.structs.astuple(each) for each in drawn)
    options.out.mkdir(parents=True, exist_ok=True)
    for each in drawn:
        repository = options.snapshots / each.repo.replace("/", "+", 1) / "repo"
        (options.out / each.file_name).write_bytes(git(repository, "show", f"{each.commit}:{each.path}"))
    licensed = len({each.repo for each in candidates})
    print(f"{len(snapshots)} snapshots, {len(candidates)} candidates in {licensed}, {len(drawn)} drawn")


if __name__ == "__main__":
    main()
