"""bench/detection.py on made-up runs: it counts what happened, and goes on where it was stopped."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parent.parent / "bench" / "detection.py"
FIELDS = ("run", "kind", "domain", "source", "truth", "repo", "commit", "path", "licence")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_detection", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_detection", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "KEPT", tmp_path / "build" / "kept.jsonl")
    (tmp_path / "page.md").write_text("# Title\n<!-- measured -->\nold\n")
    return module


@pytest.fixture
def data(tmp_path: Path) -> Path:
    generator = random.Random(1)
    calm = [3 + generator.gauss(0, 0.02) for _ in range(400)]
    runs = {
        "calm": ("healthy", "", calm),
        "restart": ("healthy_event", "planned restart", [*calm[:300], *[loss + 4 for loss in calm[:60]]]),
        "doomed": ("faulty", "NaN at 250 | as told", [*calm[:200], *[9.0] * 50, "nan", "nan"]),
        "dead": ("faulty", "never learns", calm[:200]),
    }
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for run, (kind, truth, losses) in runs.items():
            writer.writerow(dict.fromkeys(FIELDS, "x") | {"run": run, "kind": kind, "domain": run, "truth": truth})
            path = tmp_path / "runs" / kind / f"{run}.jsonl.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = "\n".join(json.dumps({"step": i, "loss": loss}) for i, loss in enumerate(losses))
            path.write_bytes(gzip.compress(rows.encode()))
    return tmp_path


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, data: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["detection.py", "--data", str(data), "--jobs", "1", *options])
    return int(bench.main())


def test_it_counts_what_happened_and_goes_on_where_it_was(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, data: Path
) -> None:
    assert run(bench, monkeypatch, data, "--check") == 1
    assert run(bench, monkeypatch, data) == 0
    text = bench.PAGE.read_text()
    assert text.startswith("# Title\n<!-- measured -->\n")
    assert "old" not in text
    restart, doomed, dead = (bench.Label(run, "", run, "x", *"    ").half for run in ("restart", "doomed", "dead"))
    for line in (
        f"| restart | {restart} | LossSpike | 301 | planned restart |",
        f"| NaN after 150 rows or more | {doomed} | 1 of 1 (21 % to 100 %) | 1 of 1 (21 % to 100 %) | 49 |",
        f"| no NaN | {dead} | 0 of 1 (0 % to 79 %) |  |  |",
        f"| dead | {dead} | 200 | never learns |",
    ):
        assert line in text
    kept = bench.KEPT.read_text()
    monkeypatch.setattr(bench, "replayed", lambda path: pytest.fail("it was kept"))
    assert run(bench, monkeypatch, data, "--check") == 0
    assert bench.KEPT.read_text() == kept


def test_intervals_are_the_known_ones(bench: ModuleType) -> None:
    assert bench.share(1, 10) == "1 of 10 (2 % to 40 %)"  # Wilson: 0.018 to 0.404
    assert bench.rate(0, 10_000) == "0.000 (0.000 to 3.689)"  # -ln 0.025
    assert bench.rate(10, 10_000) == "10.000 (4.795 to 18.390)"  # Garwood's table
