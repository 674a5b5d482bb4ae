"""`aegis memory`: the use of a running server's memory."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from aegis.admin_client import AdminClient
from aegis.cli.size import parse_limit
from aegis.cli.timeout import Timeout
from aegis.config.sizes import format_size
from aegis.server_url import Url


def show_memory(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="As JSON, sizes in bytes.")] = False,
    *,
    url: Url,
) -> int:
    """Show the memory of a running server, or move it.

    Per device: what is free, what each instance holds of it, KV slabs by shape and how much of them is waste; of the
    node: KV in host memory and the model cache. docs/memory.md explains it.

    \b
    Examples:
      aegis memory
      aegis memory --json --url http://127.0.0.1:9000
      aegis memory limit mixed-0 256MiB
    """
    if context.invoked_subcommand is not None:
        context.default_map = {command: {"url": url} for command in ("limit", "trim")}
        return 0
    import msgspec
    from rich.console import Console

    from aegis.cli.memory_table import tables

    report = AdminClient(url).memory()
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0
    width = None if sys.stdout.isatty() else 10_000
    Console(markup=False, highlight=False, width=width).print(*tables(report), sep="\n")
    return 0


_Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its name, as `aegis memory` shows it.")]


def limit_memory(
    instance: _Instance,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Limit of its share of the device's memory.")],
    timeout: Timeout = 30.0,
    *,
    url: Url,
) -> int:
    """Limit the memory of an instance while it serves; done when it holds no more than that.

    If it cannot be done in time, nothing is changed. The size of the device or more lifts the limit.

    \b
    Examples:
      aegis memory limit mixed-0 256MiB
      aegis memory limit mixed-0 4GiB --timeout 60
    """
    nbytes = parse_limit(size)
    from aegis.telemetry.memory_report import limit_told

    client = AdminClient(url)
    given_bytes = client.limit_memory(instance, nbytes, timeout_s=timeout)
    print(f"{limit_told(client.memory(), instance, nbytes)}; it gave back {format_size(given_bytes)}")
    return 0


def trim_memory(instance: _Instance, timeout: Timeout = 30.0, *, url: Url) -> int:
    """Take back memory that an instance does not need now, down to the floor; done when it has given it.

    \b
    Example:
      aegis memory trim mixed-1
    """
    print(f"{instance} gave back {format_size(AdminClient(url).trim_memory(instance, timeout_s=timeout))}")
    return 0
