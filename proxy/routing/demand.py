"""The share of their instance that requests want, in millionths, so that instances can be compared."""

from __future__ import annotations

from typing import Final, NamedTuple

from aegis.core.estimators import Latency
from aegis.core.model import ModelSpec
from aegis.core.views import PPM


class Demand(NamedTuple):
    """A part of an instance's time for a step every TBT, of its time if weights are loaded every TTFT, and of its
    memory."""

    steps_ppm: int
    loads_ppm: int
    memory_ppm: int

    def instead(self, before: Demand, after: Demand) -> Demand:
        """The demand with `after` in place of `before`."""
        return Demand(
            self.steps_ppm - before.steps_ppm + after.steps_ppm,
            self.loads_ppm - before.loads_ppm + after.loads_ppm,
            self.memory_ppm - before.memory_ppm + after.memory_ppm,
        )

    @property
    def load_ppm(self) -> int:
        """The demand of its time: all steps, and loads in so far as memory does not hold everything."""
        over_ppm = self.memory_ppm - PPM
        return self.steps_ppm + (self.loads_ppm * over_ppm // self.memory_ppm if over_ppm > 0 else 0)


NOTHING: Final = Demand(0, 0, 0)


def demand(spec: ModelSpec, latency: Latency, capacity_tokens: int, tokens: int) -> Demand:
    """The demand of requests of one model with so many `tokens` in all; `capacity_tokens` of its KV fit beside its
    weights."""
    weight_bytes, kv = spec.manifest.image_bytes, spec.manifest.kv
    # blocks take memory even where no KV is kept: of such a model the weights alone would be all memory
    memory_bytes = weight_bytes + capacity_tokens * kv.block_bytes // kv.block_tokens
    return Demand(
        PPM * latency.decode_ns(tokens) // spec.slo.tbt_ns,
        PPM * latency.switch_ns() // spec.slo.ttft_ns,
        PPM * (weight_bytes + tokens * kv.block_bytes // kv.block_tokens) // memory_bytes,
    )
