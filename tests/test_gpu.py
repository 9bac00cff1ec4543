"""bench/gpu.py without a GPU: each check as a toy, and the script around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu

ROOT = Path(__file__).parent.parent
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


NAMES = list(gpu.BY_NAME)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_every_check_runs_as_a_toy(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.gpu",
        "--device",
        "cpu",
        "--only",
        name,
        "--results",
        str(tmp_path / "r.jsonl"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert lines[-1]["done"]
    assert len(lines) > 1
    assert not [line for line in lines if line.get("ok") is False]


@pytest.fixture(autouse=True)
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the checks by made-up ones, and the page by one of their own."""
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(gpu, "RUN", (sys.executable, str(tmp_path / "fake.py"), "--run"))
    monkeypatch.setattr(gpu, "DOCS", tmp_path)
    monkeypatch.setattr(gpu, "PATIENCE", 0.01)
    (tmp_path / "performance.md").write_text(f"# Title\n{gpu.MARKS[0]}\nold\n{gpu.MARKS[1]}\nafter\n")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(folder / "r.jsonl"), *options])
    return int(gpu.main())


def test_a_finished_check_is_not_run_again_and_a_failed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, "--only", "machine", "kernel") == 1
    said = capsys.readouterr().out
    assert "machine     done in" in said
    assert "exit status 1: it broke" in said
    found = gpu.read_known(tmp_path / "r.jsonl")
    assert [line.get("figure") for line in found["kernel"]] == ["1 | 2", "exit status 1: it broke"]
    before = len((tmp_path / "r.jsonl").read_text().splitlines())
    run(monkeypatch, tmp_path, "--only", "machine", "kernel")
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == before + 2
    assert len(gpu.read_known(tmp_path / "r.jsonl")["kernel"]) == 2, "of what was run twice the last counts"
    assert run(monkeypatch, tmp_path, "--only", "machine", "--again") == 0


@pytest.mark.slow
def test_a_check_has_a_time_limit_and_the_whole_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = gpu.BY_NAME["speed"]
    assert not gpu.run(slow, "cpu", 2.0, tmp_path / "r.jsonl")
    assert "not over in 2 s" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, "--only", "machine", "overhead", "--budget", "100") == 2
    assert "overhead    left for the next time: it takes some 260 s" in capsys.readouterr().out


def test_the_table_takes_its_place_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, tmp_path, "--only", "machine", "--device", "cpu")
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--write", "--device", "cpu")
    run(monkeypatch, tmp_path, "--write")
    page = (tmp_path / "performance.md").read_text()
    assert "| machine | first | 3 | 1 / 2 | ok |" in page
    assert "Not done: stream, quiet," in page
    assert page.startswith("# Title\n")
    assert page.endswith("after\n")
    assert "old" not in page


def test_all_checks_fit_into_twenty_minutes_and_each_into_ten() -> None:
    checks = gpu.CHECKS
    assert sum(check.seconds for check in checks) < 20 * 60
    assert max(check.seconds for check in checks) < 9 * 60


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for mark in gpu.MARKS:
        assert page.count(mark) == 1
