"""Which code a published figure is of: the head of each file in `bench/results`, and whether that code is the tree's.

The head names the commit, the day and the machine, and a digest of the code that the figures depend on. The digest is
of statements: comments, docstrings, imports, blank lines, and the files and the order in which statements stand, do not
change it, so that moves and better words leave a figure as it is. A renamed function does change it.
"""

from __future__ import annotations

import ast
import hashlib
import io
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"

_CORES = ("aegis/core", "aegis/policies.py", "decode", "memory", "prefill", "proxy/routing")
_ENGINE = ("aegis/core", "aegis/device", "aegis/engine", "aegis/models", "memory")
_INSTANCE = (*_CORES, "aegis/device", "aegis/engine", "aegis/instance", "aegis/models", "aegis/node", "aegis/transport")
_SERVER = (*_INSTANCE, "aegis/launcher", "aegis/process", "aegis/telemetry", "proxy")
_SIMULATION = (
    *_CORES,
    "aegis/policies.py",
    "aegis/sim",
    "bench/simulate/cells/search.py",
    "bench/simulate/contenders.py",
    "bench/simulate/figures.py",
    "bench/simulate/setting.py",
    "bench/simulate/sweep.py",
    "bench/simulate/tuning.py",
    "bench/workloads",
    "configs/gpus",
    "proxy/policies",
)
_PRISM = (*_SIMULATION, "bench/simulate/prism")
_GOODPUT = (*_SIMULATION, "bench/simulate/goodput.py")

DEPENDENCIES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("cells", "cells_links"), (*_SIMULATION, "bench/simulate/cells/suites.py")),
    "decode": (*_ENGINE, "bench/lab/decode"),
    "embeddings": (*_SERVER, "bench/lab/embeddings.py"),
    "fidelity": (*_SERVER, *_SIMULATION, "bench/calibration", "bench/fidelity", "bench/serve"),
    **dict.fromkeys(("fig11a", "fig11b", "fig11c", "fig12", "fig13", "fig17", "fig7"), _SIMULATION),
    "fig14": (*_SIMULATION, "bench/simulate/breakdown.py"),
    "fig15": (*_SIMULATION, "bench/simulate/switching.py"),
    "fig16": (*_SIMULATION, "bench/simulate/fragmentation.py"),
    "fig18": (*_SIMULATION, "bench/simulate/utilisation.py"),
    "gpu": (*_ENGINE, "bench/lab/gpu"),
    "handover": ("aegis/cluster", "aegis/device", "bench/lab/cluster"),
    "interference": (*_SERVER, "bench/interference/suite.py"),
    "interference_before": ("bench/interference/suite.py",),
    "interference_llama_cpp": ("bench/interference/suite.py",),
    "interference_vllm": ("bench/interference/suite.py",),
    "interference_vllm_256": ("bench/interference/suite.py",),
    "lanes": (*_ENGINE, "bench/lab/lanes.py"),
    "llama_cpp": (*_ENGINE, "bench/lab/decode"),
    "lora": (*_ENGINE, "bench/lab/decode"),
    "memory": (*_INSTANCE, "bench/lab/in_process_market.py", "bench/lab/memory"),
    "metadata": (*_SERVER, "aegis/metadata", "bench/lab/metadata.py"),
    **dict.fromkeys(("mux_conversation", "mux_loogle", "mux_openthoughts", "mux_sharegpt", "mux_tool_agent"), _GOODPUT),
    "overload": (*_SIMULATION, "bench/simulate/overload"),
    "overload_live": (*_SERVER, "bench/overload", "bench/serve", "bench/workloads"),
    "pace": (*_SERVER, "bench/lab/pace.py"),
    "prefix": (*_SERVER, "bench/lab/prefix_reuse.py"),
    **dict.fromkeys(("prism_ablation", "prism_fig10", "prism_fig5", "prism_fig6", "prism_fig7", "prism_fig9"), _PRISM),
    "prompts": (*_SERVER, "bench/lab/prompts.py"),
    **dict.fromkeys(
        ("proxy", "proxy_routes"), ("aegis/core", "aegis/telemetry", "aegis/transport", "bench/lab/proxy", "proxy")
    ),
    "quantised": (*_ENGINE, "bench/lab/decode"),
    "rivals": (*_SERVER, "bench/rivals", "bench/serve", "bench/workloads"),
    "schedule": (*_CORES, "bench/lab/scheduling"),
    "simulator": (*_CORES, "aegis/sim", "bench/lab/scheduling", "bench/workloads"),
    "start": (*_SERVER, "bench/lab/start.py"),
    "structured": (*_SERVER, "bench/lab/random_schemas.py", "bench/lab/structured_output.py"),
    "switch": ("aegis/device", "bench/lab/sized_models.py", "bench/lab/switching.py", "memory"),
    "token_path": (*_SERVER, "aegis/control", "aegis/metadata", "bench/lab/system_calls.py", "bench/lab/token_path.py"),
    "vllm": (*_ENGINE, "bench/lab/decode"),
}
"""Of each results file, by its name: the files and directories of code that its figures depend on."""


class Provenance(Struct, frozen=True):
    """The head of a results file, under `measured`. `commit` is abbreviated, with `-dirty` where code it depends on was
    not committed; None: nobody knows. `code` is the digest of that code."""

    commit: str | None
    date: str
    machine: str
    code: str


def stamped(file: Path, content: Any) -> Any:
    """`content` with its head, where `file` is one of `bench/results`; one that has a head keeps it."""
    name = file.name.partition(".")[0]
    if file.resolve().parent != RESULTS or name not in DEPENDENCIES:
        return content
    found: dict[str, Any] = msgspec.to_builtins(content)
    return found if found.get("measured") else {"measured": msgspec.to_builtins(here(name)), **found}


def here(name: str) -> Provenance:
    """The head of what this process measures on this machine with the tree's code."""
    from bench.common.machine import summary

    return Provenance(_commit(name), datetime.now(UTC).date().isoformat(), summary(), digest(name))


def read(measured: Mapping[str, Any]) -> Provenance | None:
    """The provenance in the content of a results file; None: it has no head."""
    head = measured.get("measured")
    return None if head is None else msgspec.convert(head, Provenance)


def has_changed(name: str, provenance: Provenance) -> bool:
    """Whether code that these figures depend on is another one than they were measured with."""
    return digest(name) != provenance.code


@cache
def digest(name: str, root: Path = ROOT) -> str:
    """Of the code that the figures of `name` depend on, as it is below `root`; what is not there counts as empty."""
    found = [part for path in sorted(set(DEPENDENCIES[name])) for part in _parts(root / path)]
    return hashlib.sha256("\0".join(sorted(set(found))).encode()).hexdigest()[:16]


def _parts(path: Path) -> Iterator[str]:
    files = sorted(file for kind in ("*.py", "*.yaml") for file in path.rglob(kind)) if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            yield from _statements(file) if file.suffix == ".py" else [file.read_text(encoding="utf-8")]


@cache
def _statements(file: Path) -> tuple[str, ...]:
    """The module's statements one by one, without comments, docstrings, imports and blank lines."""
    text = file.read_text(encoding="utf-8")
    lines, tree = text.split("\n"), ast.parse(text)
    for line, column in _comments(text):
        lines[line - 1] = lines[line - 1][:column]
    for node in ast.walk(tree):
        if _is_silent(node):
            lines[node.lineno - 1] = lines[node.lineno - 1][: node.col_offset]
            lines[node.lineno : node.end_lineno] = [""] * ((node.end_lineno or node.lineno) - node.lineno)
    return tuple(filter(None, (_text(lines, statement) for statement in tree.body)))


def _comments(text: str) -> Iterator[tuple[int, int]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start


def _is_silent(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Imports and docstrings: each ends its line."""
    return isinstance(node, ast.Import | ast.ImportFrom) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def _text(lines: list[str], statement: ast.stmt) -> str:
    first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
    kept = (line.rstrip() for line in lines[first - 1 : statement.end_lineno])
    return "\n".join(line for line in kept if line)


def _commit(name: str) -> str | None:
    """The one that is checked out; None if the code is no checkout of its own."""
    told = _git("rev-parse", "--show-prefix", "--short=7", "HEAD")
    prefix, _, commit = (told or "-").partition("\n")
    if prefix:
        return None
    return f"{commit}-dirty" if _git("status", "--porcelain", "--", *DEPENDENCIES[name]) else commit


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.removesuffix("\n")
