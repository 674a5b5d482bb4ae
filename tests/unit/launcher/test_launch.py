"""The output of a server for the user who started it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from aegis.config.sources import load
from aegis.core.errors import UserError
from aegis.launcher.demo_making import make_first_models
from aegis.launcher.launch import _example, _to_try, refuse_unlaunchable
from tests.unit.proxy.http.scripted import ScriptedModel, says, spec


def test_a_floor_that_no_device_has_is_refused_and_the_default_one_is_none() -> None:
    environment = {"AEGIS_MEMORY_FLOOR": "10GiB", "AEGIS_DEVICE_MEMORY": "32MiB", "AEGIS_DEVICE": "cpu"}
    with pytest.raises(UserError) as refusal:
        refuse_unlaunchable(load({}, environment))
    assert refusal.value.message == (
        "memory.floor 10GiB is more than --device-memory 32MiB: idle instances would keep all; give 32MiB at most"
    )
    refuse_unlaunchable(load({}, environment | {"AEGIS_MEMORY_FLOOR": "32MiB"}))
    refuse_unlaunchable(load({}, environment | {"AEGIS_MEMORY_FLOOR": ""}))


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_example_is_for_a_shell_and_takes_the_key_from_its_variable(needs_key: bool) -> None:
    example = _example("http://127.0.0.1:8000", "llama", "Tell me a story.", needs_key=needs_key)
    told = subprocess.run(
        ["sh", "-c", f'curl() {{ printf "%s\\n" "$@"; }}; {example}'],
        env={"AEGIS_API_KEY": "sk-1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told[:2] == ["-N", "http://127.0.0.1:8000/v1/completions"]
    assert ("Authorization: Bearer sk-1" in told) == needs_key and "sk-1" not in example
    assert json.loads(told[-1])["model"] == "llama"


def test_the_example_sends_token_ids_where_no_model_takes_text() -> None:
    bare, told = ScriptedModel(spec("bare"), says("x"), text=None), ScriptedModel(spec("told"), says("x"))
    assert _to_try([bare, told], ["lazy"])[0] == ("told", "Tell me a story.")
    assert _to_try([bare], ["lazy"])[0] == ("lazy", "Tell me a story.")
    assert _to_try([bare], []) == [("bare", [1])]
    assert _to_try([], []) == []


def test_a_cache_that_cannot_be_looked_at_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_CACHE", str(tmp_path / ("x" * 300)))
    with pytest.raises(UserError, match=r"^AEGIS_CACHE: .*: File name too long$"):
        asyncio.run(make_first_models())
