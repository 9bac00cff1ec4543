"""The networks of a demo's nodes: network namespaces on a bridge, or, without root, one loopback for all.

    sentinel-demo-PID-switch   has the bridge and the receiver of alerts
    sentinel-demo-PID-N        node N: eth0, connected with port N of the bridge, and a host name of its own

The host's own network is not changed: it gets no new interface, address or rule. All of them end with the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

NAME = "sentinel-demo"
SUBNET = "198.18.0"
"""A subnet reserved for tests of networks (RFC 2544)."""
_SWITCH, _CLUSTER_PORT, _MASTER_PORT, _INBOX_PORT = f"{SUBNET}.254", 9478, 29500, 9099


class Network(NamedTuple):
    """Addresses of a job's parts, and how a command is started on a node."""

    apart: bool
    """Whether each node has a network of its own, with a link that can be cut."""
    prefixes: Sequence[Sequence[str]]
    """Words before a command that start it on a node, by node."""
    interface: str
    coordinator: str
    """host:port where the daemons meet."""
    master: str
    """host:port of torch's store."""
    inbox: str
    """host:port of the receiver of alerts."""
    inbox_prefix: Sequence[str] = ()

    def set_link(self, node: int, state: str) -> None:
        """Plug (`up`) or unplug (`down`) the cable of a node, at the switch."""
        _run_ip(f"-n {NAME}-{os.getpid()}-switch link set port{node} {state}")


def find_hindrance() -> str:
    """Return what this machine lacks for namespaces; "" if it lacks nothing."""
    if os.geteuid() != 0:
        return "root makes network namespaces, and you are not root"
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    packages = {"ip": "iproute2", "unshare": "util-linux"}
    if missing:
        return f"{missing[0]} is not installed (package {packages[missing[0]]})"
    try:
        with open_namespaces(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"


def find_loopback(nodes: int) -> Network:
    """Return a network with all nodes at one address, and each part at a port that is free now."""
    coordinator, master, inbox = (_find_free_address() for _ in range(3))
    return Network(False, [()] * nodes, "lo", coordinator, master, inbox)


@contextlib.contextmanager
def open_namespaces(nodes: int) -> Iterator[Network]:
    """Make namespaces for this many nodes. Raises CalledProcessError if the kernel or a container forbids it."""
    _delete_abandoned()
    mark = f"{NAME}-{os.getpid()}"
    switch, names = f"{mark}-switch", [f"{mark}-{node}" for node in range(nodes)]
    addresses = [f"{SUBNET}.{node + 1}" for node in range(nodes)]
    try:
        _run_ip(f"netns add {switch}")
        _run_ip(
            f"-n {switch} link add bridge type bridge",
            f"-n {switch} addr add {_SWITCH}/24 dev bridge",
            f"-n {switch} link set bridge up",
            f"-n {switch} link set lo up",
        )
        for node, (name, address) in enumerate(zip(names, addresses, strict=True)):
            _run_ip(f"netns add {name}")
            _run_ip(
                f"-n {switch} link add port{node} type veth peer name eth0 netns {name}",
                f"-n {switch} link set port{node} master bridge up",
                f"-n {name} addr add {address}/24 dev eth0",
                f"-n {name} link set eth0 up",
                f"-n {name} link set lo up",
            )
        yield Network(
            apart=True,
            prefixes=[[*_enter(name), *_name_host(f"node{node}")] for node, name in enumerate(names)],
            interface="eth0",
            coordinator=f"{addresses[0]}:{_CLUSTER_PORT}",
            master=f"{addresses[0]}:{_MASTER_PORT}",
            inbox=f"{_SWITCH}:{_INBOX_PORT}",
            inbox_prefix=_enter(switch),
        )
    finally:
        for name in (*names, switch):
            _delete(name)


def _enter(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _name_host(host: str) -> list[str]:
    script = f'echo {host} > /proc/sys/kernel/hostname && exec "$@"'
    return ["unshare", "--uts", "sh", "-c", script, "sh"]


def _delete_abandoned() -> None:
    """Delete the namespaces of a demo that was killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        number = name.removeprefix(f"{NAME}-").partition("-")[0]
        if name.startswith(f"{NAME}-") and number.isdecimal() and not psutil.pid_exists(int(number)):
            _delete(name)


def _delete(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        _run_ip(f"netns delete {name}")


def _run_ip(*commands: str) -> None:
    for words in commands:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def _find_free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
