"""How many tokens an answer has yet, as an instance learns it of each model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from aegis.core.ids import ModelId
from aegis.core.views import ANSWER_TOKENS

_PRIOR_ANSWERS: Final = 4.0
_RECENT_ANSWERS: Final = 256.0
"""With twice as many, what they have taught counts half."""


@dataclass(slots=True)
class _Seen:
    tokens: float = _PRIOR_ANSWERS * ANSWER_TOKENS
    answers: float = _PRIOR_ANSWERS


class AnswerLengths:
    """Lengths are taken to be exponential, so that an answer has as much yet, however long it is. Where some have not
    ended, the likeliest mean is all tokens that were made over the answers that ended. `ANSWER_TOKENS` is expected at
    first, and counts as a few answers."""

    def __init__(self) -> None:
        self._seen: dict[ModelId, _Seen] = {}

    def made(self, model: ModelId, tokens: int) -> None:
        """Tokens of its answers, ended or not."""
        self._of(model).tokens += tokens

    def ended(self, model: ModelId) -> None:
        """An answer is complete."""
        seen = self._of(model)
        seen.answers += 1
        if seen.answers >= 2 * _RECENT_ANSWERS:
            seen.answers, seen.tokens = seen.answers / 2, seen.tokens / 2

    def mean(self, model: ModelId) -> float:
        """Tokens."""
        seen = self._seen.get(model)
        return seen.tokens / seen.answers if seen else ANSWER_TOKENS

    def forget(self, model: ModelId) -> None:
        self._seen.pop(model, None)

    def _of(self, model: ModelId) -> _Seen:
        return self._seen.setdefault(model, _Seen())
