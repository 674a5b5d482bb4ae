"""Both hops of loads over several devices' links, as one instance has them, and the shared words that they take."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.effects import PeerWords
from aegis.core.model import PEERS_MAX, PLACES
from aegis.device.image_relay import ImageRelay
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords
from aegis.device.shared_loads import SharedLoads

PEER_STREAMS = 2 + PEERS_MAX
"""Words of the device's that are its streams'."""

PEER_WORDS = 2 + PEERS_MAX * PLACES
"""Shared words that belong to nobody else, beside those."""


class PeerTransfers:
    """`words` has `PEER_WORDS` of the node's words `shared`, still 0."""

    __slots__ = ("loads", "relay", "words")

    def __init__(self, device: Device, shared: SharedWords, words: Sequence[int]) -> None:
        assert len(words) == PEER_WORDS
        load_word, relay_word, *rest = words
        requests = tuple([tuple(rest[at : at + PLACES]) for at in range(0, len(rest), PLACES)])
        self.loads = SharedLoads(device, shared, load_word, requests)
        self.relay = ImageRelay(device, shared, relay_word)
        self.words = PeerWords(requests, self.relay.staged)

    def close(self) -> None:
        """Ends the threads; before the device is closed."""
        self.loads.close()
        self.relay.close()
