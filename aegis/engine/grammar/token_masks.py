"""The states of outputs in their grammars, and the masks that these put on the logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from aegis.core.request import SLOW_GRAMMAR

if TYPE_CHECKING:
    from aegis.engine.grammar.compiler import Compiled


SLOW_NS = 5_000_000
"""Of processor time for one token: as a rule it takes a hundredth of that."""

SLOW_NS_MAX = 500_000_000
"""Of all slow tokens of an output. Where a text can be derived in many ways, each token takes longer than the one
before it, and everything else on the instance waits for it."""

STEP_SLOW_NS_MAX = 100_000_000
"""Of all rows of a step, before those that were slow in the last one are given up."""


class GrammarPosition:
    """One output's. It follows from the tokens alone, so a replay is where it was.

    The grammar is waited for when a mask is asked for, in a step, where its failure is the step's. An output that is
    too slow has a `problem`, and from then on any token may come next.
    """

    __slots__ = ("_compiled", "_ends", "_generated", "_last", "_matcher", "_slow", "_slow_ns", "_vocabulary", "problem")

    def __init__(self, compiled: Future[Compiled], generated: Sequence[int], ends: Sequence[int]) -> None:
        self._compiled = compiled
        self._generated = tuple(generated)
        self._last = generated[-1] if generated else None
        self._ends = ends
        self._matcher: Any = None
        self._vocabulary: Any = None
        self._slow = False  # the last token was
        self._slow_ns = 0
        self.problem = ""

    def fill(self, masks: torch.Tensor, row: int, *, late: bool = False) -> int:
        """Sets the bits of row `row` of `masks` whose tokens may come next: none where the vocabulary has nothing to go
        on with. What that took, if it was slow. If it is `late` in the step, nothing slow is begun."""
        if self.problem or (late and self._slow):
            self.problem = SLOW_GRAMMAR
            return 0
        compiled = self._compiled.result()
        began_ns, slow_ns = thread_time_ns(), self._slow_ns
        if self._matcher is None:
            self._open(compiled)
        if not self.problem:
            self._matcher.fill_next_token_bitmask(masks, row)
            if self._last in self._vocabulary.leads:
                masks[row] &= ~self._vocabulary.continuations
            self._slow = self._took(thread_time_ns() - began_ns)
        if self.problem:
            masks[row] = -1
        return self._slow_ns - slow_ns

    def _took(self, ns: int) -> bool:
        """Whether that was slow."""
        if ns <= SLOW_NS:
            return False
        self._slow_ns += ns
        if self._slow_ns > SLOW_NS_MAX:
            self.problem = SLOW_GRAMMAR
        return True

    def end(self, mask: npt.NDArray[np.int32]) -> None:
        """Sets the bits of the end tokens."""
        for end in self._ends:
            mask[end // 32] |= np.int32(1 << (end % 32) if end % 32 < 31 else -(1 << 31))

    def accept(self, token: int) -> None:
        """The token was drawn. An end token where the grammar had not come to its end leaves it where it is."""
        if self.problem:
            return
        began_ns = thread_time_ns()
        self._matcher.accept_token(token)
        self._took(thread_time_ns() - began_ns)
        self._last = token

    def _open(self, compiled: Compiled) -> None:
        from xgrammar import GrammarMatcher

        self._matcher, self._vocabulary = GrammarMatcher(compiled.grammar), compiled.vocabulary
        for token in self._generated:
            self.accept(token)


class Masks:
    """The tokens that rows of a batch may have next: all, where `positions` has None for a row. They are found while a
    GPU is still making the logits, and cross over as bits."""

    def __init__(self, positions: Sequence[GrammarPosition | None], logits: torch.Tensor) -> None:
        rows, vocab = logits.shape
        words = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, pin_memory=logits.is_cuda)
        slow_ns = 0
        for row, position in enumerate(positions):
            if position:
                slow_ns += position.fill(words, row, late=slow_ns > STEP_SLOW_NS_MAX)
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
