"""`[cluster]`: what is refused, with which messages, and what environment variables replace."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec
import pytest

from sentinel.cluster.protocol.messages import MESSAGE_BYTES, Events, Pulse, decode, encode, trim_case
from sentinel.cluster.protocol.node import Node
from sentinel.config.cluster import Meeting
from sentinel.config.settings import ClusterSettings, parse_settings
from sentinel.errors import ConfigError, ProtocolError
from tests.cluster.simulation import make_case

SECRET = "sixteen characters or more"


def read(text: str) -> ClusterSettings:
    return parse_settings(text, Path("/etc/sentinel/sentinel.toml")).cluster


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster]\naddress = 'a:1,a:1'", "at most 16 addresses, each once"),
        ("[cluster]\naddress = 'node0'", ":2: address: 'node0' is no host:port"),
        ("[cluster]\naddress = 'node0:99999'", "is no host:port"),
        ("[cluster]\naddress = 5", "address: expected text in quotes"),
        ("[cluster]\ntls_key = 'node.key'", ":2: tls_key: is set without tls_ca and tls_certificate; set all three"),
        ("[cluster]\nrouters = ['r:1', 'r']", ":2: routers: 'r' is no host:port"),
        ("[cluster]\nrouters = ['r:1']\naddress = 'a:1'", "routers: is set beside address; remove one"),
        ("[cluster]\nrouters = ['a:1,b:2']", ":2: routers: 'a:1,b:2' is not one host:port"),
        ("[cluster]\nrouters = [' r:1 ']", ":2: routers: ' r:1 ' is not one host:port"),
        ("[cluster]\nrouters = ['r:1', 'r:1']", ":2: routers: at most 16, each once"),
        (f"[cluster]\nrouters = {[f'r:{1 + port}' for port in range(17)]}", ":2: routers: at most 16, each once"),
        ("[cluster]\nrouters = 'r:1'", "routers: expected a list"),
        ("[cluster]\nport = 70000", ":2: port: 70000 is no port"),
        ("[cluster]\nenabled = 'no'", "enabled: expected true or false"),
        ("[cluster]\nsecret = 'x'", "a secret is never written here"),
    ],
)
def test_a_mistake_is_refused_with_a_reason(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert words in str(error.value)


def test_the_environment_replaces_the_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    settings = ClusterSettings(address="a:1", secret_file=tmp_path / "secret")
    meeting = settings.find_meeting({})
    assert meeting is not None
    assert meeting == Meeting(("a:1",), SECRET)
    assert SECRET not in repr(meeting)
    other = settings.find_meeting(
        {"SENTINEL_CLUSTER": "[fe80::1]:2, b:3", "SENTINEL_CLUSTER_SECRET": "another, as long as it"}
    )
    assert other is not None
    assert other == Meeting(("[fe80::1]:2", "b:3"), "another, as long as it")
    assert ClusterSettings().find_meeting({}) == Meeting((), "")
    assert ClusterSettings().find_meeting({"SENTINEL_CLUSTER_SECRET": SECRET}) == Meeting((), SECRET)
    assert ClusterSettings(enabled=False, address="a:1").find_meeting({"SENTINEL_CLUSTER": "a:1"}) is None


def test_routers_of_a_site_need_a_secret_and_the_environment_goes_before_them() -> None:
    settings = read("[cluster]\nrouters = ['r1:7447', 'r2:7447']")
    assert settings.find_meeting({"SENTINEL_CLUSTER_SECRET": SECRET}) == Meeting(
        (), SECRET, routers=("r1:7447", "r2:7447")
    )
    named = {"SENTINEL_CLUSTER": "a:1", "SENTINEL_CLUSTER_SECRET": SECRET}
    assert settings.find_meeting(named) == Meeting(("a:1",), SECRET)
    with pytest.raises(ConfigError, match="so the nodes need a secret: set SENTINEL_CLUSTER_SECRET"):
        settings.find_meeting({})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SENTINEL_CLUSTER": "here"}, "SENTINEL_CLUSTER: 'here' is no host:port"),
        ({"SENTINEL_CLUSTER": "2001:db8::10"}, "'2001:db8::10' is no host:port; write one such as 10.0.0.1:9478 or ["),
        ({"SENTINEL_CLUSTER": "a:1"}, "set SENTINEL_CLUSTER_SECRET or [cluster] secret_file"),
        ({"SENTINEL_CLUSTER": "a:1", "SENTINEL_CLUSTER_SECRET": "short"}, "a secret of 5 characters; use 16 or more"),
        (
            {"SENTINEL_CLUSTER_SECRET": os.fsdecode(b"\xff" * 32)},
            "SENTINEL_CLUSTER_SECRET: is no text; use letters and digits, as of `openssl rand -hex 32`",
        ),
    ],
)
def test_a_variable_that_the_environment_lacks_is_reported(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ClusterSettings().find_meeting(environment)
    assert words in str(error.value)


def test_a_secret_file_that_is_not_there_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"secret_file: /nowhere/secret: cannot be read \(No such file"):
        ClusterSettings(address="a:1", secret_file=Path("/nowhere/secret")).find_meeting({})


def test_what_is_no_message_or_too_large_is_refused() -> None:
    pulse = Pulse(node=1, incarnation=1, hostname="h", attempt=0, step=0)
    assert decode(encode(pulse), Pulse) == pulse
    for payload in (b"", b"\xc1", encode(pulse)[:-3], b"\x90", bytes(MESSAGE_BYTES + 1)):
        with pytest.raises(ProtocolError):
            decode(payload, Pulse)
    with pytest.raises(ProtocolError, match="a message of more than"):
        decode(zlib.compress(bytes(100 * MESSAGE_BYTES)), Pulse)
    with pytest.raises(ProtocolError, match="no Events"):
        decode(encode(pulse), Events)
    with pytest.raises(ProtocolError, match="another node speaks protocol 2"):
        decode(encode(Pulse(protocol=2, node=1, incarnation=1, hostname="h", attempt=0, step=0)), Pulse)


def test_a_large_case_is_trimmed_and_the_case_of_the_node_stays_whole() -> None:
    case = make_case(1, "Hang", 5)
    case.stacks = {str(rank): "x" * 32768 for rank in range(8)}
    assert len(encode(Events(node=1, incarnation=1, after=0, upto=1))) + len(str(trim_case(case))) < 4096
    assert len(case.stacks) == 8


@pytest.mark.parametrize("part", ["layers", "evidence", "missing"])
def test_a_case_with_a_large_diagnosis_keeps_no_later_one_from_the_coordinator(part: str) -> None:
    """A mixture of experts has tens of thousands of parameters; a node that is cut off names all others."""
    node, case = Node(1, 1, 0.0), make_case(1, "UnusedParameters", 5)
    lines = tuple(f"model.layers.{number // 384}.mlp.experts.{number % 384}.weight" for number in range(20_000))
    case.diagnosis = msgspec.structs.replace(case.diagnosis, cause="no gradient", **{part: lines})
    for one in (case, make_case(2, "LossSpike", 9)):
        node.record(one)
    first, second = decode(encode(node.list_events(0)), Events).cases
    assert first.case.diagnosis.cause == "no gradient"
    assert second.case.alert == "LossSpike"
