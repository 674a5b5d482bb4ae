"""`aegis models`: the models of a running server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from aegis.admin_client import AdminClient
from aegis.config.paths import refusing
from aegis.config.slo import limits_ns
from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.server_url import Url


def list_models(url: Url) -> int:
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
    for model in AdminClient(url).models(coming=True):
        state = ": ".join(str(model[key]) for key in ("state", "detail") if model.get(key))
        table.add_row(str(model.get("id")), state or "-", *(str(model.get(key) or "-") for key in ("weights", "root")))
    width = None if sys.stdout.isatty() else 10_000  # one line for each model where a program reads
    Console(markup=False, highlight=False, width=width).print(table)
    return 0


def add_model(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Checkpoint or adapter directory, GGUF file, hub id or address.")
    ],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name for clients. [default: the source's]")] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Of a LoRA adapter: the model that it is run with. [default: as it says]"),
    ] = None,
    lazy: Annotated[bool, typer.Option("--lazy", help="Fetch its weights at its first request.")] = False,
    *,
    url: Url,
) -> int:
    """Add a model to a running server; it is registered beside serving.

    \b
    Examples:
      aegis models add ~/checkpoints/llama
      aegis models add Qwen/Qwen3-0.6B --name qwen
      aegis models add hf://Qwen/Qwen3-0.6B@main --lazy
      aegis models add ~/adapters/sql --name sql --base llama
    """
    if not source:
        raise UserError("SOURCE is empty; give a directory, a GGUF file, a hub id or an address")
    with refusing("SOURCE", source):
        local = Path(source).expanduser()
        here = local.resolve() if local.is_dir() else local.absolute()  # a file may be a link to one of another name
        is_here = local.exists()
    answer = AdminClient(url).add(str(here) if is_here else source, name, base=base, lazy=lazy)
    print(f"{answer.get('id', name or source)} is {answer.get('state', 'added')}")
    return 0


def set_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `aegis models list` shows it.")],
    slo: Annotated[
        str | None, typer.Option(metavar="TARGETS", help="When tokens are due: ttft=10,tbt=0.1,gap=0.5")
    ] = None,
    priority: Annotated[int | None, typer.Option(metavar="N", help="-8 to 8; the lower, the earlier.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(metavar="N", help="0: no limit.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(metavar="N", help="0: no limit.")] = None,
    concurrent: Annotated[int | None, typer.Option(metavar="N", help="Requests at one time; 0: no limit.")] = None,
    pin: Annotated[bool | None, typer.Option("--pin/--unpin", help="Keep its weights in the model cache.")] = None,
    pace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of its streams that do not say: made or smooth.")
    ] = None,
    *,
    url: Url,
) -> int:
    """Change a model of a running server, at once; values that are not named stay.

    \b
    Examples:
      aegis models set qwen --slo ttft=2,tbt=0.05 --priority -2
      aegis models set qwen --requests-per-minute 60 --concurrent 4 --pin
    """
    deadlines = None if slo is None else {f"{name}_ms": ns / NS_PER_MS for name, ns in limits_ns(slo).items()}
    named = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
    }
    changes = {"slo": deadlines, "priority": priority, "pin": pin, "pace": pace}
    if all(value is None for value in (*named.values(), *changes.values())):
        raise UserError("nothing to change; see aegis models set --help")
    client, limits = AdminClient(url), None
    if any(value is not None for value in named.values()):
        present = next((each.get("limits") or {} for each in client.models() if each.get("id") == model), {})
        limits = {k: v for k, v in (present | {k: v for k, v in named.items() if v is not None}).items() if v}
    client.update(model, limits=limits, **changes)
    print(f"{model} is changed")
    return 0


def unload_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `aegis models list` shows it.")],
    url: Url,
) -> int:
    """Take a model's weights out of memory, after the requests that use them; the next request loads it again.

    \b
    Example:
      aegis models unload qwen
    """
    AdminClient(url).unload(model)
    print(f"{model} leaves memory: where it is idle at once, elsewhere after its requests")
    return 0


def remove_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `aegis models list` shows it.")],
    url: Url,
) -> int:
    """Remove a model from a running server.

    \b
    Example:
      aegis models remove qwen
    """
    AdminClient(url).remove(model)
    print(f"{model} is removed")
    return 0
