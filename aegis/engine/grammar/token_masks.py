"""The states of outputs in their grammars, and the masks that these put on the logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from aegis.engine.grammar.compiler import Compiled


class GrammarPosition:
    """One output's. It follows from the tokens alone, so a replay is where it was.

    The grammar is waited for when a mask is asked for, in a step, where its failure is the step's.
    """

    __slots__ = ("_compiled", "_ends", "_generated", "_last", "_matcher", "_vocabulary")

    def __init__(self, compiled: Future[Compiled], generated: Sequence[int], ends: Sequence[int]) -> None:
        self._compiled = compiled
        self._generated = tuple(generated)
        self._last = generated[-1] if generated else None
        self._ends = ends
        self._matcher: Any = None
        self._vocabulary: Any = None

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Sets the bits of row `row` of `masks` whose tokens may come next: none where the vocabulary has nothing to go
        on with."""
        if self._matcher is None:
            self._open()
        self._matcher.fill_next_token_bitmask(masks, row)
        if self._last in self._vocabulary.leads:
            masks[row] &= ~self._vocabulary.continuations

    def end(self, mask: npt.NDArray[np.int32]) -> None:
        """Sets the bits of the end tokens."""
        for end in self._ends:
            mask[end // 32] |= np.int32(1 << (end % 32) if end % 32 < 31 else -(1 << 31))

    def accept(self, token: int) -> None:
        """The token was drawn. An end token where the grammar had not come to its end leaves it where it is."""
        self._matcher.accept_token(token)
        self._last = token

    def _open(self) -> None:
        from xgrammar import GrammarMatcher

        compiled = self._compiled.result()
        matcher = GrammarMatcher(compiled.grammar)
        for token in self._generated:
            matcher.accept_token(token)
        self._matcher, self._vocabulary = matcher, compiled.vocabulary


class Masks:
    """The tokens that rows of a batch may have next: all, where `positions` has None for a row. They are found while a
    GPU is still making the logits, and cross over as bits."""

    def __init__(self, positions: Sequence[GrammarPosition | None], logits: torch.Tensor) -> None:
        rows, vocab = logits.shape
        words = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, pin_memory=logits.is_cuda)
        for row, position in enumerate(positions):
            if position:
                position.fill(words, row)
        bits = words.numpy()
        fertile = bits.any(axis=1)  # one look at all rows: a step has little time
        if not fertile.all():
            for barren in np.flatnonzero(~fertile).tolist():
                if position := positions[barren]:
                    position.end(bits[barren])
        self._banned = (banned_here if logits.is_cpu else banned_there)(words, logits.device)[:, :vocab]

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of `logits [rows, vocab]` in which all other tokens are banned."""
        return logits.masked_fill(self._banned, -torch.inf)


def banned_here(words: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`[rows, 32 * words]` bool: the tokens whose bits of `words` are 0."""
    return torch.from_numpy(np.unpackbits(~words.numpy().view(np.uint8), axis=1, bitorder="little").view(bool))


def banned_there(words: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on `device`, where an eighth of it is sent to."""
    sent = words.view(torch.uint8).to(device, non_blocking=True)
    return _banned_of_byte(device)[sent.int()].flatten(1)


@cache
def _banned_of_byte(device: torch.device) -> torch.Tensor:
    """`[256, 8]`: which of its eight tokens a byte of a mask bans."""
    bytes_ = torch.arange(256)[:, None]
    return (bytes_ >> torch.arange(8) & 1 == 0).to(device)
