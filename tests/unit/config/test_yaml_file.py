"""Reading YAML that a user wrote: whatever is wrong with it is a line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aegis.config.yaml_file import read_mapping, read_with_lines
from aegis.core.errors import UserError

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
)


def written(directory: Path, text: str) -> Path:
    file = directory / "file.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x: &a [*a]", "aliases make more of it than can be read"),
        (LAUGHS, "aliases make more of it than can be read"),
        ("a: 2026-13-45", "put it in quotes"),
        ('a: !!int "x"', "put it in quotes"),
        ('a: !!timestamp "z"', "put it in quotes"),
        ("a: 1\na: 2", "line 2: not readable as YAML: key 'a' is given twice"),
        ("- a", "should hold keys and values"),
        ("a: [", "not readable as YAML"),
        ("[" * 100_000, "nested too deeply"),
        ('a: 1\nb: ["\\ud800"]', "line 2: not readable as YAML: half of a surrogate pair is no character"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        read_mapping(written(tmp_path, text))
    assert told in caught.value.message and "\n" not in caught.value.message


def test_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    file = written(tmp_path, "a: &a {b: 1, c:}\nd: {<<: *a, e: 2}\n")
    assert read_mapping(file) == {"a": {"b": 1}, "d": {"b": 1, "e": 2}}
    assert read_with_lines(file)[1]["d", "e"] == 2
    assert read_mapping(written(tmp_path, "")) == {}


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    file = written(tmp_path, "")
    os.truncate(file, 1 << 40)
    with pytest.raises(UserError, match=r"file.yaml: it has 1048576 MiB, at most 4 are read$"):
        read_mapping(file)


def test_a_device_without_end_is_not_read_either() -> None:
    with pytest.raises(UserError, match=r"^/dev/zero: it has more than 4 MiB, which is all that is read$"):
        read_mapping(Path("/dev/zero"))


def test_a_pipe_is_read_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a: 1\nb: {c: 2}\n")
    os.close(writing)
    try:
        mapping, lines = read_with_lines(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
    assert mapping == {"a": 1, "b": {"c": 2}}
    assert lines == {("a",): 1, ("b",): 2, ("b", "c"): 2}
