"""Brings about what a plan says, and what users and other processes do to memory meanwhile."""

from __future__ import annotations

from functools import partial

from aegis.core.ids import InstanceId
from aegis.core.messages import FromInstance
from aegis.sim.faults.instance import FaultyInstance
from aegis.sim.faults.noisy_neighbour import NoisyNeighbour
from aegis.sim.faults.plan import Crash, Move, NeighbourStay, Spell
from aegis.sim.faults.world import World
from memory.page_arbiter import Settled
from proxy.routing.events import MoveModel


class FaultInjector:
    """All that happens to a world beside its requests."""

    def __init__(self, world: World) -> None:
        self._world = world

    def schedule(self, span_ns: int) -> None:
        """Commands within `span_ns`, the rest when the plan has it."""
        plan, after = self._world.scenario.plan, self._world.state.after
        for command in range(self._world.scenario.moves):
            after(self._world.state.draw.below(span_ns), partial(self._command, command))
        for crash in plan.crashes:
            after(crash.at_ns, partial(self._crash, crash))
        for spell in plan.pauses:
            after(spell.at_ns, partial(self._pause, spell))
        for spell in plan.delays:
            after(spell.at_ns, partial(self._delay, spell))
        for spell in plan.slow:
            after(spell.at_ns, partial(self._slow, spell))
        for move in plan.moves:
            after(move.at_ns, partial(self._move, move))
        for number, neighbour in enumerate(plan.neighbours):
            after(neighbour.at_ns, partial(self._move_in, InstanceId(f"neighbour-{number}"), neighbour))

    def _move(self, move: Move) -> None:
        models, names = sorted(self._world.models.specs), self._world.up()
        targets = [name for name in names if not name.startswith("prefill")]
        if models and targets:
            model, target = models[move.victim % len(models)], targets[move.target % len(targets)]
            source = None if move.source is None else names[move.source % len(names)]
            self._world.state.note(f"{model} is to move to {target} from {source or 'everywhere'}")
            self._world.moves += 1
            self._world.inform(MoveModel(model, target, source))

    def _victim(self, number: int) -> FaultyInstance | None:
        names = self._world.up()
        return self._world.instances[names[number % len(names)]] if names else None

    def _crash(self, crash: Crash) -> None:
        if instance := self._victim(crash.victim):
            self._world.crash(
                instance.instance,
                unnoticed_ns=crash.unnoticed_ns,
                absent_ns=crash.absent_ns,
                for_good=crash.for_good,
            )

    def _pause(self, spell: Spell) -> None:
        if instance := self._victim(spell.victim):
            self._world.state.note(f"{instance.instance} stands still for {spell.for_ns} ns")
            instance.stop(spell.for_ns)

    def _delay(self, spell: Spell) -> None:
        links = self._world.state.links()
        if links:
            link = links[spell.victim % len(links)]
            self._world.state.note(f"messages '{link}' take {spell.by} ns longer for {spell.for_ns} ns")
            self._world.state.delay(link, spell.for_ns, spell.by)

    def _slow(self, spell: Spell) -> None:
        """Of two spells at once the later one counts."""
        if instance := self._victim(spell.victim):
            self._world.state.note(f"copies of {instance.instance} take {spell.by} times as long for {spell.for_ns} ns")
            usual = self._world.scenario.plan.slowness
            instance.slowness = usual * spell.by
            self._world.state.after(spell.for_ns, lambda: setattr(instance, "slowness", usual))

    def _command(self, command: int) -> None:
        """A user changes the limit of an instance while it serves, or trims it; again if commands are retried."""
        world, draw, scenario = self._world, self._world.state.draw, self._world.scenario
        commands = [command, scenario.moves + command][: 1 + scenario.plan.commands_twice]
        if not world.instances:
            world.settled.update({each: Settled(each, 0) for each in commands})
            return
        name = world.up()[draw.below(len(world.instances))]
        if draw.uniform() < 0.3:
            for each in commands:
                world.perform(world.arbiter.trim(name, command=each))
            return
        most = max(world.budget.least_pages(spec.manifest.image_bytes) for spec in scenario.specs)
        pages, patience_ns = most + draw.below(scenario.pages - most + 1), draw.below(60_000_000)
        for each in commands:
            world.perform(world.arbiter.set_limit(name, pages, command=each, patience_ns=patience_ns))

    # --- neighbours ---------------------------------------------------------------------------------------------------

    def _move_in(self, name: InstanceId, stay: NeighbourStay) -> None:
        world = self._world
        neighbour = NoisyNeighbour(world.state, name, self._say, refuses=stay.refuses)
        world.neighbours[name] = neighbour
        world.memory.join(name, world.arbiter)
        neighbour.begin(stay.pages * world.scenario.pages // 1000, stay.slabs * world.scenario.host_slabs // 1000)
        world.state.after(stay.for_ns, lambda: self._move_out(name))

    def _say(self, name: InstanceId, message: FromInstance) -> None:
        def arrive() -> None:
            if name in self._world.neighbours:
                self._world.hear(name, message)

        self._world.state.send(f"from {name}", arrive)

    def _move_out(self, name: InstanceId) -> None:
        self._world.neighbours.pop(name).alive = False
        self._world.forget(name, ())
