"""Nodes that meet at a site's Zenoh router: none of them listens, and any of the first ones can be the coordinator."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sentinel.cluster.protocol.messages import Pulse, encode
from sentinel.config.cluster import Meeting
from tests.cluster.job import HIGH, LOW, RUN, SECRET, free_address, node_daemon
from tests.cluster.listener import Listener
from tests.cluster.test_nodes import received
from tests.cluster.test_takeover import coordinates, follows
from tests.notify.consumer import Consumer
from tests.waiting import until

pytest.importorskip("zenoh", reason="pip install eclipse-zenoh")
pytestmark = pytest.mark.processes

_ROUTER = """
import sys, zenoh
config = zenoh.Config.from_json5('{mode: "router", scouting: {multicast: {enabled: false}}}')
config.insert_json5("listen/endpoints", f'["tcp/{sys.argv[1]}"]')
with zenoh.open(config):
    print("listens", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def router(address: str) -> Iterator[subprocess.Popen[str]]:
    """Run a router as a site has one, open to everyone who reaches it; killed at the end."""
    command = [sys.executable, "-c", _ROUTER, address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_nodes_meet_at_a_router_and_go_on_when_the_coordinator_or_the_router_dies(
    ops: Consumer, options: tuple[str, ...], tmp_path: Path
) -> None:
    address = free_address()
    with (tmp_path / "sentinel.toml").open("a") as settings:
        settings.write(f"[cluster]\nrouters = ['{address}']\n")
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(router(address))
        nodes = [stack.enter_context(node_daemon(n, 3, "", tmp_path, *options)) for n in range(3)]
        until(functools.partial(coordinates, nodes[0]), "node 0 to be the coordinator")
        assert nodes[0].job()["no_orders"] == ""
        for node in nodes[1:]:
            until(functools.partial(follows, node, f"node 0 (by router {address})"), f"node {node.node} to hear it")
        nodes[0].process.kill()
        until(functools.partial(coordinates, nodes[1]), "node 1 to take over")
        until(functools.partial(follows, nodes[2], f"node 1 (by router {address})"), "node 2 to follow it")
        nodes[2].rank.steps(0, [LOW, HIGH])
        pages = [ops.next()]
        first.kill()
        until(lambda: nodes[2].job()["view"] != "joined", "node 2 to hear no coordinator")
        stack.enter_context(router(address))
        for node in nodes[1:]:
            until(lambda node=node: node.job()["view"] in ("coordinator", "joined"), f"node {node.node} to be back")
        nodes[2].rank.steps(2, [LOW])
        while pages[-1]["status"] == "firing":  # a coordinator that changed does not know what was delivered
            pages.append(ops.next())
    alerts = [page["alerts"][0] for page in pages]
    assert {alert["labels"]["run_id"] for alert in alerts} == {RUN}
    assert len({alert["annotations"]["incident"] for alert in alerts}) == 1
    assert len({page["groupKey"] for page in pages}) == 1
    assert received(ops) == []


def test_messages_of_a_stranger_through_a_router_are_refused() -> None:
    from sentinel.cluster.session import Session

    address, listener = free_address(), Listener()
    with router(address), contextlib.ExitStack() as stack:
        for node, secret in ((0, SECRET), (1, "of another job, as long"), (2, SECRET)):
            session = Session(Meeting((), secret, routers=(address,)), RUN, node, listener)
            stack.callback(session.close)
            if node == 0:
                session.lead()
                continue
            pulse = encode(Pulse(node=node, incarnation=1, hostname="h", attempt=0, step=0))

            def is_there(session: Session = session, pulse: bytes = pulse, node: int = node) -> bool:
                session.publish_pulse(pulse)
                return bool(listener.refused if node == 1 else listener.pulses)

            until(is_there, f"node 0 to get something of node {node}")
    assert set(listener.pulses) == {2}
    assert set(listener.refused) == {"it is not signed with the job's secret"}
