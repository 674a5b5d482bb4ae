"""The prompt as the beginning of an answer (`echo`), made once for all choices of the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.request import Token
from aegis.models.text.text_model import TextModel
from proxy.http.streaming.transcript import Piece, Scored


class EchoedPrompt:
    """`text`, and the prompt's tokens if the client is told of tokens."""

    __slots__ = ("_piece", "_prompt", "_texts", "text")

    def __init__(self, text: str, prompt: tuple[int, ...] = (), texts: Sequence[str] = ()) -> None:
        """`prompt` is empty if tokens are not told; `texts` are those of its tokens, if they are told too."""
        self.text = text
        self._prompt = prompt
        self._texts = texts
        self._piece: Piece | None = None

    def piece(self, scores: Sequence[Token]) -> Piece:
        """`scores` are of the tokens from the second on, if they were asked for: nothing precedes the first one. Those
        of the choice that comes first are told of all choices, as they are scores of one prompt."""
        if self._piece is None:
            self._piece = Piece(self.text, self._scored(scores))
            self._prompt, self._texts = (), ()
        return self._piece

    def _scored(self, scores: Sequence[Token]) -> tuple[Scored, ...]:
        if not self._prompt:
            return ()
        tokens = (Token(self._prompt[0]), *(scores or map(Token, self._prompt[1:])))
        texts = self._texts or [""] * len(tokens)
        scored, offset = list[Scored](), 0
        for token, text in zip(tokens, texts, strict=True):
            scored.append(Scored(token, offset, text))
            offset += len(text)
        return tuple(scored)


def texts_of_tokens(text: TextModel | None, tokens: Sequence[int]) -> list[str]:
    """The text that each token adds; 10 microseconds for each."""
    stream = text.stream() if text else None
    return [stream.push(token) for token in tokens] if stream else []
