"""What a model makes of a text that generates none: a vector, or the score of a pair of texts."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""As sentence-transformers names them."""


class Pooling(Struct, frozen=True):
    """From a model's last hidden states to its answer. If it `scores`, that is the one label of its own head, and the
    rest is of no use; else the results of all `modes` one behind the other."""

    dimensions: int
    modes: tuple[PoolingMode, ...] = ()
    normalises: bool = False
    scores: bool = False
    sigmoid: bool = False  # the score is squeezed between 0 and 1
    prompt: str = ""  # comes before each text

    @property
    def task(self) -> Literal["embed", "rerank"]:
        return "rerank" if self.scores else "embed"
