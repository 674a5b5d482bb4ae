"""What renders chat templates in transformers, imported without the rest of it.

A module of a package is imported after the package, and those of transformers look for the names that thousands of
model files export, and import what speaks to the Hub. That is three quarters of the processor time in which a process
that works on texts starts, and such a process is killed and started anew whenever a text takes too long. So the module
is imported here from packages that are bare. Later imports of transformers find it whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_PACKAGES = ("transformers", "transformers.utils")
_MODULE = "transformers.utils.chat_template_utils"


def import_templates() -> None:
    """Imports transformers' `chat_template_utils`. All of transformers, where this release needs it for that."""
    if _PACKAGES[0] in sys.modules:
        import_module(_MODULE)
        return
    before = set(sys.modules)
    try:
        with _bare_packages():
            import_module(_MODULE)
    except (ImportError, AttributeError):
        for name in sys.modules.keys() - before:
            if name.startswith(_PACKAGES[0]):
                del sys.modules[name]
        import_module(_MODULE)


@contextmanager
def _bare_packages() -> Iterator[None]:
    """Stand in for transformers' own, with nothing in them but their modules."""
    spec = find_spec(_PACKAGES[0])
    places = spec.submodule_search_locations if spec else None
    if not places:
        raise ImportError(f"no package {_PACKAGES[0]}")
    for name in _PACKAGES:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(Path(place, *name.split(".")[1:])) for place in places]
    try:
        yield
    finally:
        for name in _PACKAGES:
            sys.modules.pop(name, None)
