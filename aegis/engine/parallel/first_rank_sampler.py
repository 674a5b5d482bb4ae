"""The sampler of ranks that sample nothing, because the first one does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aegis.core.ids import RequestId
from aegis.core.request import Failure, Token
from aegis.engine.sampler import Sampler


class FirstRankSampler(Sampler):
    """In place of one that samples: the first rank does. `reports` is what it said of the prompt at hand."""

    reports = False

    def problem(self, request: RequestId) -> Failure | None:
        return None

    def wants_prompt(self, request: RequestId) -> bool:
        return self.reports

    def prompt_logprobs(self, request: RequestId, logits: object, following: Sequence[int]) -> list[Token]:
        return []

    def sample(self, requests: Sequence[RequestId], logits: torch.Tensor) -> list[Token]:
        """Once they are there: nothing else waits for what reads the weights, which the next command may unmap."""
        if logits.is_cuda:
            torch.cuda.current_stream(logits.device).synchronize()
        return [Token(0)] * len(requests)
