"""What an API's wording of a reply consists of: the events of a stream, and the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from msgspec import Raw, Struct

from aegis.core.errors import UserError
from proxy.http.openai.choices import Usage
from proxy.http.streaming.event_stream import DONE, error_event, event
from proxy.http.streaming.transcript import Piece


class Shape(Protocol):
    """The wording of one reply. A stream is what `begun`, `told` and then `ended` or `failed` give."""

    def begun(self) -> bytes:
        """The events before there is a token."""
        ...

    def told(self, index: int, piece: Piece) -> bytes:
        """The events of the next piece; none if there is nothing to send yet."""
        ...

    def ended(self, usage: Usage) -> bytes:
        """The events after all pieces."""
        ...

    def failed(self, error: UserError) -> bytes:
        """The last events of a stream that cannot go on."""
        ...

    def choice(self, index: int, piece: Piece) -> Struct | Sequence[Struct]:
        """All of one choice in the reply that is not streamed."""
        ...

    def whole(self, choices: Sequence[Raw], usage: Usage) -> Struct:
        """The reply that is not streamed; each `choice` as JSON."""
        ...

    async def kept(self) -> None:
        """Returns when what later requests may refer to is kept; after `ended` or `whole`, before the client has it."""
        ...

    def closed(self) -> None:
        """The reply is over, however it ended."""
        ...

    @property
    def stop(self) -> asyncio.Event | None:
        """Set when the answer shall end where it is; None: nobody can do that."""
        ...


class ChunkShape(Struct, frozen=True):
    """The part of a `Shape` that completions and chat share: each event is a chunk, and the last one is `[DONE]`."""

    def begun(self) -> bytes:
        return b""

    def told(self, index: int, piece: Piece) -> bytes:
        chunk = self.chunk(index, piece)
        return b"" if chunk is None else event(chunk)

    def ended(self, usage: Usage) -> bytes:
        chunk = self.usage_chunk(usage)
        return DONE if chunk is None else event(chunk) + DONE

    def failed(self, error: UserError) -> bytes:
        return error_event(error)

    async def kept(self) -> None:
        pass

    def closed(self) -> None:
        pass

    @property
    def stop(self) -> asyncio.Event | None:
        return None

    def chunk(self, index: int, piece: Piece) -> Struct | None:
        raise NotImplementedError

    def usage_chunk(self, usage: Usage) -> Struct | None:
        """The chunk after all others, if the client asked for it."""
        raise NotImplementedError
