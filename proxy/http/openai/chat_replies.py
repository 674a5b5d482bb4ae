"""The wording of replies of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, cast

from msgspec import UNSET, Raw, Struct, UnsetType, field, structs

from aegis.core.request import FinishReason
from aegis.models.text.text_model import TextModel
from proxy.http.openai.chat_reader import ChatReader, Reading
from proxy.http.openai.choices import CompletionDetails, Usage
from proxy.http.openai.reply_shape import ChunkShape
from proxy.http.openai.token_names import bytes_of, name_of
from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, ReasoningPart, TextPart
from proxy.http.streaming.transcript import Piece, Scored
from proxy.http.structured.tool_calls import MISTRAL


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


class Function(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True):
    """Whole, or in a delta: `index` is in deltas only, `id`, `type` and the function's name in the first of a call."""

    function: Function
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Message(Struct, frozen=True):
    """Reasoning has two names: DeepSeek's, and the one that vLLM has come to use."""

    role: str
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class DeltaMessage(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatCompletionChunk(Struct, frozen=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET


def token_logprob(text: TextModel, scored: Scored) -> TokenLogprob:
    token = scored.token
    name = scored.text or name_of(text, token.id)
    return TokenLogprob(name, token.logprob, bytes_of(name), [_top(text, *entry) for entry in token.top])


def _top(text: TextModel, token: int, logprob: float) -> TopLogprob:
    name = name_of(text, token)
    return TopLogprob(name, logprob, bytes_of(name))


def text_of(parts: Sequence[Part], kind: type[TextPart | ReasoningPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


class ChatShape(ChunkShape, frozen=True):
    """A `reply_shape.Shape`."""

    id: str
    created_s: int
    model: str
    text: TextModel
    reading: Reading
    logprobs: bool
    token_ids: bool
    include_usage: bool
    readers: dict[int, ChatReader] = field(default_factory=dict)  # of choices

    def chunk(self, index: int, piece: Piece) -> ChatCompletionChunk | None:
        reader = self.readers.setdefault(index, ChatReader(self.reading))
        parts = reader.read(piece)
        if piece.text and not parts and not (piece.first or piece.finish or self.logprobs or self.token_ids):
            return None
        delta = self._delta(index, parts, piece)
        choice = ChunkChoice(index, delta, self._logprobs(piece), self._finish(reader, piece), self._token_ids(piece))
        return self._chunk([choice], None if self.include_usage else UNSET)

    def usage_chunk(self, usage: Usage) -> ChatCompletionChunk | None:
        return self._chunk([], self._detailed(usage)) if self.include_usage else None

    def whole(self, choices: Sequence[Raw], usage: Usage) -> ChatCompletion:
        told = cast("list[ChatChoice]", choices)
        return ChatCompletion(self.id, "chat.completion", self.created_s, self.model, told, self._detailed(usage))

    def choice(self, index: int, piece: Piece) -> ChatChoice:
        reader = self.readers[index] = ChatReader(self.reading)
        parts = reader.read(piece)
        content, reasoning = text_of(parts, TextPart), text_of(parts, ReasoningPart) or UNSET
        calls = [self._whole_call(index, parts, part) for part in parts if isinstance(part, CallBegun)]
        message = Message("assistant", content or (None if calls else ""), reasoning, reasoning, calls or UNSET)
        return ChatChoice(index, message, self._logprobs(piece), self._finish(reader, piece), self._token_ids(piece))

    def _detailed(self, usage: Usage) -> Usage:
        if self.reading.marks is None:
            return usage
        thought = sum(reader.reasoning_tokens for reader in self.readers.values())
        return structs.replace(usage, completion_tokens_details=CompletionDetails(thought))

    def _delta(self, choice: int, parts: Sequence[Part], piece: Piece) -> DeltaMessage:
        content, reasoning = text_of(parts, TextPart), text_of(parts, ReasoningPart) or UNSET
        calls = self._call_deltas(choice, parts)
        silent = piece.finish or reasoning or calls
        role = "assistant" if piece.first else UNSET
        return DeltaMessage(role, content or (UNSET if silent else ""), reasoning, reasoning, calls or UNSET)

    def _call_deltas(self, choice: int, parts: Sequence[Part]) -> list[ToolCall]:
        """One of each call: clients look at no further one of the same."""
        deltas = dict[int, ToolCall]()
        for part in parts:
            match part:
                case CallBegun(index, name):
                    deltas[index] = ToolCall(Function("", name), index, self._call_id(choice, index), "function")
                case CallArguments(index, text):
                    begun = deltas.get(index, ToolCall(Function(""), index))
                    function = structs.replace(begun.function, arguments=begun.function.arguments + text)
                    deltas[index] = structs.replace(begun, function=function)
        return list(deltas.values())

    def _whole_call(self, choice: int, parts: Sequence[Part], begun: CallBegun) -> ToolCall:
        said = [part.text for part in parts if isinstance(part, CallArguments) and part.index == begun.index]
        return ToolCall(Function("".join(said), begun.name), UNSET, self._call_id(choice, begun.index), "function")

    def _call_id(self, choice: int, call: int) -> str:
        """An id that is the same when the request is retried. Mistral's templates take ids of nine characters only."""
        digest = blake2b(f"{self.id} {choice} {call}".encode(), digest_size=12).hexdigest()
        mistral = self.reading.tools and self.reading.tools.form is MISTRAL
        return digest[:9] if mistral else f"call_{digest}"

    def _finish(self, reader: ChatReader, piece: Piece) -> str | None:
        """A function that the client named is no choice of the model's: as OpenAI has it, the reply stops then."""
        named = self.reading.tools and self.reading.tools.choice == "named"
        return "tool_calls" if piece.finish == FinishReason.STOP and reader.called and not named else piece.finish

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(self.id, "chat.completion.chunk", self.created_s, self.model, choices, usage)

    def _token_ids(self, piece: Piece) -> list[int] | UnsetType:
        return [scored.token.id for scored in piece.tokens] if self.token_ids else UNSET

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return ChatLogprobs([token_logprob(self.text, each) for each in piece.tokens]) if self.logprobs else None
