"""The names of the store's keys, and the version of their contents."""

from __future__ import annotations

from msgspec import Struct

SCHEMA = 2
"""Of the layout in docs/distribution.md; a store of another one is refused."""


class Keys(Struct, frozen=True):
    """All begin with the prefix, so that several clusters can share one Redis."""

    prefix: str

    @property
    def schema(self) -> str:
        return f"{self.prefix}:schema"

    @property
    def cluster(self) -> str:
        return f"{self.prefix}:cluster"

    @property
    def loads(self) -> str:
        return f"{self.prefix}:loads"

    @property
    def proxies(self) -> str:
        """The beginning of every key of a proxy."""
        return f"{self.prefix}:proxy:"

    def proxy(self, owner: str) -> str:
        return self.proxies + owner

    def request(self, call: str) -> str:
        """`call` is `RecordedCall.key`."""
        return f"{self.prefix}:request:{call}"

    def response(self, key: str) -> str:
        return f"{self.prefix}:response:{key}"

    def tokens(self, call: str) -> str:
        return f"{self.prefix}:tokens:{call}"
