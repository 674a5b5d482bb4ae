"""Callers, and the API keys that identify them.

A key is kept as its digest, which identifies the key but cannot be sent in its place, and is compared in constant time.
"""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest

from msgspec import Struct

from aegis.core.limits import UNLIMITED, Limits

_CHARACTERS_MAX = 4096


class Caller(Struct, frozen=True):
    """`name` is as the configuration has it; empty if no key is needed."""

    name: str = ""
    limits: Limits = UNLIMITED
    is_admin: bool = False


ANYONE = Caller()


class Key(Struct, frozen=True):
    """An API key: the digest of the value in `Authorization: Bearer …`."""

    digest: bytes
    caller: Caller


def is_key(text: str) -> bool:
    """Whether it is one word of printable ASCII characters, which a header can hold."""
    return 0 < len(text) <= _CHARACTERS_MAX and text.isascii() and text.isprintable() and " " not in text


def digest_of(key: str) -> bytes:
    return sha256(key.encode()).digest()


class Keyring(Struct, frozen=True):
    """All keys of a server. If there are none of callers, everybody may ask, unless the last one was revoked while the
    server ran: then it is `closed`. Without an admin key, this machine's own users may command."""

    callers: tuple[Key, ...] = ()
    admin: Key | None = None
    closed: bool = False

    @property
    def asks(self) -> bool:
        """Whether a request needs a key."""
        return self.closed or bool(self.callers)

    def find(self, sent: str) -> Caller | None:
        digest = digest_of(sent)
        found = [key.caller for key in (*self.callers, self.admin) if key and compare_digest(digest, key.digest)]
        return found[0] if found else None
