"""The plan of a run: each request with its time, its model and its lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from aegis.core.ids import ModelId
from aegis.core.model import Slo


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come, `at_ns` after the start. `text`: its prompt, where the data set has one; the number of input
    tokens is then an estimate, until the server says how many they are."""

    at_ns: int
    model: ModelId
    input_tokens: int
    output_tokens: int
    text: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request, in nanoseconds since the start of the run.

    The client was to send it at `planned.at_ns`, came to it `late_ns` later, and sent it at `sent_ns`, which is later
    still if it first waited for others to end. `failure` is empty if the answer came whole.
    """

    request: int
    planned: Planned
    late_ns: int
    sent_ns: int
    stop_ns: int
    input_tokens: int
    token_times_ns: tuple[int, ...] = ()
    finish: str = ""
    failure: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_ns)

    @property
    def ttft_ns(self) -> int:
        return self.token_times_ns[0] - self.sent_ns

    @property
    def e2el_ns(self) -> int:
        return self.token_times_ns[-1] - self.sent_ns

    @property
    def tpot_ns(self) -> float:
        """Zero where there is one token."""
        return (self.e2el_ns - self.ttft_ns) / max(self.output_tokens - 1, 1)

    @property
    def owed_tokens(self) -> int:
        """As many as were asked for, but no more than were made where the model ended its answer by itself."""
        ended_itself = not self.failure and self.finish != "length"
        return self.output_tokens if ended_itself else max(self.planned.output_tokens, self.output_tokens)

    def on_time(self, slo: Slo) -> int:
        """The number of tokens that came when they were due (Aegaeon §2.1); none if the request failed."""
        if self.failure:
            return 0
        at_ns = self.planned.at_ns
        return sum(came_ns <= slo.due_ns(at_ns, index) for index, came_ns in enumerate(self.token_times_ns))


def digest(plan: Sequence[Planned]) -> str:
    """A digest that is the same for runs that send the same requests at the same times to the same models."""
    rows = [
        (
            each.at_ns,
            each.model,
            each.input_tokens,
            each.output_tokens,
            each.text,
            *([each.priority] * bool(each.priority)),
        )
        for each in plan
    ]
    return blake2b(msgspec.json.encode(rows), digest_size=16).hexdigest()
