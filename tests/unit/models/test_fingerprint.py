"""Same checkpoint, same name; anything that changes the image changes it."""

import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from aegis.models.checkpoint import open_checkpoint
from aegis.models.fingerprint import fingerprint
from tests import checkpoints


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "llama", "llama")


def of(directory: Path, dtype: str = "auto") -> str:
    return fingerprint(open_checkpoint(directory), dtype)


def test_it_is_stable(directory: Path) -> None:
    assert of(directory) == of(directory)


def test_the_dtype_counts(directory: Path) -> None:
    assert of(directory, "float32") != of(directory, "bfloat16")


def test_weights_packed_for_another_processor_are_another_image(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(directory)
    plain, packed = (fingerprint(checkpoint, "auto", packs=packs) for packs in (False, True))
    monkeypatch.setattr("aegis.models.fingerprint._processor", lambda: ("flags : sse2",))
    assert len({plain, packed, fingerprint(checkpoint, "auto", packs=True)}) == 3
    assert fingerprint(checkpoint, "auto") == plain


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer.json", "spiece.model"])
def test_files_beside_the_weights_count(directory: Path, file: str) -> None:
    before = of(directory)
    (directory / file).write_text((directory / file).read_text() + " " if (directory / file).exists() else "{}")
    assert of(directory) != before


def test_the_default_among_additional_templates_counts(directory: Path) -> None:
    file = directory / "additional_chat_templates" / "default.jinja"
    file.parent.mkdir()
    file.write_text("one")
    before = of(directory)
    file.write_text("another")
    assert of(directory) != before


def test_other_weights_of_the_same_size_and_time_count(directory: Path) -> None:
    before = of(directory)
    file = directory / "model.safetensors"
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=times)
    assert of(directory) != before


def test_files_that_do_not_matter_do_not_count(directory: Path) -> None:
    before = of(directory)
    (directory / "README.md").write_text("about")
    assert of(directory) == before
