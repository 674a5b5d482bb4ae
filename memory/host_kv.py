"""A machine's host memory for KV: slabs leased to instances, and kept KV in slabs that no instance needs."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import (
    CheckPrefix,
    ForgetPeer,
    GrantSlabs,
    KeepKv,
    KvKept,
    NeedSlabs,
    OfferKv,
    PeerForgotten,
    PrefixChecked,
    ReturnSlabs,
    Submit,
)
from aegis.core.model import ModelSpec
from aegis.core.request import Job, KeptPrefix
from memory.kept_prefixes import Counters, KeptPrefixes
from memory.slab_leases import SlabLeases

ForHost = NeedSlabs | ReturnSlabs | PeerForgotten | OfferKv | KvKept | CheckPrefix

Answers = list[tuple[InstanceId, GrantSlabs | ForgetPeer | KeepKv | PrefixChecked]]


def with_prefix(submit: Submit, kept: KeptPrefix | None) -> Submit:
    return replace(submit, job=replace(submit.job, kept=kept)) if kept else submit


class HostKv:
    """`capacity` slabs of `slab_bytes`. `spec_of` knows the models whose KV may be kept; where no KV is kept, it knows
    none. `counters` count kept KV, and may be shared with other machines."""

    __slots__ = ("_spec_of", "kept", "leases")

    def __init__(
        self,
        capacity: int,
        slab_bytes: int,
        spec_of: Callable[[ModelId], ModelSpec | None],
        counters: Counters | None = None,
    ) -> None:
        self.kept = KeptPrefixes(slab_bytes, counters)
        self.leases = SlabLeases(capacity, self.kept)
        self._spec_of = spec_of

    def prefix_of(self, job: Job) -> KeptPrefix | None:
        """The kept KV of the prompt that the job prefills. A prompt whose logprobs are requested has to be run."""
        spec = self._spec_of(job.served)
        if spec is None or job.is_whole:
            return None
        manifest = spec.manifest
        return self.kept.find(manifest.fingerprint, manifest.kv, (*job.prompt, *job.sent))

    def looked_up(self, submit: Submit) -> Submit:
        """The message with the kept KV of its prompt."""
        return with_prefix(submit, self.prefix_of(submit.job))

    def join(self, instance: InstanceId) -> None:
        self.leases.join(instance)

    def lost(self, instance: InstanceId, words: tuple[int, ...]) -> Answers:
        self.kept.lost(instance)
        return [*self.leases.lost(instance, words)]

    def leave(self, reader: InstanceId) -> Answers:
        """An instance of another machine is gone; it only read from here."""
        return [*self.leases.leave(reader)]

    def on_message(self, instance: InstanceId, message: ForHost) -> Answers:
        match message:
            case NeedSlabs(count):
                return [*self.leases.ask(instance, count)]
            case ReturnSlabs(slabs):
                return [*self.leases.give_back(instance, slabs)]
            case PeerForgotten(peer):
                return [*self.leases.forgotten(instance, peer)]
            case OfferKv():
                return [(instance, self._offered(instance, message))]
            case KvKept(offer, done):
                self.kept.ended(instance, offer, done=done)
                return [*self.leases.serve()]
            case CheckPrefix(request, attempt, entry):
                return [(instance, PrefixChecked(request, attempt, self.kept.intact(entry)))]

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        self.leases.check()
        self.kept.check()

    def _offered(self, writer: InstanceId, message: OfferKv) -> KeepKv:
        spec = self._spec_of(message.model)
        if spec is None:
            return KeepKv(message.offer, 0, ())
        manifest = spec.manifest
        return self.kept.offer(writer, message, manifest.fingerprint, manifest.kv, self.leases.spare)
