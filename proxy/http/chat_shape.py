"""How `/v1/chat/completions` words its replies."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from aegis.models.text import TextModel
from proxy.http.choice import Usage
from proxy.http.token_names import bytes_of, name_of
from proxy.http.transcript import Piece, Scored


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float | None
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]


class Message(Struct, frozen=True):
    role: str
    content: str


class DeltaMessage(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    """Whole, or a chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChatChoice | ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatShape(Struct, frozen=True):
    """An `answer.Shape`."""

    id: str
    created_s: int
    model: str
    text: TextModel
    logprobs: bool
    token_ids: bool
    include_usage: bool

    def chunk(self, index: int, piece: Piece) -> ChatCompletion:
        delta = DeltaMessage("assistant" if piece.first else UNSET, piece.text or (UNSET if piece.finish else ""))
        choice = ChunkChoice(index, delta, self._logprobs(piece), piece.finish, self._token_ids(piece))
        return self._chunk([choice], None if self.include_usage else UNSET)

    def usage(self, usage: Usage) -> ChatCompletion:
        return self._chunk([], usage)

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> ChatCompletion:
        choices = [self._choice(index, piece) for index, piece in enumerate(pieces)]
        return ChatCompletion(self.id, "chat.completion", self.created_s, self.model, choices, usage)

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        message = Message("assistant", piece.text)
        return ChatChoice(index, message, self._logprobs(piece), piece.finish, self._token_ids(piece))

    def _chunk(self, choices: Sequence[ChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletion:
        return ChatCompletion(self.id, "chat.completion.chunk", self.created_s, self.model, choices, usage)

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return [scored.token.id for scored in piece.tokens] if self.token_ids else UNSET

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return ChatLogprobs([self._token(scored) for scored in piece.tokens]) if self.logprobs else None

    def _token(self, scored: Scored) -> TokenLogprob:
        token = scored.token
        name = scored.text or name_of(self.text, token.id)
        return TokenLogprob(name, token.logprob, bytes_of(name), [self._top(*entry) for entry in token.top])

    def _top(self, token: int, logprob: float) -> TopLogprob:
        name = name_of(self.text, token)
        return TopLogprob(name, logprob, bytes_of(name))
