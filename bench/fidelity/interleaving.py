"""Two workloads interleaved, so that both see the machine as fast and as slow as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aegis.telemetry.records import Record
from bench.calibration.telemetry import Telemetry
from bench.common.result_files import write
from bench.workloads.arrival import Arrival, in_order


@dataclass(frozen=True, slots=True)
class Interleaving:
    """A piece of the workload that costs are measured on, then one of that which is compared, and so on. Around each
    piece half a `pause_ns`, in which its requests end."""

    piece_ns: int
    pause_ns: int

    @property
    def _slot_ns(self) -> int:
        return self.piece_ns + self.pause_ns

    def by_turns(self, measured: Iterable[Arrival], compared: Iterable[Arrival]) -> list[Arrival]:
        return in_order([*self._spread(measured, 0), *self._spread(compared, 1)])

    def is_compared(self, at_ns: int) -> bool:
        """Whether what happens then is compared; the time is since the start of both."""
        return at_ns // self._slot_ns % 2 == 1

    def split(self, asked: Sequence[Record], seen: Telemetry) -> tuple[Telemetry, Telemetry]:
        """Divides the history of a server between the workload that costs are measured on and the one that is compared.
        Events that began in a pause belong to the nearer piece."""
        start_ns = _start_ns(asked, seen.records)
        measured, compared = Telemetry([], []), Telemetry([], [])
        for span in seen.spans:
            (compared if self.is_compared(span.start_ns - start_ns) else measured).spans.append(span)
        for record in seen.records:
            (compared if self.is_compared(record.arrival_ns - start_ns) else measured).records.append(record)
        return measured, compared

    def _spread(self, arrivals: Iterable[Arrival], side: int) -> Iterable[Arrival]:
        for each in arrivals:
            piece, within_ns = divmod(each.at_ns, self.piece_ns)
            yield replace(each, at_ns=(2 * piece + side) * self._slot_ns + self.pause_ns // 2 + within_ns)


def write_trace(arrivals: Iterable[Arrival], file: Path) -> None:
    """Writes a trace that `--trace` reads, to the nanosecond. Raises UserError."""
    rows = (f"{each.at_ns / 1e9:.9f},{each.model},{each.input_tokens},{each.output_tokens}\n" for each in arrivals)
    write(file, "".join(["arrival_s,model,input_tokens,output_tokens\n", *rows]).encode())


def _start_ns(asked: Sequence[Record], records: Sequence[Record]) -> int:
    """The start on the clock of `records`, whose first is the first that was asked."""
    first_ns = min(record.arrival_ns for record in records)
    return first_ns - min(record.arrival_ns for record in asked)
