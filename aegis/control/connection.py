"""A client of the broker that connects again and again, its subscriptions with it.

`aiomqtt`, MQTT 3.1.1. Sessions are clean: a client that comes back publishes its state anew, and a broker that has
forgotten everything is as good as one that has not.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence

import aiomqtt
from aiomqtt.exceptions import MqttConnectError
from msgspec import Struct

from aegis.config.mqtt_address import Address
from aegis.control.messages import encode
from aegis.core.errors import UserError
from aegis.process.tasks import cancelled
from aegis.telemetry.logs import log

KEEPALIVE_S = 2
"""After one to one and a half times this the broker publishes the last will of a client on a host that is gone."""

_ANSWER_S = 5.0  # that the broker has for each answer
_BACKOFF_S, _BACKOFF_MAX_S = 0.1, 1.0
_UNAUTHORISED = (4, 5, 134, 135)  # as MQTT 3.1.1 numbers it, and as the library does in terms of version 5

_logger = logging.getLogger(__name__)
_library = logging.getLogger("mqtt.aegis")  # says of every lost connection what is said here
_library.setLevel(logging.CRITICAL)


class Connection:
    """A connection of one event loop. `on_message` is called with topic and payload, `on_up` each time when it is
    connected and has subscribed."""

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        subscriptions: Sequence[str],
        on_message: Callable[[str, bytes], None],
        on_up: Callable[[], None] = lambda: None,
        will: tuple[str, Struct] | None = None,
        log_level: int = logging.WARNING,
    ) -> None:
        """`name` is unique among the clients of the broker; `will` is retained in its topic. That the broker is away,
        or back, is told at `log_level`."""
        self._address = address
        self._name = name
        self._subscriptions = subscriptions
        self._on_message = on_message
        self._on_up = on_up
        self._log_level = log_level
        self._will = aiomqtt.Will(will[0], encode(will[1]), qos=1, retain=True) if will else None
        self._client: aiomqtt.Client | None = None
        self._serving: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[None] | None = None  # callers that wait for the first connection

    @property
    def is_up(self) -> bool:
        return self._client is not None

    async def open(self) -> None:
        """Connects, and stays so until `close`. Raises UserError if the broker cannot be reached or refuses."""
        self._opened = asyncio.get_running_loop().create_future()
        self.keep()
        try:
            await self._opened
        except UserError:
            await self.close()
            raise

    def keep(self) -> None:
        """Like `open`, of a broker that is known to be right and perhaps not there yet: returns at once."""
        self._serving = asyncio.create_task(self._serve())

    async def publish(self, topic: str, payload: Struct, *, qos: int = 0, retain: bool = False) -> bool:
        """Whether it was handed to the broker, at QoS 1 and 2 whether it has it; false without a connection. What
        cannot be published is told in the log and counts as handed over: nobody is to try it again."""
        client = self._client
        if client is None:
            return False
        try:
            await client.publish(topic, encode(payload), qos=qos, retain=retain, timeout=_ANSWER_S)
        except aiomqtt.MqttError:
            return False
        except ValueError as error:
            _log_unpublishable(topic, error)
        return True

    async def clear(self, topic: str) -> None:
        """Nothing is retained there any more, if the broker can be reached."""
        client = self._client
        if client is None:
            return
        try:
            await client.publish(topic, b"", qos=1, retain=True, timeout=_ANSWER_S)
        except aiomqtt.MqttError:
            pass
        except ValueError as error:
            _log_unpublishable(topic, error)

    async def close(self) -> None:
        """Disconnects in an orderly way, so that the broker does not publish the last will."""
        if self._serving:
            await cancelled(self._serving)

    # ------------------------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Until it is cancelled."""
        pause_s, away, seen = _BACKOFF_S, False, self._opened is not None  # one that is not there yet is no news
        while True:
            try:
                async with self._new_client() as client:
                    await self._subscribe(client)
                    if away:
                        log(_logger, self._log_level, "broker is back", {"broker": str(self._address)})
                    pause_s, away, seen = _BACKOFF_S, False, True
                    await self._listen(client)
            except (aiomqtt.MqttError, OSError, UnicodeError) as error:  # the last: no host can have such a name
                why = _complaint(self._address, error)
                if self._opened and not self._opened.done():
                    self._opened.set_exception(UserError(why))
                elif seen and not away:
                    log(_logger, self._log_level, "broker is away", {"why": why})
                away = seen
            finally:
                self._client = None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    async def _subscribe(self, client: aiomqtt.Client) -> None:
        if self._subscriptions:
            await client.subscribe([(topic, 1) for topic in self._subscriptions])
        self._client = client
        if self._opened and not self._opened.done():
            self._opened.set_result(None)
        self._on_up()

    async def _listen(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            if isinstance(message.payload, bytes):
                self._take(message.topic.value, message.payload)

    def _take(self, topic: str, payload: bytes) -> None:
        try:
            self._on_message(topic, payload)
        except Exception:  # noqa: BLE001 - a bug of ours costs this message, not those that come
            log(_logger, logging.ERROR, "message not handled, for a bug", {"topic": topic}, exc_info=True)

    def _new_client(self) -> aiomqtt.Client:
        address = self._address
        return aiomqtt.Client(
            address.path or address.host,
            address.port or 1883,  # which a socket of a path has no use for
            username=address.user,
            password=address.password,
            identifier=self._name,
            will=self._will,
            transport="unix" if address.path else "tcp",
            timeout=_ANSWER_S,
            keepalive=KEEPALIVE_S,
            logger=_library,
            tls_context=ssl.create_default_context(cafile=address.ca_file) if address.tls else None,
        )


def _log_unpublishable(topic: str, error: ValueError) -> None:
    """Logs what cannot be published because its topic has wildcards or is too long: names from elsewhere may make it
    so."""
    log(_logger, logging.WARNING, "nothing that can be published", {"topic": topic, "why": str(error)})


def _complaint(address: Address, error: Exception) -> str:
    """One line, without the password."""
    if isinstance(error, MqttConnectError):
        code = getattr(error.rc, "value", error.rc)
        why = "refuses this user and password" if code in _UNAUTHORISED else f"refuses the connection ({error.rc})"
        return f"the MQTT broker at {address} {why}; see --mqtt"
    why = str(error).removeprefix("[Errno ").partition("] ")[2] or str(error)
    return f"no MQTT broker answers at {address} ({why}); see --mqtt"
