"""The stored form of a request's tokens: batches of entries, appended one after the other.

Each entry says where it begins, so that a batch written twice (after an answer that got lost) counts once, and a
missing one (the server made room) ends the known part.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from aegis.core.request import FinishReason, Token


class Entry(Struct, frozen=True, array_like=True):
    """Tokens `[first, first + len(tokens))` of a sequence, and its finish, if that is all. `scores`: logprobs of its
    prompt."""

    sequence: int
    first: int
    tokens: tuple[Token, ...] = ()
    finish: FinishReason | None = None
    scores: tuple[Token, ...] = ()


@dataclass(slots=True)
class Sequence:
    """The stored part of one sequence."""

    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    scores: tuple[Token, ...] = ()


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Entry]).decode
_entries = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


def joined(batches: Several[bytes]) -> bytes:
    """One batch with all that these have; of none, none."""
    if len(batches) < 2:
        return b"".join(batches)
    return encode([entry for batch in batches for entry in _entries(batch)])


def assemble(batches: Iterable[bytes], sequences: int) -> list[Sequence]:
    """The stored part of so many sequences. Raises ValueError for batches that this version did not write."""
    known = [Sequence() for _ in range(sequences)]
    for batch in batches:
        for entry in _decode(batch):
            if not 0 <= entry.sequence < sequences:
                raise ValueError("a batch of another request")
            _take(known[entry.sequence], entry)
    return known


def _take(known: Sequence, entry: Entry) -> None:
    have = len(known.tokens)
    if entry.first > have:
        return
    known.tokens += entry.tokens[have - entry.first :]
    known.finish = known.finish or entry.finish
    known.scores = known.scores or entry.scores
