"""transformers, imported without the parts of torch that serving never uses.

While transformers is imported, it marks kernels of its own for torch's compiler, and prepares for tensors that are
spread over processes. That imports the compiler, distributed tensors and sympy: 1000 modules, and a third of the
processor time in which an instance starts. Instances compile nothing, and ranks share models out by other means
(`parallel/`). Where scipy is installed, transformers imports it for losses of training, and accelerate, with clients of
clouds, for models that are spread over devices. So this module hides all of them from transformers during its import.
Later imports of them find them whole.

transformers also looks for the names that its model files export: it reads all 3 000 files, twice, and splits each into
lines. Here it does so once, and looks at the lines with names only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_EXPORTS = "transformers.utils.import_utils"
_UNUSED = ("is_torch_distributed_available", "is_scipy_available", "is_accelerate_available")


def import_transformers() -> None:
    """Imports the base classes of models. Does nothing if they, or the hidden parts of torch, are imported already."""
    if {"transformers.modeling_utils", _COMPILER, "torch.distributed.tensor"} & sys.modules.keys():
        return
    before = set(sys.modules)
    try:
        with _read_once(), _hidden():
            import transformers.generation.utils
            import transformers.modeling_utils  # noqa: F401
    except (ImportError, AttributeError, TypeError):  # this release needs them: let it be imported again, in full
        for name in sys.modules.keys() - before:
            if name.startswith("transformers."):
                del sys.modules[name]


@contextmanager
def _read_once() -> Iterator[None]:
    finder = _ExportsFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _ExportsFinder(MetaPathFinder):
    """Finds the module of transformers that looks for exported names, and has it look faster."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _EXPORTS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ExportsLoader(spec.loader.name, spec.loader.path)
        return spec


class _ExportsLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        names, structure = module.fetch__all__, module.create_import_structure_from_path
        # the names are in the last line that begins so, and those after it
        vars(module)["fetch__all__"] = lambda text: names(text[text.rfind("\n__all__") + 1 :])
        # its memory tells a path from the same path as text
        vars(module)["create_import_structure_from_path"] = lambda path: structure(str(path))


@contextmanager
def without_compiler() -> Iterator[None]:
    """torch imports its compiler to run its own Python functions outside of it, as those of tensors without memory are.
    Here they run as they are, unless it is imported already."""
    import torch

    if _COMPILER in sys.modules:
        yield
        return
    sys.modules[_COMPILER] = torch._dynamo = _unmarking(torch.__path__)
    try:
        yield
    finally:
        del sys.modules[_COMPILER], torch._dynamo


@contextmanager
def _hidden() -> Iterator[None]:
    import transformers.utils

    places = (transformers.utils, transformers.utils.import_utils)
    known = {name: getattr(transformers.utils, name) for name in _UNUSED}
    for place in places:
        vars(place).update({name: lambda: False for name in _UNUSED})
    try:
        with without_compiler():
            yield
    finally:
        for place in places:
            vars(place).update(known)


def _unmarking(torch_path: Iterable[str]) -> ModuleType:
    """Stands in for the compiler. Its decorators, with arguments or without, return functions unchanged; submodules of
    the compiler's package can be imported."""

    def unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
        return function or unmarked

    module = ModuleType(_COMPILER)
    module.__path__ = [f"{place}/_dynamo" for place in torch_path]
    vars(module).update(allow_in_graph=unmarked, assume_constant_result=unmarked, disable=unmarked)
    return module
