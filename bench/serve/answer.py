"""The answer to one request as its bytes come in: an event stream of `/v1/completions` or `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

LINE_BYTES_MAX = 16 << 20

_Count = Annotated[int, Meta(ge=0)]


class RequestFailed(Exception):
    """A request that did not end as it should; the reason is one line. `status` is that of HTTP, where it was no
    200."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class _Usage(Struct, frozen=True):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens in it: one, if there is content and the server does not say how many tokens it is."""
        if self.token_ids is not None:
            return len(self.token_ids)
        said: Sequence[object] = (self.text,)
        if self.delta is not None:
            said = (self.delta.content, self.delta.reasoning, self.delta.reasoning_content, self.delta.tool_calls)
        return int(any(said))


class _Event(Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class Answer:
    """Bytes in, tokens with the times at which they came out. `prompt_tokens` is None where the server did not say."""

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.finish = ""
        self.done = False
        self._completion_tokens: int | None = None
        self._rest = b""
        self._chunks: list[tuple[int, int]] = []  # (time, tokens)
        self._decoder = msgspec.json.Decoder(_Event)

    def feed(self, data: bytes, now_ns: int) -> None:
        """Takes what came at `now_ns`. Raises RequestFailed if the server says so or sends no event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_ns)
        if len(self._rest) > LINE_BYTES_MAX:
            raise RequestFailed(f"an event of more than {LINE_BYTES_MAX >> 20} MiB")

    def ended(self) -> None:
        """No more bytes will come. Raises RequestFailed if the answer is not whole."""
        if not self.done and not self.finish:
            raise RequestFailed("the stream ended before the answer did")
        if not self.tokens:
            raise RequestFailed("the answer has no tokens")

    @property
    def tokens(self) -> int:
        """As many tokens as the server says it made, or else as have been seen."""
        return self._completion_tokens or self.seen

    @property
    def seen(self) -> int:
        """Tokens that have come so far, as far as chunks tell."""
        return sum(tokens for _, tokens in self._chunks)

    def token_times_ns(self, stop_ns: int) -> list[int]:
        """One time for each token.

        Where the chunks hold other than `tokens` tokens, because the server did not say how many each holds, the
        tokens are dealt to them in proportion; where no chunk had content they all came at the end, `stop_ns`.
        """
        chunks = self._chunks or [(stop_ns, 1)]
        seen = [0, *accumulate(tokens for _, tokens in chunks)]
        dealt = [self.tokens * count // seen[-1] for count in seen]
        return [
            now_ns
            for (now_ns, _), first, stop in zip(chunks, dealt, dealt[1:], strict=False)
            for _ in range(first, stop)
        ]

    def _take(self, data: bytes, now_ns: int) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = self._decoder.decode(data)
        except msgspec.DecodeError:
            raise RequestFailed("an event is not as the API has it") from None
        if event.error is not None:
            raise RequestFailed(f"error in the stream: {error_message(event.error)}")
        for choice in event.choices or ():
            if choice.tokens:
                self._chunks.append((now_ns, choice.tokens))
            self.finish = choice.finish_reason or self.finish
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            self._completion_tokens = event.usage.completion_tokens


def error_message(error: Any) -> str:
    """The server's error message, from the `error` of its reply, whatever its form."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message) if message else "no reason given"
