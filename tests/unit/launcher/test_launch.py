"""The output of a server for the user who started it."""

from __future__ import annotations

import json
import subprocess

import pytest

from aegis.launcher.launch import _example


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_example_is_for_a_shell_and_takes_the_key_from_its_variable(needs_key: bool) -> None:
    example = _example("http://127.0.0.1:8000", "llama", needs_key=needs_key)
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
