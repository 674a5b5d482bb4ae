"""A file's tokenizer and chat template do what those of the checkpoint did that it was made of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aegis.models.gguf.header import GgufFile, read_header
from aegis.models.gguf.tokenizer import write_tokenizer_files
from aegis.models.text.text_model import TextModel
from aegis.models.text.tokenizer_files import write_tokenizer
from tests import checkpoints, gguf_files

TEXTS = (
    "the cat and the hat sat on the mat",
    "  two spaces, a\ttab\nand lines\r\n\n",
    "naïve café — 東京 🙂",
    "1234567 and 3.14",
    "<|user|>the hat<|end|> <|assistant|>",
    "it's, we'll, THEY'RE",
    "",
)
PIECES = [*"▁acehnst", "th", "▁th", "he", "▁the", "at", "▁c", "▁cat", "sa", "ca", "cat", "▁sat", "hat"]
"""The best first."""


def file_of(path: Path, add: Callable[[gguf.GGUFWriter], object], architecture: str = "llama") -> GgufFile:
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


def served(file: GgufFile, into: Path) -> TextModel:
    """As registration has it."""
    into.mkdir(exist_ok=True)
    assert write_tokenizer_files(file, into) is None
    assert write_tokenizer(into, into) is None
    text = TextModel.load(into)
    assert text
    return text


def refusal(file: GgufFile, into: Path) -> str:
    into.mkdir(exist_ok=True)
    said = write_tokenizer_files(file, into)
    assert said and "\n" not in said and list(into.iterdir()) == []
    return said


def test_bytes_merges_special_tokens_and_template_are_the_checkpoint_s(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path)
    file = file_of(tmp_path / "m.gguf", lambda writer: gguf_files.add_tokenizer(writer, tmp_path))
    text, expected = served(file, tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path)
    for sample in TEXTS:
        ids = expected(sample)["input_ids"]
        assert text.encode(sample) == ids
        assert text.decode(ids, skip_special_tokens=False) == expected.decode(ids)
    messages = [{"role": "user", "content": "the cat"}]
    assert text.render_chat(messages) == expected.apply_chat_template(messages, tokenize=False)
    assert text.is_special("<|end|>") and not text.is_special("the")


def with_split(directory: Path, split: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    """With merges of digits, which not all splits leave together."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet)
    trained.train_from_iterator([*TEXTS, "1234 5678 12345678 12 34 56"] * 3, trainer)
    trained.pre_tokenizer = split
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, bos_token="<|begin|>", eos_token="<|end|>")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(directory)
    return fast


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
SPLITS = {
    "llama-bpe": _split(LLAMA3),
    "qwen2": _split(QWEN2),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("name", SPLITS)
def test_texts_are_split_as_the_file_says(name: str, tmp_path: Path) -> None:
    expected = with_split(tmp_path, SPLITS[name])

    def add(writer: gguf.GGUFWriter) -> None:
        gguf_files.add_tokenizer(writer, tmp_path)
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre(name)
        writer.add_add_bos_token(True)

    text = served(file_of(tmp_path / "m.gguf", add), tmp_path / "out")
    begin = expected.convert_tokens_to_ids("<|begin|>")
    for sample in (*TEXTS, "12345678, 1234"):
        assert text.encode(sample) == [begin, *expected(sample)["input_ids"]], sample
        assert text.encode(sample, add_special_tokens=False) == expected(sample)["input_ids"]


def test_llama3_takes_a_word_that_is_a_token_as_it_is(tmp_path: Path) -> None:
    with_split(tmp_path, SPLITS["llama-bpe"])
    file = tmp_path / "tokenizer.json"
    tree = json.loads(file.read_text())
    word = tree["model"]["vocab"]["zq"] = len(tree["model"]["vocab"])  # which no merge makes
    file.write_text(json.dumps(tree))

    def encoded(pre: str) -> list[int]:
        def add(writer: gguf.GGUFWriter) -> None:
            gguf_files.add_tokenizer(writer, tmp_path)
            writer.kv_data[0].pop("tokenizer.ggml.pre")
            writer.add_tokenizer_pre(pre)
            writer.add_add_bos_token(False)

        return served(file_of(tmp_path / "m.gguf", add), tmp_path / pre).encode("zq")

    assert encoded("llama-bpe") == [word]
    assert encoded("qwen2") != [word]


def test_old_files_of_qwen2_split_as_it_does(tmp_path: Path) -> None:
    expected = with_split(tmp_path, SPLITS["qwen2"])

    def add(writer: gguf.GGUFWriter) -> None:
        gguf_files.add_tokenizer(writer, tmp_path)
        writer.kv_data[0].pop("tokenizer.ggml.pre")

    text = served(file_of(tmp_path / "m.gguf", add, "qwen2"), tmp_path / "out")
    assert text.encode("12345678, 1234") == expected("12345678, 1234")["input_ids"]


def add_pieces(writer: gguf.GGUFWriter) -> list[str]:
    """SentencePiece's, whose merges follow from scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(PIECES))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(PIECES)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return tokens


def sentencepiece(text: str) -> list[str]:
    """The two neighbours that make the best token are joined, the first of equals first, until none do; characters that
    are no tokens are bytes."""
    parts = list(text)
    while joined := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in PIECES]:
        i = min(joined, key=lambda i: PIECES.index(parts[i] + parts[i + 1]))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    spelled = [[part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()] for part in parts]
    return [token for tokens in spelled for token in tokens]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_and_bytes_are_sentencepiece_s(prefix: bool, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_pieces(writer)
        writer.add_add_space_prefix(prefix)

    file = file_of(tmp_path / "m.gguf", add)
    text, tokens = served(file, tmp_path / "out"), file.texts("tokenizer.ggml.tokens") or []
    for sample in ("the cat é", "that sat", "a  hat", "seance", " cat", "  ", "a\nsea"):
        spelled = [tokens[id] for id in text.encode(sample)]
        assert spelled == ["<s>", *sentencepiece(prefix * "▁" + sample.replace(" ", "▁"))]
        assert text.decode(text.encode(sample)) == sample


def _change(key: str, value: Any) -> Callable[[gguf.GGUFWriter, Path], None]:
    def add(writer: gguf.GGUFWriter, directory: Path) -> None:
        gguf_files.add_tokenizer(writer, directory)
        writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
        if isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{key}", value)
        elif value is not None:
            writer.add_array(f"tokenizer.ggml.{key}", value)

    return add


WRONG: dict[str, tuple[Callable[[gguf.GGUFWriter, Path], None], str]] = {
    "none": (_change("tokens", None), "the file has no tokenizer"),
    "unknown kind": (_change("model", "bert"), "its tokenizer cannot be read: Cannot build a tokenizer .* 'bert'"),
    "unknown split": (_change("pre", "klingon"), "its tokenizer splits texts as 'klingon' does, which is not known"),
    "types": (_change("token_type", [1, 1]), r"cannot be read: there are \d+ tokens and 2 of token_type"),
    "numbers for tokens": (_change("tokens", [1, 2]), "cannot be read: tokenizer.ggml.tokens is no array of strings"),
    "text for tokens": (_change("tokens", "abc"), "cannot be read: tokenizer.ggml.tokens is no array"),
    "texts for types": (_change("token_type", ["a"]), "cannot be read: tokenizer.ggml.token_type is no array of numb"),
    "merge": (_change("merges", ["a b c"]), "cannot be read: the merge 'a b c' is not one of two tokens to a third"),
    "merge of no tokens": (_change("merges", ["a bbbb"]), "cannot be read: the merge 'a bbbb' is not one of two"),
    "twice": (_change("tokens", ["a", "a"] * 143), "cannot be read: a token is there twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_said_in_a_line(name: str, tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path)
    add, said = WRONG[name]
    file = file_of(tmp_path / "m.gguf", lambda writer: add(writer, tmp_path))
    assert re.search(said, refusal(file, tmp_path / "out"))


def test_no_token_is_beyond_the_vocabulary(tmp_path: Path) -> None:
    """transformers' classes have special tokens of their own."""
    checkpoints.write_tokenizer(tmp_path)
    file = file_of(tmp_path / "m.gguf", lambda writer: gguf_files.add_tokenizer(writer, tmp_path))
    text = served(file, tmp_path / "out")
    count = len(file.texts("tokenizer.ggml.tokens") or [])
    assert max(text.encode("<|endoftext|></s><unk><s>")) < count
