"""The cuts of a prefill into chunks, so that other batches that are due need not wait for its end."""

from __future__ import annotations

from aegis.core.effects import Row
from aegis.core.estimators import Latency
from aegis.core.model import Slo
from aegis.core.request import Job
from aegis.core.views import TurnRules
from decode.rows import prompt_row
from decode.sequences import Sequence

_MULTIPLE_TOKENS = 4


def chunk_stop(sequence: Sequence, latency: Latency, *, chunk_ns: int, least_tokens: int) -> int:
    """The stop of the next chunk of the sequence's prefill: its end if that takes no more than `chunk_ns`, else as late
    as the time allows but not before `least_tokens`. Of a long prompt, 16 tokens may take a quarter of the time, so
    that it does not end with a block. A prefill that has to report its prompt's logprobs is not cut."""
    stop = sequence.cached
    if sequence.job.is_whole:
        return stop
    return latency.prefill_stop(
        stop - sequence.lacks, stop, chunk_ns, multiple=_MULTIPLE_TOKENS, least_tokens=least_tokens
    )


def next_row(sequence: Sequence, latency: Latency, rules: TurnRules, within_ns: int | None) -> Row:
    """The row of the next chunk, which takes no longer than `within_ns`; None: of all that is left, or of as much as
    goes in a step."""
    stop = sequence.cached
    if within_ns is not None and rules.chunk_tokens is not None:
        stop = chunk_stop(sequence, latency, chunk_ns=within_ns, least_tokens=rules.chunk_tokens)
    if rules.step_tokens is not None and not sequence.job.is_whole:
        stop = min(stop, sequence.cached - sequence.lacks + rules.step_tokens)
    return prompt_row(sequence, stop)


def prompt_rank_ns(job: Job, slo: Slo, latency: Latency) -> int:
    """Where a prompt stands among others that wait: the sooner it came and the shorter it is, the earlier. None that
    comes by its length later, or after that, overtakes it, so that none starves."""
    return job.ranked_ns(slo) + latency.prefill_ns(job.prefill_tokens, job.kept_tokens)
