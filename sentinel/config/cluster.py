"""`[cluster]`: where the nodes of a job meet, and the secret that admits a node."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from sentinel.errors import ConfigError
from sentinel.node import small_files
from sentinel.node.addresses import MOST_ADDRESSES, split_addresses

SECRET_CHARACTERS = 16
"""Least characters of a secret. A shorter one can be guessed by anyone who reaches the port."""


class TlsFiles(NamedTuple):
    """TLS files in PEM. With them both sides of a connection prove that they have a certificate of this authority."""

    ca: Path
    certificate: Path
    key: Path


class Meeting(NamedTuple):
    """Where the nodes of a job meet, and what admits a node."""

    addresses: tuple[str, ...]
    """`host:port` of the nodes that may be the coordinator, from node 0 on. Empty: to be found by the process group's
    store."""
    secret: str
    """The secret; empty: a certificate is enough."""
    tls: TlsFiles | None = None
    """None: messages are not encrypted."""
    is_public: bool = False
    """Whether the secret came through that store, where everyone who reaches it can read it."""
    is_found: bool = False
    """Whether the addresses came through it: one may be taken, or on another network, by the time it is needed."""
    routers: tuple[str, ...] = ()
    """`host:port` of the site's Zenoh routers. If there are any, all nodes connect to one of them, and none listens."""

    @property
    def takes_orders(self) -> bool:
        """Whether nodes that are admitted may end, begin and roll back, besides sharing what they see."""
        return not self.is_public

    @property
    def candidates(self) -> int:
        """How many nodes may be the coordinator, from node 0 on."""
        return MOST_ADDRESSES if self.routers else len(self.addresses)

    def __repr__(self) -> str:
        return f"Meeting({','.join(self.addresses or self.routers)})"  # no secret in a log


class ClusterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[cluster]`: a job over several nodes is watched as one. The same on all nodes."""

    enabled: bool = True
    """Whether nodes of a job meet."""
    address: str = ""
    """`host:port` on the node of global rank 0, which listens there; after commas, those of nodes 1, 2 ..., which take
    over. $SENTINEL_CLUSTER replaces it. Without it the nodes find each other by the process group's store, and nodes 0
    and 1 listen."""
    port: int = 0
    """Without `address`: the port on which nodes 0 and 1 listen; 0: any free one."""
    routers: tuple[str, ...] = ()
    """In place of `address`: `host:port` of each Zenoh router of the site. All nodes connect to one of them, and none
    listens. A secret is needed. $SENTINEL_CLUSTER, if it is set, takes precedence."""
    secret_file: Path | None = None
    """File with the secret, the same on all nodes; $SENTINEL_CLUSTER_SECRET replaces it."""
    tls_ca: Path | None = None
    """Certificate, in PEM, of the authority that signed those of the nodes and nothing else. With `tls_certificate` and
    `tls_key` the nodes' messages are encrypted, and both sides prove their identity; a secret is not needed."""
    tls_certificate: Path | None = None
    """This node's certificate, in PEM; host names in it are not checked."""
    tls_key: Path | None = None
    """The private key of this node's certificate, in PEM, without a password."""

    def __post_init__(self) -> None:
        if self.address:
            split_addresses(self.address, "address")
        if self.routers:
            self._check_routers()
            if self.address:
                raise ValueError("routers: is set beside address; remove one: nodes meet at either")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port: {self.port} is no port; write one from 1 to 65535, or 0 for any free one")
        files = {"tls_ca": self.tls_ca, "tls_certificate": self.tls_certificate, "tls_key": self.tls_key}
        lacking = [name for name, file in files.items() if file is None]
        if 0 < len(lacking) < len(files):
            given = next(name for name, file in files.items() if file is not None)
            raise ValueError(f"{given}: is set without {' and '.join(lacking)}; set all three")

    def _check_routers(self) -> None:
        for router in self.routers:
            if split_addresses(router, "routers") != (router,):
                raise ValueError(f"routers: {router!r} is not one host:port; write one an entry, without blanks")
        if len(self.routers) > MOST_ADDRESSES or len(set(self.routers)) < len(self.routers):
            raise ValueError(f"routers: at most {MOST_ADDRESSES}, each once")

    def find_meeting(self, environment: Mapping[str, str] = os.environ) -> Meeting | None:
        """Return where to meet; None where it is turned off. Raises ConfigError."""
        if not self.enabled:
            return None
        named = environment.get("SENTINEL_CLUSTER", "")
        address = named or self.address
        try:
            place = "SENTINEL_CLUSTER" if named else "[cluster] address"
            addresses = split_addresses(address, place) if address else ()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        routers = () if named else self.routers
        secret, tls = self._read_secret(environment), self._check_certificates()
        if routers and not secret:
            raise ConfigError(
                "[cluster] routers: a router also passes on messages of strangers that it lets in, so the nodes need a "
                "secret: set SENTINEL_CLUSTER_SECRET or [cluster] secret_file, the same on all nodes"
            )
        if addresses and not secret and tls is None:
            raise ConfigError(
                "the address of a job's nodes is known and their secret is not: set SENTINEL_CLUSTER_SECRET or "
                "[cluster] secret_file, the same on all nodes"
            )
        return Meeting(addresses, secret, tls, routers=routers)

    def _check_certificates(self) -> TlsFiles | None:
        if self.tls_ca is None or self.tls_certificate is None or self.tls_key is None:
            return None
        files = TlsFiles(self.tls_ca, self.tls_certificate, self.tls_key)
        for name, file in files._asdict().items():
            try:
                small_files.text(file)
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", "no text")
                raise ConfigError(
                    f"[cluster] tls_{name}: {file}: cannot be read ({why}); write it there, in PEM, readable by "
                    f"user {os.getuid()}"
                ) from None
        try:
            context = ssl.create_default_context(cafile=files.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"[cluster] tls_ca: {files.ca}: no certificate in PEM ({error.reason})") from None
        try:
            context.load_cert_chain(files.certificate, files.key, password=lambda: "")
        except ssl.SSLError as error:
            raise ConfigError(
                f"[cluster] tls_certificate: {files.certificate}, tls_key: {files.key}: no certificate and its key, in "
                f"PEM and without a password ({error.reason})"
            ) from None
        return files

    def _read_secret(self, environment: Mapping[str, str]) -> str:
        secret, place = environment.get("SENTINEL_CLUSTER_SECRET", "").strip(), "SENTINEL_CLUSTER_SECRET"
        if not secret and self.secret_file is not None:
            place = f"[cluster] secret_file: {self.secret_file}"
            try:
                secret = small_files.text(self.secret_file).strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{place}: cannot be read ({getattr(error, 'strerror', 'no text')})") from None
            if not secret:
                raise ConfigError(f"{place}: is empty; write {SECRET_CHARACTERS} characters or more into it")
        try:
            secret.encode()
        except UnicodeEncodeError:  # of random bytes, in the environment
            raise ConfigError(f"{place}: is no text; use letters and digits, as of `openssl rand -hex 32`") from None
        if secret and len(secret) < SECRET_CHARACTERS:
            raise ConfigError(f"{place}: a secret of {len(secret)} characters; use {SECRET_CHARACTERS} or more")
        return secret
