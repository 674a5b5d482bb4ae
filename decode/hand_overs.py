"""Requests that go on elsewhere, and models whose requests come from elsewhere: a decode or mixed instance's part in a
move. docs/moves.md tells it as a whole.

A sequence is handed over as soon as no run is under way for it: (1) one whose prefill has not begun is let go, and one
whose prefill has begun is finished first; (2) KV that has not arrived from another instance yet stays there, and its
address is passed on; (3) KV on the device is moved to host slabs; (4) what lies in our host slabs stays there until
whoever adopts it says that nothing reads it any more, as KV of a prefill instance does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aegis.core.ids import InstanceId, MachineId, ModelId
from aegis.core.messages import (
    Adopt,
    BringIn,
    BroughtIn,
    FromInstance,
    HandedOver,
    HandOver,
    KvReleased,
    ReleaseKv,
    ReleaseProxy,
)
from aegis.core.request import KvHandle
from decode.eviction import Eviction
from decode.kv_swap import KvSwap
from decode.phases import Phases
from decode.sequences import DEVICE, HOST, Room, Sequence, Where
from decode.worklist import WorkList
from memory.balloon import PageRequestState
from memory.handed_kv import HandedKv
from memory.ledger import Ledger


@dataclass(frozen=True, slots=True)
class _Wanted:
    sequence: Sequence
    with_kv: bool


class HandOvers:
    """The sequences that one instance is to hand over, and the models whose requests are to come to it."""

    def __init__(
        self,
        instance: InstanceId,
        machine: MachineId,
        ledger: Ledger,
        kv: KvSwap,
        work: WorkList,
        eviction: Eviction,
        phases: Phases,
        send: Callable[[FromInstance], None],
        leave: Callable[[Sequence], None],
    ) -> None:
        """`leave` ends a sequence here, and frees what it still has."""
        self._instance = instance
        self._ledger = ledger
        self._kv = kv
        self._work = work
        self._eviction = eviction
        self._phases = phases
        self._send = send
        self._leave = leave
        self._wanted: list[_Wanted] = []
        self._handed = HandedKv(instance, machine, ledger.host)
        self._expected: list[ModelId] = []  # one entry per question
        self._tried: set[ModelId] = set()  # whose load was begun for that

    def __bool__(self) -> bool:
        return bool(self._wanted or self._expected)

    @property
    def handed(self) -> int:
        """Requests whose KV still lies in our host slabs."""
        return len(self._handed)

    def ask(self, event: HandOver, sequence: Sequence | None) -> None:
        """A sequence that is not here any more has ended, or was given up, which the proxy learns of."""
        if sequence and sequence.job.attempt == event.attempt:
            sequence.leaving = True
            self._wanted.append(_Wanted(sequence, event.with_kv))

    def on_message(self, event: BringIn | ReleaseKv | ReleaseProxy) -> None:
        match event:
            case BringIn(model):
                self._expected.append(model)
                self._eviction.expected.add(model)
            case ReleaseKv(request, attempt):
                self._handed.release(request, attempt)
            case ReleaseProxy(proxy):
                self._handed.release_all(proxy)

    def advance(self) -> None:
        """Hands over what can be."""
        self._wanted = [wanted for wanted in self._wanted if not self._done(wanted)]

    def bring_in(self) -> None:
        """Brings in expected models, as long as no turn here waits for what it needs itself."""
        if self._expected and (self._work.stepping or not self._work.batches):
            self._expected = [model for model in self._expected if not self._answered(model)]
            self._eviction.expected.intersection_update(self._expected)
            self._tried.intersection_update(self._expected)

    def take_back(self, sequence: Sequence) -> None:
        """KV that was handed over from here, and that nobody else has adopted, is the sequence's own again. No
        `KvReleased` is sent: that could be taken for one about the next time that it is handed over."""
        handle = sequence.handle
        if handle and handle.owner == self._instance:
            handed = self._handed.take_back(sequence.job)
            sequence.host, sequence.saved, sequence.handle = handed.blocks, handed.ready, None

    def refuse(self, event: Adopt) -> None:
        """The request is not adopted: its KV is released."""
        request, attempt = event.job.request, event.job.attempt
        if event.kv.owner == self._instance:
            self._handed.release(request, attempt)
        else:
            self._send(KvReleased(request, attempt, event.kv))

    def load_failed(self, model: ModelId) -> None:
        """The next question begins a load again."""
        while model in self._expected:
            self._expected.remove(model)
            self._eviction.expected.discard(model)
            self._send(BroughtIn(model, there=False))
        self._tried.discard(model)

    # --- sequences ----------------------------------------------------------------------------------------------------

    def _done(self, wanted: _Wanted) -> bool:
        """Whether the sequence is not here any more."""
        sequence = wanted.sequence
        if sequence.dropped:
            return True
        if sequence in self._work.busy or _is_begun(sequence):
            return False
        if sequence.lacks or not wanted.with_kv:
            self._hand(sequence, None)
            return True
        if sequence.where is DEVICE and self._kv.put_away(sequence) is Room.NOW:
            self._hand(sequence, None)
            return True
        if sequence.where is not HOST:
            return False
        self._hand(sequence, sequence.handle or self._kept(sequence))
        return True

    def _kept(self, sequence: Sequence) -> KvHandle:
        """The address of its KV in our host slabs, which are not its own any more."""
        assert sequence.saved is not None
        host, sequence.host = sequence.host, ()
        return self._handed.hand(sequence.job, sequence.shape, host, sequence.cached, sequence.saved)

    def _hand(self, sequence: Sequence, kv: KvHandle | None) -> None:
        if kv:
            sequence.handle = None
        self._phases.stop((sequence,))
        self._leave(sequence)
        self._send(HandedOver(sequence.job.request, sequence.job.attempt, sequence.generated, kv))

    # --- models -------------------------------------------------------------------------------------------------------

    def _answered(self, model: ModelId) -> bool:
        weights, there = self._ledger.weights, False
        if model in self._ledger.specs:
            there = weights.is_resident(model)
            if not there and self._comes(model):
                return False
        self._send(BroughtIn(model, there))
        return True

    def _comes(self, model: ModelId) -> bool:
        """Whether it is on its way, or something is awaited after which it may be."""
        weights, ledger = self._ledger.weights, self._ledger
        if weights.is_loading(model):
            return not weights.is_abandoned(model)
        if model in self._tried:
            return False  # it had to make way
        if self._eviction.load(model, spare=ledger.budget.pages_per_slab if self._work.batches else 0, prefetch=True):
            self._tried.add(model)
            return True
        return ledger.balloon.request_state is PageRequestState.ASKED or bool(ledger.device.moving)


def _is_begun(sequence: Sequence) -> bool:
    """Whether a part of its prefill has been run, and a part has not."""
    return sequence.where is not Where.NOWHERE and 0 < sequence.lacks < sequence.cached - sequence.reused
