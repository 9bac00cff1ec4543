"""The command line of `sentinel doctor`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sentinel.cli.doctor import judge_ranks
from sentinel.errors import ConfigError
from sentinel.toolkit.doctor.command import Examined, examine_command, rewritten
from tests.doctor.scripts import PLANTED
from tests.waiting import until


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sentinel", "doctor", *arguments], capture_output=True, text=True)


@pytest.mark.processes
def test_a_script_is_run_for_a_few_steps_and_judged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, pathlib\nfrom helper import NAME\nassert sys.argv[1:] == ['--lr', '1']\n"
        + PLANTED["adam-weight-decay"].replace("range(9)", "range(10**6)")
        + "    pathlib.Path(NAME).open('a').write('step\\n')\n"
    )
    (tmp_path / "helper.py").write_text(f"NAME = {str(tmp_path / 'steps')!r}\n")
    done = doctor("--json", "--steps", "2", "--", sys.executable, str(script), "--lr", "1")
    assert done.returncode == 1
    found = [finding["name"] for finding in json.loads(done.stdout)["findings"]]
    assert "adam-weight-decay" in found
    assert "error" not in found
    assert (tmp_path / "steps").read_text().count("step") == 2


@pytest.mark.slow
@pytest.mark.processes
def test_as_many_steps_are_examined_as_were_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLANTED["no-gradient"])
    done = doctor("--json", "--steps", "3", "--", sys.executable, str(script))
    said = {finding["name"]: finding["what"] for finding in json.loads(done.stdout)["findings"]}
    assert said["no-gradient"].startswith("at 3 steps ")


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_never_steps_and_hangs_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, time\nprint('loading \\x1b[2J', file=sys.stderr, flush=True)\ntime.sleep(1000)\n")
    done = doctor("--timeout", "10", "--", sys.executable, str(script))
    assert done.returncode == 1
    assert "the time was over before the steps were" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.processes
def test_a_doctor_that_is_asked_to_end_ends_its_script(tmp_path: Path) -> None:
    script, noted = tmp_path / "train.py", tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(noted)!r}, 'w').write(f'{{os.getpid()}}.')\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "sentinel", "doctor", "--", sys.executable, str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: noted.exists() and noted.read_text().endswith("."), "the script")
        process.terminate()
        assert process.communicate()[1].strip() == "sentinel: interrupted"
    assert not psutil.pid_exists(int(noted.read_text()[:-1]))


@pytest.mark.slow
@pytest.mark.processes
def test_ranks_in_sessions_of_their_own_are_ended_when_the_time_is_over(tmp_path: Path) -> None:
    """torchrun starts each rank in a session, which the end of its process group does not reach."""
    start = f"setsid sleep 1000 & echo $! > {tmp_path / 'rank'}; wait"
    assert examine_command(["sh", "-c", start, "train.py"], steps=1, seconds=5).timed_out
    rank = int((tmp_path / "rank").read_text())
    until(lambda: not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE, "its end")


def test_only_a_command_that_took_too_long_is_given_more_time() -> None:
    stderr = "W1127 run.py:874] Setting OMP_NUM_THREADS\nW1127 run.py:874] *****\n\n"
    (late,) = judge_ranks(Examined([], stderr, timed_out=True))
    (ended,) = judge_ranks(Examined([], "", timed_out=False))
    assert (late.name, ended.name) == ("no-step", "no-step")
    assert late.why == "its last line on stderr: W1127 run.py:874] Setting OMP_NUM_THREADS"
    assert ended.why == "it wrote nothing to stderr"
    assert ("--timeout" in late.line, "--timeout" in ended.line) == (True, False)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --lr 3", "python -m sentinel.hooks.examine train.py --lr 3"),
        ("python3 -m package.train -v", "python3 -m sentinel.hooks.examine -m package.train -v"),
        (
            "torchrun --nproc-per-node 2 train.py",
            "torchrun --nproc-per-node 2 -m sentinel.hooks.examine train.py",
        ),
        (
            "python -m torch.distributed.run --nproc-per-node 2 train.py",
            "python -m torch.distributed.run --nproc-per-node 2 -m sentinel.hooks.examine train.py",
        ),
        ("torchrun --module package.train -v", "torchrun -m sentinel.hooks.examine -m package.train -v"),
        ("srun -n 2 python -m package.train", "srun -n 2 python -m sentinel.hooks.examine -m package.train"),
        ("uv run train.py", "uv run -m sentinel.hooks.examine train.py"),
        ("bash env.sh python train.py", "bash env.sh python -m sentinel.hooks.examine train.py"),
        ("numactl -m 0 python train.py", "numactl -m 0 python -m sentinel.hooks.examine train.py"),
        (
            "deepspeed --num_gpus 2 train.py --deepspeed",
            "deepspeed --num_gpus 2 --module sentinel.hooks.examine train.py --deepspeed",
        ),
    ],
)
def test_the_command_is_rewritten_to_start_the_examiner(command: str, expected: str) -> None:
    assert rewritten(command.split()) == expected.split()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("target", ["train.py", "-m train"])
def test_the_local_rank_that_a_launcher_puts_first_is_the_scripts(target: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit(' '.join(sys.argv[1:]))\n")
    facts = tmp_path / "facts"
    command = [sys.executable, "-m", "sentinel.hooks.examine", "--local_rank=0", *target.split(), "--lr", "1"]
    environment = {**os.environ, "SENTINEL_EXAMINATION": str(facts), "PYTHONPATH": os.getcwd()}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert json.loads((tmp_path / "facts.0.json").read_text())["error"].endswith("with --local_rank=0 --lr 1")


@pytest.mark.parametrize(
    "command", [["make", "train"], ["bash", "a.py"], ["sh", "-c", "python a.py"], ["./a.py"], ["srun", "bash", "a.py"]]
)
def test_a_command_in_which_no_python_command_is_seen_is_refused_in_a_sentence(command: list[str]) -> None:
    with pytest.raises(ConfigError, match="no Python command with a script"):
        rewritten(command)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--steps", "0"), "Invalid value for '--steps'"),
        (("--", "make", "train"), "a script (.py) or -m module"),
        (("--", "/no/such/python", "train.py"), "No such file"),
    ],
)
def test_wrong_use_ends_with_2(arguments: tuple[str, ...], said: str) -> None:
    done = doctor(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
