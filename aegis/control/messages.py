"""The messages on the bus (MQTT), as JSON. `configs/bus.schema.json` is derived from these.

The embedded broker speaks MQTT 3.1.1, so the payload holds what version 5 has properties for.
"""

from __future__ import annotations

from enum import StrEnum
from inspect import cleandoc
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from aegis.control.topics import CLIENT_PATTERN
from aegis.core.ids import MODEL_NAME_PATTERN
from aegis.core.role import Role

PROTOCOL = 1
"""The number of the protocol. It is raised whenever a peer with the number before would misunderstand. Other numbers
are refused."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Raised by decoding what is no such message; the last where it is nested deeply."""

ADDED_MAX = 64
"""Instances by one order."""

ModelName = Annotated[str, Meta(pattern=f"^{MODEL_NAME_PATTERN}$")]
ClientName = Annotated[str, Meta(pattern=f"^{CLIENT_PATTERN}$")]
CorrelationId = Annotated[str, Meta(min_length=1, max_length=128)]


class Phase(StrEnum):
    """The phase in the life of an instance, or of a cluster."""

    STARTING = "starting"
    UP = "up"
    STOPPED = "stopped"  # in order
    LOST = "lost"  # said by the broker: a last will


class Claim(Struct, frozen=True, kw_only=True):
    """The owner of the prefix, retained in `{prefix}/cluster`. Last will: the same, lost."""

    cluster: str
    node: str
    pid: int
    phase: Phase
    protocol: int = PROTOCOL


class Beat(Struct, frozen=True, kw_only=True):
    """In `{prefix}/cluster/beat`, from the launcher: the cluster is there, and the broker delivers."""

    cluster: str
    node: str
    pid: int
    number: int
    protocol: int = PROTOCOL


class InstanceState(Struct, frozen=True, kw_only=True):
    """Retained in `…/state`. Last will: lost, with nothing but who it was. A new incarnation is a new process."""

    cluster: str
    instance: str
    incarnation: int
    phase: Phase
    role: Role
    node: str
    pid: int
    running_model: str | None = None
    resident: tuple[str, ...] = ()  # models whose weights are on its device
    queued: int = 0  # requests
    running: int = 0
    protocol: int = PROTOCOL


class Heartbeat(Struct, frozen=True, kw_only=True):
    """In `…/heartbeat`, twice a second once the instance is up. `progress` grows while its main loop gets on, and what
    runs on its lanes. `lanes_ns`, where its device is divided: how long the run on each lane has lasted, 0 if none
    does."""

    cluster: str
    instance: str
    incarnation: int
    number: int
    progress: int
    lanes_ns: tuple[int, ...] = ()
    protocol: int = PROTOCOL


# --- commands -------------------------------------------------------------------------------------------------------


class Drain(Struct, frozen=True, tag_field="do", tag="drain"):
    """Move its requests elsewhere, which goes on with their streams, and end its process until `resume`."""


class Resume(Struct, frozen=True, tag_field="do", tag="resume"):
    """Start an instance again that was drained."""


class Pin(Struct, frozen=True, tag_field="do", tag="pin"):
    """Keep the model's weights in the model cache of the instance's node, whatever others need."""

    model: ModelName


class Unpin(Struct, frozen=True, tag_field="do", tag="unpin"):
    """The model's weights may leave the model cache again."""

    model: ModelName


class LoadModel(Struct, frozen=True, tag_field="do", tag="load"):
    """Bring the model's weights into the model cache of the instance's node; done when they are there."""

    model: ModelName
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class SetRole(Struct, frozen=True, tag_field="do", tag="set_role"):
    """Start the instance anew as this; its requests go on elsewhere. Done when it serves."""

    role: Role
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 120.0


class SetLimit(Struct, frozen=True, tag_field="do", tag="set_limit"):
    """The device memory that the instance may hold; done when it holds no more than that, or nothing is changed."""

    nbytes: Annotated[int, Meta(gt=0)]
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 30.0


class MoveModel(Struct, frozen=True, tag_field="do", tag="move"):
    """The model's requests go on at this instance, and those that come go there; done when none is left elsewhere."""

    model: ModelName
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class Remove(Struct, frozen=True, tag_field="do", tag="remove"):
    """Like `drain`, and forget it: there will be no instance of that name any more."""


class Add(Struct, frozen=True, tag_field="do", tag="add"):
    """To the cluster: start `count` more instances of that role, under new names. Done when they serve; an instance
    that does not come up leaves nothing behind. No role: mixed, if all are."""

    role: Role | None = None
    count: Annotated[int, Meta(ge=1, le=ADDED_MAX)] = 1
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 120.0


Command = Drain | Resume | Pin | Unpin | LoadModel | SetRole | SetLimit | MoveModel | Remove


class Order(Struct, frozen=True, kw_only=True):
    """To `…/commands`, at QoS 1 or 2. The reply to `client` bears the same `id`; an order whose `id` the client has
    used before is not done again."""

    id: CorrelationId
    client: ClientName
    command: Command
    protocol: int = PROTOCOL


class ClusterOrder(Struct, frozen=True, kw_only=True):
    """To `cluster/commands`; like `Order`."""

    id: CorrelationId
    client: ClientName
    command: Add
    protocol: int = PROTOCOL


class Reply(Struct, frozen=True, kw_only=True):
    """To `…/replies/{client}`. `message` says in one line what was done, or why not. The cluster's is no instance's."""

    id: str
    instance: str
    done: bool
    message: str
    protocol: int = PROTOCOL


class Sender(Struct, frozen=True):
    """The part of a command that is needed to refuse it, however wrong the rest is."""

    id: CorrelationId
    client: ClientName
    protocol: int = PROTOCOL


PAYLOADS = (Claim, Beat, InstanceState, Heartbeat, Order, ClusterOrder, Reply)


def encode(payload: Struct) -> bytes:
    return msgspec.json.encode(payload)


def json_schema() -> dict[str, Any]:
    """JSON Schema of every payload, by name under `$defs`."""
    schemas, components = msgspec.json.schema_components(PAYLOADS, ref_template="#/$defs/{name}")
    for component in components.values():
        if "description" in component:  # a docstring, of which not every version takes the indentation
            component["description"] = cleandoc(component["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "aegis over MQTT",
        "anyOf": list(schemas),
        "$defs": components,
    }
