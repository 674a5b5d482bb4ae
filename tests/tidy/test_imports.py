"""The import contracts: each can fail, and no core or policy escapes them."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.long_forms import first_rows_of

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
CONTRACTS = {contract["id"]: contract for contract in LINTER["contracts"]}
VIOLATIONS = [
    ("core", "aegis/core/ids.py", "import memory.pages"),
    ("core", "aegis/core/ids.py", "import aegis.config.sizes"),
    ("memory", "memory/pages.py", "import aegis.config.config"),
    ("memory", "memory/pages.py", "import decode.policies.weighted_round_robin"),
    ("deciders", "prefill/policies/grouped_fcfs.py", "import aegis.config.sizes"),
    ("deciders", "proxy/routing/decode_lists.py", "import proxy.http.errors"),
    ("pure", "memory/pages.py", "import time"),
    ("pure", "aegis/core/rng.py", "from random import random"),
    ("pure", "decode/policies/weighted_round_robin.py", "import torch"),
    ("layers", "decode/policies/weighted_round_robin.py", "import prefill.policies.grouped_fcfs"),
    ("layers", "proxy/routing/router.py", "import decode.policies.weighted_round_robin"),
    ("layers", "aegis/engine/protocol.py", "import aegis.instance"),
    ("layers", "aegis/instance/settings.py", "import aegis.node"),
    ("layers", "aegis/node/machine.py", "import proxy.live"),
    ("layers", "proxy/http/errors.py", "import aegis.metadata"),
    ("layers", "aegis/launcher/__init__.py", "import bench"),
    ("http", "proxy/http/structured/tools.py", "import proxy.http.request.sampling"),
    ("http", "proxy/http/errors.py", "import proxy.http.security.admission"),
    ("simulation", "aegis/sim/timeline_semaphores.py", "import aegis.transport"),
    ("tensors", "proxy/http/errors.py", "import torch"),
    ("tensors", "aegis/config/config.py", "import transformers"),
    ("vllm", "aegis/engine/vllm/engine.py", "import vllm"),
    ("ray", "aegis/node/node.py", "import ray"),
    ("cli", "bench/__init__.py", "import aegis.cli.main"),
    ("bench", "bench/serve/suite.py", "import bench.lab.metadata"),
    ("bench", "bench/common/figures.py", "import bench.simulate.table"),
    ("bench", "bench/simulate/setting.py", "import bench.report.page"),
    ("plots", "bench/report/page.py", "import matplotlib"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages and their contracts, to be spoiled."""
    directory = tmp_path_factory.mktemp("imports")
    shutil.copy(ROOT / "pyproject.toml", directory)
    for package in ("aegis", "bench", "decode", "memory", "prefill", "proxy"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def lint(directory: Path, contract: str) -> tuple[int, str]:
    command = [LINT_IMPORTS, "--no-logo", "--contract", contract]
    done = subprocess.run(command, cwd=directory, env={"PYTHONPATH": "."}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("contract", "file", "line"), first_rows_of(4, list(VIOLATIONS)))
def test_a_violation_breaks_its_contract(copy: Path, contract: str, file: str, line: str) -> None:
    spoiled = copy / file
    text = spoiled.read_text(encoding="utf-8")
    try:
        spoiled.write_text(f"{text}\n{line}\n", encoding="utf-8")
        code, out = lint(copy, contract)
    finally:
        spoiled.write_text(text, encoding="utf-8")
    assert code == 1
    assert "BROKEN" in out
    assert file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in out


def test_every_contract_has_a_violation_that_breaks_it() -> None:
    assert {contract for contract, _, _ in VIOLATIONS} == set(CONTRACTS)


def test_what_is_forbidden_to_the_pure_exists() -> None:
    """A misspelt name would forbid nothing."""
    assert [name for name in CONTRACTS["pure"]["forbidden_modules"] if not importlib.util.find_spec(name)] == []


def test_all_of_prefill_decode_and_proxy_but_their_shells_is_held_to_be_pure() -> None:
    shells = {"decode.worker", "prefill.worker", "proxy.http", "proxy.live"}
    modules = {
        ".".join((package, entry.stem))
        for package in ("decode", "prefill", "proxy")
        for entry in (ROOT / package).iterdir()
        if entry.suffix == ".py" or (entry.is_dir() and entry.name != "__pycache__")
    } - {"decode.__init__", "prefill.__init__", "proxy.__init__"}
    assert modules - shells <= set(CONTRACTS["pure"]["source_modules"])
    assert modules - shells <= set(CONTRACTS["deciders"]["source_modules"])
