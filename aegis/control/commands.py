"""Commands that have come, so that each is done once and answered, however often it is sent.

Client and id identify a command. If it comes again while it is being done, its one reply answers both; if it comes
again later, it gets the same reply once more, which is what a client needs whose reply was lost.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from aegis.control.messages import PROTOCOL, UNREADABLE, ClusterOrder, Order, Reply, Sender
from aegis.control.topics import CLUSTER

REMEMBERED = 4096
"""Orders that are known again; the oldest are forgotten."""

_sender = msgspec.json.Decoder(Sender)
_order = msgspec.json.Decoder(Order)
_cluster_order = msgspec.json.Decoder(ClusterOrder)


class Unanswerable(Exception):
    """The command names no client that could get a reply; the message says what is wrong."""


def read(payload: bytes, instance: str) -> Order | ClusterOrder | tuple[str, Reply]:
    """The order, or its client and why it is refused. Raises Unanswerable."""
    try:
        sender = _sender.decode(payload)
    except UNREADABLE as error:
        raise Unanswerable(str(error)) from None
    if sender.protocol != PROTOCOL:
        why = f"this is protocol {PROTOCOL}, the order speaks {sender.protocol}; use the same version of aegis"
    else:
        try:
            return (_cluster_order if instance == CLUSTER else _order).decode(payload)
        except UNREADABLE as error:
            why = f"no such order: {error}"
    return sender.client, Reply(id=sender.id, instance=instance, done=False, message=why)


class CommandLog:
    """The commands that one launcher has got."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._replies: OrderedDict[tuple[str, str, str], Reply | None] = OrderedDict()  # None: being done

    def begin(self, instance: str, order: Order | ClusterOrder) -> bool | Reply:
        """Whether it is to be done now; the reply where it has been."""
        key = (instance, order.client, order.id)
        if key in self._replies:
            return self._replies[key] or False
        self._replies[key] = None
        for old in [key for key in list(self._replies)[: -self._remembered] if self._replies[key]]:
            del self._replies[old]
        return True

    def end(self, instance: str, order: Order | ClusterOrder, reply: Reply) -> None:
        self._replies[(instance, order.client, order.id)] = reply
