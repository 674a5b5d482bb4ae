"""The option `--url` of commands that speak to a running server."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from aegis.admin_client import DEFAULT_URL, URL


def server_url() -> str:
    """The address where none is given."""
    return os.environ.get(URL) or DEFAULT_URL


def url_help(of: str) -> str:
    return f"{of} [default: {URL}, or {DEFAULT_URL}]"


def url_option(*names: str, of: str = "Address of the server.") -> Any:
    """Not an environment variable of typer's: that would outrank an address that is given before a subcommand."""
    return typer.Option(*names, metavar="URL", default_factory=server_url, show_default=False, help=url_help(of))


Url = Annotated[str, url_option("--url")]
