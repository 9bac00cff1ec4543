"""`sentinel top`: its picture, and the program in a real terminal."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel.cli.top_frame import Traces, frame, sparkline
from tests.daemon.simulated import SimulatedRank, daemon_process
from tests.zygote import DAEMON, run_fork


def run(**more: Any) -> dict[str, Any]:
    return {
        "run": "gpt", "run_id": "gpt-1", "attempt": 0, "step": 120, "history": "", "trouble": "", "open_incidents": 0,
        "values": {"loss": 2.5, "grad_norm": 0.6, "learning_rate": 3e-4, "step_seconds": 0.2, "forward_seconds": 0.1},
        "ranks": [rank(0)], "gpus": {"devices": []}, "rollback": {"armed": True, "held": [100], "done": []}, **more,
    }  # fmt: skip


def rank(number: int, state: str = "live", **more: Any) -> dict[str, Any]:
    return {"rank": number, "state": state, "step": 120, "phase": "", "stall": {"seconds": 0.0}, **more}


def case(**more: Any) -> dict[str, Any]:
    return {"alert": "LossSpike", "step": 118, "state": "firing", "severity": "critical", "summary": "loss 9", **more}


def text(runs: list[dict[str, Any]], cases: list[dict[str, Any]], width: int = 80, height: int = 24) -> str:
    traces = Traces()
    traces.add(runs)
    return "\n".join(line.text for line in frame(runs, cases, traces, width, height))


def test_a_run_shows_what_matters() -> None:
    said = text([run()], [case()])
    for words in (
        "1 run",
        "1 incident open",
        "gpt (gpt-1)  step 120",
        "loss       2.5",
        "forward 50%",
        "snapshots 100",
    ):
        assert words in said
    assert "! LossSpike" in said


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (20, 3)])
def test_the_picture_fits_any_terminal(width: int, height: int) -> None:
    ranks = [rank(number, "silent" if number == 700 else "live") for number in range(1024)]
    runs = [run(ranks=ranks, run="x" * 300), run(run_id="other")]
    lines = text(runs, [case() for _ in range(50)], width, height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_the_last_line_counts_what_a_small_terminal_leaves_out() -> None:
    runs = [run(run_id=f"gpt-{number}") for number in range(9)]
    whole, cut = (text(runs, [], height=height).splitlines() for height in (500, 20))
    assert cut == [*whole[:19], f"and {len(whole) - 19} lines more"]


def test_an_open_incident_is_shown_however_many_came_after_it() -> None:
    over = [case(alert="SlowStep", state="resolved") for _ in range(50)]
    said = text([run()], [case(), *over])
    assert "1 incident open" in said
    assert said.splitlines()[-1].startswith("! LossSpike")


def test_the_heading_counts_the_incidents_only_where_some_are_left_out() -> None:
    few, many = (text([run()], [case() for _ in range(count)]).splitlines() for count in (2, 50))
    assert [line for line in few if line.startswith("incidents")] == ["incidents"]
    (heading,) = (line for line in many if line.startswith("incidents"))
    assert heading == f"incidents, the last {sum(line.startswith('! ') for line in many)}"


def test_a_rank_that_is_not_live_is_named() -> None:
    stalled = rank(3, "silent", stall={"seconds": 42.0})
    said = text([run(ranks=[rank(0), rank(1), rank(2), stalled])], [])
    assert "ooos" in said
    assert "rank 3 is silent at step 120, no progress for 42 s" in said


def test_nodes_of_a_job_are_shown_with_their_ranks_silent_ones_first() -> None:
    nodes = [
        {"node": n, "hostname": f"host{n}", "state": "silent" if n == 40 else "alive", "silent_seconds": 12.0,
         "step": 90 if n == 7 else 120, "ranks": {str(rank): 120 for rank in range(8 * n, 8 * n + 8)}}
        for n in range(64)
    ]  # fmt: skip
    job = {"view": "joined", "node": 3, "address": "host0:9478", "coordinator_silent_seconds": 0.1, "expected": 65,
           "nodes": nodes}  # fmt: skip
    lines = text([run(job=job)], [], width=100, height=40).splitlines()
    first = lines.index("job        63 of 65 nodes heard; this is node 3, coordinator at host0:9478")
    shrunk = text([run(job=job | {"shrunk": "65 of 66 nodes: without node 65"})], [], width=100, height=40).splitlines()
    assert shrunk[first + 1].strip() == "65 of 66 nodes: without node 65"
    assert lines[first + 1] == "node 40    host40, silent for 12 s, step 120, ranks 320 to 327"
    assert lines[first + 2] == "node 7     host7, alive, step 90, ranks 56 to 63"
    assert lines[first + 9].strip() == "and 56 more nodes, alive, at steps 120 to 120"
    assert lines[first + 10].strip() == "1 of 65 nodes not heard yet"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_rows_of_a_job_are_wrapped_and_begin_with_how_many_nodes_are_heard(width: int) -> None:
    absence = "this node would be the coordinator, but is in touch with only 1 of 2 nodes, itself included (for 42 s)"
    nodes = [
        {"node": n, "hostname": f"gpu-worker-{n}.cluster.example", "state": "silent" if n else "alive",
         "silent_seconds": 42.0 * n, "step": 120456, "ranks": {str(8 * n + one): 120456 for one in range(8)}}
        for n in range(2)
    ]  # fmt: skip
    job = {"view": "alone", "node": 0, "address": "host0:9478", "absence": absence, "expected": 2, "nodes": nodes,
           "blame": {"1": 4}, "blamed_incidents": 6}  # fmt: skip
    unasked = f"run gpt: not asked: the other nodes: {absence}; this is what this node sees alone"
    lines = [line.text for line in frame([run(job=job)], [], Traces(), width, 40, [unasked])]
    assert max(map(len, lines)) <= width
    first = next(at for at, line in enumerate(lines) if line.startswith("job "))
    assert lines[first].startswith("job        1 of 2 nodes heard; this is node 0, local view only")
    said = " ".join(" ".join(lines[first:]).split())
    assert f"tells people by itself: {absence} node 1 gpu-worker-1.cluster.example, silent for 42 s, step" in said
    assert "was in 4 of 6 incidents, ranks 8 to 15" in said
    assert unasked in said


def test_nodes_that_could_not_be_asked_are_named_by_top() -> None:
    traces = Traces()
    lines = frame([run()], [case()], traces, 80, 24, ["run gpt: not asked: node 2 (host2): silent for 12 s"])
    assert ("run gpt: not asked: node 2 (host2): silent for 12 s", "yellow") in lines


def test_a_gpu_is_shown_by_its_readings() -> None:
    values = {"gpu_utilization_ratio": 0.97, "gpu_memory_used_bytes": 61e9, "gpu_memory_total_bytes": 80e9}
    assert "gpu 0      97% busy, 61.0 of 80 GB" in text([run(gpus={"devices": [{"gpu": 0, "values": values}]})], [])


def test_names_from_runs_cannot_control_the_terminal() -> None:
    said = text([run(run="a\x1b[2Jb")], [case(summary="x\r\n\x1b]0;y\x07")])
    assert "\x1b" not in said
    assert "\r" not in said


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([0, 6, 8], "▁▇█"),
        ([1, 1], " ▁▁"),
        ([0, math.nan, 8], "▁x█"),
        ([0, 1, 0, 9, 0, 0], "▁█▁"),
        ([math.inf], "  x"),
        ([1, 10, 1000], "▁▃█"),
        ([-1e308, 0, 1.7e308], "▁▃█"),
    ],
)
def test_a_sparkline_shows_the_highest_of_each_stretch(past: list[float], expected: str) -> None:
    assert sparkline(past, 3) == expected


def test_the_words_of_an_incident_are_wrapped_under_themselves() -> None:
    words = "20 of the last 20 sampled gradients were clipped to 1; norm 3416 at step 420"
    lines = text([run()], [case(summary="x"), case(alert="AlwaysClipping", summary=words)]).splitlines()
    first = next(at for at, line in enumerate(lines) if "AlwaysClipping" in line)
    column = lines[first].index("20 of the last")
    said = [line[column:] for line in lines[first:]]
    assert " ".join(said) == words
    assert len(said) > 1
    assert lines[first - 1][column:] == "x"


def test_shares_of_a_step_are_of_the_whole_where_each_rank_has_its_own_slowest_part() -> None:
    values = {"step_seconds": 0.1, "backward_seconds": 0.08, "other_seconds": 0.08}
    assert "backward 50%  other 50%" in text([run(values=values)], [])


def test_the_past_of_a_run_comes_from_its_history(tmp_path: Path) -> None:
    from tests.report.runs import history

    known = run(history=str(history(tmp_path / "gpt.sqlite", steps=50)), step=50)
    traces = Traces()
    traces.add([known])
    assert len(traces.list_values("gpt-1", "loss")) == 51
    traces.add([known])  # the same step again
    assert len(traces.list_values("gpt-1", "loss")) == 51


@pytest.mark.slow
@pytest.mark.processes
def test_in_a_real_terminal_it_shows_a_live_run_and_q_ends_it() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as one:
        one.hello()
        one.steps(0, [3.0, 2.5, 2.0])
        plain = run_fork([sys.executable, "-m", "sentinel", "top", "--json"], DAEMON)
        assert json.loads(plain.stdout)["runs"][0]["run"] == "train"
        process, terminal = _in_a_terminal("top", "--interval", "0.2")
        shown = _until(terminal, "train (r1)")
        os.write(terminal, b"q")
        shown += _rest(terminal)
        assert process.wait(20) == 0
        assert "\x1b[?1049h" in shown  # a screen of its own
        assert "\x1b[?1049l" in shown  # and the former one back
        os.close(terminal)


def _in_a_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "sentinel", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def _until(terminal: int, words: str) -> str:
    said = ""
    deadline = time.monotonic() + 30
    while words not in said:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, said
        said += os.read(terminal, 65536).decode(errors="replace")
    return said


def _rest(terminal: int) -> str:
    said = ""
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # EIO: the other side is closed
            return said
        if not chunk:
            return said
        said += chunk.decode(errors="replace")


def test_without_a_watched_run_top_says_so_and_ends_with_1() -> None:
    done = run_fork([sys.executable, "-m", "sentinel", "top"], DAEMON)
    assert done.returncode == 1
    assert "No run is watched" in done.stdout
