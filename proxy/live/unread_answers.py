"""Bounds on what waits for clients that read more slowly than their answers are made: one for each answer, and one for
all clients of a proxy together; and the choice of the answer that is given up beyond it."""

from __future__ import annotations

import asyncio
from typing import Protocol
from weakref import WeakSet

from proxy.http.market import Delivery, Delta, PromptScores

ANSWER_BYTES_MAX = 16 << 20
ALL_BYTES_MAX = 32 << 20

_DELIVERY_BYTES = 96
_TOKEN_BYTES = 112
_ALTERNATIVE_BYTES = 136  # a pair of numbers, each an object
_WITH_TOKENS = (Delta, PromptScores)


class AnswerBytes:
    """The bytes of one answer, all its choices together."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class UnreadAnswer(Protocol):
    """Something that deliveries wait in."""

    @property
    def share(self) -> AnswerBytes: ...

    def give_up(self, why: str) -> None:
        """Drops them, and tells the client so."""
        ...


class UnreadAnswers:
    """All of one proxy."""

    def __init__(self, *, answer_bytes_max: int = ANSWER_BYTES_MAX, all_bytes_max: int = ALL_BYTES_MAX) -> None:
        self.nbytes = 0
        self._answer_bytes_max = answer_bytes_max
        self._all_bytes_max = all_bytes_max
        self._waiting: WeakSet[UnreadAnswer] = WeakSet()
        self._looks = False

    def join(self, waiting: UnreadAnswer) -> None:
        self._waiting.add(waiting)

    def grow(self, share: AnswerBytes, nbytes: int) -> None:
        """`nbytes` more of the answer wait to be read by its client; fewer, where that is negative."""
        share.nbytes += nbytes
        self.nbytes += nbytes
        too_much = share.nbytes > self._answer_bytes_max or self.nbytes > self._all_bytes_max
        if too_much and nbytes > 0 and not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)  # after the readers had their turn

    def _look(self) -> None:
        self._looks = False
        answers: dict[AnswerBytes, list[UnreadAnswer]] = {}
        for waiting in self._waiting:
            answers.setdefault(waiting.share, []).append(waiting)
        self.nbytes = sum(share.nbytes for share in answers)  # a handle that is gone may have left some unread
        for share in sorted(answers, key=lambda share: -share.nbytes):
            if share.nbytes > self._answer_bytes_max:
                why = f"{_mib(share.nbytes)} of it were not read"
            elif self.nbytes > self._all_bytes_max:
                why = f"{_mib(share.nbytes)} of it were not read, and more of it than of any other"
            else:
                return
            for waiting in answers[share]:
                waiting.give_up(why)


def bytes_of(delivery: Delivery) -> int:
    """About what it takes in memory. Its tokens all have as many alternatives."""
    if not isinstance(delivery, _WITH_TOKENS) or not delivery.tokens:
        return _DELIVERY_BYTES
    tokens = delivery.tokens
    return _DELIVERY_BYTES + len(tokens) * (
        _TOKEN_BYTES + len(tokens[-1].vector or b"") + _ALTERNATIVE_BYTES * len(tokens[-1].top)
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
