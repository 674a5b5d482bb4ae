"""A simulated run under way on a lane of its instance's device, and what it takes of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aegis.core.effects import Row, Run
from aegis.core.ids import ModelId
from aegis.sim.compute_shares import WHOLE, ComputeShares, SharedBandwidth
from aegis.sim.processor_sharing import RunProgress, SharedProcessors
from aegis.sim.step_costs import StepCosts
from aegis.sim.times import OneStep, Times


@dataclass(frozen=True, slots=True)
class DividedCompute:
    """The compute of one instance's device where lanes may have parts of it. `reading_share` is of the time of a decode
    step of a model, over so many cached tokens in so many rows (`GpuSpec.reading_share`)."""

    shares: ComputeShares
    bandwidth: SharedBandwidth
    reading_share: Callable[[ModelId, int, int], float]


class LaneRun:
    """`left` are the tokens that its rows have to make, `changed` is told that others slow it now, or no longer do.

    Its work is counted in the time that it takes alone on the whole device. It takes longer in proportion to its own
    slowness on its share, to that of the bandwidth and to that of the processors.
    """

    __slots__ = (
        "_bandwidth_slowness",
        "_changed",
        "_own_slowness",
        "_processors_slowness",
        "at_boundary",
        "begun",
        "ends",
        "heard_at",
        "left",
        "looking",
        "most_steps",
        "progress",
        "run",
        "times",
        "version",
    )

    def __init__(self, run: Run, left: list[int], changed: Callable[[LaneRun], None]) -> None:
        self.run = run
        self.left = left
        self.begun = False  # until then it has no times; that others are slowed by it comes before
        self.progress: RunProgress | None = None  # where others can slow it, or it has a part of the device
        self.most_steps = 1
        self.version = 0  # what was scheduled for another one finds so
        self.looking = False  # at the boundary to come
        self.heard_at = 0  # the boundary where it did so last: after so many steps
        self.ends = False  # at the next boundary
        self.at_boundary = False
        self._changed = changed
        self._own_slowness = self._bandwidth_slowness = self._processors_slowness = WHOLE

    @property
    def slowness(self) -> int:
        return self._own_slowness * self._bandwidth_slowness // WHOLE * self._processors_slowness // WHOLE

    def begin(
        self,
        start_ns: int,
        costs: StepCosts,
        *,
        share: int = WHOLE,
        divided: DividedCompute | None = None,
        processors: SharedProcessors | None = None,
        by_layers: bool = False,
        skips_kept: bool = False,
    ) -> None:
        """It begins, and from now on takes its part of bandwidth and processors, until `over`. `by_layers`: pieces of a
        prompt stand for some of its layers. `skips_kept`: what is kept of a prompt takes no time, although its row has
        it."""
        run = self.run
        pieces = [(_start(row) if skips_kept else row.start, row.stop) for row in run.prompts]
        streams = run.rows[len(pieces) :]
        if by_layers and not streams and any([row.start > row.job.kept_tokens for row in run.prompts]):
            costs = costs.going_on()
        context = sum([row.start for row in streams])
        if divided:
            self._take(divided, costs, pieces, context, share)
        if processors:
            processors.enter(self._slowed_by_processors)
            self._processors_slowness = processors.slowness
        if divided or processors:
            self.progress = RunProgress(start_ns, self.slowness)
        if pieces:
            self.times: Times = OneStep(start_ns, costs.step_ns(pieces, context, len(streams)), self.progress)
        else:
            self.most_steps = min(run.steps, *self.left)
            self.times = Times(costs, start_ns, context, len(streams), self.most_steps, self.progress)
        self.times.steps = self.times.boundary(run.until_ns)
        self.begun = True

    def over(self, divided: DividedCompute | None, processors: SharedProcessors | None) -> None:
        self.version += 1
        if divided:
            divided.bandwidth.leave(self._slowed_by_bandwidth)
        if processors:
            processors.leave(self._slowed_by_processors)

    def slow(self, now_ns: int) -> None:
        """From now on the run is as fast as `slowness` says; its steps end at other times."""
        assert self.progress is not None
        self.progress.change(now_ns, self.slowness)
        self.version += 1
        if not self.ends:
            self.times.steps = self.most_steps
            self.times.steps = self.times.boundary(self.run.until_ns)

    def _take(
        self, divided: DividedCompute, costs: StepCosts, pieces: Sequence[tuple[int, int]], context: int, share: int
    ) -> None:
        """Takes its part of the bandwidth. A prompt so short that reading the weights takes longer than computing it is
        slowed as decodes are."""
        shares, rows = divided.shares, len(self.run.rows)
        on_share = shares.decode_slowness(share)
        reading = divided.reading_share(self.run.model, context, rows)
        traffic = shares.decode_traffic(share, reading)
        if pieces:
            computing_ns, reading_ns = costs.parts_ns(pieces)
            alone_ns = max(computing_ns, reading_ns, 1)
            divided_ns = max(computing_ns * shares.prefill_slowness(share), reading_ns * on_share)
            self._own_slowness = divided_ns // alone_ns
            traffic = max(shares.prefill_traffic_of(share), traffic * reading_ns // alone_ns)
        else:
            self._own_slowness = on_share
        divided.bandwidth.enter(self._slowed_by_bandwidth, traffic)
        self._bandwidth_slowness = divided.bandwidth.slowness

    def _slowed_by_bandwidth(self, slowness: int) -> None:
        self._bandwidth_slowness = slowness
        self._changed(self)

    def _slowed_by_processors(self, slowness: int) -> None:
        self._processors_slowness = slowness
        self._changed(self)


def _start(row: Row) -> int:
    """The last position is always run."""
    return min(max(row.start, row.job.kept_tokens), row.stop - 1)
