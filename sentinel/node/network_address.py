"""Find this machine's address in the network that the job's ranks use."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import socket
import struct
from typing import Any

_NAMED_BY = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_READ_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_REASONS = {errno.EADDRINUSE: "the port is taken", errno.EADDRNOTAVAIL: "the address is not of this node"}
_ELSEWHERE = ("192.0.2.1", 9)
"""An address in a network that exists only in documents (RFC 5737): the default route leads there."""


def find_own_address(store_host: str, store_port: int) -> str:
    """Return the address of the interface that `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` names, else of the one from
    which the process group's store is reached. Raises OSError where there is none.

    Where this machine's own name means its loopback, as in Debian's /etc/hosts, return the address of the default
    route: the other nodes know the name by another address.
    """
    for variable in _NAMED_BY:
        if address := _read_interface(os.environ.get(variable, "")):
            return address
    address = _find_source(store_host, store_port)
    if _is_loopback(address) and not _names_loopback(store_host):
        try:
            return _find_source(*_ELSEWHERE)
        except OSError:  # no such route: a machine without a network
            pass
    return address


def list_listening_addresses(address: str) -> list[str]:
    """Return where to listen for nodes that know this one as `host:port`: there, and, where that host's name means the
    loopback here, as in Debian's /etc/hosts, also at its address in the network of the job's ranks."""
    host, _, port = address.rpartition(":")
    try:
        if _names_loopback(host) or not _is_loopback(_find_source(host.strip("[]"), int(port))):
            return [address]
        own = find_own_address(host, int(port))
    except OSError:  # a name that is not known here, or no network: listening there will report it
        return [address]
    return [address] if _is_loopback(own) else [address, f"[{own}]:{port}" if ":" in own else f"{own}:{port}"]


def explain_unusable_address(address: str) -> str:
    """Return why this machine cannot listen at `host:port`; empty: it can."""
    try:
        for family, _, _, _, target in _look_up(address):
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
    except OSError as error:
        return _REASONS.get(error.errno or 0) or str(error.strerror)
    return ""


def explain_unknown_host(address: str) -> str:
    """Return why the host of `host:port` is not known to this machine; empty: it is."""
    try:
        _look_up(address)
    except OSError as error:
        return f"{address.rpartition(':')[0]} is not known here ({error.strerror})"
    return ""


def find_free_port(host: str) -> int:
    """Return a TCP port that is free now. Raises OSError where there is none, or the address is not of this machine."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def _read_interface(named: str) -> str:
    """Return the IPv4 address of the first interface that fits the names, by NCCL's rules: they are prefixes, `=`
    before them asks for the whole name. Empty: none fits, or the names say which not to take (`^`)."""
    if not named or named.startswith("^"):
        return ""
    exact, wanted = named.startswith("="), [name.strip() for name in named.lstrip("=").split(",") if name.strip()]
    interfaces = [name for _, name in socket.if_nameindex()]
    fits = [name for want in wanted for name in interfaces if name == want]
    fits += [name for want in wanted for name in interfaces if not exact and name.startswith(want)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in fits:
            try:
                found = fcntl.ioctl(probe, _READ_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            return socket.inet_ntoa(found[20:24])
    return ""


def _look_up(address: str) -> list[tuple[int, int, int, str, Any]]:
    """Return the addresses of `host:port`, as the system knows them. Raises OSError."""
    host, _, port = address.rpartition(":")
    try:
        return [*socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)]
    except UnicodeError:  # as for a..b
        raise OSError(errno.EINVAL, "no host name") from None


def _find_source(host: str, port: int) -> str:
    """Return the address from which packets to another one are sent; none is sent."""
    targets = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, _, _, _, target = min(targets, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        address: str = probe.getsockname()[0]
    return address


def _names_loopback(host: str) -> bool:
    """Return whether a host name means the loopback."""
    return _is_loopback(host.strip("[]")) or host == "localhost"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
