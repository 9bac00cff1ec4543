"""bench/gpu.py where there is no GPU: each check as a toy, and the script around them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parent.parent / "bench" / "gpu.py"
FAKE = """
import sys, time
name = sys.argv[2]
print('{"what": "first", "figure": "1 | 2", "ok": true, "bar": "3"}', flush=True)
print("what somebody else says", flush=True)
if name == "kernel":
    sys.exit("it broke")
if name == "speed":
    time.sleep(60)
"""


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_gpu", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = list(loaded().BY_NAME)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_every_check_runs_as_a_toy(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--device", "cpu", "--only", name, "--results", str(tmp_path / "r.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert lines[-1]["done"]
    assert len(lines) > 1
    assert not [line for line in lines if line.get("ok") is False]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With checks that are made up."""
    module = loaded()
    (tmp_path / "gpu.py").write_text(FAKE)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    (tmp_path / "page.md").write_text(f"# Title\n{module.MARKS[0]}\nold\n{module.MARKS[1]}\nafter\n")
    return module


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(folder / "r.jsonl"), *options])
    return int(bench.main())


def test_what_is_done_is_not_run_again_and_what_broke_is(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(bench, monkeypatch, tmp_path, "--only", "machine", "kernel") == 1
    said = capsys.readouterr().out
    assert "machine     done in" in said
    assert "exit status 1: it broke" in said
    found = bench.known(tmp_path / "r.jsonl")
    assert [line.get("figure") for line in found["kernel"]] == ["1 | 2", "exit status 1: it broke"]
    before = len((tmp_path / "r.jsonl").read_text().splitlines())
    run(bench, monkeypatch, tmp_path, "--only", "machine", "kernel")
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == before + 2
    assert len(bench.known(tmp_path / "r.jsonl")["kernel"]) == 2, "of what was run twice the last counts"
    assert run(bench, monkeypatch, tmp_path, "--only", "machine", "--again") == 0


def test_a_check_has_a_time_limit_and_the_whole_a_budget(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = bench.BY_NAME["speed"]
    assert not bench.run(slow, "cpu", 2.0, tmp_path / "r.jsonl")
    assert "not over in 2 s" in capsys.readouterr().out
    assert run(bench, monkeypatch, tmp_path, "--only", "machine", "overhead", "--budget", "100") == 2
    assert "overhead    left for the next time: it takes some 260 s" in capsys.readouterr().out


def test_the_table_takes_its_place_in_the_page(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(bench, monkeypatch, tmp_path, "--only", "machine", "--device", "cpu")
    with pytest.raises(SystemExit):
        run(bench, monkeypatch, tmp_path, "--write", "--device", "cpu")
    run(bench, monkeypatch, tmp_path, "--write")
    page = (tmp_path / "page.md").read_text()
    assert "| machine | first | 3 | 1 / 2 | ok |" in page
    assert "Not done: stream, quiet," in page
    assert page.startswith("# Title\n")
    assert page.endswith("after\n")
    assert "old" not in page


def test_all_of_it_fits_into_twenty_minutes_and_a_call_into_ten() -> None:
    checks = loaded().CHECKS
    assert sum(check.seconds for check in checks) < 20 * 60
    assert max(check.seconds for check in checks) < 9 * 60


def test_the_page_has_a_place_for_it() -> None:
    page = (BENCH.parent.parent / "docs" / "performance.md").read_text()
    for mark in loaded().MARKS:
        assert page.count(mark) == 1
