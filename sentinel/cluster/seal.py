"""Proof that a message comes from those who have the job's secret.

Zenoh has a node prove the secret to the one that it connects to, and not the other way: a router that lets everyone in
may stand at an address that came through the process group's store. So each message proves it, too.
"""

from __future__ import annotations

import hashlib
import hmac

from sentinel.errors import ProtocolError

_SIZE = 16


class Seal:
    """Of one job. Without a secret it adds nothing: then TLS has proved who the other side is."""

    def __init__(self, secret: str) -> None:
        digest = hashlib.blake2b(secret.encode(), digest_size=32, person=b"sentinel-seal").digest()
        self._key = digest if secret else b""

    def sign(self, key: str, payload: bytes) -> bytes:
        """`payload` as it is sent under `key`."""
        return self._make_mark(key, payload) + payload

    def check(self, key: str, sealed: bytes) -> bytes:
        """The payload of what came under `key`. Raises ProtocolError where it was not signed with the secret for it."""
        size = _SIZE if self._key else 0
        mark, payload = sealed[:size], sealed[size:]
        if not hmac.compare_digest(mark, self._make_mark(key, payload)):
            raise ProtocolError("it is not signed with the job's secret")
        return payload

    def _make_mark(self, key: str, payload: bytes) -> bytes:
        if not self._key:
            return b""
        return hashlib.blake2b(key.encode() + b"\0" + payload, digest_size=_SIZE, key=self._key).digest()
