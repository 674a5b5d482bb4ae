"""LoRA adapters of a model whose rows share its steps: the model's layers run for all rows at once, and what an adapter
adds to them, for its own rows.

Layers are told apart by their path in the module tree. One that an adapter changes is wrapped once, for as long as the
model is attached; in steps without adapters that costs a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers.pytorch_utils import Conv1D

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.engine.cpu.low_rank import Changes, LowRank, OfRows, add_changes, takes
from aegis.engine.protocol import StepRow
from aegis.engine.quantised.layers import QuantisedLinear
from aegis.engine.tensor_views import CPU, dtype_named, tensor_at

DOWN, UP = "A", "B"
_FEW_TOKENS = 64

Where = slice | torch.Tensor
"""Tokens of a step, in the order in which layers see them."""

Segments = Sequence[tuple[ModelId, Where]]


class _Adapting(threading.local):
    segments: Segments = ()
    of_rows: OfRows | None = None
    """The same for each token, if there are few."""
    shares: dict[tuple[ModelId, ...], tuple[torch.Tensor, torch.Tensor]]
    """By the adapters of a layer: `[tokens, sum of ranks]`, the scale of an adapter where a token is its own; and where
    it is not."""


_adapting = _Adapting()


def segments_of(rows: Iterable[StepRow], device: torch.device = CPU) -> Segments:
    """The tokens of each adapter, of rows that are run in this order."""
    found: dict[ModelId, list[tuple[int, int]]] = {}
    start = 0
    for row in rows:
        stop = start + len(row.tokens)
        if row.adapter is not None:
            ranges = found.setdefault(row.adapter, [])
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        start = stop
    return [(adapter, _where(ranges, device)) for adapter, ranges in found.items()]


def _where(ranges: list[tuple[int, int]], device: torch.device) -> Where:
    if len(ranges) == 1:
        return slice(*ranges[0])
    return torch.tensor([token for start, stop in ranges for token in range(start, stop)]).to(device)


def layer_shape(layer: torch.nn.Module) -> tuple[int, int] | None:
    """`(out, in)` of a layer that an adapter may change; None: it may not."""
    if isinstance(layer, torch.nn.Linear | QuantisedLinear):
        return layer.out_features, layer.in_features
    if isinstance(layer, Conv1D):
        return layer.nf, layer.nx
    return None


class Adapters:
    """The adapters of one attached model."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._changes: dict[str, dict[ModelId, LowRank]] = {}  # by the path of the layer
        paths = [path for path, layer in module.named_modules() if layer_shape(layer) is not None]
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._compiled = Changes(paths)

    @contextmanager
    def adapting(self, rows: Sequence[StepRow]) -> Iterator[None]:
        """Forward passes of this thread inside are of the tokens of these rows, in this order, and add what the rows'
        adapters do to them."""
        few = sum(len(row.tokens) for row in rows) <= _FEW_TOKENS
        tokens = [row.adapter for row in rows for _ in row.tokens] if few else ()
        _adapting.of_rows = self._compiled.of_rows(tokens)
        _adapting.segments, _adapting.shares = segments_of(rows, self._device), {}
        try:
            yield
        finally:
            _adapting.segments, _adapting.of_rows = (), None

    def add(self, spec: ModelSpec, weights_base: int) -> Mapping[str, LowRank]:
        """What it adds, by the path of the layer. Raises ModelRefused if the model has no such layers."""
        bound = _bound(spec, weights_base, self._device)
        for path, change in bound.items():
            if path not in self._changes:
                self._changes[path] = self._wrapped(path)
            self._changes[path][spec.model] = change
        self._compiled.add(spec.model, bound)
        return bound

    def remove(self, adapter: ModelId) -> None:
        for changes in self._changes.values():
            changes.pop(adapter, None)
        self._compiled.remove(adapter)

    def _wrapped(self, path: str) -> dict[ModelId, LowRank]:
        """What adapters add to the layer from now on."""
        try:
            layer = self._module.get_submodule(path)
        except AttributeError:
            raise ModelRefused(f"its base has no layer {path}") from None
        changes: dict[ModelId, LowRank] = {}
        layer.forward = partial(_forward, layer.forward, changes, self._numbers[path])
        return changes


def _bound(spec: ModelSpec, weights_base: int, device: torch.device) -> dict[str, LowRank]:
    adapter = spec.manifest.adapter
    assert adapter
    views = {
        name: tensor_at(weights_base + entry.offset, entry.shape, dtype_named(entry.dtype), device)
        for entry in spec.manifest.tensors
        for name in entry.names
    }
    paths = [name.removesuffix(f".{DOWN}") for name in views if name.endswith(f".{DOWN}")]
    return {path: LowRank(views[f"{path}.{DOWN}"], views[f"{path}.{UP}"], adapter.scale) for path in paths}


def _forward(
    base: Callable[[torch.Tensor], torch.Tensor], changes: Mapping[ModelId, LowRank], number: int, x: torch.Tensor
) -> torch.Tensor:
    y = base(x)
    segments, rows = _adapting.segments, _adapting.of_rows
    if not segments:
        return y
    tokens, made = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if rows is not None and takes(tokens, made):
        add_changes(rows, number, tokens, made)
        return y
    found = [(adapter, where, changes[adapter]) for adapter, where in segments if adapter in changes]
    if len(found) > 1 and len(tokens) <= _FEW_TOKENS:
        _add_together(found, tokens, made)
        return y
    for _, where, change in found:
        inner = torch.mm(tokens[where], change.down.t())
        if isinstance(where, slice):
            made[where].addmm_(inner, change.up, alpha=change.scale)
        else:
            made.index_add_(0, where, torch.mm(inner, change.up), alpha=change.scale)
    return y


def _add_together(found: Sequence[tuple[ModelId, Where, LowRank]], tokens: torch.Tensor, made: torch.Tensor) -> None:
    """All adapters in two products. Every token is multiplied by each `down`, and what is not its own becomes zero,
    whatever it was: it may be no number. For few tokens that costs less than two products for each adapter."""
    inner = torch.mm(tokens, torch.cat([change.down for _, _, change in found]).t())
    key = tuple([adapter for adapter, _, _ in found])
    if key not in _adapting.shares:
        share = torch.zeros_like(inner)
        start = 0
        for _, where, change in found:
            stop = start + len(change.down)
            share[where, start:stop] = change.scale
            start = stop
        _adapting.shares[key] = share, share == 0
    share, others = _adapting.shares[key]
    made.addmm_(inner.mul_(share).masked_fill_(others, 0.0), torch.cat([change.up for _, _, change in found]))
