"""A checkpoint's tokenizer becomes a tokenizer.json, or there is a reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.models.text.tokenizer_files import write_tokenizer


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
