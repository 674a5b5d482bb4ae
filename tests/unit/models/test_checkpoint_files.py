"""What is no file is never opened, and what is too large is never read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.models.checkpoint import refuse_odd_files


def _sparse(file: Path, nbytes: int) -> None:
    file.touch()
    os.truncate(file, nbytes)


def _socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(file))


def _in_templates(at: Path) -> None:
    (at / "additional_chat_templates").mkdir()
    os.mkfifo(at / "additional_chat_templates" / "rag.jinja")


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (lambda at: os.mkfifo(at / "config.json"), "^config.json is no file"),
    "socket": (lambda at: _socket(at / "x"), "^x is no file"),
    "device": (lambda at: (at / "tokenizer.json").symlink_to("/dev/zero"), "^tokenizer.json is no file"),
    "circle": (lambda at: (at / "a").symlink_to(at / "a"), "^a: Too many levels"),
    "template": (_in_templates, "^additional_chat_templates/rag.jinja is no file"),
    "json": (lambda at: _sparse(at / "config.json", 1 << 40), "^config.json has 1048576 MiB, at most 64 are read"),
    "tokenizer": (lambda at: _sparse(at / "tokenizer.json", 1 << 30), "tokenizer.json has 1024 MiB, at most 512"),
    "vocabulary": (lambda at: _sparse(at / "spiece.model", 1 << 30), "spiece.model has 1024 MiB, at most 512"),
    "text": (lambda at: _sparse(at / "merges.txt", 1 << 30), "merges.txt has 1024 MiB, at most 64"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_refused(name: str, tmp_path: Path) -> None:
    make, said = ODD[name]
    make(tmp_path)
    with pytest.raises(ModelRefused, match=said):
        refuse_odd_files(tmp_path)


def test_what_a_hub_cache_and_an_honest_directory_hold_passes(tmp_path: Path) -> None:
    blob, snapshot = tmp_path / "blob", tmp_path / "snapshot"
    blob.write_text("{}")
    snapshot.mkdir()
    (snapshot / "config.json").symlink_to(blob)
    (snapshot / "gone.json").symlink_to(tmp_path / "nothing")
    (snapshot / "original").mkdir()
    _sparse(snapshot / "model.safetensors", 1 << 40)
    _sparse(snapshot / "pytorch_model.bin", 1 << 40)
    _sparse(snapshot / "tokenizer.json", 100 << 20)
    refuse_odd_files(snapshot)
