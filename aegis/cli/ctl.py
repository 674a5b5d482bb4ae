"""`aegis ctl`: a command to a running cluster, or one of its instances, over MQTT, and the reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from aegis.cli.timeout import Timeout
from aegis.core.errors import UserError
from aegis.server_url import url_option

if TYPE_CHECKING:
    from aegis.control.messages import Add, Command
    from aegis.core.role import Role

ctl = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)

_Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its name, as `aegis memory` shows it.")]
_Model = Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `aegis models list` shows it.")]
_REPLY_S = 10.0  # beyond what the command itself may take


@ctl.callback(invoke_without_command=True)
def ctl_options(
    context: typer.Context,
    url: Annotated[str, url_option("--url", of="Server on this machine whose broker to use.")],
    mqtt: Annotated[
        str | None,
        typer.Option("--mqtt", metavar="URL", envvar="AEGIS_MQTT", help="The broker, in place of asking a server."),
    ] = None,
    mqtt_prefix: Annotated[
        str, typer.Option("--mqtt-prefix", metavar="PREFIX", envvar="AEGIS_MQTT_PREFIX", help="With --mqtt.")
    ] = "aegis",
    mqtt_ca: Annotated[
        str | None,
        typer.Option("--mqtt-ca", metavar="FILE", envvar="AEGIS_MQTT_CA_FILE", help="Certificates to trust it by."),
    ] = None,
    timeout: Timeout = 120.0,
) -> int:
    """Send a command to an instance, or the cluster, and print the reply. docs/bus.md describes the rest of the bus.

    \b
    Examples:
      aegis ctl drain mixed-1
      aegis ctl add --role decode
      aegis ctl --mqtt mqtts://me:secret@broker --mqtt-prefix lab role prefill-0 decode
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
    context.obj = {"url": url, "mqtt": mqtt, "prefix": mqtt_prefix, "ca_file": mqtt_ca, "timeout_s": timeout}
    return 0


@ctl.command()
def drain(context: typer.Context, instance: _Instance) -> int:
    """Move its requests elsewhere and end its process until it is resumed.

    \b
    Example:
      aegis ctl drain mixed-1
    """
    from aegis.control.messages import Drain

    return _send(context.obj, instance, Drain())


@ctl.command()
def resume(context: typer.Context, instance: _Instance) -> int:
    """Start an instance again that was drained.

    \b
    Example:
      aegis ctl resume mixed-1
    """
    from aegis.control.messages import Resume

    return _send(context.obj, instance, Resume())


@ctl.command()
def add(
    context: typer.Context,
    role: Annotated[
        str | None, typer.Option("--role", metavar="ROLE", help="prefill or decode; left out where all are mixed.")
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", help="Number of instances.")] = 1,
) -> int:
    """Start more instances, which serve like the others from then on.

    \b
    Example:
      aegis ctl add --role decode --count 2
    """
    from aegis.control.messages import ADDED_MAX, Add
    from aegis.control.topics import CLUSTER

    if not 1 <= count <= ADDED_MAX:
        raise UserError(f"--count: should be between 1 and {ADDED_MAX}, not {count}")
    return _send(context.obj, CLUSTER, Add(_role("--role", role) if role else None, count, context.obj["timeout_s"]))


@ctl.command()
def remove(context: typer.Context, instance: _Instance) -> int:
    """Drain an instance, unless it is drained, and forget it.

    \b
    Example:
      aegis ctl remove decode-2
    """
    from aegis.control.messages import Remove

    return _send(context.obj, instance, Remove())


@ctl.command()
def pin(context: typer.Context, instance: _Instance, model: _Model) -> int:
    """Keep a model's weights in the model cache of the instance's node.

    \b
    Example:
      aegis ctl pin mixed-0 llama
    """
    from aegis.control.messages import Pin

    return _send(context.obj, instance, Pin(model))


@ctl.command()
def unpin(context: typer.Context, instance: _Instance, model: _Model) -> int:
    """Let a model's weights leave the model cache again.

    \b
    Example:
      aegis ctl unpin mixed-0 llama
    """
    from aegis.control.messages import Unpin

    return _send(context.obj, instance, Unpin(model))


@ctl.command()
def load(context: typer.Context, instance: _Instance, model: _Model) -> int:
    """Bring a model's weights into the model cache of the instance's node.

    \b
    Example:
      aegis ctl load mixed-0 llama
    """
    from aegis.control.messages import LoadModel

    return _send(context.obj, instance, LoadModel(model, context.obj["timeout_s"]))


@ctl.command()
def move(context: typer.Context, model: _Model, instance: _Instance) -> int:
    """Move a model with its requests to an instance; their streams go on there.

    \b
    Example:
      aegis ctl move llama mixed-1
    """
    from aegis.control.messages import MoveModel

    return _send(context.obj, instance, MoveModel(model, context.obj["timeout_s"]))


@ctl.command()
def role(
    context: typer.Context,
    instance: _Instance,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill, decode or mixed.")],
) -> int:
    """Start the instance anew in another role; its requests go on elsewhere.

    \b
    Example:
      aegis ctl role prefill-1 decode
    """
    from aegis.control.messages import SetRole

    return _send(context.obj, instance, SetRole(_role("ROLE", role), context.obj["timeout_s"]))


@ctl.command()
def limit(
    context: typer.Context,
    instance: _Instance,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="Limit of its share of the device's memory.")],
) -> int:
    """Limit the device memory of an instance; done when it holds no more than that.

    \b
    Example:
      aegis ctl limit mixed-0 256MiB
    """
    from aegis.cli.size import parse_limit
    from aegis.control.messages import SetLimit

    return _send(context.obj, instance, SetLimit(parse_limit(size), context.obj["timeout_s"]))


def _role(what: str, name: str) -> Role:
    from aegis.core.role import Role

    if name not in list(Role):
        raise UserError(f"{what}: '{name}' is none of {', '.join(Role)}")
    return Role(name)


def _send(options: dict[str, Any], instance: str, command: Command | Add) -> int:
    """Prints the reply. Raises Refused with the cluster's own words if it refuses."""
    import asyncio
    import re

    from aegis.admin_client import AdminClient, Refused
    from aegis.config.mqtt_address import check_ca_file, parse
    from aegis.config.values import PREFIX_PATTERN
    from aegis.control.client import order

    url, prefix = options["mqtt"], options["prefix"]
    if url is None:
        place = AdminClient(options["url"]).node().bus
        if place is None:
            raise UserError("that server has no broker")
        url, prefix = place.url, place.prefix
    elif not re.fullmatch(PREFIX_PATTERN, prefix):
        raise UserError("--mqtt-prefix: should be of letters, digits and . _ -, with / between parts")
    try:
        address = parse(url, ca_file=options["ca_file"])
    except ValueError as error:
        raise UserError(f"--mqtt: {error}") from None
    if address.tls and options["ca_file"]:
        check_ca_file(options["ca_file"], "--mqtt-ca")
    timeout_s = options["timeout_s"] + _REPLY_S
    reply = asyncio.run(order(address, prefix, instance, command, timeout_s=timeout_s))
    if not reply.done:
        raise Refused(reply.message)
    print(reply.message)
    return 0
