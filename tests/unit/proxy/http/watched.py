"""A market whose instances have done something, for those who watch it."""

from __future__ import annotations

from time import monotonic_ns

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.role import Role
from aegis.telemetry.history import History
from aegis.telemetry.live_view import LiveInstance, SeenUntil
from aegis.telemetry.memory_report import (
    DeviceReport,
    HostKvReport,
    ImageReport,
    InstanceReport,
    MemoryReport,
    ModelCacheReport,
    RangesReport,
    ShapeReport,
    SlabsReport,
    WeightsReport,
)
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from tests.unit.proxy.http.scripted import Script, ScriptedMarket, ScriptedModel, says, spec

MIB = 1 << 20
INSTANCES = [InstanceId("mixed-0"), InstanceId("mixed-1")]
WHY = "must begin in 3 ms (first token due in 9 ms)"
PERIOD_NS, TURN_NS = 400 * NS_PER_MS, 350 * NS_PER_MS


class WatchedMarket(ScriptedMarket):
    """`models` of them take turns on two instances, and did so for the last `past_s` seconds when it was made. Where
    devices are `divided`, a prompt of the next model runs beside each decode, on two fifths."""

    def __init__(self, models: int, script: Script | None = None, past_s: int = 20, *, divided: bool = False) -> None:
        names = [f"model-{number}" for number in range(models)]
        super().__init__({name: ScriptedModel(spec(name), script or says("hello")) for name in names})
        self.names = [ModelId(name) for name in names]
        self.past = History(spans=5000, records=1000, decisions=1000, token_times=False)
        self.memory = memory_of(self.names)
        self.turns = 0
        self.next_ns = monotonic_ns() - past_s * NS_PER_S
        self.broken = False
        self.divided = divided

    async def live(self, seen: SeenUntil) -> bytes:
        if self.broken:
            raise ConnectionError
        self.now_ns = monotonic_ns()
        while self.next_ns + PERIOD_NS < self.now_ns and self.names:
            self.turn(self.next_ns)
            self.next_ns += PERIOD_NS
        self.instances = [
            LiveInstance(name, Role.MIXED, 0, "up", self.names[0] if self.names else None, 2, 1) for name in INSTANCES
        ]
        return await super().live(seen)

    def turn(self, at_ns: int) -> None:
        for seat, instance in enumerate(INSTANCES):
            model = self.names[(self.turns + seat) % len(self.names)]
            what = f"{model} has the turn for 350 ms"
            request = RequestId(self.turns)
            self.past.decisions.add([Decision(at_ns, instance, DecisionKind.TURN, model, (request,), what, Why(WHY))])
            middle_ns, stop_ns = at_ns + 30 * NS_PER_MS, at_ns + TURN_NS
            self.past.spans.add(
                [
                    Span(instance, SpanKind.LOAD, model, at_ns, at_ns + 9 * NS_PER_MS, nbytes=6 * MIB),
                    Span(instance, SpanKind.SWITCH, model, at_ns, at_ns + NS_PER_MS, nbytes=6 * MIB),
                    Span(instance, SpanKind.PREFILL, model, at_ns + NS_PER_MS, middle_ns, 1, 1, 24),
                    Span(
                        instance,
                        SpanKind.DECODE,
                        model,
                        middle_ns,
                        stop_ns,
                        2,
                        32,
                        100,
                        share=600 if self.divided else 1000,
                    ),
                    Span(instance, SpanKind.SWAP_OUT, ModelId(""), stop_ns, stop_ns + NS_PER_MS, nbytes=MIB),
                ]
            )
            if self.divided:
                other = self.names[(self.turns + seat + 1) % len(self.names)]
                beside = Span(instance, SpanKind.PREFILL, other, middle_ns, stop_ns, 1, 1, 99, lane=1, share=400)
                self.past.spans.add([beside])
            self.past.records.add([Record(request, model, at_ns, 24, 33, "finished", 33, middle_ns, stop_ns)])
            self._count(model)
        self.turns += 1

    def _count(self, model: ModelId) -> None:
        before = self.tallies.get(model, Tally(model))
        number = before.finished + 1
        self.tallies[model] = Tally(
            model, number % 3, 1, number, number, 0, 0, 24 * number, 64 * number, 60 * number, 64 * number
        )


def memory_of(models: list[ModelId]) -> MemoryReport:
    few = models[:3]
    ranges = RangesReport(0, 0, 0, tuple(WeightsReport(model, "resident", 6 * MIB) for model in few))
    weights = 6 * MIB * len(few)
    instances = tuple(
        InstanceReport(name, weights + 8 * MIB, None, 0, False, weights, 6 * MIB, 2 * MIB, 0, ranges, {})
        for name in INSTANCES
    )
    shapes = tuple(ShapeReport((model,), 40 << 10, 2, 30, 4, 60, 2, 0.3) for model in few)
    device = DeviceReport(
        0, 256 * MIB, 256 * MIB - 2 * (weights + 8 * MIB), 0, 0, 2 * MIB, instances, SlabsReport(0, 0.0, shapes)
    )
    images = tuple(ImageReport(model, "cached", False, 6 * MIB) for model in models)
    host = HostKvReport(512 * MIB, 64 * MIB, 448 * MIB, 0, 0, SlabsReport(0, 0.0, shapes[:1]))
    return MemoryReport((device,), host, ModelCacheReport(512 * MIB, 6 * MIB * len(models), images, {}))
