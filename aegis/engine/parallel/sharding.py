"""Sharding of a model among the ranks of a tensor-parallel instance, by transformers' plan for it.

A plan names modules and parameters, each with a style: it says which dimension of the weight is cut, and what the ranks
exchange after the module has run (Megatron-LM, Shoeybi et al. 2019, section 3). Every rank has a part of the same
shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.engine.parallel.group import Group


class Cut(NamedTuple):
    """Along which dimension a tensor is cut. `halves`: it is two, one above the other, each to be cut. No dimension:
    the first rank has it all, the others zeros, for it is added once where parts are summed."""

    dim: int | None
    halves: bool = False

    def part(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        if self.dim is None:
            return whole if rank == 0 else torch.zeros_like(whole)
        if self.halves:
            return torch.cat([_slice(half, self.dim, rank, size) for half in whole.chunk(2, self.dim)], self.dim)
        return _slice(whole, self.dim, rank, size)


_LAYER = re.compile(r"\.\d+(?=\.|$)")
_WHOLE = "replicated_with_grad_allreduce"
_CUT_OUTPUT = frozenset({"colwise", "colwise_gather_output", "embedding_rowwise"})
_CUT_INPUT = frozenset({"rowwise", "rowwise_split_input"})
_PACKED = "packed_colwise"
_EXPERTS = "moe_tp_experts"  # a module, whose parameters have styles of their own
_KNOWN = _CUT_OUTPUT | _CUT_INPUT | {_PACKED, _EXPERTS}
_MAY_STAY_WHOLE = frozenset({"colwise_gather_output", "embedding_rowwise"})


def cuts(model: PreTrainedModel, size: int) -> dict[str, Cut]:
    """The cut of each parameter that is not whole on every rank, by name. A parameter whose results the ranks gather
    anyway stays whole if it cannot be divided evenly. Raises ModelRefused if another one cannot be."""
    found = {}
    for path, style in _planned(model).items():
        for name, parameter in _parameters(model, path) if style != _EXPERTS else ():
            cut = _cut(model, path, style, parameter)
            length = parameter.shape[cut.dim] // (1 + cut.halves) if cut.dim is not None else 0
            if length % size == 0:
                found[name] = cut
            elif style not in _MAY_STAY_WHOLE:
                raise ModelRefused(f"{type(model).__name__}: {size} ranks cannot share the {length} rows of {name}")
    return found


def cuts_attention(model: PreTrainedModel) -> bool:
    """Whether each rank attends with heads of its own: else all ranks do with all of them, and have all KV."""
    owners = [path.rpartition(".")[0] for path, style in _planned(model).items() if style == "colwise"]
    return any(hasattr(model.get_submodule(owner), "layer_idx") for owner in owners)


def connect(model: PreTrainedModel, group: Group) -> None:
    """Makes the modules of a model, whose parameters are this rank's parts, tell each other what the plan says."""
    modules = dict(model.named_modules())
    for path, style in _planned(model).items():
        if path in modules:
            _connect(modules[path], style, group)


def _connect(module: Any, style: str, group: Group) -> None:
    match style:
        case "rowwise" | "moe_tp_experts":
            module.forward = partial(_summed, module.forward, group)
        case "rowwise_split_input":
            module.forward = partial(_split_summed, module.forward, group)
        case "colwise_gather_output" if module.weight.shape[0] < module.out_features:
            module.forward = partial(_gathered, module.forward, group)
        case "embedding_rowwise" if module.weight.shape[0] < module.num_embeddings:
            module.padding_idx = None  # of the whole; it matters to gradients alone
            module.forward = partial(_looked_up, module.forward, group, module.weight.shape[0])


def _planned(model: PreTrainedModel) -> dict[str, str]:
    """The style of every module and parameter in the plan, by its path. Raises ModelRefused if there is no plan."""
    plan = model.tp_plan
    if not plan or not model.config.base_model_tp_plan:
        raise ModelRefused(f"{type(model).__name__} has no plan for tensor parallelism")
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters())]
    styles = {path: plan.get(_LAYER.sub(".*", path), _WHOLE) for path in paths}
    planned = {path: style for path, style in styles.items() if style != _WHOLE}
    for path, style in planned.items():
        if style not in _KNOWN:
            raise _unknown(model, path, style)
    return planned


def _unknown(model: PreTrainedModel, path: str, style: str) -> ModelRefused:
    return ModelRefused(f"{type(model).__name__}: {path} is to be shared out as {style!r}, which is unknown here")


def _parameters(model: PreTrainedModel, path: str) -> list[tuple[str, torch.Tensor]]:
    """The parameters of a module, or the one of that path, with their names."""
    owner, _, leaf = path.rpartition(".")
    if leaf in (own := model.get_submodule(owner)._parameters):
        return [(path, own[leaf])]
    return [(f"{path}.{name}", parameter) for name, parameter in model.get_submodule(path).named_parameters()]


def _cut(model: PreTrainedModel, path: str, style: str, parameter: torch.Tensor) -> Cut:
    """Weights are `[..., out, in]`, of a linear layer or of several experts."""
    is_matrix = parameter.ndim > 1
    if style in _CUT_OUTPUT:
        return Cut(-2 if is_matrix else 0)
    if style in _CUT_INPUT:
        return Cut(-1 if is_matrix else None)
    if style == _PACKED and is_matrix:
        return Cut(-2, halves=True)
    raise _unknown(model, path, style)


def _slice(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    length = whole.shape[dim] // size
    return whole.narrow(dim, rank * length, length)


def _summed(forward: Callable[..., torch.Tensor], group: Group, *inputs: Any, **named: Any) -> torch.Tensor:
    return group.add(forward(*inputs, **named))


def _split_summed(forward: Callable[[torch.Tensor], torch.Tensor], group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.add(forward(_slice(x, -1, group.rank, group.size)))


def _gathered(forward: Callable[[torch.Tensor], torch.Tensor], group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.gather(forward(x))


def _looked_up(
    forward: Callable[[torch.Tensor], torch.Tensor], group: Group, rows: int, ids: torch.Tensor
) -> torch.Tensor:
    """Every id is in one rank's part of the table; the others add nothing."""
    own = ids - group.rank * rows
    elsewhere = (own < 0) | (own >= rows)
    return group.add(forward(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere[..., None], 0))
