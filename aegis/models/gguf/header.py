"""The header of a GGUF file: its metadata, and where its tensors are.

    "GGUF", version, number of tensors, number of entries; the entries; the tensors' names, dimensions, types and
    offsets; and then, aligned, the tensors

A file is foreign, and may say anything. So each number is compared with the file's size, or with a bound, before it is
used: a header takes time and memory in proportion to its own bytes, of which there is a most. Arrays, such as a
vocabulary, are passed over and decoded when they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from aegis.core.errors import ModelRefused
from aegis.models.gguf import blocks
from aegis.models.gguf.blocks import BLOCKS, STAY, Kind

HEADER_BYTES_MAX = 128 << 20
STRINGS_MAX = 1 << 21
"""In arrays. A vocabulary of 262 144 tokens and twice as many merges are a third of that."""

ENTRIES_MAX = 4096
TENSORS_MAX = 1 << 16
TEXT_BYTES_MAX = 4 << 20
KEY_BYTES_MAX = 256
TENSOR_NAME_BYTES_MAX = 64
DIMENSIONS_MAX = 4
ALIGNMENT_MAX = 1 << 16
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_COUNT = struct.Struct("<Q")
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Elements:
    """An array of the metadata, still in the file."""

    kind: int
    count: int
    start: int
    stop: int


Value = bool | int | float | str | Elements


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is. `shape` has the rows first, as torch has it; the file has it the other way round."""

    kind: Kind
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header has been read, and found to fit it."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Place]
    header_bytes: int

    @property
    def kind(self) -> Kind:
        """The type of most of its weights."""
        counts = Counter[Kind]()
        for place in self.tensors.values():
            counts[place.kind] += place.elements
        return max(counts, key=lambda kind: (counts[kind], kind))

    @property
    def elements(self) -> int:
        return sum(place.elements for place in self.tensors.values())

    @property
    def served_bytes(self) -> int:
        """The bytes that its tensors take at least when they are served: as numbers of 16 bits where they do not stay
        what they are."""
        return sum(
            place.nbytes if place.kind in STAY else max(place.nbytes, 2 * place.elements)
            for place in self.tensors.values()
        )

    def header(self) -> bytes:
        with self.path.open("rb") as file:
            return file.read(self.header_bytes)

    def texts(self, key: str) -> list[str] | None:
        """The array of strings at `key`; None if there is none. Raises ModelRefused for one of another type."""
        array = self._array(key)
        if array is None:
            return None
        if array.kind != _STRING:
            raise ModelRefused(f"{key} is no array of strings")
        reader = _Reader(self._read(array), key)
        return [reader.text(TEXT_BYTES_MAX) for _ in range(array.count)]

    def numbers(self, key: str) -> list[int] | list[float] | None:
        """The array of numbers at `key`; None if there is none. Raises ModelRefused for one of another type."""
        array = self._array(key)
        if array is None:
            return None
        if array.kind not in _SCALARS:
            raise ModelRefused(f"{key} is no array of numbers")
        found: list[int] | list[float] = np.frombuffer(
            self._read(array), np.dtype(_SCALARS[array.kind].format), array.count
        ).tolist()
        return found

    def _array(self, key: str) -> Elements | None:
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, Elements):
            raise ModelRefused(f"{key} is no array")
        return value

    def _read(self, array: Elements) -> bytes:
        with self.path.open("rb") as file:
            file.seek(array.start)
            return file.read(array.stop - array.start)

    def blocks(self, name: str) -> blocks.Array:
        """The bytes `[blocks, block.nbytes]` of a tensor, in the file's memory."""
        place = self.tensors[name]
        block = BLOCKS[place.kind]
        mapped = np.memmap(self.path, np.uint8, "r", place.start, (place.nbytes,))
        return mapped.reshape(-1, block.nbytes)


class HeaderGoesOn(ModelRefused):
    """There is more of the header than is known of the file."""


def read_header(path: Path, *, known_bytes: int | None = None) -> GgufFile:
    """Raises ModelRefused, in a line that does not repeat the path, for what is no GGUF file, is cut off, or says what
    cannot be; OSError if it cannot be read. If only so many bytes of the file are known, the others being empty, it
    raises HeaderGoesOn where the header takes more."""
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        if nbytes < 24:
            raise ModelRefused("it is no GGUF file: it is too short")
        most = min(nbytes, HEADER_BYTES_MAX)
        known = most if known_bytes is None else min(most, known_bytes)
        with mmap.mmap(file.fileno(), known, access=mmap.ACCESS_READ) as mapped:
            try:
                return _read(path, _Reader(mapped, "the header", whole=most == nbytes), nbytes)
            except _CutOff as refusal:
                raise HeaderGoesOn(refusal.message) if known < most else refusal from None


def _read(path: Path, reader: _Reader, nbytes: int) -> GgufFile:
    if (magic := reader.take(4)) != b"GGUF":
        raise ModelRefused(f"it is no GGUF file: it begins with {magic!r}")
    version = reader.number(4)
    if version not in _VERSIONS:
        other = " (big-endian)" if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS else ""
        raise ModelRefused(f"it is GGUF of version {version}{other}; versions 2 and 3 are read, little-endian")
    tensors, entries = reader.number(8), reader.number(8)
    for what, count, most in (("tensors", tensors, TENSORS_MAX), ("entries", entries, ENTRIES_MAX)):
        if count > most:
            raise ModelRefused(f"its header announces {count} {what}, at most {most} are read")
    metadata = dict[str, Value]()
    for _ in range(entries):
        key = reader.text(KEY_BYTES_MAX)
        if key in metadata:
            raise ModelRefused(f"its header has {_shown(key)} twice")
        metadata[key] = reader.value(reader.number(4))
    found = dict[str, tuple[Kind, tuple[int, ...], int]]()
    for _ in range(tensors):
        name = reader.text(TENSOR_NAME_BYTES_MAX)
        if name in found:
            raise ModelRefused(f"its header has the tensor {_shown(name)} twice")
        found[name] = _read_tensor(reader, name)
    if not found:
        raise ModelRefused("it holds no tensors")
    alignment = _alignment(metadata)
    start = -(-reader.at // alignment) * alignment
    return GgufFile(path, metadata, dict(_placed(found, start, alignment, nbytes)), reader.at)


def _read_tensor(reader: _Reader, name: str) -> tuple[Kind, tuple[int, ...], int]:
    count = reader.number(4)
    if not 1 <= count <= DIMENSIONS_MAX:
        raise ModelRefused(f"{_shown(name)} has {count} dimensions, 1 to {DIMENSIONS_MAX} are possible")
    shape = tuple(reversed([reader.number(8) for _ in range(count)]))
    number = reader.number(4)
    try:
        kind = Kind(number)
    except ValueError:
        raise ModelRefused(f"{_shown(name)} is of type {number}, which is not known; {_readable()}") from None
    if kind not in BLOCKS:
        raise ModelRefused(f"{_shown(name)} is of type {kind.name}, which is not read; {_readable()}")
    return kind, shape, reader.number(8)


def _readable() -> str:
    return f"types that are read: {', '.join(kind.name for kind in BLOCKS)}"


def _alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ModelRefused(
            f"general.alignment is {_shown(alignment)}; it should be a power of two from 8 to {ALIGNMENT_MAX}"
        )
    return alignment


def _placed(
    found: Mapping[str, tuple[Kind, tuple[int, ...], int]], start: int, alignment: int, nbytes: int
) -> Iterator[tuple[str, Place]]:
    """Tensors in the order of their bytes, which no two share: else a short file could stand for any number."""
    end = start
    for name, (kind, shape, offset) in sorted(found.items(), key=lambda each: (each[1][2], each[0])):
        block = BLOCKS[kind]
        if min(shape) < 1 or shape[-1] % block.elements:
            rows = f", rows of {kind.name} are multiples of {block.elements}" if block.elements > 1 else ""
            raise ModelRefused(f"{_shown(name)} has dimensions {_shown(list(shape))}{rows}")
        size = prod(shape) // block.elements * block.nbytes
        if offset % alignment:
            raise ModelRefused(f"{_shown(name)} is at {offset}, which is no multiple of {alignment}")
        if start + offset + size > nbytes:
            raise ModelRefused(
                f"{_shown(name)} ends at byte {start + offset + size} of a file of {nbytes}: it is cut off, or its "
                "header is wrong; fetch it again"
            )
        if start + offset < end:
            raise ModelRefused(f"{_shown(name)} begins at byte {start + offset}, inside of another tensor")
        end = start + offset + size
        yield name, Place(kind, shape, start + offset, size)


class _CutOff(ModelRefused):
    """Something ends behind the end of what can be read."""


class _Reader:
    """Reads one thing after the other; never beyond the end. `whole`: the bytes are the whole of the file."""

    __slots__ = ("_data", "_nbytes", "_strings", "_what", "_whole", "at")

    def __init__(self, data: bytes | mmap.mmap, what: str, *, whole: bool = True) -> None:
        self._data = data
        self._nbytes = len(data)
        self._what = what
        self._whole = whole
        self._strings = 0
        self.at = 0

    def take(self, nbytes: int) -> bytes:
        start = self._skip(nbytes)
        return self._data[start : self.at]

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def text(self, bytes_max: int) -> str:
        nbytes = self.number(8)
        if nbytes > bytes_max:
            raise ModelRefused(f"a text in {self._what} has {nbytes} bytes, at most {bytes_max} are read")
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError:
            raise ModelRefused(f"a text in {self._what} is not UTF-8") from None

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text(TEXT_BYTES_MAX)
        if kind == _ARRAY:
            return self._pass_over(self.number(4), self.number(8))
        if kind not in _SCALARS:
            raise ModelRefused(f"a value in {self._what} is of type {kind}, which GGUF does not have")
        scalar = _SCALARS[kind]
        found: bool | int | float = scalar.unpack(self.take(scalar.size))[0]
        return found

    def _pass_over(self, kind: int, count: int) -> Elements:
        start = self.at
        if kind in _SCALARS:
            self._skip(count * _SCALARS[kind].size)
        elif kind == _STRING:
            self._strings += count
            if self._strings > STRINGS_MAX:
                raise ModelRefused(f"arrays in {self._what} have {self._strings} texts, at most {STRINGS_MAX} are read")
            self._pass_over_texts(count)
        else:
            raise ModelRefused(f"an array in {self._what} has elements of type {kind}; numbers and strings are read")
        return Elements(kind, count, start, self.at)

    def _pass_over_texts(self, count: int) -> None:
        data, at, last = self._data, self.at, self._nbytes - _COUNT.size
        for _ in range(count):
            if at > last:
                break
            at += _COUNT.size + _COUNT.unpack_from(data, at)[0]
        else:
            self._skip(at - self.at)
            return
        self._skip(self._nbytes)  # which is too much

    def _skip(self, nbytes: int) -> int:
        start = self.at
        if nbytes > self._nbytes - start:
            if self._whole:
                raise _CutOff(f"{self._what} is cut off, or wrong at byte {start}; fetch the file again")
            raise _CutOff(f"{self._what} has more than {HEADER_BYTES_MAX >> 20} MiB, which is the most that is read")
        self.at += nbytes
        return start


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARACTERS]
