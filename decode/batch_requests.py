"""What the requests of a batch are like: their deadlines, prompts and streams."""

from __future__ import annotations

from aegis.core.ids import RequestId
from aegis.core.model import Slo
from aegis.core.step_terms import prefill_terms
from aegis.core.views import BatchView
from decode.sequences import ARRIVING, DEVICE, Sequence

Deadline = tuple[int, int]  # of a sequence's next token, as it is and shifted by priority


class BatchRequests:
    """What a view needs to know of a batch's sequences, found in one pass, because an instance makes views of all its
    batches for each plan. Sequences in a run on the second lane are left out. If it `defers_refused`, the deadlines of
    sequences that were refused room count only where there are no others; if it `defers_arriving`, so do those of
    sequences whose KV is on its way. Such sequences cannot run yet: a batch that had turn after turn for their sake
    would only bring its other sequences forward."""

    __slots__ = (
        "again_tokens",
        "blocks_ahead",
        "context_tokens",
        "decoding",
        "following",
        "prompts",
        "requests",
        "slo",
        "squares",
        "stream_ns",
        "tokens",
        "view",
        "view_until_ns",
        "waiting",
    )

    def __init__(
        self, sequences: list[Sequence], slo: Slo, *, defers_refused: bool, defers_arriving: bool = False
    ) -> None:
        requests: list[RequestId] = []
        waiting: list[Deadline] = []
        decoding: list[Deadline] = []
        deferred: list[tuple[list[Deadline], Deadline]] = []
        context_tokens = tokens = squares = prompts = again_tokens = 0
        following: Sequence | None = None
        stream_ns: int | None = None
        for sequence in sequences:
            if sequence.beside:
                continue
            job, cached, lacks, last_ns = sequence.job, sequence.cached, sequence.lacks, sequence.last_ns
            requests.append(job.request)
            context_tokens += cached
            due_at_ns = slo.due_ns(job.arrival_ns, sequence.generated)
            deadline = (due_at_ns, due_at_ns + job.priority * slo.ttft_ns)
            deadlines = waiting if lacks else decoding
            if (defers_refused and sequence.refused) or (defers_arriving and sequence.where is ARRIVING):
                deferred.append((deadlines, deadline))
            else:
                deadlines.append(deadline)
            if lacks:
                prompts += 1
                own, own_squares = prefill_terms(cached, cached - lacks)
                tokens, squares = tokens + own, squares + own_squares
                if job.sent:
                    again_tokens += own
                if following is None or sequence.rank_ns < following.rank_ns:
                    following = sequence
            elif last_ns is not None and (stream_ns is None or last_ns < stream_ns) and sequence.where is DEVICE:
                stream_ns = last_ns
        if deferred and not waiting and not decoding:
            for deadlines, deadline in deferred:
                deadlines.append(deadline)
        self.slo = slo
        self.blocks_ahead: int | None = None  # nobody has asked yet
        self.view: BatchView | None = None  # that was made of it
        self.view_until_ns = 0  # for so long it may be kept
        self.requests, self.waiting, self.decoding, self.prompts = requests, waiting, decoding, prompts
        self.context_tokens, self.tokens, self.squares = context_tokens, tokens, squares
        self.again_tokens = again_tokens
        self.following, self.stream_ns = following, stream_ns
