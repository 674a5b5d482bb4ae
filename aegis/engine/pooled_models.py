"""Models that pool, run as transformers has them: texts of about one length side by side, without any KV.

Texts are padded behind their ends, so that each has the positions that it has alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec import Struct
from transformers import AutoModel, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from aegis.core.model import Pooling

TOKENS_MAX = 1 << 14
"""Of one pass, with what pads them."""

SPELLED_OUT = "eager"
"""transformers' name for attention that makes all scores of a layer."""

SCORES_MAX = 1 << 26
"""Of one pass in a layer whose attention is spelled out: 256 MiB."""

_DENSE = "dense_behind_pooling_"
_PADDED_PART = 8  # at most one of so many tokens is padding
_PADDED_FREE = 4  # in each text, whatever its length: short texts would else be run one by one


def heads_of(config: PretrainedConfig) -> int:
    """Of its attention; 1 for what has none."""
    heads: int = getattr(config.get_text_config(), "num_attention_heads", None) or 1
    return heads


class Text(Struct, frozen=True):
    """A text, or a pair of texts the second of which begins at `pair_at`."""

    tokens: Sequence[int]
    pair_at: int = 0


def auto_class(pooling: Pooling) -> Any:
    """The one of transformers' classes that makes such a model from a checkpoint or a configuration."""
    return AutoModelForSequenceClassification if pooling.scores else AutoModel


def without_head(module: PreTrainedModel) -> tuple[str, ...]:
    """Takes off the layer that some encoders have for their own first token, which no mode of pooling reads; many
    checkpoints lack its weights. How their names begin, if there is one."""
    if getattr(module, "pooler", None) is None:
        return ()
    module.pooler = None
    return ("pooler.",)


def add_dense(module: PreTrainedModel, pooling: Pooling) -> list[torch.nn.Linear]:
    """Puts the layers behind the pooling into the module, on the meta device: so their weights lie with the others."""
    layers, size = list[torch.nn.Linear](), module.config.get_text_config().hidden_size * len(pooling.modes)
    for number, dense in enumerate(pooling.dense):
        layers.append(torch.nn.Linear(size, dense.dimensions, dense.bias, device="meta"))
        module.add_module(f"{_DENSE}{number}", layers[-1])
        size = dense.dimensions
    return layers


class PooledModel:
    """A module and what is made of its output."""

    def __init__(self, module: PreTrainedModel, pooling: Pooling) -> None:
        self._module = module
        self._pooling = pooling
        config = module.config.get_text_config()
        padding, known = config.pad_token_id, range(module.get_input_embeddings().num_embeddings)
        self._padding: int | None = padding if padding in known else None  # -1 is one that says: none
        takes_types = "token_type_ids" in inspect.signature(module.forward).parameters
        self._takes_types = takes_types and getattr(config, "type_vocab_size", 0) > 1
        config.use_cache = False
        self._scores = heads_of(config) if config._attn_implementation == SPELLED_OUT else 0  # of two tokens
        self._dense = [module.get_submodule(f"{_DENSE}{number}") for number in range(len(pooling.dense))]

    @torch.inference_mode()
    def vectors(self, texts: Sequence[Text]) -> torch.Tensor:
        """`[texts, dimensions]` in float32, on the model's device. No text is empty."""
        result = torch.empty(len(texts), self._pooling.dimensions, device=self._module.device)
        for group in self._groups(texts):
            result[group] = self._run([texts[at] for at in group])
        return result

    def _groups(self, texts: Sequence[Text]) -> Iterator[list[int]]:
        """The places of texts that are run side by side. Where nothing is padding, a classifier could not tell which
        token is a text's last one."""
        alone = self._pooling.scores and self._padding is None
        group, longest = list[int](), 0
        for at in sorted(range(len(texts)), key=lambda at: -len(texts[at].tokens)):
            length, tokens = len(texts[at].tokens), (len(group) + 1) * longest
            full = alone or tokens > TOKENS_MAX or tokens * longest * self._scores > SCORES_MAX
            if group and (full or longest - length > _PADDED_FREE + longest // _PADDED_PART):
                yield group
                group = []
            longest = longest if group else length
            group.append(at)
        if group:
            yield group

    def _run(self, texts: Sequence[Text]) -> torch.Tensor:
        lengths = [len(text.tokens) for text in texts]
        longest, padding = max(lengths), self._padding or 0
        ids = torch.tensor([[*text.tokens, *[padding] * (longest - len(text.tokens))] for text in texts])
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(torch.int64)
        given = {"input_ids": ids, "attention_mask": mask}
        if self._takes_types:
            starts = torch.tensor([text.pair_at or longest for text in texts])
            given["token_type_ids"] = (torch.arange(longest) >= starts[:, None]).to(torch.int64) * mask
        sent = {name: values.to(self._module.device, non_blocking=True) for name, values in given.items()}
        output = self._module(**sent)
        if self._pooling.scores:
            scores: torch.Tensor = output.logits.float()
            return scores.sigmoid() if self._pooling.sigmoid else scores
        return self._pooled(output.last_hidden_state, sent["attention_mask"])

    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`hidden [texts, tokens, size]`."""
        vectors = torch.cat([_of_mode(mode, hidden, mask).to(hidden.dtype) for mode in self._pooling.modes], -1)
        for layer, dense in zip(self._dense, self._pooling.dense, strict=True):
            vectors = layer(vectors).tanh() if dense.tanh else layer(vectors)
        wide = vectors.float()
        return torch.nn.functional.normalize(wide, dim=-1) if self._pooling.normalises else wide


def _of_mode(mode: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    counts = mask.sum(1, keepdim=True)
    if mode == "cls":
        return hidden[:, 0]
    if mode == "lasttoken":
        return hidden[torch.arange(len(hidden), device=hidden.device), counts[:, 0] - 1]
    there = mask[:, :, None].bool()
    if mode == "max":
        return hidden.masked_fill(~there, float("-inf")).amax(1)
    wide = hidden.float().masked_fill(~there, 0.0)
    if mode == "weightedmean":
        weights = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None] * mask
        return (wide * weights[:, :, None]).sum(1) / weights.sum(1, keepdim=True)
    return wide.sum(1) / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)
