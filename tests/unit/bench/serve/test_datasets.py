"""Data sets: what is read, what is left out, what is refused."""

import json
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from bench.serve.datasets import Dataset, Sample

LONG, SHORT = "word " * 20, "x"


def written(directory: Path, text: str) -> Path:
    file = directory / "data"
    file.write_text(text)
    return file


def test_random_lengths_are_drawn_around_the_mean() -> None:
    fixed = Dataset(random_input_len=50, random_output_len=10).samples(20, 0)
    assert fixed == [Sample(50, 10)] * 20
    drawn = Dataset(random_input_len=50, random_output_len=10, random_range_ratio=0.5).samples(500, 0)
    assert {sample.input_tokens for sample in drawn} == set(range(25, 76))
    assert {sample.output_tokens for sample in drawn} == set(range(5, 16))


def test_the_seed_decides() -> None:
    one, same, other = (Dataset(random_range_ratio=0.5).samples(20, seed) for seed in (1, 1, 2))
    assert one == same != other


def test_sharegpt_is_the_first_two_turns_of_fitting_length(tmp_path: Path) -> None:
    turns = [(LONG, LONG), (SHORT, LONG), (LONG, SHORT), (LONG * 100, LONG), (LONG, LONG * 90)]
    conversations = [{"conversations": [{"from": "x", "value": value} for value in pair]} for pair in turns]
    conversations += [{"conversations": [{"from": "human", "value": LONG}]}, {"id": "empty"}]
    file = written(tmp_path, json.dumps(conversations))
    assert Dataset("sharegpt", file).samples(3, 0) == [Sample(25, 25, LONG)] * 3
    fixed = Dataset("sharegpt", file, sharegpt_output_len=3).samples(3, 0)
    assert fixed == [Sample(25, 3, LONG)] * 3


def test_burstgpt_is_the_lengths_of_answered_calls_of_gpt_4(tmp_path: Path) -> None:
    rows = "5,ChatGPT,1,2,3,x\n6,GPT-4,100,0,100,x\n7,GPT-4,100,20,120,x\n"
    file = written(tmp_path, "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + rows)
    assert Dataset("burstgpt", file).samples(2, 0) == [Sample(100, 20)] * 2


def test_custom_rows_say_what_they_ask_and_of_whom(tmp_path: Path) -> None:
    file = written(tmp_path, '{"prompt": "abcdefgh", "output_tokens": 5, "model": "m"}\n\n{"prompt": "a", "more": 1}\n')
    samples = Dataset("custom", file, custom_output_len=9).samples(3, 0)
    assert samples == [Sample(2, 5, "abcdefgh", "m"), Sample(1, 9, "a"), Sample(2, 5, "abcdefgh", "m")]


def test_a_row_ends_with_its_line_and_not_within_a_text(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\x85b", "a\u2029b"]  # ends of lines for str.splitlines, characters for JSON
    rows = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts)
    (file := tmp_path / "data").write_bytes(rows.encode())
    assert [sample.text for sample in Dataset("custom", file).samples(3, 0)] == texts


@pytest.mark.parametrize("name", ["custom", "burstgpt", "sharegpt"])
def test_what_has_no_end_is_not_read(name: str) -> None:
    with pytest.raises(UserError, match=r"/dev/zero: is no regular file or pipe"):
        Dataset(name, Path("/dev/zero")).samples(1, 0)


def test_a_file_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    rows = "".join(f"1,GPT-4,{tokens},1,1,x\n" for tokens in range(1, 40))
    file = written(tmp_path, "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + rows)
    one, same, other = (Dataset("burstgpt", file).samples(39, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(sample.input_tokens for sample in one) == list(range(1, 40))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt": 5}\n', ":2: "),
        ("custom", '{"prompt": ""}\n', ":1: .*prompt"),
        ("custom", '{"prompt": "a", "output_tokens": 0}\n', ":1: .*output_tokens"),
        ("custom", "", "no usable row"),
        ("burstgpt", "Model,Request tokens\nGPT-4,5\n", ":2: "),
        ("burstgpt", "Model,Request tokens,Response tokens\nGPT-4,x,5\n", ":2: "),
        ("burstgpt", f"Model,Request tokens,Response tokens\nGPT-4,5,5\nGPT-4,5,{'5' * 200_000}\n", ":2: field larger"),
        ("sharegpt", "[}", "JSON"),
        ("sharegpt", "[]", "no usable row"),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Dataset(name, written(tmp_path, text)).samples(1, 0)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path, reason in ((None, "needs --dataset-path"), (tmp_path / "none", "No such file"), (binary, "UTF-8")):
        with pytest.raises(UserError, match=reason):
            Dataset("custom", path).samples(1, 0)
