"""Files of spans and records."""

import gzip
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.telemetry.files import read_records, read_spans, write
from tests.unit.bench.report.made import record, span

SPANS = [span("decode", 1, 2, requests=3), span("swap_in", 2, 3, model="", nbytes=7)]
RECORDS = [record(1, 0, 5, 9), record(2, 3, 6, 8)]


@pytest.mark.parametrize("name", ["spans.jsonl", "spans.jsonl.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, SPANS)
    assert read_spans(tmp_path / name) == SPANS
    write(tmp_path / name, RECORDS)
    assert read_records(tmp_path / name) == RECORDS


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write(tmp_path / name, SPANS)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_a_line_is_a_value(tmp_path: Path) -> None:
    write(tmp_path / "s", SPANS)
    first, *_ = (tmp_path / "s").read_text().splitlines()
    assert first == '["decode-0","decode","a",1000000,2000000,3,0,0,0,0,0,0,1000,[],0,0,0]'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'["d","decode","a",1,2]\n["d","dance","a",1,2]\n', ":2: is no span: Invalid enum value 'dance'"),
        (b'["d","decode","a",1,2]\n\n{', ":3: is no span: "),
        (b"[1]", ":1: is no span: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_spans(file)
    assert error.value.message.startswith(str(file) + said)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"a": ' + b"[" * 100_000)
    with pytest.raises(UserError, match=":1: is no record: "):
        read_records(file)


def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl.gz"
    file.write_bytes(gzip.compress(b"[]" * 1000)[:-9])
    with pytest.raises(UserError, match="is no whole gzip file"):
        read_spans(file)
    file.write_bytes(b"[]")
    with pytest.raises(UserError, match="is no whole gzip file"):
        read_spans(file)
    with pytest.raises(UserError, match="No such file"):
        read_spans(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="/dev/zero: is no regular file"):
        read_spans(Path("/dev/zero"))
    with pytest.raises(UserError, match="name too long"):
        read_spans(tmp_path / ("a" * 300))
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "no" / "s.jsonl", SPANS)
