"""One choice's text as its tokens come in: the part that may be sent now, the part that has to wait, and the end.

Tokens are taken one by one, so neither the text nor its end depends on how they were delivered. Text waits while it may
belong to a stop string, and a token's logprobs wait with its text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from msgspec import Struct, structs

from aegis.core.request import FinishReason, Token
from aegis.models.text.text_model import TextModel
from proxy.http.streaming.stop_strings import StopScanner

_CONTEXT_TOKENS = 4  # of the prompt: a first word has its space, and a character may begin there


class Scored(Struct, frozen=True):
    """A token and the place where its text begins, in characters of the choice's text. `text` is the text that it
    added."""

    token: Token
    offset: int
    text: str


class Piece(Struct, frozen=True):
    """The next part of a choice's text. `first` and `finish` mark its first and last piece; joined they are the
    choice. `stop` is the stop string that ended it."""

    text: str = ""
    tokens: tuple[Scored, ...] = ()
    finish: FinishReason | None = None
    first: bool = False
    stop: str | None = None


def by_token(piece: Piece, sent: int) -> list[Piece]:
    """The piece in pieces of one token each, with the text that it has; `sent` is the place where its text begins."""
    parts, done = list[Piece](), 0
    for scored in piece.tokens:
        end = min(max(scored.offset + len(scored.text) - sent, done), len(piece.text))
        parts.append(Piece(piece.text[done:end], (scored,)))
        done = end
    return [*parts, structs.replace(piece, text=piece.text[done:], tokens=())]


def tokens_of(text: str, tokens: Sequence[Scored], held: int) -> tuple[list[Scored], list[Scored]]:
    """The tokens of a text that is among theirs, as near to the end as can be, and those behind it. So many characters
    at their end are held back. A token without text is a part of the character that follows."""
    whole = "".join(scored.text for scored in tokens)
    begin = whole.rfind(text, 0, max(len(whole) - held, 0))
    within, behind, at = list[Scored](), list[Scored](), 0
    for scored in tokens:
        if at >= begin + len(text):
            behind.append(scored)
        elif at >= begin or at + len(scored.text) > begin:
            within.append(scored)
        at += len(scored.text)
    return within, behind


def join(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish if pieces else None,
        stop=pieces[-1].stop if pieces else None,
    )


class Transcript:
    """A stop token has no text; `stop` strings end the text before them, once `min_tokens` are generated.

    `offset` is the length of the text before the first generated character (an echoed prompt's), `shown` are special
    tokens that are text.
    """

    def __init__(
        self,
        text: TextModel | None,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        offset: int = 0,
        shown: Collection[str] = (),
    ) -> None:
        self.generated = 0
        self.finished = False
        self._stream = text.stream(shown) if text else None
        if self._stream:
            for token in prompt[-_CONTEXT_TOKENS:]:
                self._stream.push(token)
        self._stops = StopScanner(stop) if stop else None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._waiting_text = ""
        self._waiting_tokens: list[Scored] = []
        self._sent = offset
        self._seen = offset

    def push(self, tokens: Sequence[Token]) -> Piece:
        """The next generated tokens. After the last piece nothing may be pushed."""
        assert not self.finished
        for token in tokens:
            self.generated += 1
            text = ""
            if self._stream and not self._is_stop(token):
                text = self._stream.push(token.id)
            self._waiting_tokens.append(Scored(token, self._seen, text))
            if stop := self._add(text):
                return self._last(FinishReason.STOP, stop)
        return self._release(len(self._waiting_text) - (self._stops.held if self._stops else 0))

    def finish(self, reason: FinishReason) -> Piece:
        """The engine generates no more."""
        assert not self.finished
        stop = self._add(self._stream.end() if self._stream else "")
        return self._last(FinishReason.STOP if stop else reason, stop)

    def _is_stop(self, token: Token) -> bool:
        """Whether the engine ends with this token, as `Job.finish` says."""
        return self.generated > self._min_tokens and token.id in self._stop_token_ids

    def _add(self, text: str) -> str | None:
        """The stop string that this completed, if any, which then no longer waits."""
        self._waiting_text += text
        self._seen += len(text)
        match = self._stops.feed(text) if self._stops and self.generated >= self._min_tokens else None
        if match is None:
            return None
        beyond = len(text) - match.end + match.length
        self._waiting_text = self._waiting_text[: len(self._waiting_text) - beyond]
        return match.stop

    def _release(self, characters: int) -> Piece:
        text, self._waiting_text = self._waiting_text[:characters], self._waiting_text[characters:]
        self._sent += len(text)
        tokens = tuple(takewhile(self._is_final, self._waiting_tokens))
        del self._waiting_tokens[: len(tokens)]
        return Piece(text, tokens)

    def _is_final(self, token: Scored) -> bool:
        """Whether all its text is sent, and a later stop string cannot take it back."""
        return self._stops is None or token.offset < self._sent >= token.offset + len(token.text)

    def _last(self, reason: FinishReason, stop: str | None) -> Piece:
        """Tokens that begin in a stop string, or after it, are dropped with it."""
        self.finished = True
        piece = self._release(len(self._waiting_text))
        rest = tuple(token for token in self._waiting_tokens if not stop or token.offset < self._sent)
        return Piece(piece.text, piece.tokens + rest, reason, stop=stop)
