"""The wording of a planned request: its prompt of about so many tokens, and the JSON around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from aegis.core.ids import ModelId
from aegis.core.rng import Stream
from bench.serve.plan import Planned

_WORDS = (
    *(
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "can",
        "did",
        "do",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
    ),
    *("him", "his", "how", "if", "in", "into", "is", "it", "its", "like", "may", "more", "most", "much", "my", "no"),
    *(
        "not",
        "now",
        "of",
        "on",
        "one",
        "only",
        "or",
        "other",
        "our",
        "out",
        "over",
        "said",
        "she",
        "so",
        "some",
        "such",
    ),
    *("than", "that", "the", "their", "them", "then", "there", "they", "this", "time", "to", "two", "up", "us", "was"),
    *("we", "well", "were", "what", "when", "which", "who", "will", "with", "would", "year", "you", "your"),
)
_SPARE = 1 << 12  # starting points of prompts


class Draws:
    """Prompts of any length as windows into one long row of draws: no two that matter begin alike, and making one
    while requests are under way takes no time."""

    def __init__(self, seed: int, tokens_max: int) -> None:
        stream = Stream(seed, "prompts")
        self._row = [stream.below(1 << 16) for _ in range(tokens_max + _SPARE)]
        self._seed = seed

    def window(self, index: int, count: int) -> list[int]:
        """`count` numbers in [0, 65536), the same for the same request."""
        first = Stream(self._seed, "prompt", index).below(_SPARE)
        return self._row[first : first + count]


@dataclass(frozen=True, slots=True)
class Wording:
    """Words requests for one endpoint. `token_ids`: of each model, those that prompts are made of; None, prompts are
    text, of one short word a token. `returning`: the models whose server tells the token ids of each chunk."""

    chat: bool
    draws: Draws
    token_ids: Mapping[ModelId, Sequence[int]] | None
    returning: frozenset[ModelId]
    ignore_eos: bool
    extra: Mapping[str, Any]

    def body(self, planned: Planned, index: int) -> bytes:
        """The JSON of the `index`-th request of a run."""
        prompt = self._prompt(planned, index)
        fields: dict[str, Any] = {
            "model": planned.model,
            "max_tokens": planned.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        fields |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        if planned.priority:
            fields["priority"] = planned.priority
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if planned.model in self.returning:
            fields["return_token_ids"] = True
        return msgspec.json.encode(fields | dict(self.extra))

    def _prompt(self, planned: Planned, index: int) -> str | list[int]:
        if planned.text is not None:
            return planned.text
        row = self.draws.window(index, planned.input_tokens)
        if self.token_ids is None or self.chat:
            return " ".join(_WORDS[number % len(_WORDS)] for number in row)
        ids = self.token_ids[planned.model]
        return [ids[number % len(ids)] for number in row]
