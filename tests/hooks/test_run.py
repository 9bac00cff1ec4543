"""`sentinel run`: a script without a line of Sentinel is watched, and otherwise behaves as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.cli.run import environment
from tests.hooks.conftest import FakeDaemon

RUN = [sys.executable, "-m", "sentinel", "run"]

TRAIN = """
import hashlib, os, subprocess, sys
import torch

def say(what):
    sys.stdout.write(f"{what}\\n")  # at once: torchrun has its ranks unbuffered, where print() writes the end apart
    sys.stdout.flush()

def main():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    workers = {} if "RANK" in os.environ else {"num_workers": 1, "multiprocessing_context": "spawn"}
    data = torch.utils.data.DataLoader(torch.randn(48, 6), batch_size=8, **workers)
    if "RANK" in os.environ:
        import torch.distributed as dist
        dist.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in data:
        optimizer.zero_grad()
        (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    say(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
    if "RANK" in os.environ:
        dist.barrier()
        import time
        time.sleep(0.5)  # pytorch#190489: gloo's threads else may abort the process at its end
        dist.destroy_process_group()
    else:
        loaded = "print('torch' in sys.modules, any(name.startswith('sentinel') for name in sys.modules))"
        subprocess.run([sys.executable, "-c", f"import sys, the_users_own; {loaded}"], check=True)
    say(any("launch" in entry for entry in sys.path))
    sys.exit(7 if "RANK" not in os.environ else 0)

if __name__ == "__main__":
    main()
"""

OWN = """
import sys, types
sys.modules["the_users_own"] = types.ModuleType("the_users_own")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_is_watched_and_none_the_wiser(daemon: FakeDaemon, tmp_path: Path) -> None:
    """A watched script has the same weights and exit code, and runs the user's own sitecustomize.

    Loader workers (spawned processes) and other processes are no runs, and load neither torch nor Sentinel.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "sitecustomize.py").write_text(OWN)
    command = [sys.executable, str(tmp_path / "train.py")]
    own = {**os.environ, "PYTHONPATH": str(tmp_path)}
    bare = subprocess.run(command, env=own, capture_output=True, text=True)
    watched = subprocess.run([*RUN, "--name", "mine", "--", *command], env=own, capture_output=True, text=True)
    assert (watched.returncode, watched.stdout) == (7, bare.stdout), watched.stderr
    assert bare.stdout.split()[1:] == ["False", "False", "False"]
    assert daemon.ended().reason == "exit"
    (hello,) = daemon.of(wire.Hello)
    assert hello.identity.run == "mine"
    assert hello.identity.run_id.startswith("mine-")
    assert daemon.seqs() == list(range(6))
    assert list(daemon.series("loss")) == list(range(6))
    assert "sentinel: watching run 'mine'" in watched.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_the_ranks_of_torchrun_are_one_run(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "train.py")]
    done = subprocess.run([*RUN, "--", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    daemon.wait(lambda: len(daemon.of(wire.Goodbye)) == 2)
    identities = [hello.identity for hello in daemon.of(wire.Hello)]
    assert sorted((one.rank, one.world_size) for one in identities) == [(0, 2), (1, 2)]
    assert len({one.run_id for one in identities}) == 1
    assert identities[0].run == "train"
    assert len(set(done.stdout.split())) == 2, "the replicas have the same weights"
    assert sorted(daemon.seqs()) == sorted([*range(6), *range(6)])


LISTENING = """
import signal, sys, time
got = []
def note(number, frame):
    got.append(signal.Signals(number).name)
    print(*got, flush=True)
for one in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(one, note)
print("ready", flush=True)
while "SIGINT" not in got:
    time.sleep(0.01)
"""


def test_signals_pass_through_once() -> None:
    """Slurm signals the process that it started; a terminal signals all processes in its foreground."""
    command = [*RUN, "--", sys.executable, "-c", LISTENING]

    def heed_interrupts() -> None:
        """Handle SIGINT by default, though a shell that runs the tests in its background ignores it for them."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "SIGTERM\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGTERM SIGUSR1\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.read() == "SIGTERM SIGUSR1 SIGINT\n"
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_signal_that_kills_is_the_commands_own_end() -> None:
    command = [*RUN, "--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    assert subprocess.run(command).returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ([], 2, "Missing argument"),
        (["--", "no-such-command"], 127, "sentinel: no-such-command: no such command"),
        (["--", "/"], 126, "sentinel: /: Permission denied"),
        ([sys.executable, "-c", "import sys; sys.exit(sys.argv[1:] != ['--name', 'x'])", "--name", "x"], 0, ""),
        (["--", sys.executable, "-E", "-c", ""], 0, "with -E Python does not see Sentinel"),
    ],
)
def test_wrong_use(command: list[str], status: int, said: str) -> None:
    done = subprocess.run([*RUN, *command], capture_output=True, text=True)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_command_inherits() -> None:
    made = environment({"PYTHONPATH": "/a:/b", "HOME": "/h"}, ["python", "-u", "my train.py"], None)
    hook, *rest = made["PYTHONPATH"].split(":")
    assert [path.name for path in Path(hook).glob("*.py")] == ["sitecustomize.py"]
    assert rest == ["/a", "/b"]
    assert made["HOME"] == "/h"
    assert made["SENTINEL_RUN_ID"].startswith("my-train-")
    assert made["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environment(made, ["python", "train.py"], None) == made, "one inside another changes nothing"
    assert environment({}, ["python", "-m", "pkg.train"], None)["SENTINEL_RUN_ID"].startswith("pkg-train-")


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"SLURM_JOB_ID": "1"}, ["srun", "python", "train.py"]),
        ({}, ["torchrun", "--nnodes=2", "train.py"]),
        ({}, ["torchrun", "--nnodes", "1:4", "train.py"]),
        ({"PET_NNODES": "4"}, ["torchrun", "--rdzv-id=train", "train.py"]),
        ({}, ["accelerate", "launch", "--num_machines", "2", "--machine_rank", "0", "train.py"]),
        ({}, ["accelerate", "launch", "--num-machines=2", "train.py"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["python", "train.py"]),
    ],
)
def test_no_id_is_made_for_ranks_that_others_also_start(given: dict[str, str], command: list[str]) -> None:
    assert "SENTINEL_RUN_ID" not in environment(given, command, None)


YAML = "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nnum_machines: {}\nnum_processes: 16\n"
JSON = '{{\n  "machine_rank": 0,\n  "num_machines": {},\n  "use_cpu": false\n}}\n'


@pytest.mark.parametrize("place", ["--config_file", "HF_HOME"])
@pytest.mark.parametrize("written", [YAML, JSON], ids=["YAML", "JSON"])
def test_the_machines_of_accelerates_configuration_file_are_counted(place: str, written: str, tmp_path: Path) -> None:
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    options = ["--config_file", str(file)] if place == "--config_file" else []
    given = {} if options else {"HF_HOME": str(tmp_path)}
    for machines in (1, 2):
        file.write_text(written.format(machines))
        made = environment(given, ["accelerate", "launch", *options, "train.py"], None)
        assert ("SENTINEL_RUN_ID" in made) == (machines == 1)
    assert "SENTINEL_RUN_ID" in environment(given, ["python", "train.py"], None)
    assert "SENTINEL_RUN_ID" in environment({}, ["accelerate", "launch", "--num_machines", "1", "train.py"], None)


@pytest.mark.parametrize("given", [{"PET_NNODES": "4"}, {"PET_NNODES": ""}, {"SENTINEL_RUN_ID": ""}])
def test_an_id_is_made_where_all_ranks_are_started_here(given: dict[str, str]) -> None:
    """torchrun's option goes before its variable; an empty variable says nothing."""
    nodes = ["--nnodes=1"] if given.get("PET_NNODES") else []
    assert environment(given, ["torchrun", *nodes, "train.py"], None)["SENTINEL_RUN_ID"].startswith("train-")
