"""Beginnings of prompts whose KV a workload says is there, as it is from earlier turns of a conversation.

They take room on the device, and nothing is copied: the cache that holds them is taken to be on the device itself, as
SGLang's is, and always to hit.
"""

from __future__ import annotations

from msgspec.structs import replace

from aegis.core.ids import RequestId
from aegis.core.messages import CheckPrefix, PrefixChecked, Submit
from aegis.core.request import KeptPrefix

_BLOCK_TOKENS = 16


class ReusedPrefixes:
    """The reused beginnings of the prompts of requests under way."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: dict[RequestId, int] = {}

    def note(self, request: RequestId, reused_tokens: int, prompt_tokens: int) -> None:
        """Whole blocks of it, and not the last token, which has to be run."""
        whole = min(reused_tokens, prompt_tokens - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
        if whole > 0:
            self._tokens[request] = whole

    def forget(self, request: RequestId) -> None:
        self._tokens.pop(request, None)

    def looked_up(self, submit: Submit) -> Submit:
        tokens = self._tokens.get(submit.job.request)
        if tokens is None:
            return submit
        return replace(submit, job=replace(submit.job, kept=KeptPrefix((), tokens, 0)))

    def answers(self, asked: CheckPrefix) -> PrefixChecked:
        return PrefixChecked(asked.request, asked.attempt, True)
