"""A GGUF file elsewhere, looked at before it is fetched: its header is read where it is, and so is what of its tensors
decides the configuration.

What was read lies in a file of the same size without the rest of its bytes, which take no room on disk.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from aegis.core.errors import ModelRefused
from aegis.models.gguf.header import HEADER_BYTES_MAX, GgufFile, HeaderGoesOn, read_header
from aegis.models.gguf.rope_factors import FACTORS_MAX, NAMES

_FIRST_BYTES = 1 << 20
_TIMES = 4
_FACTOR_BYTES_MAX = FACTORS_MAX * 8

Part = Callable[[int, int], Awaitable[bytes]]
"""The bytes `[start, stop)` of the file."""


async def look(path: Path, size_bytes: int, part: Part) -> None:
    """Writes to `path` what `open_gguf` reads. Raises ModelRefused."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as out:
            out.truncate(size_bytes)
            file = await _header(draft, size_bytes, part)
            for place in [place for name, place in file.tensors.items() if name in NAMES]:
                if place.nbytes > _FACTOR_BYTES_MAX:
                    raise ModelRefused(f"a tensor of rotary factors has {place.nbytes} bytes")
                _write(draft, place.start, await part(place.start, place.start + place.nbytes))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


async def _header(draft: Path, size_bytes: int, part: Part) -> GgufFile:
    have, most = 0, min(size_bytes, HEADER_BYTES_MAX)
    wanted = min(_FIRST_BYTES, most)
    while True:
        came = await part(have, wanted)
        if len(came) < wanted - have:
            raise ModelRefused(f"it ended after {have + len(came)} of {size_bytes} bytes; see to its source")
        _write(draft, have, came)
        have = wanted
        try:
            return read_header(draft, known_bytes=have)
        except HeaderGoesOn:
            wanted = min(have * _TIMES, most)


def _write(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as out:
        out.seek(at)
        out.write(content)
