"""Prefill and decode multiplexed on one device (MuxWise §3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.core.lane_views import Division, LaneChoice, LanesView
from aegis.core.views import BatchView, DecodeView, Turn, TurnRules, Work
from decode.policies.weighted_round_robin import WeightedRoundRobin

_TURNS = WeightedRoundRobin()
_RULES = TurnRules(max_batch=256, chunk_tokens=16)


@dataclass(frozen=True, slots=True)
class MuxWise:
    """The decode has the first lane and begins first. Of the shares with which its guarded step keeps the time between
    two tokens and the gap target, it gets the least; if none does, the largest. The second lane prefills the next
    prompt of its model meanwhile, as early as it can: "we prioritize SLO attainment for the decode phase and process
    the prefill phase as early as possible" (§3.4.1). Without prompts a decode has the whole device, and without streams
    a prompt has.

    Layers. MuxWise launches so many layers of a prefill at a time as take one decode step, N_PL = ⌈T_d · N_T / T_P⌉, so
    that the device can be divided anew and a short prompt can come first. An engine of aegis cuts prompts by tokens,
    and each piece reads the weights again; so a piece takes as long as `piece_steps` decode steps. Prompts that wait
    share a prefill, in the paper too. Here others join a prompt only where it ends; so if no more than `join_steps`
    decode steps of it are left, it is not cut, and as many join it as fill that time. Between two pieces the prompt
    with the lowest rank goes on: one that takes d is preempted by none that comes d later, which is the
    paper's "no recursive preemption" for any number of prompts.

    Several models take turns as with `WeightedRoundRobin`; the paper has one. The ablations of its §4.4: not `guarded`
    takes a step beside a prefill for one alone on the whole device, not `layer_wise` runs prompts as a whole, and of
    `fixed` shares the decode always has that part, in thousandths."""

    turns: WeightedRoundRobin = _TURNS
    piece_steps: int = 32
    join_steps: int = 32
    guarded: bool = True
    layer_wise: bool = True
    fixed: int | None = None
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        return self.turns.place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return self.turns.plan(batches, now_ns)

    def beside(self, lanes: LanesView, now_ns: int) -> LaneChoice | None:
        """The next prompt of the model, if there is one."""
        prompts = [c for c in lanes.companions if c.prefills and c.batch.model == lanes.decoding.model]
        if not prompts:
            return None
        prompt = prompts[0]
        division = self._division(lanes, prompt.divisions)
        steps = self.join_steps if division.beside_ns <= self.join_steps * division.step_ns else self.piece_steps
        within_ns = steps * division.step_ns if self.layer_wise else None
        return LaneChoice(prompt.batch.batch, True, division.shares, within_ns)

    def _division(self, lanes: LanesView, divisions: Sequence[Division]) -> Division:
        if self.fixed is not None:
            fixed = self.fixed
            return min(divisions, key=lambda division: abs(division.shares[0] - fixed))
        target_ns = min(lanes.decoding.tbt_ns, lanes.decoding.gap_ns)
        for division in divisions:
            if (division.step_ns if self.guarded else lanes.step_ns) <= target_ns:
                return division
        return divisions[-1]
