"""A dense checkpoint's linear layers quantised when it is registered, and what that costs, measured.

The text is the passage of the demo market's that the dense model foretells best: a demo model its own. Both models read
it, the dense one first. Refused is what makes the model a worse one than the fewer bytes can be worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from math import exp, isfinite
from types import MappingProxyType

import torch
from msgspec import Struct
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.model import Quantised, WeightsName
from aegis.core.rng import Stream
from aegis.engine.quantised.integers import Integers, dequantised, quantise
from aegis.models.demo.passages import PASSAGES
from aegis.models.text.text_model import TextModel

PERPLEXITY_RATIO_MAX = 1.5
"""Of a quantised model's perplexity over the dense one's."""

_TRIED_TOKENS, _READ_TOKENS = 48, 160
_WITH_WEIGHTS = (torch.nn.Linear, torch.nn.Embedding)


class QuantisedLayers(Struct, frozen=True):
    integers: dict[str, Integers]
    told: Quantised | None


def quantise_layers(
    model: PreTrainedModel,
    weights: WeightsName,
    text: TextModel | None,
    came: Mapping[str, Integers] = MappingProxyType({}),
) -> QuantisedLayers:
    """The integers of every linear layer by name, but of those whose weight is an embedding too. From then on the
    weights of `model` are what they stand for. Layers that `came` as integers of as few bits stay. Raises
    ModelRefused."""
    stay = {name: found for name, found in came.items() if _stays(found, weights)}
    passage = _passage(model, text)
    before = _logits(model, passage)
    integers = replace_weights(model, weights, stay)
    if not integers and stay:
        return QuantisedLayers(stay, None)
    if not integers:
        raise ModelRefused(f"no layer of it can be quantised: serve it without --weights {weights}")
    told = _compare(before, _logits(model, passage), passage, weights, len(integers))
    if not told.perplexity_ratio <= PERPLEXITY_RATIO_MAX:  # a NaN is not either
        raise ModelRefused(
            f"as {weights} its perplexity is {told.perplexity_ratio:.2f} times that of the checkpoint, at most "
            f"{PERPLEXITY_RATIO_MAX} is accepted: serve it as {_better(weights)}"
        )
    return QuantisedLayers(stay | integers, told)


def _stays(integers: Integers, weights: WeightsName) -> bool:
    return integers.bits == 4 or (weights == "int8" and integers.scales.shape[1] == 1)


def _better(weights: WeightsName) -> str:
    order: dict[WeightsName, str] = {"int4": "int4-g32 or int8", "int4-g64": "int4-g32 or int8", "int4-g32": "int8"}
    return order.get(weights, "dense")


def replace_weights(model: PreTrainedModel, weights: WeightsName, but: Collection[str] = ()) -> dict[str, Integers]:
    """Returns the same as `integers_of`, and gives the layers of `model` the weights that these integers stand for."""
    integers = integers_of(model, weights, but)
    for name, found in integers.items():
        weight = model.get_submodule(name).weight
        weight.data = dequantised(found).to(weight.dtype)
    return integers


def integers_of(model: PreTrainedModel, weights: WeightsName, but: Collection[str] = ()) -> dict[str, Integers]:
    """Of every linear layer by name, `but` of these, and of those whose weight has another place too."""
    places = Counter(id(part.weight) for part in model.modules() if isinstance(part, _WITH_WEIGHTS))
    layers = {name: part for name, part in model.named_modules() if type(part) is torch.nn.Linear}
    own = {name: part.weight.detach() for name, part in layers.items() if places[id(part.weight)] == 1}
    own = {name: weight for name, weight in own.items() if name not in but}
    return {name: found for name, weight in own.items() if (found := quantise(weight, weights)) is not None}


def _passage(model: PreTrainedModel, text: TextModel | None) -> list[int]:
    """The tokens that it is tried with: those of a passage, or drawn ones for a model without a tokenizer."""
    vocab_size = model.config.get_text_config().vocab_size
    if text is None:
        draws = Stream(0, "quantising")
        return [draws.below(vocab_size) for _ in range(_TRIED_TOKENS)]
    passages = [text.encode(passage)[:_READ_TOKENS] for passage in PASSAGES.values()]
    usable = [tokens for tokens in passages if len(tokens) > 1 and max(tokens) < vocab_size]
    if not usable:
        raise ModelRefused("its tokenizer has tokens that its vocabulary lacks: it cannot be compared quantised")
    return min(usable, key=lambda tokens: _surprise(_logits(model, tokens[:_TRIED_TOKENS]), tokens[:_TRIED_TOKENS]))


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """`[tokens, vocab]`"""
    ids = torch.tensor([list(tokens)])
    logits: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits[0].float()


def _surprise(logits: torch.Tensor, tokens: Sequence[int]) -> float:
    """The mean of negative log probabilities."""
    return float(cross_entropy(logits[:-1], torch.tensor(list(tokens[1:]))))


def _compare(
    before: torch.Tensor, after: torch.Tensor, tokens: Sequence[int], weights: WeightsName, layers: int
) -> Quantised:
    difference = _surprise(after, tokens) - _surprise(before, tokens)
    ratio = exp(min(difference, 700.0)) if isfinite(difference) else float("inf")
    spread = float(before.max() - before.min())
    largest = float((after - before).abs().max())
    return Quantised(weights, layers, ratio, largest / spread if spread else largest)
