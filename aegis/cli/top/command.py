"""`aegis top`: the activity of a running server, in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from aegis.server_url import Url


def top(
    url: Url,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="Seconds between two updates.")] = 1.0,
) -> int:
    """Watch a running server: instances and the models they run, queues, tokens a second, memory.

    Keys: q quits, p pauses, s changes the order of the models. It asks for what the dashboard shows, with the admin
    key in AEGIS_ADMIN_KEY where the server has one.

    \b
    Examples:
      aegis top
      aegis top --url http://10.0.0.7:8000 --every 5
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("aegis top needs a terminal; programs read /metrics, or `aegis memory` and `aegis models list`")
    from aegis.cli.top.app import Top

    Top(AdminClient(url), url, every).run()
    return 0
