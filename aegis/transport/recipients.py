"""Who is to know what an instance says: the node of memory, models and its life, a proxy of its own requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

from aegis.core.ids import ProxyId, proxy_of
from aegis.core.messages import (
    Broken,
    GaveUp,
    KvReleased,
    Phase,
    Prefilled,
    PromptLogprobs,
    Reused,
    Started,
    StepsTook,
    SwitchDone,
    Tokens,
)

T = TypeVar("T")

_OF_ONE_REQUEST: frozenset[object] = frozenset(
    {Broken, GaveUp, KvReleased, Prefilled, PromptLogprobs, Reused, Started, Tokens}
)


def addressed(messages: Sequence[T], proxies: Iterable[ProxyId]) -> dict[ProxyId | None, list[T | Phase]]:
    """The messages of each, in order; None is the node. `proxies` are those that are told of every switch, and of how
    long steps take."""
    mail: defaultdict[ProxyId | None, list[T | Phase]] = defaultdict(list)
    for message in messages:
        if type(message) in _OF_ONE_REQUEST:
            mail[proxy_of(message.request)].append(message)  # type: ignore[attr-defined]
        elif isinstance(message, Phase):
            for proxy, part in _phases(message).items():
                mail[proxy].append(part)
        elif isinstance(message, SwitchDone):
            for somebody in (None, *proxies):
                mail[somebody].append(message)
        elif isinstance(message, StepsTook):
            for proxy in proxies:
                mail[proxy].append(message)
        else:
            mail[None].append(message)
    return mail


def _phases(phase: Phase) -> dict[ProxyId, Phase]:
    """A batch may have requests of several proxies."""
    requests = defaultdict(list)
    for request in phase.requests:
        requests[proxy_of(request)].append(request)
    return {proxy: Phase(tuple(own), phase.running) for proxy, own in requests.items()}
