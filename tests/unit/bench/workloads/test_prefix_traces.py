"""Traces whose prompts share their beginnings: how they are read, and what a cache has of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.workloads import prefix_traces, spec
from bench.workloads.prefix_traces import Prompt, found, read, replayed, reused_tokens


def line(blocks: list[int], *, tokens: int | None = None, output: int = 9) -> str:
    length = tokens or 512 * len(blocks)
    return json.dumps({"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": blocks})


def prompts(*blocks: str, tokens: int | None = None) -> list[Prompt]:
    return [Prompt(tokens or 512 * len(each), 9, tuple(each)) for each in blocks]


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    jsonl = tmp_path / "conversation_trace.jsonl"
    jsonl.write_text(f"{line([0, 1], tokens=700, output=0)}\n\n{line([0, 2])}\n")
    rows = "arrival_s,model,input_tokens,output_tokens\n0.0,,700,0\n3.0,,1024,9\n"
    (tmp_path / "mooncake_conv.csv.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "mooncake_conv_prefix512.csv.gz").write_bytes(gzip.compress(b"hash\n0 1\n0 2\n"))
    assert read(jsonl) == [Prompt(700, 1, ("0", "1")), Prompt(1024, 9, ("0", "2"))]
    assert read(tmp_path / "mooncake_conv.csv.gz") == read(jsonl)
    assert found(tmp_path, "conversation") == jsonl
    jsonl.unlink()
    assert found(tmp_path, "conversation") == tmp_path / "mooncake_conv.csv.gz"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "conversation_trace.jsonl:1: "),
        ("[]", "conversation_trace.jsonl:1: "),
        ("\n" + line([0]).replace("input_length", "length"), "conversation_trace.jsonl:2: lacks 'input_length'"),
        (line([0], tokens=-1), ":1: expected a whole number of input tokens, 1 or more, got -1"),
        (line([0]).replace("512", "true"), ":1: expected a whole number of input tokens, 1 or more, got True"),
        (line([0, 1], tokens=512), ":1: 2 blocks for 512 tokens; each has 512"),
        ("[" * 100_000, "conversation_trace.jsonl:1: "),
        ("", "the trace holds no requests"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "conversation_trace.jsonl"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read(file)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_without_its_blocks_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mooncake_conv.csv"
    file.write_text("input_tokens,output_tokens\n512,1\n512,1\n")
    with pytest.raises(UserError, match=r"not beside it, in mooncake_conv_prefix512\.csv"):
        read(file)
    (tmp_path / "mooncake_conv_prefix512.csv").write_text("hash\n0\n")
    with pytest.raises(UserError, match="has 1 rows, fewer than"):
        read(file)
    file.with_suffix(".csv").write_text("input_tokens\n512\n")
    with pytest.raises(UserError, match="2: lacks 'output_tokens'"):
        read(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "conversation_trace.jsonl.gz").write_bytes(gzip.compress(b"x" * 5000)[:-20])
    with pytest.raises(UserError, match="gzip file is damaged"):
        read(found(tmp_path, "conversation"))
    (tmp_path / "toolagent_trace.jsonl").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match="not a text file"):
        read(found(tmp_path, "tool-agent"))
    with pytest.raises(UserError, match=r"has no conversation_trace\.jsonl or .*, compressed or not"):
        found(tmp_path / "none", "conversation")


@pytest.mark.parametrize(
    ("cache_tokens", "reused"),
    [(None, [0, 512, 1024, 1024]), (2 * 512, [0, 512, 512, 512]), (3 * 512, [0, 512, 1024, 1024]), (0, [0, 0, 0, 0])],
)
def test_a_cache_keeps_the_beginnings_that_were_used_last(cache_tokens: int | None, reused: list[int]) -> None:
    assert list(reused_tokens(prompts("ab", "ac", "ab", "ac"), cache_tokens)) == reused


def test_no_more_is_reused_than_a_prompt_has() -> None:
    assert list(reused_tokens(prompts("ab", "ab", tokens=700))) == [0, 700]


def test_prompts_replace_those_that_were_drawn_and_begin_again(tmp_path: Path) -> None:
    file = tmp_path / "toolagent_trace.jsonl"
    file.write_text("\n".join([line([0, 1]), line([0, 2])]))
    drawn = spec.parse("poisson:models=1,rps=5,duration=1", 0)
    arrivals = replayed(drawn, file)
    assert [a.at_ns for a in arrivals] == [a.at_ns for a in drawn]
    assert [a.reused_tokens for a in arrivals] == [0, 512, *[1024] * (len(drawn) - 2)]
    assert set(prefix_traces.NAMES) == {"conversation", "tool-agent"}
