"""The sources that `--models` may name, the errors for others, and the progress of a download."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, filter_repo_objects

from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.models import sources
from aegis.models.remote.listing import is_beside_weights
from aegis.models.sources import Source, bar, check_name, fetch, read_sources


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def yaml(tmp_path: Path, text: str) -> str:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return str(file)


def test_a_checkpoint_directory_is_one_model_named_after_it(tmp_path: Path) -> None:
    path = directory(tmp_path / "llama")
    assert read_sources([str(path)]) == [Source(ModelId("llama"), path=str(path))]


def test_a_directory_of_checkpoints_is_all_of_them_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        directory(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [source.model for source in read_sources([str(tmp_path)])] == ["a", "b"]


def test_a_hub_id_is_a_model_of_that_name() -> None:
    assert read_sources(["Qwen/Qwen3-0.6B"]) == [Source(ModelId("Qwen/Qwen3-0.6B"), hub="Qwen/Qwen3-0.6B")]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("hf://org/name", "org/name"),
        ("hf://org/name@v1.2", "org/name"),
        ("hf://gpt2@refs/pr/1", "gpt2"),
        ("https://host:8443/models/llama/", "llama"),
        ("https://host/llama-1.0.tar", "llama-1.0"),
        ("http://host/", "host"),
        ("http://host./x", "x"),
        ("http://[::1]:80/x", "x"),
        ("s3://bucket/team/llama", "llama"),
        ("s3://bucket", "bucket"),
    ],
)
def test_an_address_is_a_model_named_after_its_end(address: str, name: str) -> None:
    assert read_sources([address]) == [Source(ModelId(name), url=address)]


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("hf://", "expected hf://org/name"),
        ("hf://a/b/c", "expected hf://org/name"),
        ("hf://org/../name", "expected hf://org/name"),
        ("s3://B/x", "expected s3://bucket/prefix"),
        ("https://", "expected hf://org/name@revision, https://host/folder"),
        ("https://[1/x", "expected hf://org/name@revision, https://host/folder"),
        ("http://a..b/c", r"http://a\.\.b/c: no host can be named 'a\.\.b'"),
        (f"https://{'a' * 64}.org/x", "no host can be named"),
        ("https://user:secret@host/x", "may hold no user, password or query"),
        ("https://host/x.tar?signature=secret", "may hold no user, password or query"),
    ],
)
def test_what_is_no_address_is_refused_and_secrets_are_not_repeated(address: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as refusal:
        read_sources([address])
    assert "secret" not in refusal.value.message


def test_a_lazy_model_at_an_address_in_a_file(tmp_path: Path) -> None:
    file = yaml(tmp_path, "models: {late: {url: 's3://bucket/x', lazy: true, pin: true}}")
    assert read_sources([file]) == [Source(ModelId("late"), url="s3://bucket/x", lazy=True, pin=True)]
    with pytest.raises(UserError, match="expected s3://bucket/prefix"):
        read_sources([yaml(tmp_path, "models: {late: {url: 's3://', lazy: true}}")])


def test_yaml_paths_are_relative_to_the_file_and_targets_in_milliseconds(tmp_path: Path) -> None:
    path = directory(tmp_path / "checkpoints" / "one")
    file = yaml(
        tmp_path,
        "models:\n"
        "  first: {path: checkpoints/one, slo: {ttft_ms: 2500, tbt_ms: 12.5}, dtype: bfloat16}\n"
        "  second: {hub: org/name, slo: {tbt_ms: 1}, pin: true}\n",
    )
    default = Slo(ttft_ns=7, tbt_ns=8)
    assert read_sources([file], default_slo=default) == [
        Source(ModelId("first"), path=str(path), slo=Slo(2_500_000_000, 12_500_000), dtype="bfloat16"),
        Source(ModelId("second"), hub="org/name", slo=Slo(7, 1_000_000), pin=True),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {a: {pth: x}}", "models.a: Object contains unknown field `pth`"),
        ("models: {a: {hub: o/n}}\nmodel: 1", "unknown key 'model'"),
        ("models: {a: {hub: o/n}, a: {hub: o/m}}", "'a' is given twice"),
        ("models: {a: {hub: o/n, slo: {ttft: 1}}}", "unknown field `ttft`"),
        (
            "models: {a: {hub: o/n, slo: {ttft_ms: -1}}}",
            "models.a.slo.ttft_ms: expected 0.001 to 86400000 milliseconds",
        ),
        (
            "models: {a: {hub: o/n, slo: {tbt_ms: 1.0e-7}}}",
            "models.a.slo.tbt_ms: expected 0.001 to 86400000 milliseconds",
        ),
        ("models: {a: {hub: o/n, dtype: int4}}", "models.a: Invalid enum value 'int4'"),
        ("models: {a: {hub: o/n, path: x}}", "models.a: give one of 'path', 'hub' and 'url'"),
        ("models: {a: {}}", "models.a: give one of 'path', 'hub' and 'url'"),
        ("models: {a: {path: nowhere}}", "models.a: no such directory"),
        ("models: {'a b': {hub: o/n}}", "'a b' cannot be a model's name"),
        ("models: []", "expected a `models:` map"),
        ("models: {", "not readable as YAML"),
    ],
)
def test_a_bad_yaml_is_one_line_naming_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    file = yaml(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_sources([file])
    assert said in caught.value.message
    assert file in caught.value.message
    assert "\n" not in caught.value.message


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    first, second = directory(tmp_path / "x" / "llama"), directory(tmp_path / "y" / "llama")
    with pytest.raises(UserError, match=r"y/llama: there is already a model named 'llama'"):
        read_sources([str(first), str(second)])


@pytest.mark.parametrize("name", ["llama", "org/Name-1.5_b:v2+x@y", "7", "x" * 128])
def test_a_name_is_ascii_and_short(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "a b", "modèle", "a\n", "x" * 129, None, 5])
def test_another_name_is_refused(name: object) -> None:
    with pytest.raises(UserError, match=r"cannot be a model's name: use up to 128 ASCII letters"):
        check_name(name)


@pytest.mark.parametrize("name", ["~nosuchuser", "~nosuchuser/x", "x" * 300, "x/" * 3000, "a\0b", "a\nb", ""])
def test_what_the_system_rejects_is_one_line(name: str) -> None:
    with pytest.raises(UserError) as caught:
        read_sources([name])
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 500


def test_a_directory_whose_name_is_no_model_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'a b' cannot be a model's name: .*; rename it, or name it in a YAML file"):
        read_sources([str(directory(tmp_path / "a b"))])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    closed = directory(tmp_path / "closed")
    closed.chmod(0)
    with pytest.raises(UserError, match="closed: Permission denied"):
        read_sources([str(closed)])


def test_a_directory_beside_checkpoints_that_may_not_be_read_is_left_to_registering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are served; a disk has a `lost+found` of that kind."""
    for name in ("llama", "lost+found", "no name"):
        directory(tmp_path / name)
    looked_at, access = sources.is_checkpoint, os.access

    def closed(path: Path) -> bool:
        return path.name in ("lost+found", "no name")

    def is_checkpoint(path: Path) -> bool:
        if closed(path):
            raise PermissionError(13, "Permission denied")
        return looked_at(path)

    monkeypatch.setattr(sources, "is_checkpoint", is_checkpoint)
    monkeypatch.setattr(os, "access", lambda path, mode: not closed(Path(path)) and access(path, mode))
    assert [source.model for source in read_sources([str(tmp_path)])] == ["llama", "lost+found"]


def test_a_directory_that_a_file_names_and_that_may_not_be_read_is_left_to_registering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the file that was said not to be readable."""
    directory(tmp_path / "closed")
    (tmp_path / "models.yaml").write_text("models: {shut: {path: closed}}")
    looked_at = sources.is_adapter

    def is_adapter(path: Path) -> bool:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return looked_at(path)

    monkeypatch.setattr(sources, "is_adapter", is_adapter)
    assert [source.model for source in read_sources([str(tmp_path / "models.yaml")])] == ["shut"]


def test_where_no_checkpoint_is_a_closed_directory_does_not_hide_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no model's by its name, as a `.Trash-0` of another user."""
    (tmp_path / ".Trash-0").mkdir()
    there, access = Path.is_file, os.access

    def looked_at(path: Path) -> bool:
        if path.parent.name == ".Trash-0":
            raise PermissionError(13, "Permission denied")
        return there(path)

    monkeypatch.setattr(Path, "is_file", looked_at)
    monkeypatch.setattr(Path, "exists", looked_at)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != ".Trash-0" and access(path, mode))
    with pytest.raises(UserError, match="neither it nor any directory in it holds"):
        read_sources([str(tmp_path)])


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "a/b/c", "no.yaml", "spaced out"])
def test_what_is_neither_there_nor_a_hub_id_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        read_sources([name])


def test_an_empty_directory_and_an_odd_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither it nor any directory in it holds"):
        read_sources([str(tmp_path)])
    (tmp_path / "model.onnx").touch()
    with pytest.raises(UserError, match=r"expected a \.yaml or \.gguf file, a directory, a hub id or an address"):
        read_sources([str(tmp_path / "model.onnx")])


def _pipe(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(file)
    return file


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda _: "/dev/zero", "/dev/zero: it is no file, but a device; expected a .yaml or .gguf file, a directory"),
        (lambda at: _pipe(at / "m.gguf"), "m.gguf: it is no file, but a named pipe; expected a .yaml or .gguf file"),
        (lambda at: _pipe(at / "config.json").parent, ": config.json is no file, but a named pipe; put that of"),
        (lambda at: _pipe(at / "adapter_config.json").parent, ": adapter_config.json is no file, but a named pipe"),
        (lambda at: _pipe(at / "a" / "b" / "config.json").parents[1], "a/b: config.json is no file"),
        (lambda at: yaml(at, "models: {a: {path: /dev/zero}}"), "models.a: expected a directory or a .gguf file, not"),
        (lambda _: "file:///etc", "file:///etc: name what is on this machine by its path alone, like /etc"),
        (lambda _: "FILE:/etc", "FILE:/etc: name what is on this machine by its path alone, like /etc"),
        (lambda _: "file://", "file://: name what is on this machine by its path alone, like /models"),
        (lambda _: "ftp://host/x", "ftp://host/x: expected hf://org/name@revision, https://host/folder"),
        (lambda _: "s3:/bucket/x", "s3:/bucket/x: expected hf://org/name@revision, https://host/folder"),
    ],
)
def test_what_is_no_model_is_refused_at_once_with_what_it_is(
    make: Callable[[Path], object], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        read_sources([str(make(tmp_path))])
    assert told in caught.value.message
    assert "\n" not in caught.value.message


def test_a_gguf_file_is_one_model_named_after_it(tmp_path: Path) -> None:
    file = tmp_path / "Qwen3-0.6B-Q4_K_M.gguf"
    file.touch()
    assert read_sources([str(file)]) == [Source(ModelId("Qwen3-0.6B-Q4_K_M"), path=str(file))]
    entry = yaml(tmp_path, "models: {small: {path: Qwen3-0.6B-Q4_K_M.gguf}}")
    assert read_sources([entry]) == [Source(ModelId("small"), path=str(file))]


def test_a_link_to_a_gguf_file_is_one_too(tmp_path: Path) -> None:
    """As the hub's cache has them."""
    (tmp_path / "blob").touch()
    file = tmp_path / "m.gguf"
    file.symlink_to(tmp_path / "blob")
    assert read_sources([str(file)]) == [Source(ModelId("m"), path=str(file))]
    assert read_sources([yaml(tmp_path, "models: {a: {path: m.gguf}}")]) == [Source(ModelId("a"), path=str(file))]


def test_gguf_files_of_a_directory_are_models_beside_its_checkpoints(tmp_path: Path) -> None:
    directory(tmp_path / "b")
    for name in ("c.gguf", "a.gguf", "notes.txt"):
        (tmp_path / name).touch()
    assert [source.model for source in read_sources([str(tmp_path)])] == ["a", "b", "c"]


def test_a_gguf_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        read_sources([str(tmp_path / "away.gguf")])
    for name in ("away.gguf", "models/away.gguf"):  # which could be a hub id
        with pytest.raises(UserError, match=rf"^{name}: no such file or directory$"):
            read_sources([name])
    with pytest.raises(UserError, match=r"models.a: no such directory or .gguf file: .*away.gguf"):
        read_sources([yaml(tmp_path, "models: {a: {path: away.gguf}}")])


def test_beside_the_weights_of_a_hub_id_comes_what_comes_of_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def download(_: str, **options: Any) -> str:
        asked.update(allow=options["allow_patterns"], ignore=options["ignore_patterns"])
        return "/hub"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    fetch(Source(ModelId("m"), hub="org/name"))
    vocabularies = ["merges.txt", "qwen.tiktoken", "spiece.model", "tokenizer.json", "vocab.txt"]
    names = ["1_Pooling/config.json", "README.md", "chat_template.jinja", "onnx/config.json", *vocabularies]
    found = filter_repo_objects(names, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"])
    assert list(found) == [name for name in names if is_beside_weights(name)]


def test_a_hub_id_without_network_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelRefused, match=r"the hub cannot be reached .*; name a checkpoint directory instead"):
        fetch(Source(ModelId("m"), hub="no-such-org/no-such-model"))


@pytest.mark.parametrize("bars", [disable_progress_bars, enable_progress_bars])
def test_bytes_are_told_and_nothing_is_drawn(bars: Callable[[], None]) -> None:
    bars()
    told: list[str] = []
    kind = bar(told.append)
    with kind(total=64 << 20, unit="B", unit_scale=True, mininterval=0) as progress:
        progress.update(16 << 20)
        progress.update(48 << 20)
    with kind(total=3, unit="it", mininterval=0) as files:
        files.update(3)
    assert "downloading, 16 of 64 MiB" in told
    assert told[-1] == "downloading, 64 of 64 MiB"


def test_of_no_bytes_nothing_is_told() -> None:
    told: list[str] = []
    with bar(told.append)(total=0, unit="B", mininterval=0):
        pass
    assert told == []
