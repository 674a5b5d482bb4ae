"""Traces: every format read alike, and each bad row refused by file and line."""

from __future__ import annotations

import gzip
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from bench.workloads.arrival import Arrival, in_order
from bench.workloads.traces import read

HEADER = "arrival_s,model,input_tokens,output_tokens\n"
ROWS = "0.5,chat,10,20\n0.25,code,3,4\n"
ARRIVALS = [Arrival(250_000_000, ModelId("code"), 3, 4), Arrival(500_000_000, ModelId("chat"), 10, 20)]
TIMED = [
    {"timestamp": 500, "model": "chat", "input_length": 10, "output_length": 20, "hash_ids": [1, 2]},
    {"timestamp": 250, "model": "code", "input_length": 3, "output_length": 4, "hash_ids": []},
]


def written(folder: Path, name: str, text: str) -> Path:
    path, raw = folder / name, text.encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "a.b.csv"])
def test_csv_is_read_in_order(tmp_path: Path, name: str) -> None:
    assert read(written(tmp_path, name, HEADER + ROWS)) == ARRIVALS


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_timed_traces_are_read_in_order(tmp_path: Path, name: str) -> None:
    text = "\n".join(map(json.dumps, TIMED)) + "\n\n"
    assert read(written(tmp_path, name, text), sec_multiplier=0.001) == ARRIVALS
    assert read(written(tmp_path, name, text))[0].at_ns == 250_000_000_000


def test_columns_may_come_in_any_order_and_more_of_them(tmp_path: Path) -> None:
    text = "\ufeffoutput_tokens,note,input_tokens,model,arrival_s\r\n20,x,10,chat,0.5\r\n\r\n4,,3,code,0.25\r\n"
    assert read(written(tmp_path, "t.csv", text)) == ARRIVALS


def test_priorities_may_be_given(tmp_path: Path) -> None:
    text = "arrival_s,model,input_tokens,output_tokens,priority\n0.5,chat,10,20,-2\n0.25,code,3,4,\n"
    timed = "\n".join(json.dumps(row | {"priority": p} if p else row) for row, p in zip(TIMED, (-2, 0), strict=True))
    arrivals = [ARRIVALS[0], replace(ARRIVALS[1], priority=-2)]
    assert read(written(tmp_path, "t.csv", text)) == arrivals
    assert read(written(tmp_path, "t.jsonl", timed), sec_multiplier=0.001) == arrivals
    assert refused(written(tmp_path, "t.csv", text.replace("-2", "9"))).endswith(
        "t.csv:2: the request has priority 9; expected -8 to 8"
    )
    assert "expected seconds and whole numbers" in refused(written(tmp_path, "t.csv", text.replace("-2", "high")))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", HEADER + "1,,5,0\n"),
        ("t.csv", "arrival_s,input_tokens,output_tokens\n1,5,0\n"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 5, "output_length": 0}'),
        ("t.jsonl", '{"timestamp": 1, "input_length": 5, "output_length": 0, "model": null}'),
    ],
)
def test_a_trace_without_models_is_of_one_and_no_output_counts_as_a_token(tmp_path: Path, name: str, text: str) -> None:
    assert read(written(tmp_path, name, text)) == [Arrival(1_000_000_000, ModelId("m000"), 5, 1)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("x,chat,1,1", "expected seconds and whole numbers of tokens, got arrival_s 'x'"),
        ("1,chat,1.5,1", "input_tokens '1.5'"),
        ("1,chat,1,", "output_tokens ''"),
        ("-1,chat,1,1", "arrives at -1 s"),
        ("nan,chat,1,1", "arrives at nan s"),
        ("inf,chat,1,1", "arrives at inf s"),
        ("1,chat,0,1", "0 input tokens"),
        ("1,chat,1,-1", "-1 output tokens"),
        ("1,chat,1", "3 fields; the header has 4"),
        ("1,chat,1,1,1", "5 fields; the header has 4"),
        ("1,../chat,1,1", "'../chat' is no name of a model"),
    ],
)
def test_a_bad_row_is_refused_by_file_and_line(tmp_path: Path, row: str, problem: str) -> None:
    path = written(tmp_path, "t.csv", f"{HEADER}0,chat,1,1\n{row}\n")
    message = refused(path)
    assert message.startswith(f"{path}:3: ")
    assert problem in message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"timestamp": 1, "output_length": 1}', "missing required field `input_length`"),
        ('{"timestamp": "1", "input_length": 1, "output_length": 1}', "Expected `float`, got `str`"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "arrives at -1 s"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "model": "a b"}', "'a b' is no name of a model"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, "t.jsonl.gz", json.dumps(TIMED[0]) + f"\n{line}\n")
    message = refused(path)
    assert message.startswith(f"{path}:2: ")
    assert problem in message


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    assert "1: the header lacks output_tokens" in refused(written(tmp_path, "a.csv", "arrival_s,model,input_tokens\n"))
    assert "1: the header lacks arrival_s" in refused(written(tmp_path, "b.csv", ""))
    assert "holds no requests" in refused(written(tmp_path, "c.csv", HEADER))
    assert "holds no requests" in refused(written(tmp_path, "d.jsonl", "\n"))
    assert "name ends in .csv" in refused(written(tmp_path, "e.txt.gz", HEADER + ROWS))
    assert "No such file" in refused(tmp_path / "none.csv")
    (tmp_path / "f.csv").write_bytes(HEADER.encode() + b"\xff\xff,a,1,1\n")
    assert "not a text file in UTF-8" in refused(tmp_path / "f.csv")
    (tmp_path / "g.csv.gz").write_bytes(HEADER.encode())
    assert "gzip" in refused(tmp_path / "g.csv.gz")
    (tmp_path / "h.csv.gz").write_bytes(gzip.compress((HEADER + ROWS * 99).encode())[:-12])
    assert "damaged" in refused(tmp_path / "h.csv.gz")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.csv.gz"])
def test_a_device_is_no_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    assert refused(tmp_path / name) == f"{tmp_path / name}: is no regular file or pipe"


@pytest.mark.parametrize(("name", "head"), [("t.csv.gz", HEADER), ("t.jsonl", json.dumps(TIMED[0]) + "\n")])
def test_a_line_without_end_is_refused(tmp_path: Path, name: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.workloads.traces._LINE_CHARACTERS_MAX", 1000)
    path = written(tmp_path, name, head + "0" * 2000)
    assert refused(path) == f"{path}:2: the line has more than 1000 characters"


def test_a_trace_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.csv")
    writing = threading.Thread(target=(tmp_path / "t.csv").write_text, args=(HEADER + ROWS,))
    writing.start()
    assert read(tmp_path / "t.csv") == ARRIVALS
    writing.join()


arrivals = st.builds(
    Arrival,
    at_ns=st.integers(0, 10**15),
    model=st.sampled_from(["m000", "a/b-1.5", "x:y"]).map(ModelId),
    input_tokens=st.integers(1, 1 << 40),
    output_tokens=st.integers(1, 1 << 40),
)


@given(st.lists(arrivals, min_size=1, max_size=5))
def test_what_was_written_is_read_to_the_nanosecond(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[Arrival]
) -> None:
    rows = (f"{a.at_ns / 1e9!r},{a.model},{a.input_tokens},{a.output_tokens}\n" for a in wanted)
    path = written(tmp_path_factory.getbasetemp(), "law.csv", HEADER + "".join(rows))
    assert read(path) == in_order(wanted)
