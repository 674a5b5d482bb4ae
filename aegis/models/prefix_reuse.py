"""Whether the KV of a position is the same whatever follows it, so that prompts that begin alike can share it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec


@cache
def may_reuse(directory: str) -> bool:
    """Of the model in this image directory. Frequencies of rotary embeddings may follow the length of what is run, as
    transformers' `dynamic_rope_update` has it; without a configuration there are none."""
    try:
        config = msgspec.json.decode((Path(directory) / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return True
    return not any("dynamic" in kind or kind in ("longrope", "su") for kind in _kinds(config))


def _kinds(value: object) -> Iterator[str]:
    """The values of `rope_type`, or of its older name `type`, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("rope_type", "type") and isinstance(inner, str):
                yield inner
            yield from _kinds(inner)
