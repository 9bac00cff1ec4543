"""Addresses at which the nodes of a job meet, as people and other nodes write them."""

from __future__ import annotations

MOST_ADDRESSES = 16
"""Addresses of nodes that may be the coordinator, at most."""


def split_addresses(addresses: str, place: str) -> tuple[str, ...]:
    """Return each `host:port` of a list with commas. Raises ValueError that names `place`."""
    found = tuple(address.strip() for address in addresses.split(","))
    for address in found:
        host, _, port = address.rpartition(":")
        is_host = host and not any(c.isspace() or c in "/?#" for c in host)
        if ":" in host:  # of 2001:db8::10 nothing shows whether 10 is a port
            is_host = is_host and host.startswith("[") and host.endswith("]")
        if not is_host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{place}: {address!r} is no host:port; write one such as 10.0.0.1:9478 or [fd00::1]:9478")
    if len(found) > MOST_ADDRESSES or len(set(found)) < len(found):
        raise ValueError(f"{place}: at most {MOST_ADDRESSES} addresses, each once: of node 0, 1, 2 ...")
    return found
