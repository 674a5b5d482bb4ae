"""Models that pool, run as transformers has them: texts of about one length side by side, without any KV.

Texts are padded behind their ends, so that each has the positions that it has alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec import Struct
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from aegis.core.pooling import Pooling

TOKENS_MAX = 1 << 14
"""Of one pass, with what pads them."""

_PADDED_PART = 8  # at most one of so many tokens is padding
_PADDED_FREE = 4  # in each text, whatever its length: short texts would else be run one by one


class Text(Struct, frozen=True):
    """Of a pair the second text begins at `pair_at`."""

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


@torch.inference_mode()
def pooled(module: PreTrainedModel, pooling: Pooling, texts: Sequence[Text]) -> torch.Tensor:
    """`[texts, dimensions]` in float32, on the model's device. No text is empty."""
    result = torch.empty(len(texts), pooling.dimensions, device=module.device)
    for group in _groups(texts, None if _reads_padding(module) else 1):
        result[group] = _run(module, pooling, [texts[at] for at in group])
    return result


def _groups(texts: Sequence[Text], most: int | None) -> Iterator[list[int]]:
    """The places of texts that are run side by side."""
    group, longest = list[int](), 0
    for at in sorted(range(len(texts)), key=lambda at: -len(texts[at].tokens)):
        length = len(texts[at].tokens)
        padding = longest - length
        full = len(group) == most or (len(group) + 1) * longest > TOKENS_MAX
        if group and (full or padding > _PADDED_FREE + longest // _PADDED_PART):
            yield group
            group = []
        longest = longest if group else length
        group.append(at)
    if group:
        yield group


def _reads_padding(module: PreTrainedModel) -> bool:
    """Whether padded texts are told from others. A classifier that looks for the last token of each text knows it by
    the padding after it."""
    return module.config.get_text_config().pad_token_id is not None


def _run(module: PreTrainedModel, pooling: Pooling, texts: Sequence[Text]) -> torch.Tensor:
    lengths = [len(text.tokens) for text in texts]
    longest, padding = max(lengths), module.config.get_text_config().pad_token_id or 0
    ids = torch.tensor([[*text.tokens, *[padding] * (longest - len(text.tokens))] for text in texts])
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(torch.int64)
    given = {"input_ids": ids, "attention_mask": mask}
    if _takes_types(module):
        starts = torch.tensor([text.pair_at or longest for text in texts])
        given["token_type_ids"] = (torch.arange(longest) >= starts[:, None]).to(torch.int64) * mask
    sent = {name: values.to(module.device, non_blocking=True) for name, values in given.items()}
    output = module(**sent)
    if pooling.scores:
        scores = output.logits.float()
        return scores.sigmoid() if pooling.sigmoid else scores
    return _vectors(output.last_hidden_state, sent["attention_mask"], pooling)


def _takes_types(module: PreTrainedModel) -> bool:
    """Whether its layers tell the second text of a pair from the first."""
    takes = "token_type_ids" in inspect.signature(module.forward).parameters
    return takes and getattr(module.config, "type_vocab_size", 0) > 1


def _vectors(hidden: torch.Tensor, mask: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """`hidden [texts, tokens, size]`."""
    vectors = torch.cat([_of_mode(mode, hidden, mask) for mode in pooling.modes], -1).float()
    return torch.nn.functional.normalize(vectors, dim=-1) if pooling.normalises else vectors


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
