"""`sentinel rules backtest`: the same rules, over recorded runs."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner, Result

from sentinel.cli import cli
from sentinel.engine import RUN, Entity, Observation, Rewound, Table, load_rules, rules_of
from sentinel.engine.backtest import backtest
from sentinel.node import paths
from sentinel.runs.steps import RunStep
from sentinel.store.writer import Store
from tests.report.runs import history as kept_run
from tests.waiting import until

TIMED = "group: mine\nrules:\n  - {alert: Slow, expr: loss > 1, for: 90s}\n"


def write(path: Path, losses: list[float], name: str = "loss", **more: float) -> Path:
    path.write_text("\n".join(json.dumps({"step": i, name: loss} | more) for i, loss in enumerate(losses)))
    return path


def noise(level: float, count: int) -> list[float]:
    generator = random.Random(f"{level}")
    return [level + generator.gauss(0, 0.02) for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "good.jsonl", noise(3, 300))
    write(tmp_path / "spike.jsonl", noise(3, 200) + noise(6, 25) + noise(3, 135) + [math.nan] * 3)
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["rules", "backtest", *map(str, arguments)], env={"COLUMNS": "80"})


def test_alerts_with_step_and_evidence_and_exit_code_1(folder: Path) -> None:
    result = run(folder / "spike.jsonl")
    assert result.exit_code == 1
    assert "step 201      critical  LossSpike, since step 201, resolved at" in result.output
    assert "loss 6.03" in " ".join(result.output.split())
    assert "step 360      critical  NonFiniteLoss, since step 360" in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_a_rule_that_could_not_look_does_not_read_as_fine(folder: Path) -> None:
    result = run(folder / "good.jsonl")
    assert (result.exit_code, "good  300 rows of JSON lines: no alert" in result.output) == (0, True)
    _, _, blind = result.output.partition("could not look:")
    assert "GradientSpike        no grad_norm" in blind
    assert "LossSpike" not in blind
    write(folder / "short.jsonl", noise(3, 9))
    assert "LossSpike            warming" in run(folder / "short.jsonl").output


def test_a_rule_that_could_not_have_fired_did_not_look(tmp_path: Path) -> None:
    """The condition of ParametersNotUpdated needs metrics that the log lacks, beside others that it has."""
    path = write(tmp_path / "x.jsonl", noise(3, 300), lr=1e-3, grad_norm=1.0)
    (found,) = json.loads(run(path, "--json").stdout)["runs"]
    looked = {row["rule"]: row for row in found["rules"]}
    blind = looked["ParametersNotUpdated"]
    assert (blind["judged"], blind["state"]) == (0, "no data")
    assert blind["missing"] == ["grad_norm_applied", "no_gradient", "update_ratio"]
    for rule in ("SchedulerMisused", "VanishingGradient", "LossSpike"):
        assert looked[rule]["judged"] > 0, rule


def test_json_for_scripts(folder: Path) -> None:
    result = run(folder, "--json", "--jobs", 2)
    assert result.exit_code == 1
    good, spike = json.loads(result.stdout)["runs"]
    assert (good["run"], good["rows"], good["alerts"], good["error"]) == ("good", 300, [], "")
    first, second = spike["alerts"]
    assert (first["alert"], first["severity"], first["step"], first["state"]) == (
        "LossSpike",
        "critical",
        201,
        "resolved",
    )
    assert (second["alert"], second["step"], second["state"], second["over_step"]) == (
        "NonFiniteLoss",
        360,
        "firing",
        None,
    )
    assert second["values"]["loss"] == "NaN"
    looked = {row["rule"]: row for row in good["rules"]}
    assert (looked["NonFiniteLoss"]["judged"], looked["GradientSpike"]["missing"]) == (300, ["grad_norm"])


@pytest.mark.slow
def test_several_processes_find_what_one_does(folder: Path) -> None:
    assert run(folder, "--json", "--jobs", 2).stdout == run(folder, "--json", "--jobs", 1).stdout


@pytest.fixture
def replaying(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A backtest of two logs that are being written, by two processes, each of which waits for its log's next line."""
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    for log in logs:
        os.mkfifo(log)
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from sentinel.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "rules", "backtest", *map(str, logs), "--jobs", "2"]
    ends: list[int] = []

    def has_reader(log: Path) -> bool:
        try:
            ends.append(os.open(log, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # ENXIO: none has it open
            return False
        return True

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        for log in logs:
            until(partial(has_reader, log), f"a reader of {log}")
        yield process
        process.kill()
    for end in ends:
        os.close(end)


@pytest.mark.slow
def test_ctrl_c_while_several_processes_replay_is_one_line(replaying: subprocess.Popen[str]) -> None:
    os.killpg(replaying.pid, signal.SIGINT)
    assert replaying.communicate(timeout=60)[1].strip() == "sentinel: interrupted"
    assert replaying.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_a_process_that_replays_is_one_line_and_no_alert(
    replaying: subprocess.Popen[str], number: signal.Signals
) -> None:
    """The kernel kills it where memory runs out; Ctrl-C reaches it beside its parent, also while it is idle."""
    for worker in psutil.Process(replaying.pid).children():
        if "spawn_main" in " ".join(worker.cmdline()):
            worker.send_signal(number)
    said = replaying.communicate(timeout=60)[1].strip()
    assert said.startswith("sentinel: a process that replayed logs was ended")
    assert ("--jobs 1" in said, "\n" in said, replaying.returncode) == (True, False, 2)


@pytest.mark.slow
def test_a_progress_bar_is_shown_at_a_terminal_only(folder: Path) -> None:
    assert "replaying" not in run(folder).stderr
    watched = CliRunner().invoke(cli, ["rules", "backtest", str(folder)], env={"COLUMNS": "80", "TTY_COMPATIBLE": "1"})
    assert ("replaying" in watched.stderr, "2/2" in watched.stderr) == (True, True)
    assert "replaying" not in watched.stdout


def test_a_kept_run_is_found_by_its_name() -> None:
    kept_run(paths.state_directory() / "runs" / "gpt.sqlite")
    result = run("gpt", "--alert", "NonFiniteLoss", "--json")
    (found,) = json.loads(result.output)["runs"]
    assert (found["run"], found["error"]) == ("gpt", "")


@pytest.mark.parametrize("announced", [True, False])
def test_a_stage_that_was_announced_is_no_spike(announced: bool) -> None:
    store = Store(paths.state_directory() / "runs" / "course.sqlite", run="course", run_id="course")
    store.records.begin_attempt(0, msgspec.msgpack.encode({"step_offset": 0}))
    for seq, loss in enumerate(noise(1, 200) + noise(9, 40)):
        store.records.add_step(0, RunStep(seq, 1e9 + seq, {0: {"loss": loss}}, {"loss": loss}, None))
    if announced:
        store.records.add_event(0, 200, "stage", name="harder")
    store.flush()
    store.close()
    (found,) = json.loads(run("course", "--alert", "LossSpike", "--json").output)["runs"]
    assert [alert["step"] for alert in found["alerts"]] == ([] if announced else [200])


def test_columns_of_any_name(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [*noise(3, 200), *noise(8, 9)], name="my cost")
    result = run(path)
    assert (result.exit_code, "name one with --map COLUMN=METRIC; there are: my cost" in result.stderr) == (2, True)
    result = run(path, "--map", "my cost=loss")
    assert (result.exit_code, "loss is its my cost" in result.stdout) == (1, True)
    assert run(path, "--map", "my cost").exit_code == 2
    result = run(path, "--map", "my cost=losss", "--alert", "LossSpike")
    assert str(result.exception) == (
        "--map my cost=losss: no rule reads losss; they read grad_norm, loss, reinforcement_learning, rival_loss, "
        "step_skipped"
    )


def test_rules_of_the_user_and_one_rule_alone(folder: Path) -> None:
    rules = folder / "mine.yaml"
    rules.write_text("group: mine\nrules:\n  - {alert: High, expr: loss > 5, severity: info}\n")
    result = run(folder / "spike.jsonl", "--rules", rules, "--alert", "High", "--json")
    (found,) = json.loads(result.stdout)["runs"]
    assert [alert["alert"] for alert in found["alerts"]] == ["High"]
    assert [row["rule"] for row in found["rules"]] == ["High"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alert", "LossSpkie"], "no rule is called LossSpkie; did you mean 'LossSpike'?"),
        (["--rules", "{folder}/bad.yaml"], "bad.yaml:3:22: unknown metric 'lss'"),
        (["--plot", "{folder}/x.gif"], "the picture is written as SVG: name it"),
        (["{folder}/gone.jsonl"], "gone.jsonl: no such file or folder"),
        (["gone"], "gone: no such file or folder, and no history of gone; no run is kept on this node"),
    ],
)
def test_wrong_use(folder: Path, arguments: list[str], said: str) -> None:
    (folder / "bad.yaml").write_text("group: mine\nrules:\n  - {alert: A, expr: lss > 5}\n")
    result = run(folder / "good.jsonl", *[argument.format(folder=folder) for argument in arguments])
    assert result.exception is not None
    assert said in str(result.exception)


@pytest.mark.slow
def test_a_file_that_is_no_log_is_passed_over_in_a_folder_and_an_error_where_it_is_named(folder: Path) -> None:
    (folder / "notes.txt").write_text("tried a higher rate\n")
    among = run(folder, "--json")
    assert len(json.loads(among.stdout)["runs"]) == 2
    assert among.stderr.endswith(f"name one alone to see why: {folder}/notes.txt\n")
    result = run(folder / "notes.txt", folder / "good.jsonl")
    assert (result.exit_code, "notes.txt: not a log that can be read" in result.stderr) == (2, True)


def test_bad_lines_are_reported(folder: Path) -> None:
    path = folder / "good.jsonl"
    path.write_text(path.read_text() + "\nKilled\n")
    assert f"{path}:301: no JSON" in " ".join(run(path).output.split())


def test_a_rule_of_seconds_is_not_applied_to_a_log_without_times(folder: Path) -> None:
    (folder / "timed.yaml").write_text(TIMED)
    result = run(folder / "spike.jsonl", "--rules", folder / "timed.yaml", "--alert", "Slow")
    assert (result.exit_code, "Slow                 the log has no times" in result.output) == (0, True)
    timed = write(folder / "timed.jsonl", noise(3, 100))
    timed.write_text(
        "\n".join(line[:-1] + f', "t": {1.7e9 + i}}}' for i, line in enumerate(timed.read_text().splitlines()))
    )
    result = run(timed, "--rules", folder / "timed.yaml", "--alert", "Slow")
    assert "step 90       warning   Slow, since step 0" in result.output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["one.svg", "many.svg"])
def test_a_picture_shows_the_alert(folder: Path, name: str) -> None:
    runs = [folder / "spike.jsonl"] if name == "one.svg" else [folder]
    assert run(*runs, "--plot", folder / name).exit_code == 1
    content = (folder / name).read_text(encoding="utf-8")
    assert content.startswith("<svg ")
    assert "LossSpike 201" in content


@pytest.mark.parametrize("spike", [False, True])
def test_a_run_that_is_resumed_further_back(tmp_path: Path, spike: bool) -> None:
    """The log has steps 0 to 299, then 200 to 399: the jump raises no alarm, and delays none after it."""
    falling = [4 - 0.005 * i + wobble for i, wobble in enumerate(noise(0, 400))]
    again = falling[200:]
    if spike:
        again[150:160] = [7.0] * 10
    rows = [*enumerate(falling[:300]), *enumerate(again, 200)]
    path = tmp_path / "resumed.jsonl"
    path.write_text("\n".join(json.dumps({"step": step, "loss": loss}) for step, loss in rows))
    alerts = json.loads(run(path, "--json").stdout)["runs"][0]["alerts"]
    assert [(alert["alert"], alert["step"]) for alert in alerts] == ([("LossSpike", 350)] if spike else [])


def test_a_run_that_starts_over_warms_up_again(tmp_path: Path) -> None:
    """Its input is slow for 75 steps, each time that it starts: InputBound has a warm-up of 100 steps."""
    once = [
        {"step": i, "loss": 3 * 0.995**i, "step_time": 1.0, "data_time": 0.6 if i < 75 else 0.01} for i in range(300)
    ]
    path = tmp_path / "twice.jsonl"
    path.write_text("\n".join(map(json.dumps, once + once)))
    assert json.loads(run(path, "--json").stdout)["runs"][0]["alerts"] == []


# The engine's part.


def rules(text: str) -> tuple[object, ...]:
    return rules_of([load_rules(f"group: t\nrules:\n  - {{{text}}}\n", "t.yaml")])


def test_a_resumed_run_is_rewound_and_its_steps_are_those_of_the_log() -> None:
    """The log has steps 0 to 19, bad from 15 on; it is resumed from step 10, and bad again at step 18 (seq 28)."""
    first = [Observation(i, float(i), {RUN: {"loss": 9.0 if i >= 15 else 1.0}}) for i in range(20)]
    again = [Observation(i + 10, i + 10.0, {RUN: {"loss": 9.0 if i >= 18 else 1.0}}) for i in range(10, 20)]
    report = backtest(
        rules("alert: A, expr: 'loss > 2 * mean(past(loss), 5)'"), [*first, Rewound(9, 19, -10), *again], run="x"
    )
    assert [(alert.step, alert.state, alert.summary) for alert in report.alerts] == [
        (15, "rolled_back", "loss > 2 * mean(past(loss), 5)"), (18, "firing", "loss > 2 * mean(past(loss), 5)"),
    ]  # fmt: skip
    assert report.steps == 30


@pytest.mark.parametrize(("slow_from", "fired", "first"), [(290, 292, 290), (298, 250, 298)])
def test_the_steps_of_an_alert_over_a_resume_are_those_of_the_log(slow_from: int, fired: int, first: int) -> None:
    """Step 299 is followed by step 250 again. No rollback undoes times, so that the alert goes on."""
    before = [Observation(i, float(i), {RUN: {"step_seconds": 3.0 if i >= slow_from else 1.0}}) for i in range(300)]
    after = [Observation(i + 50, i + 50.0, {RUN: {"step_seconds": 3.0 if i < 270 else 1.0}}) for i in range(250, 300)]
    report = backtest(
        rules("alert: Slow, expr: step_seconds > 2, for: 3 steps"), [*before, Rewound(249, 299, -50), *after], run="x"
    )
    (alert,) = report.alerts
    assert (alert.step, alert.first_step, alert.state, alert.over_step) == (fired, first, "resolved", 270)


def test_a_rule_over_statistics_of_layers_looked_at_them() -> None:
    table = Table((Entity("layer", "a"),), {"layer_grad_norm": [9.0], "layer_nonfinite": [0.0]})
    (looked,) = backtest(
        rules("alert: A, scope: layer, expr: not absent(layer_nonfinite) and layer_grad_norm > 99"),
        [Observation(0, 0.0, {RUN: {"loss": 1.0}}, table)],
        run="x",
    ).rules
    assert (looked.judged, looked.state, looked.missing) == (1, "inactive", ())


def test_a_rule_reports_the_metrics_that_it_lacked_first() -> None:
    step = Observation(0, 0.0, {RUN: {"loss": 1.0}})
    for text, missing in {
        "alert: A, expr: loss > 0 and grad_norm > 1": ("grad_norm",),
        "alert: A, expr: loss > 9 and grad_norm > 1": (),
        "alert: A, scope: layer, expr: layer_grad_norm > grad_norm": ("grad_norm", "layer_grad_norm"),
        "alert: A, expr: not absent(loss_scale) and loss_scale < 1 or grad_norm > 1": ("grad_norm",),
    }.items():
        (looked,) = backtest(rules(text), [step], run="x").rules
        assert looked.missing == missing, text
        assert bool(looked.judged) == (not missing)
