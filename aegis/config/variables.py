"""Environment variables that look like those of the configuration, and are none."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from aegis.config.config import OPTIONS, leaves, variable

_PREFIX = "AEGIS_"
_NO_SETTINGS = frozenset({"AEGIS_CACHE", "AEGIS_COMPILE", "AEGIS_CONFIG", "AEGIS_NO_COMPILED_STEPS", "AEGIS_URL"})
"""What else is read of the environment."""

_ALIKE = 0.8
"""Of 1. Other tools have variables that begin alike, and mean nothing here."""


def mistyped(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable that nothing reads and that is like one that sets a key, or is spelled like the path of
    a key that an option names otherwise."""
    meant = {variable(path): variable(path) for path in (OPTIONS["slo"], *(path for path, _ in leaves()))}
    meant = {_PREFIX + "_".join(path).upper(): variable(path) for path, _ in leaves()} | meant
    known = _NO_SETTINGS.union(meant.values())
    by_rest = {name.removeprefix(_PREFIX): of for name, of in meant.items()}
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            for near in difflib.get_close_matches(name.removeprefix(_PREFIX), by_rest, n=1, cutoff=_ALIKE):
                yield f"{name} has no effect; did you mean {by_rest[near]}?"
