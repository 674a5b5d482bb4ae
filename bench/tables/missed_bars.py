"""Why figures miss their bars, and claims of a paper do not hold here: the reasons that the documentation's tables give
beside them. They are removed with the misses that they explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NOT_EXPLAINED = "not explained"

_ROOFLINE = "chunks of 768 tokens keep 50 ms by the roofline; the paper had to take 256"
_UNSTEADY = "answers last for many minutes and requests come for one, so batches only grow"
_ONE_BY_ONE = "its prompts run one by one here; SGLang prefills batches of them"
_HALF = "a prompt that begins beside a decode keeps half of the GPUs until it ends"
_LAYERS = "`muxwise` goes by a profile, and stops prompts between layers at no cost"
_PUT_OFF = "batches put off wait for turns in a tenth of the time; `--refuse-late` refuses instead"
_WITHOUT_PLACE = "it fails requests of models without a place, and keeps others' weights loaded"
_SCATTERED = "scattered blocks of 16 KiB; from 256 KiB on 0.89 to 1.0"

MISSED: Mapping[str, str] = {
    "bfloat16: ratio": "the engine alone reaches 1.6 to 1.8; the rest of a request's time is the same for both",
    "float32: ratio": "the engine alone reaches 1.6 to 1.8; the rest of a request's time is the same for both",
    "overhead over the system calls, 64 in a row": "by less than the machine's noise that day",
    "overhead over the system calls, 64 scattered": "pages that are not adjacent are booked and mapped one by one",
    "loogle/llama-3-70b/a100x8/chunked-prefill": "a chunk of 256 has 44 % of the speed of 4 096, as in Figure 6 (a)",
    "loogle/llama-3-70b/a100x8/nanoflow": "a chunk of 256 has 44 % of the speed of 4 096, as in Figure 6 (a)",
    "loogle/llama-3-70b/a100x8/loongserve": _HALF,
    "mux-sharegpt/llama-3-70b/a100x8/nanoflow": "nano-batches pay a step's 43 ms twice, as in Table 4; not confirmed",
    "mux-sharegpt/llama-3-70b/a100x8/loongserve": "its engine is taken to be as fast as SGLang's; Table 3 says half",
    "mux-sharegpt/llama-3-70b/a100x8/sglang-pd": _ONE_BY_ONE,
    "conversation/llama-3-70b/a100x8/muxwise: TTFT": _LAYERS,
    "openthoughts/llama-3-70b/a100x8/chunked-prefill": _UNSTEADY,
    "openthoughts/llama-3-70b/a100x8/nanoflow": _UNSTEADY,
    "openthoughts/llama-3-70b/a100x8/muxwise: TTFT": _LAYERS,
    "tool-agent/llama-3-8b/a100x8/chunked-prefill": _ROOFLINE,
    "tool-agent/llama-3-8b/a100x8/nanoflow": _ROOFLINE,
    "tool-agent/llama-3-70b/a100x8/loongserve": _HALF,
    "tool-agent/llama-3-70b/a100x8/sglang-pd": _ONE_BY_ONE,
    "tool-agent/llama-3-70b/a100x8/muxwise: TTFT": _LAYERS,
    "512 same: slowdown": "by a hundredth; 1.21 in seven runs after these three",
    "chat: added to a request, p99": "by a hundredth, where requests are written to Redis; 0.23 to 0.29 in five runs",
    "gap as made, p99": "turns lasted for half a second at most, so there was less to smooth",
    "swap-out of 64 blocks or more ÷ memcpy, worst": _SCATTERED,
    "swap-in of 64 blocks or more ÷ memcpy, worst": _SCATTERED,
    "overload: median": "were every token on time in every cell, it would be 1.13 against these rivals",
    "overload: TTFT": _PUT_OFF,
    "overload: TTFT/muxserve": _WITHOUT_PLACE,
    "overload: TTFT/muxserve++": _WITHOUT_PLACE,
    "overload: TTFT/s-partition": _WITHOUT_PLACE,
}

_PROMPTS_FIRST = (
    "in all of these policies prompts come first and KV leaves for them, whatever memory there is; see tokens/s"
)
_MOVED = (
    "memory holds all models: a policy that keeps them loaded never waits; one that moves or unloads one loads it again"
)

_CLAIMS: Sequence[tuple[str, str]] = (
    ("market/load: no rival", _PROMPTS_FIRST),
    ("market/gpus: no rival", _PROMPTS_FIRST),
    ("arena/", _MOVED),
    ("market/x", _MOVED),
)
"""By how the texts of the claims begin."""


def reason_of(*names: str) -> str:
    """Why a figure missed its bar: of its names, from the closest to the most general, the first with a reason."""
    return next((MISSED[name] for name in names if name in MISSED), _NOT_EXPLAINED)


def reason_of_claim(says: str) -> str:
    """Why a claim of a paper does not hold here."""
    return next((reason for start, reason in _CLAIMS if says.startswith(start)), _NOT_EXPLAINED)
