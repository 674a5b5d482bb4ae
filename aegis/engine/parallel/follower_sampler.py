"""The sampler of ranks that do not sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aegis.core.ids import RequestId
from aegis.core.request import Token
from aegis.engine.sampler import Sampler


class NoSampler(Sampler):
    """In place of one that samples: the first rank does. `reports` is what it said of the prompt at hand."""

    reports = False

    def wants_prompt(self, request: RequestId) -> bool:
        return self.reports

    def prompt_logprobs(self, request: RequestId, logits: torch.Tensor, prompt: Sequence[int]) -> tuple[Token, ...]:
        return ()

    def sample(self, requests: Sequence[RequestId], logits: torch.Tensor) -> list[Token]:
        return [Token(0)] * len(requests)
