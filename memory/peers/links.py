"""Who carries for whom: the node's account of the links of its devices (Prism §5.3, parallel loading).

An instance whose demanded load has begun asks for links; every device whose link is idle is asked to carry a part, up
to `most` of them, by one of its instances. Idle is a link over which neither a demanded load of its own instances goes
nor a part of another one's. What an instance knows better, it answers: one that cannot carry says at once that it is
over. A load waits for nobody, so nothing here has a deadline.

Sans-I/O: every method returns messages. Laws: (N1) of each device one instance at most carries, and for another device;
(N2) no more than `most` carry for one load.
"""

from __future__ import annotations

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId
from aegis.core.messages import CarryBegan, CarryImage, CarryOver, LoadOver, NeedLinks, PeerReady
from aegis.core.model import PEERS_MAX
from aegis.core.request import EventHandle

ForLinks = NeedLinks | LoadOver | CarryBegan | CarryOver
LinkMessage = tuple[InstanceId, CarryImage | PeerReady]


class PeerLinks:
    """`most` peers carry for one load: more than the peer link takes would only be in each other's way."""

    __slots__ = ("_carrying", "_devices", "_loading", "_most", "_staged")

    def __init__(self, most: int) -> None:
        self._most = min(most, PEERS_MAX)
        self._devices: dict[InstanceId, str] = {}  # by the addresses of their memory
        self._loading: dict[InstanceId, dict[EventHandle, None]] = {}
        self._carrying: dict[InstanceId, tuple[InstanceId, EventHandle]] = {}
        self._staged: dict[InstanceId, int] = {}  # words of those that have carried

    def join(self, instance: InstanceId, address: str) -> None:
        """The instance is on the device whose memory is at `address`. Those that join reach each other's memory."""
        self._devices[instance] = address
        self._loading[instance] = {}

    def lost(self, instance: InstanceId) -> int | None:
        """It neither loads nor carries any more. Who carries for it finds that by itself. Who takes pieces from it has
        to, before its pages are anybody else's: the word by which it told of them is to be poisoned."""
        if instance not in self._devices:
            return None
        del self._devices[instance], self._loading[instance]
        self._carrying.pop(instance, None)
        return self._staged.pop(instance, None)

    def on_message(self, instance: InstanceId, message: ForLinks) -> list[LinkMessage]:
        if instance not in self._devices:
            return []
        match message:
            case NeedLinks():
                return self._ask(instance, message)
            case LoadOver(load):
                self._loading[instance].pop(load, None)
            case CarryBegan(target, load, peer, runs, staged):
                self._staged[instance] = staged
                if load in self._loading.get(target, ()):
                    ready = PeerReady(load, peer, instance, self._devices[instance], runs, staged)
                    return [(target, ready)]
            case CarryOver(target, load):
                if self._carrying.get(instance) == (target, load):
                    del self._carrying[instance]
        return []

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        carrying = [self._devices[peer] for peer in self._carrying]
        if len(set(carrying)) != len(carrying):
            raise LawBroken(f"N1: two instances of a device carry: {self._carrying}")
        for peer, (target, _) in self._carrying.items():
            if self._devices[peer] == self._devices.get(target):
                raise LawBroken(f"N1: {peer} carries for {target}, on the same device")
        carried = list(self._carrying.values())
        for load in carried:
            if carried.count(load) > self._most:
                raise LawBroken(f"N2: {carried.count(load)} carry for {load}, {self._most} may")

    def _ask(self, target: InstanceId, asked: NeedLinks) -> list[LinkMessage]:
        self._loading[target][asked.load] = None
        messages: list[LinkMessage] = []
        for peer in self._idle(target)[: self._most]:
            at = len(messages)
            self._carrying[peer] = (target, asked.load)
            messages.append((peer, CarryImage(target, asked.load, at, asked.nbytes, asked.cached, asked.requests[at])))
        return messages

    def _idle(self, target: InstanceId) -> list[InstanceId]:
        """One instance of each device with an idle link, those after the target first."""
        busy = {self._devices[each] for each, loads in self._loading.items() if loads}
        busy |= {self._devices[each] for each in self._carrying}
        free: dict[str, InstanceId] = {}
        for instance, device in sorted(self._devices.items()):
            if device not in busy:
                free.setdefault(device, instance)
        after = self._devices[target]
        return [free[device] for device in sorted(free, key=lambda device: (device < after, device))]
