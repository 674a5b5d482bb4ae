"""The records of calls: with them a retry, at whatever proxy, gets the answer that was begun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from msgspec import Struct

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.core.request import Sampling
from proxy.http.market import SequenceHandle


class RecordedCall(Struct, frozen=True):
    """A call as far as it is recorded: no prompt and no text is. Its id is its caller's: others may have the same."""

    request: str
    fingerprint: str  # of what was asked: a retry has the same
    model: ModelId
    slo: Slo
    sampling: Sampling  # of the first sequence
    sequences: int
    is_new: bool = False  # its id is known to no other proxy
    caller: str = ""

    @property
    def key(self) -> str:
        """The key of the call, unique among all callers' calls."""
        return f"{quote(self.caller, safe='')}/{self.request}"


Submit = Callable[[Sampling, tuple[int, ...]], SequenceHandle]
"""Has a sequence generated that goes on after these tokens."""


class CallRecord(Protocol):
    """The record of one call, which nobody else answers meanwhile. Who has one calls `close` when the reply has ended,
    however it ended."""

    @property
    def seed(self) -> int:
        """The one the call was first answered with."""
        ...

    def handle(self, sequence: int, sampling: Sampling, submit: Submit) -> SequenceHandle:
        """Delivers what is recorded of the sequence, then what `submit` adds to it, which is recorded. Raises what
        `submit` raises."""
        ...

    def close(self) -> None:
        """Sequences that have not ended count as cancelled."""
        ...


class Records(Protocol):
    """The records of all calls, of all proxies."""

    async def open(self, asked: RecordedCall) -> CallRecord:
        """Returns at once if the request is new, else when it is recorded.

        Raises UserError: 409 where the same request is being answered, 422 where another one had its id, 503 where
        the records cannot be reached in time."""
        ...


class _Nothing:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def handle(self, sequence: int, sampling: Sampling, submit: Submit) -> SequenceHandle:
        return submit(sampling, ())

    def close(self) -> None:
        pass


class NoRecords:
    """Keeps nothing: every call is a new one. Implements `Records`."""

    async def open(self, asked: RecordedCall) -> CallRecord:
        return _Nothing(asked.sampling.seed)
