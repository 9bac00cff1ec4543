"""Deployments of jobs over several nodes start each node with the same address, secret and number of nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from sentinel.cli import run as sentinel_run
from sentinel.config.cluster import ClusterSettings
from sentinel.errors import EXIT_BY_RULE, EXIT_STOPPED, EXIT_UNFINISHED
from tests.deploy.checkers import DEPLOY
from tests.deploy.test_manifests import documents

NODES = 4


def read_meeting(environment: dict[str, str]) -> list[str]:
    """Return where nodes meet by one node's variables: the nodes that may be the coordinator, from node 0 on."""
    meeting = ClusterSettings().find_meeting(environment)
    assert meeting is not None
    return list(meeting.addresses)


def read_torchrun(words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what torchrun makes of its arguments and variables."""
    pytest.importorskip("torch")
    from torch.distributed import run

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return run.parse_args(words)


def test_containers_of_compose_are_nodes_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    services = yaml.safe_load((DEPLOY / "compose" / "nodes.yaml").read_text())["services"]
    assert list(services) == [f"node{node}" for node in range(NODES)]
    for node, service in enumerate(services.values()):
        assert service["environment"]["SENTINEL_CLUSTER_SECRET"].startswith("${SENTINEL_CLUSTER_SECRET:?")
        environment = service["environment"] | {"SENTINEL_CLUSTER_SECRET": "x" * 16}
        assert read_meeting(environment) == [f"node{number}:9478" for number in range(3)]
        *supervised, launcher = service["entrypoint"]
        assert (supervised[:2], supervised[-1], launcher) == (["sentinel", "run"], "--", "torchrun")
        read = read_torchrun(service["command"], {"PET_NODE_RANK": environment["PET_NODE_RANK"]}, monkeypatch)
        assert (read.nnodes, read.node_rank, read.master_addr) == (str(NODES), node, "node0")
        assert (read.module, read.training_script) == (True, "sentinel.demo.faulty.nodes")
        assert "--log=/tmp/loss.jsonl" in read.training_script_args


def test_pods_of_a_job_set_are_nodes_of_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    (job_set,) = documents(DEPLOY / "kubernetes" / "jobset.yaml")
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == NODES
    (container,) = spec["template"]["spec"]["containers"]
    first, *others = (
        f"{job_set['metadata']['name']}-{job['name']}-0-{number}.{job_set['metadata']['name']}" for number in range(3)
    )
    words = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert read_meeting(words | {"SENTINEL_CLUSTER_SECRET": "x" * 16}) == [f"{host}:9478" for host in (first, *others)]
    assert container["command"][:4] == ["sentinel", "run", "--", "torchrun"]
    read = read_torchrun(container["command"][4:], {k: v for k, v in words.items() if k[:4] == "PET_"}, monkeypatch)
    assert (read.nnodes, read.master_addr, read.rdzv_id) == (str(NODES), first, "train")
    inherited = sentinel_run.environment(words, container["command"][3:], None)
    assert "SENTINEL_RUN_ID" not in inherited, "all pods take the id of the rendezvous"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [EXIT_STOPPED, EXIT_BY_RULE]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_a_train_job_has_the_same_secret_and_the_same_first_pod() -> None:
    (train_job,) = documents(DEPLOY / "kubernetes" / "trainjob.yaml")
    (job_set,) = documents(DEPLOY / "kubernetes" / "jobset.yaml")
    trainer = train_job["spec"]["trainer"]
    (container,) = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    of_set = [one for one in container["env"] if one["name"].startswith("SENTINEL_")]
    assert trainer["env"] == of_set
    assert trainer["command"][:4] == container["command"][:4]
    assert trainer["numNodes"] == NODES


def test_the_network_policy_lets_only_pods_of_the_job_reach_the_coordinator() -> None:
    (policy,) = documents(DEPLOY / "kubernetes" / "networkpolicy.yaml")
    (job_set,) = documents(DEPLOY / "kubernetes" / "jobset.yaml")
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job_set["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    open_to = [rule["from"] for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert open_to == [[{"podSelector": own}]]
    assert all(9478 not in [port["port"] for port in rule.get("ports", ())] for rule in policy["spec"]["ingress"])


@pytest.mark.parametrize(
    ("status", "nodes"), [(0, ["a7", "b3"]), (EXIT_UNFINISHED, ["a7", "b3"]), (EXIT_STOPPED, ["a7", "b3", "b4", "b5"])]
)
def test_a_batch_script_starts_each_node_alike(tmp_path: Path, status: int, nodes: list[str]) -> None:
    """Stand-ins for Slurm and for `sentinel` write down how they were called."""
    tools = {
        "scontrol": 'case $1 in show) printf "%s\\n" $LISTED ;; *) echo "$@" > requeued ;; esac',
        "srun": 'shift; for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" || status=$?; done\n'
        "exit ${status:-0}",
        "sentinel": f'{sys.executable} -c "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"'
        f' "$@" >> calls; exit {status}',
    }  # fmt: skip
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "417", "SLURM_JOB_NODELIST": "a7,b[3-5]", "SLURM_NNODES": str(len(nodes)),
        "LISTED": " ".join(nodes),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "--rate", "1 e-3"], cwd=tmp_path, capture_output=True,
        env=os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (1 if status == EXIT_STOPPED else 0), done.stderr
    assert (tmp_path / "requeued").exists() == (status == EXIT_UNFINISHED)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == len(nodes)
    assert len({environment["SENTINEL_CLUSTER_SECRET"] for _, environment in calls}) == 1
    for node, (words, environment) in enumerate(calls):
        assert read_meeting(environment) == [f"{name}:10418" for name in nodes[:3]]
        assert words[:3] == ["run", "--", "torchrun"]
        assert {f"--node-rank={node}", f"--nnodes={len(nodes)}", "--master-addr=a7", "--rdzv-id=417"} <= set(words)
        assert words[-3:] == ["train.py", "--rate", "1 e-3"]
