"""What cores ask for, performed in one place for both simulated worlds: the handlers are each world's.

An effect without a handler is done at once and takes no time, such as mapping pages where only time counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from aegis.core.decision import Decision
from aegis.core.effects import (
    AbandonLoad,
    CopyBlocks,
    Effect,
    EndRun,
    LoadWeights,
    Run,
    Send,
    WipePages,
)
from aegis.core.ids import InstanceId
from aegis.core.messages import Submit, ToInstance
from proxy.routing.events import Deliver, Ended, Event, ModelMoved, To
from proxy.routing.router import Router


class InstanceEffects:
    """Those of a prefill or decode core. `others` are the handlers of effects that one world alone has."""

    __slots__ = ("_handlers",)

    def __init__(
        self,
        *,
        send: Callable[[Send], None],
        run: Callable[[Run], None],
        end_run: Callable[[EndRun], None],
        load: Callable[[LoadWeights], None],
        abandon: Callable[[AbandonLoad], None],
        copy: Callable[[CopyBlocks], None],
        wipe: Callable[[WipePages], None],
        others: Mapping[type, Callable[[Any], None]],
    ) -> None:
        self._handlers: dict[type, Callable[[Any], None]] = {
            Send: send,
            Run: run,
            EndRun: end_run,
            LoadWeights: load,
            AbandonLoad: abandon,
            CopyBlocks: copy,
            WipePages: wipe,
            **others,
        }

    def perform(self, effects: Iterable[Effect]) -> None:
        """Performs the effects in their order."""
        for effect in effects:
            handler = self._handlers.get(type(effect))
            if handler:
                handler(effect)


class Kept(Protocol):
    """What is kept of earlier prompts."""

    def looked_up(self, submit: Submit) -> Submit:
        """The message with the kept KV of its prompt."""
        ...


class RouterEffects:
    """Those of the router, which is told of events here. With a `host` each new prompt is looked up in what the host
    has kept of earlier ones."""

    __slots__ = ("_decided", "_deliver", "_ended", "_host", "_moved", "_router", "_send")

    def __init__(
        self,
        router: Router,
        host: Kept | None,
        *,
        send: Callable[[InstanceId, ToInstance], None],
        ended: Callable[[Ended], None],
        deliver: Callable[[Deliver], None] | None = None,
        decided: Callable[[Decision], None] | None = None,
        moved: Callable[[ModelMoved], None] | None = None,
    ) -> None:
        self._router = router
        self._host = host
        self._send = send
        self._ended = ended
        self._deliver = deliver
        self._decided = decided
        self._moved = moved

    def tell(self, event: Event, now_ns: int) -> None:
        """What the router decides is done, in order."""
        for effect in self._router.on(event, now_ns):
            if type(effect) is To:
                message = effect.message
                if self._host and type(message) is Submit:
                    message = self._host.looked_up(message)
                self._send(effect.instance, message)
            elif type(effect) is Ended:
                self._ended(effect)
            elif type(effect) is Deliver:
                if self._deliver:
                    self._deliver(effect)
            elif type(effect) is Decision and self._decided:
                self._decided(effect)
            elif type(effect) is ModelMoved and self._moved:
                self._moved(effect)
