"""Broken checkpoints are refused before anything is loaded, each with its own reason; what is no regular file is never
opened, and what is too large is never read."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.models.checkpoint import TEMPLATES, open_checkpoint, refuse_odd_files
from tests import checkpoints

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("single"), "llama")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("sharded"), "llama", shards=3)


def copy(source: Path, into: Path) -> Path:
    for file in source.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    return into


def shard(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[1]


def edit_index(directory: Path, change: Callable[[dict[str, str]], None]) -> None:
    tree = json.loads((directory / INDEX).read_text())
    change(tree["weight_map"])
    (directory / INDEX).write_text(json.dumps(tree))


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def test_whole_checkpoints_are_opened(single: Path, sharded: Path) -> None:
    assert open_checkpoint(single).weights == (single / "model.safetensors",)
    opened = open_checkpoint(sharded)
    assert len(opened.weights) > 1
    assert opened.config["model_type"] == "llama"


SINGLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickled": (pickle_only, r"its weights are pickled \(pytorch_model.bin\)"),
    "truncated": (truncate, "model.safetensors: truncated or not a safetensors file"),
    "wrong header": (
        lambda at: (at / "model.safetensors").write_bytes(b"\xff" * 4096),
        "model.safetensors: truncated or not a safetensors file",
    ),
    "empty file": (lambda at: (at / "model.safetensors").write_bytes(b""), "truncated or not a safetensors file"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "there are no weights: expected model.safetensors"),
    "no config": (lambda at: (at / "config.json").unlink(), "there is no config.json"),
    "bad config": (lambda at: (at / "config.json").write_text("{"), "config.json: not readable as JSON"),
    "deep config": (lambda at: (at / "config.json").write_text("[" * 10**6), "config.json: not readable as JSON"),
    "device": (lambda at: (at / "tokenizer.json").symlink_to("/dev/zero"), "^tokenizer.json is no file"),
    "layers": (lambda at: edit_config(at, num_hidden_layers=10**7), "num_hidden_layers is 10000000, and there are 21"),
    "layers of another name": (
        lambda at: edit_config(at, n_layer=10**7),
        "n_layer is 10000000, and there are 21 tensors",
    ),
    "more of a size than there can be": (
        lambda at: edit_config(at, vocab_size=10**9),
        r"^config.json: vocab_size is 1000000000, and the weights have \d+ bytes in all$",
    ),
    "labels": (
        lambda at: edit_config(at, num_labels=10**8),
        "^config.json: num_labels is 100000000; it may be 1048576 at most$",
    ),
    "inner layers": (
        lambda at: edit_config(at, text_config={"num_decoder_layers": 22}),
        "num_decoder_layers is 22, and there are 21 tensors",
    ),
    "weights elsewhere": (
        lambda at: edit_config(at, transformers_weights="x.safetensors.index.json"),
        "transformers_weights is 'x.safetensors.index.json'; only",
    ),
    "list config": (lambda at: (at / "config.json").write_text("[]"), "config.json: expected a JSON object"),
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_not_taken_for_damaged(
    name: str, single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To fetch it again would not help."""
    opened = Path.open

    def refused(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ModelRefused, match=f"^{name}: Permission denied$"):
        open_checkpoint(single)


def test_a_directory_that_may_not_be_read_is_refused(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != single)
    with pytest.raises(ModelRefused, match=r"^its directory may not be read by this user; allow that"):
        open_checkpoint(single)


@pytest.mark.parametrize(("name", "told"), [("", "its directory"), (TEMPLATES, TEMPLATES)])
def test_a_directory_that_may_not_be_listed_is_refused(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of an adapter, or one within; it was said that no weight image can be made in the cache."""
    (tmp_path / TEMPLATES).mkdir()
    listed = Path.iterdir

    def refused(path: Path) -> Iterator[Path]:
        if path == tmp_path / name:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(ModelRefused, match=f"^{told}: Permission denied$"):
        refuse_odd_files(tmp_path)


def test_a_link_that_leads_where_nobody_may_look_is_refused(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refused)
    with pytest.raises(ModelRefused, match=r"^it cannot be looked at: Permission denied$"):
        open_checkpoint(single)


SHARDED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda at: shard(at).unlink(),
        r"the shard model-0000\d-of-\d+.safetensors, named in .* is missing",
    ),
    "tensor elsewhere": (
        lambda at: edit_index(at, lambda map_: map_.update({"no.such.weight": shard(at).name})),
        "the tensor no.such.weight, which .* places here, is not in it",
    ),
    "path outside": (
        lambda at: edit_index(at, lambda map_: map_.update({"x": "../../etc/passwd"})),
        "'../../etc/passwd' is not the name of a file beside it",
    ),
    "empty index": (lambda at: (at / INDEX).write_text("{}"), "it has no weight_map"),
}


@pytest.mark.parametrize("fault", SINGLE)
def test_a_broken_checkpoint_is_refused(fault: str, single: Path, tmp_path: Path) -> None:
    damage, said = SINGLE[fault]
    damage(copy(single, tmp_path))
    with pytest.raises(ModelRefused, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("fault", SHARDED)
def test_a_broken_sharded_checkpoint_is_refused(fault: str, sharded: Path, tmp_path: Path) -> None:
    damage, said = SHARDED[fault]
    damage(copy(sharded, tmp_path))
    with pytest.raises(ModelRefused, match=said):
        open_checkpoint(tmp_path)


def test_as_many_layers_as_tensors_are_not_too_many(single: Path, tmp_path: Path) -> None:
    edit_config(copy(single, tmp_path), num_hidden_layers=21, max_window_layers=28, n_layers=None)
    open_checkpoint(tmp_path)


def test_pickled_weights_are_never_opened(single: Path, tmp_path: Path) -> None:
    copy(single, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="convert them to safetensors"):
        open_checkpoint(tmp_path)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(("path", "told"), [("/dev/zero", "it is a device"), (__file__, "it is a file")])
def test_what_is_no_directory_is_refused(path: str, told: str) -> None:
    with pytest.raises(ModelRefused, match=f"{told}; a checkpoint is a directory or a .gguf file"):
        open_checkpoint(Path(path))


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
    "fifo": (lambda at: os.mkfifo(at / "config.json"), "^config.json is no file, but a named pipe; take it out"),
    "socket": (lambda at: _socket(at / "x"), "^x is no file, but a socket"),
    "device": (lambda at: (at / "tokenizer.json").symlink_to("/dev/zero"), "^tokenizer.json is no file, but a device"),
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
