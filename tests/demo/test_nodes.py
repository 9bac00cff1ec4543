"""The demo of a job over several nodes: its record, and whole runs, in namespaces and on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from sentinel.cli import cli
from sentinel.demo import jobstory
from sentinel.demo.inbox import Inbox, Sent
from sentinel.demo.jobrecord import KINDS, JobFault, JobRecord, find_failure
from sentinel.demo.outcome import describe_job
from sentinel.demo.page import draw_picture, write_page
from sentinel.demo.record import LossCurve, RecordedRollback
from tests.demo.test_plots import count_curves, read_texts
from tests.waiting import until

FIRST, STEPS = 60, 100


def sent(alert: str, time: float, **changes: Any) -> Sent:
    made = Sent(
        time=time, key=alert, firing=True, alert=alert, severity="critical", run_id="demo", incident="n1-0.1",
        summary="<it> broke", cause="rank 1 was killed", members="rank 1", done="", step=FIRST,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def curve(steps: list[int], **more: Any) -> LossCurve:
    times = [1000.0 + at + 30 * (at > FIRST) for at in range(len(steps))]
    return LossCurve(steps=steps, losses=[3.0] * len(steps), times=times, weights="ab12", **more)


def job_of(fault: JobFault) -> JobRecord:
    if KINDS[fault].rolls_back:
        curves = [curve(list(range(STEPS)), starts=[0], rollbacks=[RecordedRollback(at=62, to=50)]) for _ in range(2)]
    else:
        steps = [*range(FIRST + 1), *range(40, STEPS)]
        curves = [curve(steps, starts=[0, 40], places=[0, FIRST + 1]) for _ in range(2)]
    page = sent(KINDS[fault].alerts[0], 1065.0)
    over = msgspec.structs.replace(page, firing=False, done="over: attempt 1 began", time=1090.0)
    return JobRecord(
        fault=fault, seed=0, steps=STEPS, first=FIRST, curves=curves, messages=[page, over], pages=[page],
        fault_time=1060.0, apart=True, run_id="demo", state="/out/node-0", python="3.11", torch="2.13", seconds=90.0,
    )  # fmt: skip


@pytest.fixture(params=list(KINDS))
def job(request: pytest.FixtureRequest) -> JobRecord:
    return job_of(request.param)


def test_what_must_be_shown(job: JobRecord) -> None:
    assert find_failure(job) == ""
    (page,) = job.pages
    job.pages = [page, msgspec.structs.replace(page, run_id="demo@node-1")]
    assert find_failure(job) == f"the receiver got 2 pages: {page.alert} of demo, {page.alert} of demo@node-1"
    job.pages = []
    assert find_failure(job) == "the receiver got no page"
    job.pages = [sent("OutOfMemory", 1065.0)]
    assert "the page was OutOfMemory" in find_failure(job)


def test_a_node_that_differs_from_the_other_is_named(job: JobRecord) -> None:
    job.curves[1].weights = "cd34"
    assert "weights of node 1" in find_failure(job)
    job.curves[1].starts, job.curves[1].rollbacks = [0], []
    assert find_failure(job).startswith("node 1 went back otherwise")


def test_words(job: JobRecord) -> None:
    words = jobstory.verdict(job)
    assert words.startswith("The receiver got one page, 5 s after the fault, and 1 later message about it: ")
    back = "rolled back to step 50, 33 s" if job.fault == "spike" else "started again from step 40, 31 s"
    assert f"All 2 nodes were {back} after the fault" in words
    assert jobstory.comparison(job)[0][1:] == (("62 to 50",) * 2 if job.fault == "spike" else ("0 and 40",) * 2)
    assert json.dumps(job.summary())


def test_picture_and_page(job: JobRecord, tmp_path: Path) -> None:
    outcome = describe_job(job)
    draw_picture(outcome, tmp_path / "demo.svg")
    texts = read_texts(tmp_path / "demo.svg")
    assert {"the fault", f"{job.pages[0].alert}: one page", "node 0", "node 1"} <= set(texts)
    assert [count_curves(tmp_path / "demo.svg", style) for style in ("s0", "s1")] == [3, 3]
    write_page(outcome, "said", tmp_path / "demo.html")
    text = (tmp_path / "demo.html").read_text()
    assert "&lt;it&gt; broke" in text
    assert "SENTINEL_STATE=/out/node-0 sentinel incidents show" in text


def test_the_first_firing_message_of_a_problem_is_a_page(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "pages")
    with (tmp_path / "pages").open("a") as file:
        for key, status in [("a", "firing"), ("a", "firing"), ("b", "resolved"), ("a", "resolved")]:
            labels = {"alertname": "Hang", "severity": "critical", "run_id": "demo"}
            notes = {"incident": "1", "summary": "s", "step": "5"}
            body = {"groupKey": key, "status": status, "alerts": [{"labels": labels, "annotations": notes}]}
            print(json.dumps({"time": 1.0, "body": body}), file=file)
    assert len(inbox.take()) == 4
    assert [page.key for page in inbox.pages] == ["a"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2", "--fault", "leak"], "with --nodes there are spike, kill, hang, cut"),
        (["--fault", "cut"], "without --nodes there are spike, nan, scaler, leak, hang"),
        (["--nodes", "9"], "2<=x<=5"),
        (["--nodes", "2", "--steps", "50"], "needs 360"),
    ],
)
def test_wrong_use(words: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, ["demo", *words])
    assert (result.exit_code, said in result.output) == (2, True), result.output


def test_a_link_that_cannot_be_cut_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("zenoh")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    result = CliRunner().invoke(cli, ["demo", "--nodes", "2", "--fault", "cut", "--out", str(tmp_path / "out")])
    assert str(result.exception) == (
        "there is no link to cut without network namespaces: ip is not installed (package iproute2)"
    )


def test_a_service_that_would_serve_all_nodes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("zenoh")
    monkeypatch.setenv("SENTINEL_ADDRESS", "unix:/run/one.sock")
    result = CliRunner().invoke(cli, ["demo", "--nodes", "2", "--out", str(tmp_path / "out")])
    assert "one at /run/one.sock serves all" in str(result.exception)


def show(fault: str, folder: Path, **environment: str) -> dict[str, Any]:
    """Run a whole demo over two nodes, and return its JSON output."""
    command = f"-m sentinel demo --nodes 2 --fault {fault} --json --out out"
    with subprocess.Popen(
        [sys.executable, *command.split()], cwd=folder, env=os.environ | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as driver:  # fmt: skip
        output, errors = driver.communicate()
    assert driver.returncode == 0, errors
    shown: dict[str, Any] = json.loads(output)
    assert len(shown["pages"]) == 1
    assert len(set(shown["weights"])) == 1
    assert Path(shown["picture"]).exists()
    assert list_left(folder, driver.pid) == []
    return shown


def list_left(folder: Path, pid: int) -> list[str]:
    """Return the processes that name a folder, and the namespaces of this process's demo: others may run meanwhile."""
    left = [
        " ".join(process.info["cmdline"])
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]
    return left + [path.name for path in Path("/run/netns").glob(f"sentinel-demo-{pid}-*")]


@pytest.mark.networks
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bad_data_of_one_node_rolls_back_both_in_their_namespaces(tmp_path: Path) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    shown = show("spike", tmp_path)
    assert shown["networks"] == "namespaces"
    ((rollback,), other) = shown["rollbacks"]
    assert other == [rollback]
    assert rollback["to"] < 180 <= rollback["at"]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_dies_starts_both_again_on_one_loopback(tmp_path: Path) -> None:
    """Without `ip` the demo runs as for a user who is not root."""
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    shown = show("kill", tmp_path, PATH=str(tmp_path))
    assert shown["networks"] == "loopback"
    assert shown["starts"][0] == shown["starts"][1]
    assert shown["starts"][0] == [0, 160]


@pytest.mark.networks
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_and_no_namespace(tmp_path: Path, number: int) -> None:
    pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
    command = [sys.executable, "-m", "sentinel", "demo", "--nodes", "2", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        ["env", "--default-signal=INT", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as driver:
        until(lambda: list((tmp_path / "out").glob("node-1/stderr.txt")), "the last node")
        driver.send_signal(number)
        assert driver.communicate()[1] == "sentinel: interrupted; all training processes are ended\n"
    assert driver.returncode == 130
    assert list_left(tmp_path, driver.pid) == []
    assert not (tmp_path / "out").exists()
