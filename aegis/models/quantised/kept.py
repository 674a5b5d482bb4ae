"""Layers of a loaded model that stay the integers which its checkpoint has of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedModel

from aegis.engine.quantised.integers import Integers, dequantised

_WITH_WEIGHTS = (torch.nn.Linear, torch.nn.Embedding)


def kept(model: PreTrainedModel, integers: Mapping[str, Integers]) -> dict[str, Integers]:
    """Those whose layer is a plain one, and has the weight that they stand for: whatever transformers did with names
    and tensors when it loaded them. A weight that has another place too stays dense."""
    modules = dict(model.named_modules())
    places = Counter(id(part.weight) for part in modules.values() if isinstance(part, _WITH_WEIGHTS))
    found = dict[str, Integers]()
    for name, own in integers.items():
        layer = modules.get(name)
        if type(layer) is not torch.nn.Linear or places[id(layer.weight)] > 1 or layer.weight.shape != own.shape:
            continue
        if torch.equal(layer.weight, dequantised(own).to(layer.weight.dtype)):
            found[name] = own
    return found


def runs_as(model: PreTrainedModel, layers: Collection[str], integers: Mapping[str, Integers]) -> str:
    """What `layers`, which came quantised, run as."""
    forms = sorted({f"int{own.bits}" for own in integers.values()})
    if not forms or any(name not in integers for name in layers):
        forms.append(str(model.dtype).removeprefix("torch."))
    return " and ".join(forms)
