"""`aegis models`: the models of a running server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aegis.client import DEFAULT_URL, AdminClient

_Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the server.")]


def list_models(url: _Url = DEFAULT_URL) -> int:
    """List the models of a running server.

    \b
    Example:
      aegis models list --url http://127.0.0.1:9000
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("model", "state", "weights", "checkpoint"):
        table.add_column(title, overflow="fold")
    for model in AdminClient(url).models():
        state = ": ".join(str(model[key]) for key in ("state", "detail") if model.get(key))
        table.add_row(str(model.get("id")), state or "-", *(str(model.get(key) or "-") for key in ("weights", "root")))
    width = None if sys.stdout.isatty() else 10_000  # one line for each model where a program reads
    Console(markup=False, highlight=False, width=width).print(table)
    return 0


def add_model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint directory or hub id.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name for clients. [default: the source's]")] = None,
    url: _Url = DEFAULT_URL,
) -> int:
    """Add a model to a running server; it is registered beside serving.

    \b
    Examples:
      aegis models add ~/checkpoints/llama
      aegis models add Qwen/Qwen3-0.6B --name qwen
    """
    local = Path(source).expanduser()
    answer = AdminClient(url).add(str(local.resolve()) if local.is_dir() else source, name)
    print(f"{answer.get('id', name or source)} is {answer.get('state', 'added')}")
    return 0


def remove_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `aegis models list` shows it.")],
    url: _Url = DEFAULT_URL,
) -> int:
    """Remove a model from a running server.

    \b
    Example:
      aegis models remove qwen
    """
    AdminClient(url).remove(model)
    print(f"{model} is removed")
    return 0
