"""`aegis config`: the schema as it is, and every mistake of a file at once."""

import json
import os
from pathlib import Path

import pytest

from aegis.cli import config
from aegis.cli.config_check import look_at
from aegis.config.sources import load

ROOT = Path(__file__).parents[3]


def written(directory: Path, text: str) -> Path:
    file = directory / "aegis.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def mistakes(file: Path) -> list[str]:
    found = look_at(file)
    assert not found.warnings
    return list(found.mistakes)


def test_the_schema_is_the_one_that_is_in_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    assert config.schema() == 0
    assert json.loads(capsys.readouterr().out) == json.loads((ROOT / "configs" / "schema.json").read_text())


def test_every_mistake_has_a_line_with_its_line_its_key_and_what_was_expected(tmp_path: Path) -> None:
    file = written(tmp_path, "demo: maybe\nserver:\n  prot: 1\n  port: x\nmodels:\n  a: {}\n")
    assert mistakes(file) == [
        f"{file}: line 1: demo: should be a valid boolean, not 'maybe'",
        f"{file}: line 3: server.prot: unknown key; did you mean port?",
        f"{file}: line 4: server.port: should be a valid integer, not 'x'",
        f"{file}: line 6: models.a: should have one of path, hub and url",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "line 1: not readable as YAML"),
        ("api_keys: {alice: {file: away}}", "line 1: api_keys.alice: {directory}/away cannot be read"),
        ("api_keys: {a: {key: same}, b: {key: same}}", "'a' and 'b' have the same key"),
        ("sources:\n- org/name\n- ./away.yaml", "line 3: {directory}/away.yaml: no such file"),
        ("models: {a/b: {hub: x/y}}\nsources:\n- a/b", "line 3: two models are named 'a/b'"),
        ("models:\n  a:\n    url: hf://a/b/c", "line 3: models.a.url: hf://a/b/c: expected hf://org/name"),
        ('models:\n  a:\n    path: "a\\0b"', "line 3: models.a.path: '{directory}/a\\x00b': "),
        (f"models: {{a: {{path: {'a' * 300}}}}}", "line 1: models.a.path: {directory}/aaa"),
        ("models: {a: {path: ~nobody.at.all/x}}", "line 1: models.a.path: ~nobody.at.all/x: "),
        ("server:\n  port: 1\n  api_key_file: away", "line 3: api_key: {directory}/away cannot be read"),
        ("server:\n  port: 1\n  ssl_certfile: away", "line 3: --ssl-certfile: there is no file {directory}/away"),
        (
            "server:\n  ssl_certfile: aegis.yaml\n  ssl_keyfile: away",
            "line 3: --ssl-keyfile: there is no file {directory}/away",
        ),
        ("mqtt:\n  url: mqtts://b\n  ca_file: away", "line 3: mqtt.ca_file: there is no file {directory}/away"),
        ("mqtt: {url: mqtts://b, ca_file: aegis.yaml}", "line 1: mqtt.ca_file: {directory}/aegis.yaml holds no certif"),
    ],
)
def test_so_have_those_of_the_files_it_names(tmp_path: Path, text: str, complaint: str) -> None:
    [line] = mistakes(written(tmp_path, text))
    assert line.startswith(f"{tmp_path}/aegis.yaml:")
    assert complaint.format(directory=tmp_path) in line
    assert "same" not in line.replace("the same key", "")


def test_a_pipe_is_looked_at_like_a_file() -> None:
    """It says what it says once."""
    reading, writing = os.pipe()
    os.write(writing, b"demo: true\nserver:\n  api_key_file: /nowhere/key\n")
    os.close(writing)
    try:
        [line] = mistakes(Path(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
    assert line == f"/dev/fd/{reading}: line 3: api_key: /nowhere/key cannot be read: No such file or directory"


def test_they_come_in_the_order_of_lines(tmp_path: Path) -> None:
    text = "sources: [./one.yaml, org/name, ./two.yaml]\nserver:\n  admin_key_file: gone\n"
    file = written(tmp_path, text + "api_keys:\n  a: {key: same}\n  b: {file: away}\n  c: {key: same}\n")
    assert [line.removeprefix(f"{file}: ").partition(": ")[0] for line in mistakes(file)] == [
        "line 1",
        "line 1",
        "line 3",
        "line 6",
        "line 7",
    ]


@pytest.mark.parametrize("text", ["prot: 1", "memory: {prot: 1}", "models: {a: {hub: x, q_max_s: 1}}"])
def test_a_key_is_not_taken_for_one_of_another_section(tmp_path: Path, text: str) -> None:
    [line] = mistakes(written(tmp_path, text))
    assert line.endswith("unknown key")


def test_a_checkpoint_that_is_not_there_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "models:\n  a: {path: away}\n")
    assert config.check(file) == 0
    assert capsys.readouterr().out == (
        f"warning: {file}: line 2: models.a.path: {tmp_path}/away is no checkpoint: a directory with a config.json, or "
        f"a .gguf file\n{file}: no mistakes\n"
    )


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_examples_have_no_mistakes(file: Path) -> None:
    assert config.check(file) == 0


def test_a_file_without_mistakes_is_one_that_launch_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "server: {port: 9000}\ndemo: true\n")
    assert config.check(file) == 0
    assert capsys.readouterr().out == f"{file}: no mistakes\n"
    assert load({"config": file}, {}).server.port == 9000


def test_mistakes_are_a_matter_of_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert config.check(tmp_path / "none.yaml") == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().out
