"""A checkpoint's tokenizer becomes a tokenizer.json, or there is a reason why not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from aegis.core.errors import ModelRefused
from aegis.models.gguf.header import read_header
from aegis.models.gguf.tokenizer import write_tokenizer_files
from aegis.models.text.tokenizer_files import write_tokenizer
from tests import checkpoints, gguf_files


def test_a_broken_tokenizer_is_refused_and_one_that_is_not_there_is_said(tmp_path: Path) -> None:
    checkpoint, into = tmp_path / "checkpoint", tmp_path / "image"
    for directory in (checkpoint, into):
        directory.mkdir()
    assert write_tokenizer(checkpoint, into) == "the checkpoint has no tokenizer"
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    (checkpoint / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(
        ModelRefused, match=r"its tokenizer\.json cannot be read: .*; without that file it is served by"
    ):
        write_tokenizer(checkpoint, into)
    assert list(into.iterdir()) == []


def test_a_full_disk_is_no_fault_of_the_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which it would be said that it cannot be read, and the model served by token ids."""

    def full(self: object, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = checkpoints.write(tmp_path / "llama", "llama", tokenizer=True)
    gguf_files.write(tmp_path / "m.gguf", "llama", "F16", tokenizer=path)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(OSError, match="No space left on device"):
        write_tokenizer(path, tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        write_tokenizer_files(read_header(tmp_path / "m.gguf"), tmp_path)
