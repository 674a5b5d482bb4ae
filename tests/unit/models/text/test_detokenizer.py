"""A proxy loads what decodes, and nothing besides: it decodes as the whole tokenizer does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers import normalizers as norms

from aegis.models.text.detokenizer import write_detokenizer
from aegis.models.text.text_model import TextModel
from tests import checkpoints


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
    with pytest.raises(Exception, match="WordLevel"):
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


def test_one_that_would_decode_otherwise_is_not_written(tmp_path: Path) -> None:
    """Two tokens of a Unigram model may be alike; here they would become one."""
    unigram("<unk>", "a", "a", "b").save(str(tmp_path / "tokenizer.json"))
    write_detokenizer(tmp_path)
    assert not (tmp_path / "detokenizer.json").exists()
