"""How `--allow-shrink` changes a command, and what it needs to know."""

from __future__ import annotations

import msgspec
import pytest

from sentinel import wire
from sentinel.errors import ConfigError
from sentinel.hooks.core import identity
from sentinel.supervise.job_nodes import find_job_nodes

COMMAND = ("torchrun", "--nnodes={nodes}", "--node-rank={node_rank}", "train.py")
PLACE = {"SENTINEL_NODES": "4", "SENTINEL_NODE_RANK": "3"}


def test_the_launcher_gets_numbers_without_gaps_and_sentinels_number_of_a_node_stays() -> None:
    nodes = find_job_nodes(2, PLACE, COMMAND)
    assert nodes.fill(COMMAND) == ["torchrun", "--nnodes=4", "--node-rank=3", "train.py"]
    assert nodes.begin(wire.Order(start=0, does="begin", nodes=(0, 1, 3))) == (2,)
    assert nodes.fill(COMMAND) == ["torchrun", "--nnodes=3", "--node-rank=2", "train.py"]
    environment = nodes.list_environment()
    assert {name: environment[name] for name in ("SENTINEL_NODES", "SENTINEL_NODE_RANK", "SENTINEL_NODE")} == {
        "SENTINEL_NODES": "3", "SENTINEL_NODE_RANK": "2", "SENTINEL_NODE": "3",
    }  # fmt: skip
    members = msgspec.json.decode(environment["SENTINEL_MEMBERS"], type=wire.Members)
    assert (members.start, members.nodes, members.left_out) == (1, (0, 1, 3), (2,))


def test_a_rank_reports_sentinels_number_of_its_node_and_not_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = find_job_nodes(2, PLACE, COMMAND)
    nodes.begin(wire.Order(start=0, does="begin", nodes=(0, 1, 3)))
    launcher = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "2"}
    for name, value in (launcher | nodes.list_environment()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SENTINEL_RUN_ID", "r")
    said = identity.RunIdentity("r", 0).resolve()
    assert said is not None
    assert (said.node, said.members) == (3, nodes.members)


def test_the_number_of_the_node_comes_from_slurm() -> None:
    nodes = find_job_nodes(1, {"SLURM_NNODES": "3", "SLURM_NODEID": "1"}, COMMAND)
    assert (nodes.node, nodes.members.nodes) == (1, (0, 1, 2))


@pytest.mark.parametrize(
    ("least", "given", "command", "why"),
    [
        (2, PLACE, ("torchrun", "--nnodes=4", "train.py"), "the command has no {nodes} and no {node_rank}"),
        (2, PLACE, ("torchrun", "--nnodes={nodes}", "train.py"), "the command has no {node_rank}"),
        (2, {}, COMMAND, "set SENTINEL_NODES to how many there are, and SENTINEL_NODE_RANK"),
        (2, {"SENTINEL_NODES": "4"}, COMMAND, "which node is this?"),
        (2, PLACE | {"SENTINEL_NODE_RANK": "4"}, COMMAND, "SENTINEL_NODES=4, SENTINEL_NODE_RANK=4"),
        (2, PLACE | {"SENTINEL_NODES": "four"}, COMMAND, "SENTINEL_NODES=four"),
        (5, PLACE, COMMAND, "--allow-shrink 5: the job has 4 nodes"),
    ],
)
def test_a_missing_setting_is_an_error_at_the_start(
    least: int, given: dict[str, str], command: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        find_job_nodes(least, given, command)
    assert why in str(raised.value)
