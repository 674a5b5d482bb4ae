"""Requests of the tasks that MuxWise is evaluated with (Table 1): lengths, and how much of a prompt is reused.

The table has the least, the mean and the largest of each; the traces themselves are not part of this project. Between
them lengths are exponential above the least one, cut off at the largest, which has the means to a few per cent and a
tail as long as the table's. In the two multi-turn tasks the reused part of a prompt is uniform from 20 % of it on, with
the table's mean over that of the inputs: 37 % and 57 %. For Conversation, and only there, the table's mean input is
without what is reused: Mooncake's trace of that name has 12 035 tokens on average, which is the sum of the two, and
MuxWise's §1 has 36.6 % of them reused.
"""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.rng import Stream
from bench.workloads.draws import exponential

_LEAST_REUSED = 0.2

Range = tuple[int, int, int]
"""The least, the mean and the largest."""


@dataclass(frozen=True, slots=True)
class Task:
    """`reused`: the mean part of a prompt that is; or so many tokens of a system prompt, which all share."""

    inputs: Range
    outputs: Range
    reused: float = 0.0
    shared: int = 0

    def draw(self, draws: Stream) -> tuple[int, int, int]:
        """(input tokens, output tokens, reused ones among the input tokens)."""
        input_tokens, output_tokens = _drawn(draws, self.inputs), _drawn(draws, self.outputs)
        if not self.reused:
            return input_tokens, output_tokens, min(self.shared, input_tokens)
        part = _LEAST_REUSED + 2 * (self.reused - _LEAST_REUSED) * draws.uniform()
        return input_tokens, output_tokens, int(input_tokens * part)


def _drawn(draws: Stream, tokens: Range) -> int:
    least, mean, most = tokens
    return min(least + round((mean - least) * exponential(draws)), most)


TASKS = {
    "mux-sharegpt": Task((4, 226, 1024), (4, 195, 1838)),
    "loogle": Task((3380, 30_000, 81_000), (2, 15, 326)),
    "openthoughts": Task((311, 709, 4633), (684, 8374, 32_000), shared=243),
    "conversation": Task((891, 7538 + 4496, 123_000), (1, 342, 2000), reused=4496 / (7538 + 4496)),
    "tool-agent": Task((891, 8596, 123_000), (1, 182, 2000), reused=4905 / 8596),
}
