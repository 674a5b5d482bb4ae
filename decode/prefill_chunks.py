"""The cuts of a prefill into chunks, so that other batches that are due need not wait for its end."""

from __future__ import annotations

from bisect import bisect_right

from aegis.core.estimators import Latency
from decode.sequences import Sequence


def chunk_stop(sequence: Sequence, latency: Latency, *, chunk_ns: int, least_tokens: int) -> int:
    """The stop of the next chunk of the sequence's prefill: its end if that takes no more than `chunk_ns`, else the end
    of a block, as late as the time allows but not before `least_tokens`. A prefill that has to report its prompt's
    logprobs is not cut."""
    start, stop, size = sequence.cached - sequence.lacks, sequence.cached, sequence.block_tokens
    if sequence.job.sampling.prompt_logprobs is not None or latency.prefill_ns(stop, start) <= chunk_ns:
        return stop
    cuts = range(-(-(start + least_tokens) // size) * size, stop, size)
    in_time = bisect_right(cuts, chunk_ns, key=lambda cut: latency.prefill_ns(cut, start))
    return cuts[max(in_time - 1, 0)] if cuts else stop
