"""The outcome of a request, as its client saw it."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from aegis.core.ids import ModelId, RequestId

REFUSED: Final = "refused"


class Record(Struct, frozen=True):
    """`on_time` of its `output_tokens` met their deadlines; tokens that never came are not among them.

    `token_times_ns` are all tokens' where they were kept; `first_ns` and `last_ns` are None where there is none.
    Times are from one clock, not from the arrival.
    """

    request: RequestId
    model: ModelId
    arrival_ns: int
    input_tokens: int
    output_tokens: int  # that were asked for
    ended: str  # "finished", "failed", "cancelled" or "refused", which is before anything was done
    on_time: int
    first_ns: int | None = None
    last_ns: int | None = None
    token_times_ns: tuple[int, ...] = ()
