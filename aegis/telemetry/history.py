"""The recent past of a server: what its instances did, what was decided, and what became of its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aegis.core.decision import Decision
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.telemetry.records import Record
from aegis.telemetry.ring import Ring
from aegis.telemetry.spans import Span


@dataclass(slots=True)
class _Life:
    """A request that has not ended."""

    model: ModelId
    slo: Slo
    arrival_ns: int
    input_tokens: int
    output_tokens: int
    tokens: int = 0
    on_time: int = 0
    first_ns: int | None = None
    last_ns: int | None = None
    times_ns: list[int] = field(default_factory=list)


class RequestLog:
    """Keeps what becomes of requests. `ended` gets the record of each that has ended. `token_times`: keep when each
    token came, eight bytes and an object for every one."""

    def __init__(self, ended: Callable[[Record], None], *, token_times: bool) -> None:
        self._ended = ended
        self._token_times = token_times
        self._lives: dict[RequestId, _Life] = {}

    def arrived(
        self, request: RequestId, model: ModelId, slo: Slo, now_ns: int, *, prompt_tokens: int, max_tokens: int
    ) -> None:
        self._lives[request] = _Life(model, slo, now_ns, prompt_tokens, max_tokens)

    def tokens(self, request: RequestId, now_ns: int, count: int) -> None:
        """`count` more tokens came, at once."""
        life = self._lives[request]
        if life.first_ns is None:
            life.first_ns = now_ns
        life.last_ns = now_ns
        life.on_time += life.slo.on_time(life.arrival_ns, range(life.tokens, life.tokens + count), now_ns)
        life.tokens += count
        if self._token_times:
            life.times_ns += [now_ns] * count

    def end(self, request: RequestId, how: str) -> None:
        """`how`: as in `Record.ended`."""
        life = self._lives.pop(request)
        self._ended(
            Record(
                request=request,
                model=life.model,
                arrival_ns=life.arrival_ns,
                input_tokens=life.input_tokens,
                output_tokens=life.output_tokens,
                ended=how,
                on_time=life.on_time,
                first_ns=life.first_ns,
                last_ns=life.last_ns,
                token_times_ns=tuple(life.times_ns),
            )
        )


class History:
    """`spans`, `records` and `decisions` are how many of each are kept. Times are of the node's monotonic clock."""

    def __init__(self, *, spans: int, records: int, decisions: int, token_times: bool) -> None:
        self.spans: Ring[Span] = Ring(spans)
        self.records: Ring[Record] = Ring(records)
        self.decisions: Ring[Decision] = Ring(decisions)
        self.requests = RequestLog(lambda record: self.records.add((record,)), token_times=token_times)
