"""One incarnation of an instance whose memory has contents: its core, and a shell that goes step by step.

What its core asks for is performed by the table that both worlds have (`InstanceEffects`). Unlike `SimInstance` it
takes an event for each step, for every step reads KV that is there, and it may stand still, fail or die in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from aegis.core.effects import (
    AcceptPages,
    Bind,
    DivideDevice,
    Effect,
    EndRun,
    MapKv,
    MapWeights,
    MoveBlocks,
    RevokePages,
    Row,
    Run,
    StreamName,
    Track,
    Unbind,
    UnmapKv,
    UnmapWeights,
    Untrack,
)
from aegis.core.events import InstanceEvent, StepFailed, Stepped, Tick
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import Cancel, FromInstance, Submit, ToInstance
from aegis.core.request import Token
from aegis.sim.compute_shares import WHOLE
from aegis.sim.effects import InstanceEffects
from aegis.sim.faults.content_copies import ContentCopies
from aegis.sim.faults.device_memory import DeviceMemory
from aegis.sim.faults.state import Action, FaultWorldState
from aegis.sim.faults.steps import Steps
from decode.core import DecodeCore
from memory.balloon import OWING_NS
from prefill.core import PrefillCore


class FaultyInstance:
    """`hear` receives what the instance says.

    A process that is stopped (SIGSTOP) does nothing meanwhile, nor do its copies; then it goes on where it was. Of one
    that is dead nothing more comes.
    """

    def __init__(
        self,
        state: FaultWorldState,
        instance: InstanceId,
        core: PrefillCore | DecodeCore,
        words: Mapping[StreamName, int],
        *,
        hear: Callable[[FaultyInstance, FromInstance], None],
        parted: bool,
        slowness: int,
    ) -> None:
        self.instance = instance
        self.core = core
        self.words = words
        self.alive = True
        self.slowness = slowness  # of its copies
        self.bound: set[ModelId] = set()
        self.tracked: set[RequestId] = set()
        self._state = state
        self._hear = hear
        self._memory = DeviceMemory(state, instance, lambda: core.ledger.specs, parted)
        self._inbox: list[InstanceEvent] = []
        self._shares: tuple[int, ...] = (WHOLE,)
        self._running: set[int] = set()  # lanes with a run under way
        self._ending: set[int] = set()  # lanes whose run is to end after its step
        self._heard = 0  # events so far, those of a run under way excepted
        self._stopped_until_ns = 0
        memory, copies = self._memory, ContentCopies(state, self, self._memory)
        self._effects = InstanceEffects(
            send=lambda effect: self.say(effect.message),
            run=self._run,
            end_run=self._end_run,
            load=copies.load,
            abandon=copies.abandon,
            copy=copies.copy,
            wipe=copies.wipe,
            others={
                Track: self._track,
                Untrack: self._untrack,
                Bind: self._bind,
                Unbind: self._unbind,
                MapKv: memory.map_kv,
                UnmapKv: memory.unmap_kv,
                MapWeights: memory.map_weights,
                UnmapWeights: memory.unmap_weights,
                MoveBlocks: self._move,
                DivideDevice: self._divide,
                AcceptPages: lambda effect: memory.accept(effect.runs),
                RevokePages: lambda effect: memory.revoke(effect.runs),
            },
        )

    # --- the process --------------------------------------------------------------------------------------------------

    def stop(self, for_ns: int) -> None:
        if self._state.now_ns >= self._stopped_until_ns:
            self._stopped_until_ns = self._state.now_ns + for_ns

    def receive(self, message: ToInstance) -> None:
        self._when_running(lambda: self.feed(message))

    def after(self, delay_ns: int, action: Action) -> None:
        """In this process."""
        self._state.after(delay_ns, lambda: self._when_running(action))

    def note(self, what: object) -> None:
        self._state.note(f"{self.instance} {what}")

    def _when_running(self, action: Action) -> None:
        if not self.alive:
            return
        left_ns = self._stopped_until_ns - self._state.now_ns
        if left_ns > 0:
            self._state.after(left_ns, lambda: self._when_running(action))
        else:
            action()

    # --- what its core is told ----------------------------------------------------------------------------------------

    @property
    def _hears(self) -> bool:
        """Whether a lane is free to look at messages; else that waits until a step is over, as at a real one."""
        return len(self._running) < len(self._shares)

    def feed(self, event: InstanceEvent) -> None:
        events = [event]
        if isinstance(event, Stepped | StepFailed):
            self._running.remove(event.lane)
            self._memory.run_ended(event.lane)
            events, self._inbox = [event, *self._inbox], []
        elif not self._hears:
            self._inbox.append(event)
            return
        while events and self._hears:
            self._tell_core(events.pop(0))
        self._inbox += events
        self._heard += 1
        if self.core.ledger.balloon.owes and not self._running:
            self.after(OWING_NS, partial(self._tick, self._heard))

    def listen(self, lane: int) -> bool:
        """Tells the core between two steps of the lane what is new; whether that ends the run there."""
        while self._inbox and lane not in self._ending:
            self._tell_core(self._inbox.pop(0))
        return lane in self._ending

    def _tell_core(self, event: InstanceEvent) -> None:
        if isinstance(event, Submit) and event.job.kept:
            self._memory.may_read(event.job, event.job.kept)
        elif isinstance(event, Cancel):
            self._memory.read_no_more(event.request)
        effects: Sequence[Effect] = self.core.on(event, self._state.now_ns)
        first = next((at for at, effect in enumerate(effects) if isinstance(effect, Run)), len(effects))
        assert all(isinstance(effect, Run | EndRun) for effect in effects[first:]), "runs are not the last"
        self._effects.perform(effects)
        self.core.ledger.check()

    def _tick(self, heard: int) -> None:
        """Sends a tick to a core that owes pages and has got no other event since."""
        if heard == self._heard:
            self.feed(Tick())

    # --- what its core asks for ---------------------------------------------------------------------------------------

    def say(self, message: FromInstance) -> None:
        self.note(message)
        self._hear(self, message)

    def step(self, model: ModelId, rows: Sequence[Row]) -> list[Token | None]:
        return self._memory.step(model, rows)

    def _run(self, run: Run) -> None:
        self.note(run)
        assert run.lane < len(self._shares) and run.lane not in self._running, "two runs on a lane, or no such lane"
        self._running.add(run.lane)
        self._ending.discard(run.lane)
        self._memory.run_begins(run)
        fails = self._state.draw.uniform() < self._state.failing_share
        self.tracked.update([row.job.request for row in run.prompts])
        Steps(self, self._state, run, fails=fails).step()

    def _end_run(self, effect: EndRun) -> None:
        self._ending.add(effect.lane)

    def _divide(self, effect: DivideDevice) -> None:
        self.note(effect)
        assert not self._running, "divided while something runs"
        assert sum(effect.shares) == WHOLE and effect.shares != self._shares
        self._shares = effect.shares

    def _track(self, effect: Track) -> None:
        self.tracked.add(effect.job.request)

    def _untrack(self, effect: Untrack) -> None:
        self.tracked.discard(effect.request)
        self._memory.read_no_more(effect.request)

    def _bind(self, effect: Bind) -> None:
        assert effect.spec.model not in self.bound
        self.bound.add(effect.spec.model)

    def _unbind(self, effect: Unbind) -> None:
        assert not self._memory.weights_mapped(effect.model), f"{effect.model} is unbound while it is mapped"
        self.bound.remove(effect.model)

    def _move(self, effect: MoveBlocks) -> None:
        assert not self._running
        self._memory.move(effect)
