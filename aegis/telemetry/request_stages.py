"""The life of a request as stages, one after another without a gap, from what its proxy sees of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo


class StageName(StrEnum):
    QUEUE = "queue"  # until its prefill begins; again where it has to be prefilled anew
    PREFILL = "prefill"
    HAND_OVER = "hand-over"  # its KV goes to another instance, until it decodes there
    DECODE = "decode"  # a turn of its batch
    PREEMPTED = "preempted"  # another model has the turn


@dataclass(frozen=True, slots=True)
class Stage:
    """`[start_ns, stop_ns)`; so many tokens came in it."""

    name: StageName
    start_ns: int
    stop_ns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended: `how` is "finished", "failed" or "cancelled"."""

    request: RequestId
    model: ModelId
    start_ns: int
    stop_ns: int
    prompt_tokens: int
    tokens: int
    on_time: int
    how: str
    stages: tuple[Stage, ...]


@dataclass(slots=True)
class _Life:
    model: ModelId
    slo: Slo
    arrival_ns: int
    prompt_tokens: int
    stage: StageName
    since_ns: int
    tokens: int = 0
    on_time: int = 0
    before: int = 0  # tokens that came in earlier stages
    stages: list[Stage] = field(default_factory=list)

    def enter(self, stage: StageName, now_ns: int) -> None:
        self.stages.append(Stage(self.stage, self.since_ns, now_ns, self.tokens - self.before))
        self.stage, self.since_ns, self.before = stage, now_ns, self.tokens


class RequestStages:
    """`ended` gets each request that has. Told like `Metrics`."""

    def __init__(self, ended: Callable[[EndedRequest], None]) -> None:
        self._ended = ended
        self._lives: dict[RequestId, _Life] = {}

    def arrived(self, request: RequestId, model: ModelId, slo: Slo, now_ns: int, *, prompt_tokens: int) -> None:
        self._lives[request] = _Life(model, slo, now_ns, prompt_tokens, StageName.QUEUE, now_ns)

    def started(self, request: RequestId, now_ns: int) -> None:
        """A prefill began."""
        self._enter(request, StageName.PREFILL, now_ns)

    def handed_over(self, request: RequestId, now_ns: int) -> None:
        """Another instance was told to fetch its KV and to go on."""
        self._enter(request, StageName.HAND_OVER, now_ns)

    def tokens(self, request: RequestId, now_ns: int, count: int) -> None:
        """`count` more tokens came, at once; those that a prefill ends with are its own."""
        life = self._lives[request]
        if life.stage is not StageName.PREFILL:
            self._enter(request, StageName.DECODE, now_ns)
        life.on_time += life.slo.on_time(life.arrival_ns, range(life.tokens, life.tokens + count), now_ns)
        life.tokens += count
        if life.stage is StageName.PREFILL:
            self._enter(request, StageName.DECODE, now_ns)

    def phase(self, requests: Iterable[RequestId], now_ns: int, *, running: bool) -> None:
        """Their batch got or lost its turn. Those that are being prefilled, or have ended, are left out."""
        for request in requests:
            life = self._lives.get(request)
            if life and life.stage not in (StageName.QUEUE, StageName.PREFILL):
                self._enter(request, StageName.DECODE if running else StageName.PREEMPTED, now_ns)

    def replayed(self, request: RequestId, now_ns: int) -> None:
        """The request waits to be prefilled again, with the tokens that it has."""
        self._enter(request, StageName.QUEUE, now_ns)

    def end(self, request: RequestId, how: str, now_ns: int) -> None:
        life = self._lives.pop(request)
        life.enter(life.stage, now_ns)
        self._ended(
            EndedRequest(
                request,
                life.model,
                life.arrival_ns,
                now_ns,
                life.prompt_tokens,
                life.tokens,
                life.on_time,
                how,
                tuple(stage for stage in life.stages if stage.stop_ns > stage.start_ns),
            )
        )

    def _enter(self, request: RequestId, stage: StageName, now_ns: int) -> None:
        life = self._lives.get(request)
        if life and life.stage is not stage:
            life.enter(stage, now_ns)
