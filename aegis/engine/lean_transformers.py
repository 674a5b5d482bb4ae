"""transformers, imported without the parts of torch that serving never uses.

While transformers is imported, it marks kernels of its own for torch's compiler, and prepares for tensors that are
spread over processes. That imports the compiler, distributed tensors and sympy: 1000 modules, and a third of the
processor time in which an instance starts. Instances compile nothing, and ranks share models out by other means
(`parallel/`). So this module hides both from transformers during its import. Later imports of them find them whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


def import_transformers() -> None:
    """Imports the base classes of models. Does nothing if they, or the hidden parts of torch, are imported already."""
    if {"transformers.modeling_utils", _COMPILER, "torch.distributed.tensor"} & sys.modules.keys():
        return
    before = set(sys.modules)
    try:
        with _hidden():
            import transformers.generation.utils
            import transformers.modeling_utils  # noqa: F401
    except (ImportError, AttributeError, TypeError):  # this release needs them: let it be imported again, in full
        for name in sys.modules.keys() - before:
            if name.startswith("transformers."):
                del sys.modules[name]


@contextmanager
def _hidden() -> Iterator[None]:
    import torch
    import transformers.utils

    places = (transformers.utils, transformers.utils.import_utils)
    available = transformers.utils.is_torch_distributed_available
    sys.modules[_COMPILER] = torch._dynamo = _unmarking(torch.__path__)
    for place in places:
        place.is_torch_distributed_available = lambda: False
    try:
        yield
    finally:
        del sys.modules[_COMPILER], torch._dynamo
        for place in places:
            place.is_torch_distributed_available = available


def _unmarking(torch_path: Iterable[str]) -> ModuleType:
    """Stands in for the compiler. Its decorators, with arguments or without, return functions unchanged; submodules of
    the compiler's package can be imported."""

    def unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        return function or unmarked

    module = ModuleType(_COMPILER)
    module.__path__ = [f"{place}/_dynamo" for place in torch_path]
    vars(module).update(allow_in_graph=unmarked, assume_constant_result=unmarked, disable=unmarked)
    return module
