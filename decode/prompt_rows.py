"""The rows of prompts in a step of a mixed instance: the first prompt that waits, and those that join it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from aegis.core.effects import Row
from aegis.core.ids import ModelId
from aegis.core.views import TurnRules
from decode.eviction import Eviction
from decode.kv_swap import KvSwap
from decode.prefill_chunks import next_row
from decode.rows import prompt_row
from decode.sequences import Sequence, Where
from decode.step_times import StepTimes
from decode.worklist import Batch, RunningTurn
from memory.ledger import Ledger


def is_alone(sequence: Sequence) -> bool:
    """Whether its prompt runs in steps of its own: its logprobs are asked for, or a step that it shared has failed."""
    return sequence.suspect or sequence.job.sampling.prompt_logprobs is not None


def with_a_block(ready: Iterable[Sequence]) -> list[Sequence]:
    """Those that can have a step beside a prompt, or after it: making room for the prompt may have cost some of them
    theirs."""
    return [s for s in ready if s.where is Where.DEVICE and s.steps_held() > 0]


def learnt_pieces(prompts: Iterable[Sequence], rows: Iterable[Row]) -> list[tuple[int, int]]:
    """The positions, of each prompt in a step, that the step's time is to be learnt of. An engine may leave pieces that
    took no time to the step after them, so they are counted there."""
    return [(row.start if s.prefill_ns else s.reused, row.stop) for s, row in zip(prompts, rows, strict=True)]


def _within_budget(sequence: Sequence, row: Row, tokens: int) -> Row:
    """The row, cut at the end of a block so that it has no more than so many tokens; of a block, at least."""
    size = sequence.block_tokens
    stop = max((row.start + tokens) // size * size, row.start + size)
    return row if stop >= row.stop or is_alone(sequence) else prompt_row(sequence, stop)


class PromptRows:
    """`rules` are those of the policy of turns."""

    def __init__(self, ledger: Ledger, kv: KvSwap, eviction: Eviction, step_times: StepTimes, rules: TurnRules) -> None:
        self._ledger = ledger
        self._kv = kv
        self._eviction = eviction
        self._times = step_times
        self._rules = rules

    def of(
        self,
        turn: RunningTurn,
        first: Sequence,
        others: Iterable[Sequence],
        now_ns: int,
        beside: Collection[Sequence] = (),
    ) -> tuple[list[Sequence], list[Row]]:
        """The prompts of the next step and their rows: of the `first`, which has its blocks, or of a chunk of it, and
        of those that join it. With something `beside` it, it is whole and alone. Where KV of the `others` begins like a
        prompt, that is not run again, unless something runs, which copies within the device do not wait for."""
        if beside:
            return [first], [prompt_row(first, first.cached)]
        self._kv.look_around(first, others)
        chunk_ns = None if turn.free_until_ns is None else turn.free_until_ns - now_ns
        rows = [next_row(first, self._times.latency[turn.batch.model], self._rules, chunk_ns)]
        if self._rules.budget_tokens is not None:
            return self._of_budget(turn.batch, first, rows[0], others, self._rules.budget_tokens)
        within_ns = self._until_ns(turn, first, now_ns) - now_ns
        return [first, *self.joining(turn.batch, first, rows, others, within_ns)], rows

    def _of_budget(
        self, batch: Batch, first: Sequence, row: Row, others: Iterable[Sequence], budget_tokens: int
    ) -> tuple[list[Sequence], list[Row]]:
        """Prompts in their order, of the last one as much as fits, until the step has so many tokens, those of the rows
        that decode included (Sarathi-Serve, Algorithm 3)."""
        tokens = budget_tokens - (len(batch.sequences) - batch.waiting)
        if self._rules.step_tokens is not None:
            tokens = min(tokens, self._rules.step_tokens)
        prompts, rows = [first], [_within_budget(first, row, tokens)]
        tokens -= rows[0].stop - rows[0].start
        if not rows[0].samples or is_alone(first):
            return prompts, rows
        for sequence in batch.waiting_behind(first):
            if tokens < sequence.block_tokens or not self._takes(sequence, prompts, others):
                break
            row = _within_budget(sequence, prompt_row(sequence, sequence.cached), tokens)
            tokens -= row.stop - row.start
            prompts.append(sequence)
            rows.append(row)
            if not row.samples:
                break
        return prompts, rows

    def learn(
        self, pieces: SequenceOf[tuple[int, int]], beside: Collection[Sequence], model: ModelId, took_ns: int
    ) -> None:
        """A step of such pieces took so long, with those `beside` that decoded in it."""
        latency = self._times.latency[model]
        beside_ns = latency.beside_ns(sum([s.cached for s in beside]), len(beside)) if beside else 0
        latency.saw_step(pieces, max(took_ns - beside_ns, 1))

    def _until_ns(self, turn: RunningTurn, first: Sequence, now_ns: int) -> int:
        """By when a step of prompts has to end: when somebody else needs a step, or at the deadline of the first
        prompt, unless that one is late whoever joins it."""
        job, slo = first.job, self._ledger.specs[first.job.model].slo
        until_ns = now_ns + slo.gap_ns if turn.free_until_ns is None else turn.free_until_ns
        due_ns = slo.due_ns(job.arrival_ns, first.generated)
        alone_ns = self._times.latency[job.model].prefill_ns(first.cached, first.cached - first.lacks)
        return min(until_ns, due_ns) if due_ns >= now_ns + alone_ns else until_ns

    def joining(
        self, batch: Batch, first: Sequence, rows: list[Row], others: Iterable[Sequence], within_ns: int
    ) -> list[Sequence]:
        """The prompts that run in the step of the first one: those next in rank, as long as all take no longer than
        `within_ns` together and go in one step, each saves enough of its time, and there is room that nobody has to
        leave. Adds their rows to `rows`."""
        latency, rules, (row,) = self._times.latency[batch.model], self._rules, rows
        joining: list[Sequence] = []
        if rules.chunk_tokens is None or not row.samples or batch.waiting == 1 or is_alone(first):
            return joining
        took_ns, tokens = latency.prefill_ns(row.stop, row.start), row.stop - row.start
        for sequence in batch.waiting_behind(first):
            start, stop = sequence.cached - sequence.lacks, sequence.cached
            took_ns, tokens = took_ns + latency.joined_ns(stop, start), tokens + stop - start
            if rules.step_tokens is not None and tokens > rules.step_tokens:
                break
            if took_ns > within_ns or not latency.joins(stop, start, rules.join_gain):
                break
            if not self._takes(sequence, (first, *joining), others):
                break
            rows.append(prompt_row(sequence, stop))
            joining.append(sequence)
        return joining

    def _takes(self, sequence: Sequence, ahead: Iterable[Sequence], others: Iterable[Sequence]) -> bool:
        """Whether it can join those `ahead`. It has its blocks then."""
        if is_alone(sequence) or sequence.where not in (Where.NOWHERE, Where.DEVICE):
            return False
        if not self._eviction.fits(sequence) or self._kv.follows(sequence, ahead) or not self._eviction.grow(sequence):
            return False
        self._kv.look_around(sequence, others)
        return True
