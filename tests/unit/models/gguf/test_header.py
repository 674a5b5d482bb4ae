"""A header may say anything: what cannot be is refused in one line, in time and memory that its own bytes bound."""

from __future__ import annotations

import re
import resource
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aegis.core.errors import ModelRefused
from aegis.models.gguf.header import STRINGS_MAX, GgufFile, read_header
from tests import checkpoints, gguf_files

SECONDS_MAX = 2.0
"""Of processor time. The longest header that is read takes a second."""

BYTES_MAX = 64 << 20

U8, F32, BOOL, STRING, ARRAY = 0, 6, 7, 8, 9


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + value


def tensor(name: str, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(*parts: bytes, version: int = 3, tensors: int | None = None, entries: int | None = None) -> bytes:
    """Entries are told from tensors by their number, where it is not given."""
    return b"GGUF" + struct.pack("<IQQ", version, tensors or 0, entries or 0) + b"".join(parts)


ONE = tensor("a")
DATA = bytes(96)


def refused(file: Path) -> str:
    """Why, after it took no more than it may."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ModelRefused) as caught:
            read_header(file)
        seconds, most = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seconds < 10 * SECONDS_MAX and most < BYTES_MAX  # tracing takes its time
    assert "\n" not in caught.value.message and len(caught.value.message) < 300
    return caught.value.message


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is no GGUF file: it is too short"),
    "another file": (b"PK\x03\x04" + bytes(60), "it is no GGUF file: it begins with b'PK"),
    "version": (header(version=1) + DATA, "GGUF of version 1; versions 2 and 3"),
    "big-endian": (header(version=3 << 24) + DATA, r"version 50331648 \(big-endian\)"),
    "tensors": (header(tensors=1 << 60) + DATA, f"announces {1 << 60} tensors, at most 65536 are read"),
    "entries": (header(tensors=1, entries=1 << 60) + DATA, f"announces {1 << 60} entries, at most 4096"),
    "no tensors": (header() + DATA, "it holds no tensors"),
    "fewer tensors than announced": (header(ONE, tensors=2), "cut off, or wrong at byte"),
    "key": (header(text("k" * 257), tensors=1, entries=1), "has 257 bytes, at most 256 are read"),
    "long key": (header(struct.pack("<Q", 1 << 63), tensors=1, entries=1), "has 9223372036854775808 bytes"),
    "no UTF-8": (header(entry("k", STRING, text(b"\xff")), ONE, tensors=1, entries=1), "not UTF-8"),
    "twice": (header(entry("k", U8, b"1"), entry("k", U8, b"1"), tensors=1, entries=2), "has 'k' twice"),
    "type": (header(entry("k", 13, b""), tensors=1, entries=1), "of type 13, which GGUF does not have"),
    "text": (
        header(entry("k", STRING, struct.pack("<Q", 1 << 62)), tensors=1, entries=1),
        "has 4611686018427387904 bytes, at most 4194304",
    ),
    "array": (header(entry("k", ARRAY, array(U8, 1 << 62, b"")), tensors=1, entries=1), "cut off, or wrong at byte"),
    "array of texts": (
        header(entry("k", ARRAY, array(STRING, 1 << 62, b"")), tensors=1, entries=1),
        f"have {1 << 62} texts, at most {STRINGS_MAX}",
    ),
    "texts beyond the end": (
        header(entry("k", ARRAY, array(STRING, 1 << 20, text("x") * 9)), tensors=1, entries=1),
        "cut off, or wrong at byte",
    ),
    "text of an array beyond the end": (
        header(entry("k", ARRAY, array(STRING, 1, struct.pack("<Q", (1 << 64) - 1))), tensors=1, entries=1),
        "cut off, or wrong at byte",
    ),
    "array of arrays": (
        header(entry("k", ARRAY, array(ARRAY, 1, b"")), tensors=1, entries=1),
        "has elements of type 9; numbers and strings are read",
    ),
    "alignment": (
        header(entry("general.alignment", U8, b"\7"), ONE, tensors=1, entries=1) + DATA,
        "general.alignment is 7; it should be a power of two",
    ),
    "alignment that is no number": (
        header(entry("general.alignment", BOOL, b"\1"), ONE, tensors=1, entries=1) + DATA,
        "general.alignment is True",
    ),
    "name": (header(tensor("n" * 65), tensors=1) + DATA, "has 65 bytes, at most 64 are read"),
    "one name twice": (header(ONE, ONE, tensors=2) + DATA, "has the tensor 'a' twice"),
    "no dimensions": (header(tensor("a", ()), tensors=1) + DATA, "'a' has 0 dimensions, 1 to 4"),
    "dimensions": (
        header(text("a") + struct.pack("<I", 1 << 31), tensors=1) + DATA,
        "'a' has 2147483648 dimensions, 1 to 4",
    ),
    "no rows": (header(tensor("a", (4, 0)), tensors=1) + DATA, r"'a' has dimensions \[0, 4\]"),
    "elements": (header(tensor("a", ((1 << 63),) * 4), tensors=1) + DATA, "it is cut off, or its header is wrong"),
    "row": (header(tensor("a", (31, 2), 2), tensors=1) + DATA, r"\[2, 31\], rows of Q4_0 are multiples of 32"),
    "unknown type": (header(tensor("a", kind=77), tensors=1) + DATA, "is of type 77, which is not known; types that"),
    "unread type": (header(tensor("a", (256,), 16), tensors=1) + DATA, "is of type IQ2_XXS, which is not read; types"),
    "offset": (header(tensor("a", offset=1 << 63), tensors=1) + DATA, "of a file of .*: it is cut off"),
    "odd offset": (header(tensor("a", offset=1), tensors=1) + DATA, "'a' is at 1, which is no multiple of 32"),
    "cut off": (header(tensor("a", (32,)), tensors=1) + bytes(64), "it is cut off, or its header is wrong"),
    "one in another": (
        header(tensor("a", (16,)), tensor("b", (16,), offset=32), tensors=2) + bytes(192),
        "'b' begins at byte 128, inside of another tensor",
    ),
    "one on another": (
        header(tensor("a"), tensor("b"), tensors=2) + DATA,
        "'b' begins at byte 96, inside of another tensor",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    content, said = HOSTILE[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    message = refused(file)
    assert re.search(said, message), message


def test_a_header_of_more_than_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(header(entry("k", ARRAY, array(U8, 1 << 33, b"")), tensors=1, entries=1))
    with file.open("r+b") as sparse:
        sparse.truncate(1 << 34)
    assert refused(file) == "the header has more than 128 MiB, which is the most that is read"


def test_the_longest_header_takes_no_more_than_a_second(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(
        header(entry("k", ARRAY, array(STRING, STRINGS_MAX, bytes(8) * STRINGS_MAX)), tensors=1, entries=1)
    )
    began = time.process_time()
    with pytest.raises(ModelRefused, match="cut off"):
        read_header(file)
    assert time.process_time() - began < SECONDS_MAX


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("whole")
    checkpoints.write_tokenizer(directory)
    gguf_files.write(directory / "m.gguf", "llama", "Q4_0", tokenizer=directory)
    return (directory / "m.gguf").read_bytes()


def read(file: Path) -> GgufFile | None:
    """None if it is refused. All that it names is then read too."""
    try:
        found = read_header(file)
        for key in found.metadata:
            for read_array in (found.texts, found.numbers):
                try:
                    read_array(key)
                except ModelRefused as refusal:
                    assert "\n" not in refusal.message
        return found
    except ModelRefused as refusal:
        assert "\n" not in refusal.message and len(refusal.message) < 300
        return None


def test_a_whole_file_is_read(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(whole)
    found = read(tmp_path / "m.gguf")
    assert found and found.metadata["general.architecture"] == "llama"
    assert found.kind.name == "Q4_0" and found.tensors["token_embd.weight"].shape == (320, 64)
    assert found.texts("tokenizer.ggml.tokens") and found.numbers("tokenizer.ggml.token_type")
    assert found.header() == whole[: found.header_bytes]


NUMBERS = st.sampled_from([0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 60, (1 << 64) - 1])
CHANGES = st.lists(st.tuples(st.integers(0, 8000), NUMBERS, st.sampled_from([1, 4, 8])), min_size=1, max_size=6)


@given(changes=CHANGES, end=st.none() | st.integers(0, 60_000))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_refused(
    whole: bytes, tmp_path: Path, changes: list[tuple[int, int, int]], end: int | None
) -> None:
    """Numbers of all sizes anywhere in it, and an end anywhere: what is read lies in the file."""
    content = bytearray(whole)
    for at, number, nbytes in changes:
        content[at : at + nbytes] = (number & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little")
    file = tmp_path / "m.gguf"
    file.write_bytes(content[:end])
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read(file)
    assert time.process_time() - began < SECONDS_MAX
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < BYTES_MAX >> 10
    for name, place in found.tensors.items() if found else ():
        assert place.start + place.nbytes <= len(content[:end])
        assert found and found.blocks(name).nbytes == place.nbytes
