"""Proof that a message comes from a sender that has the job's secret.

With Zenoh, a node proves the secret to the one it connects to, but not the other way: at an address that came through
the process group's store, a router that accepts everyone may listen. So each message proves the secret, too.
"""

from __future__ import annotations

import hashlib
import hmac

from sentinel.errors import ProtocolError

_SIZE = 16


class Seal:
    """Signs and checks messages of one job. Without a secret it adds nothing: then TLS authenticates the other side."""

    def __init__(self, secret: str) -> None:
        digest = hashlib.blake2b(secret.encode(), digest_size=32, person=b"sentinel-seal").digest()
        self._key = digest if secret else b""

    def sign(self, key: str, payload: bytes) -> bytes:
        """Return `payload` with its mark, as it is sent under `key`."""
        return self._make_mark(key, payload) + payload

    def check(self, key: str, sealed: bytes) -> bytes:
        """Return the payload of a message that came under `key`. Raises ProtocolError if it was not signed for `key`
        with the secret."""
        size = _SIZE if self._key else 0
        mark, payload = sealed[:size], sealed[size:]
        if not hmac.compare_digest(mark, self._make_mark(key, payload)):
            raise ProtocolError("it is not signed with the job's secret")
        return payload

    def _make_mark(self, key: str, payload: bytes) -> bytes:
        if not self._key:
            return b""
        return hashlib.blake2b(key.encode() + b"\0" + payload, digest_size=_SIZE, key=self._key).digest()
