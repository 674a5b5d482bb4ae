"""Clients in processes of their own, with a model that calls tools: coding agents, which write a file with a command,
and frameworks that need other versions of packages than these tests. `make test-clients` installs and runs them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import embedders, tool_caller
from tests.live.server import SPLIT, Server, launched
from tests.schedule import ROOT
from tests.snippets import snippet

CLIENTS = os.environ.get("AEGIS_TEST_CLIENTS", "")
pytestmark = pytest.mark.skipif(not CLIENTS, reason="installs much; make test-clients")
CALLER, EMBEDDER = "caller", "embedder"
DONE = "".join(tool_caller.AFTERWARDS)
TASK = "Write the file."
_SECONDS = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("clients")
    tool_caller.write(directory / "models" / CALLER)
    embedders.write(directory / "models" / EMBEDDER, "bert", pooling={"pooling_mode_mean_tokens": True})
    options = ["--models", str(directory / "models"), "--dtype", "float32", "--device-memory", "64MiB", *SPLIT]
    with launched(directory / "server", directory / "cache", *options, "--debug-memory") as running:
        running.wait_for_ready()
        yield running
        running.wait_for_freed_memory()


def output_of(*command: str, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Of a program that has a home of its own and nothing of this process's environment but where programs are."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(cwd), "NO_PROXY": "127.0.0.1"} | dict(environment or {})
    ended = subprocess.run(
        command, cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def installed(name: str) -> str:
    return str(ROOT / CLIENTS / name)


@pytest.mark.parametrize("heading", ["llama-index", "instructor"])
def test_the_programs_of_the_documentation(server: Server, heading: str, tmp_path: Path) -> None:
    program = snippet(heading, server.url, model=CALLER, embedder=EMBEDDER)
    told = output_of(installed("bin/python"), "-c", f"{program}\nprint(place)", cwd=tmp_path)
    if heading == "llama-index":
        assert told.startswith("".join(tool_caller.GREETING))
        assert "It is warm in Paris." in told
    last = told.splitlines()[-1]
    assert re.fullmatch(r"city='.*' days=-?\d+", last), told


def test_codex_runs_a_command_and_says_so(server: Server, tmp_path: Path) -> None:
    configuration = snippet("Codex", server.url, model=CALLER)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(configuration)
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    told = output_of(installed("node_modules/.bin/codex"), "exec", *free, TASK, cwd=tmp_path)
    assert told.splitlines()[-1] == DONE
    assert (tmp_path / "exec_command.txt").read_text() == "written\n"


def test_claude_code_runs_a_command_and_says_so(server: Server, tmp_path: Path) -> None:
    variables = dict(re.findall(r"(\w+)=(\S+)", snippet("Claude Code", server.url, model=CALLER)))
    client = installed("node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs")
    told = output_of("node", client, "-p", TASK, "--allowedTools", "Bash", cwd=tmp_path, environment=variables)
    assert told.splitlines()[-1] == DONE
    assert (tmp_path / "Bash.txt").read_text() == "written\n"
