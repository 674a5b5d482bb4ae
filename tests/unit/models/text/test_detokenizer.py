"""A proxy loads what decodes, and nothing besides: it decodes as the whole tokenizer does."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers import normalizers as norms

from aegis.models.text.detokenizer import DetokenizerFile, write_detokenizer
from aegis.models.text.text_model import TextModel
from tests import checkpoints

LATE_S = 0.25
"""How much later than due another thread may come to something."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    checkpoints.write_tokenizer(tmp_path)
    write_detokenizer(tmp_path)
    return tmp_path


def unigram(*tokens: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(token, -1.0) for token in tokens], 0, byte_fallback=True))
    tokenizer.normalizer = norms.Prepend("▁")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["<plain>"])
    return tokenizer


def both(directory: Path) -> tuple[TextModel, TextModel]:
    whole, decoding = TextModel.load(directory), TextModel.load_to_decode(directory)
    assert whole is not None and decoding is not None
    return whole, decoding


def test_it_decodes_and_tells_workers_as_the_whole_one_does(directory: Path) -> None:
    whole, decoding = both(directory)
    tokens = whole.encode("<|user|>the hat 東<|end|>", add_special_tokens=False)
    for skips in (True, False):
        assert decoding.decode(tokens, skip_special_tokens=skips) == whole.decode(tokens, skip_special_tokens=skips)
    assert decoding.special_ids == whole.special_ids
    assert decoding.is_special("<|end|>") and not decoding.is_special("the")
    assert decoding.token_characters_max == whole.token_characters_max
    assert decoding.render_chat([{"role": "user", "content": "hi"}]) == "<|user|>hi<|end|><|assistant|>"
    shutil.rmtree(directory)
    told = TextModel.of(decoding.source())
    assert told.encode("<|user|>the hat 東") == whole.encode("<|user|>the hat 東")
    with pytest.raises(AssertionError, match="loaded to decode"):
        decoding.encode("the hat")


def test_a_unigram_model_decodes_alike(tmp_path: Path) -> None:
    unigram("<unk>", "▁a", "b", "<0xE6>", "<0x9D>", "<0xB1>").save(str(tmp_path / "tokenizer.json"))
    write_detokenizer(tmp_path)
    assert (tmp_path / "detokenizer.json").is_file()
    whole, decoding = both(tmp_path)
    tokens = [1, 2, 6, 3, 4, 5, 7, 1]
    assert decoding.decode(tokens) == whole.decode(tokens) == "ab東 <plain> a"


def test_without_one_the_whole_tokenizer_is_loaded(directory: Path) -> None:
    (directory / "detokenizer.json").unlink()
    whole, decoding = both(directory)
    assert decoding.encode("the hat") == whole.encode("the hat")


def test_two_tokens_that_are_alike_decode_alike(tmp_path: Path) -> None:
    unigram("<unk>", "a", "a", "b").save(str(tmp_path / "tokenizer.json"))
    write_detokenizer(tmp_path)
    whole, decoding = both(tmp_path)
    assert decoding.decode([1, 2, 3]) == whole.decode([1, 2, 3]) == "aab"


def test_ids_far_beyond_the_number_of_tokens_are_not_written(tmp_path: Path) -> None:
    """A list of all ids could take gigabytes."""
    Tokenizer(models.WordLevel({"a": 0, "b": 1 << 21}, "a")).save(str(tmp_path / "tokenizer.json"))
    write_detokenizer(tmp_path)
    assert not (tmp_path / "detokenizer.json").exists()


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Metaspace()])
def test_words_decode_alike(tmp_path: Path, decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.WordLevel({"the": 3, "##s": 1, "cat": 0, "▁hat": 9}, "the"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<end>", "cat"])
    tokenizer.add_tokens(["<plain>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_detokenizer(tmp_path)
    assert (tmp_path / "detokenizer.json").is_file()
    whole, decoding = both(tmp_path)
    for tokens in ([3, 0, 1, 9, 10, 11, 3, 99, 5], [], [12, 0]):
        for skips in (True, False):
            assert decoding.decode(tokens, skip_special_tokens=skips) == whole.decode(tokens, skip_special_tokens=skips)


def test_the_file_of_an_earlier_version_is_as_none(directory: Path) -> None:
    (directory / "detokenizer.json").write_text('{"tokenizer": {}, "token_characters_max": 3, "special": {}}')
    whole, decoding = both(directory)
    assert decoding.encode("the hat") == whole.encode("the hat")


def test_half_a_million_tokens_keep_no_other_thread_waiting(tmp_path: Path) -> None:
    checkpoints.write_tokenizer(tmp_path)
    texts: list[str | None] = [f"t{number:x}" for number in range(1 << 19)]
    found = DetokenizerFile(texts, [], msgspec.Raw(b"null"), {})
    (tmp_path / "detokenizer.json").write_bytes(msgspec.json.encode(found))
    over, late_s = Event(), 0.0

    def watch() -> None:
        nonlocal late_s
        while not over.is_set():
            began_s = monotonic()
            over.wait(0.005)
            late_s = max(late_s, monotonic() - began_s - 0.005)

    watching = Thread(target=watch)
    watching.start()
    text = TextModel.load_to_decode(tmp_path)
    over.set()
    watching.join()
    assert text and text.decode([0, 1 << 18]) == "t0 t40000" and text.token_characters_max == len("t40000")
    assert late_s <= LATE_S
