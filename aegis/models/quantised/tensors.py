"""The tensors of a quantised checkpoint under the names and in the form that transformers has them, made when they are
read, and the layers that stay integers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from aegis.core.errors import ModelRefused
from aegis.engine.quantised.integers import Integers, dequantised
from aegis.models.failures import LIBRARY_ERRORS, one_line, out_of_memory
from aegis.models.quantised.bitsandbytes import STATES
from aegis.models.quantised.configuration import Method, Scheme
from aegis.models.quantised.layers import read_weight
from aegis.models.quantised.weights import Weight, dense, integers_of

_SCALES: Mapping[Method, tuple[str, ...]] = {
    "awq": ("qweight", "scales"),
    "bitsandbytes": ("weight.absmax", "SCB"),
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv",),
    "gptq": ("qweight", "scales"),
}
"""A layer that has one of these is quantised."""

_OTHERS: Mapping[Method, tuple[str, ...]] = {
    "awq": ("qzeros",),
    "bitsandbytes": (
        "weight",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        *STATES,
    ),
    "compressed-tensors": ("weight", "weight_g_idx", "weight_global_scale", "weight_shape", "weight_zero_point"),
    "fp8": ("weight",),
    "gptq": ("g_idx", "qzeros"),
}


class Stored:
    """Stands for a tensor where transformers loads it: any index gives the whole."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: object) -> torch.Tensor:
        return self._read()


class Unpacked(NamedTuple):
    """`tensors` are by transformers' names, `integers` by their layers'; `layers` come quantised."""

    tensors: dict[str, Stored]
    integers: dict[str, Integers]
    layers: Collection[str]


class _Files:
    def __init__(self, files: Sequence[Path]) -> None:
        self._opened: dict[str, Any] = {}
        for file in files:
            opened = safe_open(file, framework="pt")
            names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]
            for name in names:
                if name in self._opened:
                    raise ModelRefused(f"{name} is in two files")
                self._opened[name] = opened

    def names(self) -> list[str]:
        return sorted(self._opened)

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened[name].get_tensor(name)
        return tensor


def unpack(files: Sequence[Path], scheme: Scheme, dtype: torch.dtype, *, keeps: bool) -> Unpacked:
    """All layers are read once to be checked, and the integers of those that can be ours are held if it `keeps` them;
    the others are made `dtype` when they are loaded. Raises ModelRefused."""
    opened = _Files(files)
    layers = _layers(scheme, opened.names())
    of_layers = {name for names in layers.values() for name in names.values()}
    tensors = {name: Stored(partial(opened.read, name)) for name in opened.names() if name not in of_layers}
    integers = dict[str, Integers]()
    for layer, names in layers.items():
        if f"{layer}.weight" in tensors:
            raise ModelRefused(f"{layer} has a quantised weight and another one")
        with _naming(layer):
            weight = _weight(opened, scheme, names)
            found = integers_of(weight, dtype) if keeps else None
        if found is not None:
            integers[layer] = found
            read = partial(of_integers, found, dtype)
        else:
            read = partial(_of_weight, opened, scheme, names, dtype)
        tensors[f"{layer}.weight"] = Stored(read)
    return Unpacked(tensors, integers, layers.keys())


def _layers(scheme: Scheme, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The tensors of each quantised layer, by what follows its name."""
    found = dict[str, dict[str, str]]()
    for name in names:
        for leaf in _SCALES[scheme.method]:
            if name.endswith(f".{leaf}"):
                found.setdefault(name.removesuffix(f".{leaf}"), {})[leaf] = name
    known = set(names)
    for layer, own in found.items():
        own.update({leaf: f"{layer}.{leaf}" for leaf in _OTHERS[scheme.method] if f"{layer}.{leaf}" in known})
    return found


def _weight(opened: _Files, scheme: Scheme, names: Mapping[str, str]) -> Weight:
    return read_weight(scheme, {leaf: opened.read(name) for leaf, name in names.items()})


def _of_weight(opened: _Files, scheme: Scheme, names: Mapping[str, str], dtype: torch.dtype) -> torch.Tensor:
    return dense(_weight(opened, scheme, names), dtype)


def of_integers(integers: Integers, dtype: torch.dtype) -> torch.Tensor:
    return dequantised(integers).to(dtype)


@contextmanager
def _naming(layer: str) -> Iterator[None]:
    try:
        yield
    except ModelRefused as refusal:
        raise ModelRefused(f"{layer}: {refusal.message}") from refusal
    except LIBRARY_ERRORS as error:
        if out_of_memory(error):
            raise
        raise ModelRefused(f"{layer}: its weight cannot be read: {one_line(error)}") from error
