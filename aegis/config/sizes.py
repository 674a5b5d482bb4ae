"""Sizes as people write them, in bytes as we count them."""

from __future__ import annotations

import re
from decimal import Decimal

SIZE_PATTERN = r"(\d+(?:\.\d+)?) ?([kKMGT]?B|[KMGT]iB)"
_SIZE = re.compile(SIZE_PATTERN, re.ASCII)
_UNITS = {"B": 1} | {
    prefix + unit: base**power
    for power, prefixes in enumerate(("kK", "M", "G", "T"), start=1)
    for prefix in prefixes
    for unit, base in (("B", 1000), ("iB", 1024))
}


def parse_size(value: object) -> int:
    """Bytes from `512MiB`, `4 GiB`, `1.5GB` or a whole number of bytes. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip()
    if text.isascii() and text.isdigit():
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 512MiB, 4GiB or 1.5GB")
    nbytes = Decimal(match[1]) * _UNITS[match[2]]
    if nbytes != int(nbytes):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest form that `parse_size` reads back as the same number: `512MiB`, `1536KiB`, `1000B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return f"{nbytes}B"
