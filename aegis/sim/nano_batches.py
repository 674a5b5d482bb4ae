"""The steps of NanoFlow, which splits each into two nano-batches and overlaps their operators on one device.

As MuxWise describes it (§4.1 and §4.2.1): chunked prefill with the same token budget, each chunk in "2 nano batches,
thus duplicating loading for each decode iteration". While the matrices of one nano-batch are multiplied, the other one
reads KV or reduces over the network. So a step takes the longer of two times: that in which all its tokens are
multiplied, and that in which both nano-batches read weights, launch and reduce, and KV is read. What a step takes
whatever its tokens are, it takes twice: a decode iteration of a 70B model on eight A100 does in MuxWise's Table 4, 42.4
ms in place of 21.2 ms. Where few tokens are multiplied nothing is gained by that, which is why the paper calls for 1024
and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from aegis.core.step_terms import prefill_terms
from aegis.sim.step_costs import StepCosts

_NANO_BATCHES: Final = 2
_PS_PER_NS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NanoBatchCosts(StepCosts):
    """`of` makes them from the costs of whole steps; what a step takes whatever its tokens are is counted twice."""

    @classmethod
    def of(cls, costs: StepCosts) -> NanoBatchCosts:
        twice = replace(costs, decode_ps=_NANO_BATCHES * costs.decode_ps, prefill_ps=_NANO_BATCHES * costs.prefill_ps)
        return cls(**{field.name: getattr(twice, field.name) for field in fields(StepCosts)})

    def prefill_ns(self, stop: int, start: int = 0) -> int:
        return self.step_ns([(start, stop)])

    def step_ns(self, pieces: Sequence[tuple[int, int]], context_tokens: int = 0, batch: int = 0) -> int:
        """The longer of multiplying, and of reading and the rest."""
        multiplied_ps, reached = 0, 0
        for start, stop in pieces:
            tokens, squares = prefill_terms(stop, start)
            multiplied_ps += self.token_ps * tokens + self.token2_ps * squares
            reached += stop
        fixed_ps = max(self.prefill_ps, self.decode_ps + self.context_token_ps * reached)
        read_ps = fixed_ps + self.context_token_ps * context_tokens + self.row_ps * batch
        return -(-max(multiplied_ps, read_ps) // _PS_PER_NS)
