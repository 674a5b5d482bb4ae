"""The wording of replies of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from msgspec import UNSET, Raw, Struct, UnsetType

from aegis.models.text.text_model import TextModel
from proxy.http.openai.choices import Usage
from proxy.http.openai.reply_shape import ChunkShape
from proxy.http.openai.token_names import name_of
from proxy.http.streaming.transcript import Piece, Scored


class Logprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """Whole, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CompletionShape(ChunkShape, frozen=True):
    """A `reply_shape.Shape`."""

    id: str
    created_s: int
    model: str
    text: TextModel | None
    logprobs: bool
    token_ids: bool
    include_usage: bool

    def chunk(self, index: int, piece: Piece) -> Completion:
        return self._reply([self.choice(index, piece)], None if self.include_usage else UNSET)

    def usage_chunk(self, usage: Usage) -> Completion | None:
        return self._reply([], usage) if self.include_usage else None

    def choice(self, index: int, piece: Piece) -> CompletionChoice:
        logprobs = self._logprobs(piece.tokens) if self.logprobs else None
        token_ids = [scored.token.id for scored in piece.tokens] if self.token_ids else UNSET
        return CompletionChoice(index, piece.text, logprobs, piece.finish, token_ids)

    def whole(self, choices: Sequence[Raw], usage: Usage) -> Completion:
        return self._reply(cast("list[CompletionChoice]", choices), usage)

    def _reply(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self.id, "text_completion", self.created_s, self.model, choices, usage)

    def _logprobs(self, tokens: Sequence[Scored]) -> Logprobs:
        return Logprobs(
            tokens=[scored.text or name_of(self.text, scored.token.id) for scored in tokens],
            token_logprobs=[scored.token.logprob for scored in tokens],
            top_logprobs=[self._top(scored) for scored in tokens],
            text_offset=[scored.offset for scored in tokens],
        )

    def _top(self, scored: Scored) -> dict[str, float] | None:
        token = scored.token
        if token.logprob is None:
            return None
        top = {name_of(self.text, alternative): logprob for alternative, logprob in token.top}
        return top | {scored.text or name_of(self.text, token.id): token.logprob}
