"""Text and token ids, as the proxy needs them: from an image directory, without torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import count, takewhile
from operator import eq
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct
from tokenizers import Tokenizer

from aegis.device.image_directory import TOKENIZER
from aegis.models.text.chat_template import read_chat_template, read_special_tokens, render
from aegis.models.text.detokenizer import Detokenizer, read_detokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_TOKENS = 4
"""No character takes more tokens than UTF-8 has bytes for it."""

_FEW_TOKENS = 1024
"""More are decoded as a batch of one, which, slower for a few, lets other Python threads run meanwhile."""


_keys = count()


class TextSource(Struct, frozen=True):
    """The data from which another process makes the same text model."""

    tokenizer_json: str
    special: dict[str, str]
    chat_template: str | None


class TextModel:
    """The tokenizer of one model. Threads may share it. `key` is its own in this process.

    Another process (`worker`) encodes and renders clients' texts, because both take as much time and memory as the
    checkpoint wants; tokens are decoded here."""

    def __init__(
        self,
        tokenizer: Tokenizer | Detokenizer,
        special: Mapping[str, str],
        chat_template: str | None,
        tokenizer_file: BinaryIO | None = None,
    ) -> None:
        """Beside a `Detokenizer` there is a `tokenizer_file`, which holds the whole tokenizer."""
        self.key = next(_keys)
        self._tokenizer = tokenizer
        self._tokenizer_file = tokenizer_file
        self._special = dict(special)
        self._chat_template = chat_template
        if isinstance(tokenizer, Detokenizer):
            self.special_ids = tokenizer.special_ids
        else:
            added = tokenizer.get_added_tokens_decoder()
            self.special_ids = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def load(cls, directory: Path) -> TextModel | None:
        """None if the checkpoint had no tokenizer."""
        if not (directory / TOKENIZER).is_file():
            return None
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        text = cls(tokenizer, read_special_tokens(directory), read_chat_template(directory))
        _ = text.token_characters_max  # looks at the whole vocabulary: here, not when a request comes
        return text

    @classmethod
    def load_to_decode(cls, directory: Path) -> TextModel | None:
        """As `load`, but what it is loaded for is to decode, and to be told to workers, which encode. That takes this
        process a fraction of the time and memory. The tokenizer's file stays open, so that it may be removed."""
        found = read_detokenizer(directory)
        if found is None:
            return cls.load(directory)
        return cls(Detokenizer(found), found.special, read_chat_template(directory), (directory / TOKENIZER).open("rb"))

    @classmethod
    def is_whole(cls, directory: Path) -> bool:
        """Whether what an image has of it can be read. Raises OSError where that is not the image's doing."""
        try:
            cls.load_to_decode(directory)
        except FileNotFoundError:
            return False
        except (MemoryError, OSError):
            raise
        except Exception:  # noqa: BLE001 - `tokenizers` has no type of its own
            return False
        return True

    @classmethod
    def of(cls, source: TextSource) -> TextModel:
        tokenizer = Tokenizer.from_str(source.tokenizer_json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return cls(tokenizer, source.special, source.chat_template)

    def source(self) -> TextSource:
        return TextSource(self.to_json(), self._special, self._chat_template)

    @cached_property
    def token_characters_max(self) -> int:
        """No token stands for more characters of a text."""
        if isinstance(self._tokenizer, Detokenizer):
            return self._tokenizer.token_characters_max
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def is_special(self, text: str) -> bool:
        """Whether it is a token that has no text."""
        return self._special_id(text) is not None

    def to_json(self) -> str:
        """The tokenizer, as `tokenizer.json` has it."""
        if self._tokenizer_file:
            file = self._tokenizer_file.fileno()
            return os.pread(file, os.fstat(file).st_size, 0).decode()
        assert isinstance(self._tokenizer, Tokenizer)
        text: str = self._tokenizer.to_str()
        return text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As a batch of one: a single text is encoded with the interpreter locked, however long it is."""
        assert isinstance(self._tokenizer, Tokenizer), "loaded to decode: a worker encodes"
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def fit(self, texts: Sequence[str | tuple[str, str]], most: int | None) -> list[tuple[list[int], int]]:
        """For `worker_messages.Fit`: the tokens of each text or pair, and where its second text begins. From one thread
        only."""
        assert isinstance(self._tokenizer, Tokenizer), "loaded to decode: a worker encodes"
        if most is not None:
            self._tokenizer.enable_truncation(most)
        try:
            found = self._tokenizer.encode_batch(list(texts))
        finally:
            self._tokenizer.no_truncation()
        cut = [
            (each.ids[:most], each.type_ids[:most]) for each in found
        ]  # whole where special tokens alone are too many
        return [(ids, types.index(1) if 1 in types else 0) for ids, types in cut]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids beyond the vocabulary have no text; bytes that are no UTF-8 become U+FFFD."""
        if isinstance(self._tokenizer, Detokenizer):
            return self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        if len(tokens) <= _FEW_TOKENS:
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
            return text
        texts: list[str] = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def stream(self, shown: Collection[str] = ()) -> TextStream:
        """`shown` are texts of special tokens that are text nevertheless."""
        return TextStream(self, frozenset(token for text in shown if (token := self._special_id(text)) is not None))

    def _special_id(self, text: str) -> int | None:
        if isinstance(self._tokenizer, Detokenizer):
            return self._tokenizer.special_id(text)
        token: int | None = self._tokenizer.token_to_id(text)
        return token if token in self.special_ids else None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for a conversation. It contains the special tokens it needs: encode it with none added.

        `variables` go to the template. Raises UserError if the model has no template or its template objects.
        """
        return render(self._chat_template, self._special, messages, add_generation_prompt, variables)


class TextStream:
    """Turns tokens into text one by one: joined, the pieces are the text of all tokens decoded at once.

    A token's text may depend on the tokens before it (a space that only a first word lacks), so each is decoded after
    those of the previous piece. Text that ends in the middle of a character waits for the rest of it.
    """

    __slots__ = ("_context", "_owed", "_shown", "_text", "_waiting")

    def __init__(self, text: TextModel, shown: frozenset[int] = frozenset()) -> None:
        self._text = text
        self._shown = shown  # special tokens; others have no text
        self._context: list[int] = []  # tokens of the last piece
        self._owed = 0  # characters at the end of their text that were no part of it
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now, possibly none."""
        if self._shown and token in self._text.special_ids and token not in self._shown:
            return ""
        self._waiting.append(token)
        piece = self._piece(self._waiting)
        if piece and not piece.endswith(_REPLACEMENT):
            return self._take(len(self._waiting), piece)
        if len(self._waiting) < 2 * _CHARACTER_TOKENS:
            return ""
        certain = len(self._waiting) - _CHARACTER_TOKENS
        before = self._piece(self._waiting[:certain])
        sure = sum(takewhile(bool, map(eq, before, piece)))  # the last of these tokens may end within a character
        return self._take(certain, before[:sure], len(before) - sure)

    def end(self) -> str:
        """The text that was still waiting; after this nothing may be pushed."""
        return self._piece(self._waiting)

    def _piece(self, tokens: list[int]) -> str:
        skip = not self._shown
        before = self._text.decode(self._context, skip_special_tokens=skip)
        return self._text.decode(self._context + tokens, skip_special_tokens=skip)[len(before) - self._owed :]

    def _take(self, count: int, piece: str, owed: int = 0) -> str:
        self._context, self._waiting, self._owed = self._waiting[:count], self._waiting[count:], owed
        return piece
