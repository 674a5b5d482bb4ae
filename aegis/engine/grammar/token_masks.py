"""The states of outputs in their grammars, and the masks that these put on the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from aegis.core.request import Failure

if TYPE_CHECKING:
    from aegis.engine.grammar.compiler import Compiled


QUICK_NS = 1_000_000
"""Of processor time for one token, which nobody is charged for: as a rule it takes a tenth of that."""

SPENT_AT_ONCE_NS = 500_000_000
SPENT_SHARE = 0.05


class SlowTime:
    """The time that grammars of some kinds may take of an instance, beyond `QUICK_NS` for each token: half a second at
    once, and a twentieth of all time. Where a text can be derived in many ways, each token takes longer than the one
    before it, and everything else on the instance waits for it."""

    def __init__(self, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._now_ns = now_ns
        self._left_ns, self._seen_ns = SPENT_AT_ONCE_NS, now_ns()
        self._took_ns: WeakKeyDictionary[Future[Compiled], int] = WeakKeyDictionary()

    def charge(self, compiled: Future[Compiled], ns: int) -> None:
        if ns > QUICK_NS:
            self._refill()
            self._left_ns -= ns - QUICK_NS
            self._took_ns[compiled] = self._took_ns.get(compiled, 0) + ns - QUICK_NS

    def objection(self, compiled: Future[Compiled]) -> Failure | None:
        """The kind of reason why an output may not be held to the grammar any further; None: it may."""
        took_ns = self._took_ns.get(compiled, 0)
        if took_ns > SPENT_AT_ONCE_NS:
            return Failure.SLOW_GRAMMAR
        if self._left_ns >= 0:
            return None
        self._refill()
        if self._left_ns >= 0:
            return None
        return Failure.SLOW_GRAMMAR if took_ns else Failure.SLOW_GRAMMARS

    def _refill(self) -> None:
        now_ns = self._now_ns()
        gained_ns = round((now_ns - self._seen_ns) * SPENT_SHARE)
        self._left_ns, self._seen_ns = min(self._left_ns + gained_ns, SPENT_AT_ONCE_NS), now_ns


class GrammarPosition:
    """One output's. It follows from the tokens alone, so a replay is where it was.

    The grammar is waited for when a mask is asked for, in a step, where its failure is the step's. An output that took
    too much time has a `problem`, and from then on any token may come next.
    """

    __slots__ = ("_compiled", "_ends", "_generated", "_last", "_matcher", "_time", "_vocabulary", "problem")

    def __init__(
        self, compiled: Future[Compiled], generated: Sequence[int], ends: Sequence[int], time: SlowTime
    ) -> None:
        self._compiled = compiled
        self._generated = tuple(generated)
        self._last = generated[-1] if generated else None
        self._ends = ends
        self._matcher: Any = None
        self._vocabulary: Any = None
        self._time = time
        self.problem: Failure | None = None

    def fill(self, masks: torch.Tensor, row: int) -> None:
        """Sets the bits of row `row` of `masks`, all of which are set, whose tokens may come next: none where the
        vocabulary has nothing to go on with."""
        if self._matcher is None:
            self._open()
        if self._goes_on():
            began_ns = thread_time_ns()
            self._matcher.fill_next_token_bitmask(masks, row)
            if self._last in self._vocabulary.leads:
                masks[row] &= ~self._vocabulary.continuations
            self._time.charge(self._compiled, thread_time_ns() - began_ns)

    def end(self, mask: npt.NDArray[np.int32]) -> None:
        """Sets the bits of the end tokens."""
        for end in self._ends:
            mask[end // 32] |= np.int32(1 << (end % 32) if end % 32 < 31 else -(1 << 31))

    def accept(self, token: int) -> None:
        """The token was drawn. An end token where the grammar had not come to its end leaves it where it is."""
        if self._goes_on():
            began_ns = thread_time_ns()
            self._matcher.accept_token(token)
            self._time.charge(self._compiled, thread_time_ns() - began_ns)
            self._last = token

    def _goes_on(self) -> bool:
        self.problem = self.problem or self._time.objection(self._compiled)
        return not self.problem

    def _open(self) -> None:
        from xgrammar import GrammarMatcher

        compiled = self._compiled.result()
        self._matcher, self._vocabulary = GrammarMatcher(compiled.grammar), compiled.vocabulary
        for token in self._generated:
            self.accept(token)


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
    """The same, unpacked on `device`: an eighth of the bytes has to be sent there."""
    sent = words.view(torch.uint8).to(device, non_blocking=True)
    return _banned_of_byte(device)[sent.int()].flatten(1)


@cache
def _banned_of_byte(device: torch.device) -> torch.Tensor:
    """`[256, 8]`: which of its eight tokens a byte of a mask bans."""
    bytes_ = torch.arange(256)[:, None]
    return (bytes_ >> torch.arange(8) & 1 == 0).to(device)
