"""Eight models of eight architectures and eight KV shapes, and what transformers itself says they answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from aegis.core.errors import ModelRefused
from aegis.core.model import EngineName, ModelSpec
from aegis.core.rng import Stream as Draws
from aegis.models.sources import read_sources
from aegis.models.terms import Terms
from aegis.node import instance_processes
from aegis.node.registration import register
from tests import checkpoints
from tests.checkpoints import VOCAB_SIZE

ENGINE: EngineName = "vllm" if os.environ.get("AEGIS_TEST_ENGINE") == "vllm" else "transformers"
"""The configuration that serves the market."""

RANKS = int(os.environ.get("AEGIS_TEST_RANKS", "1"))
"""Processes of each instance."""

PROXIES = int(os.environ.get("AEGIS_TEST_PROXIES", "1"))

EXTERNAL = os.environ.get("AEGIS_TEST_SERVICES") == "external"
"""Whether Redis and the broker are Debian's, in place of the embedded ones."""

PIECES = tuple(f"--step-tokens={n}" for n in [os.environ.get("AEGIS_TEST_PIECES", "")] if n)
"""Prompts run in pieces of so many tokens."""

LANES = os.environ.get("AEGIS_TEST_LANES", "")
"""Whether one instance does both, on two lanes: the policy that divides its device."""

RAY = os.environ.get("AEGIS_TEST_RAY", "") not in ("", "0")
"""Whether its instances are on two nodes of a Ray cluster."""

CONTEXT_TOKENS = 4096
END_TOKENS = [1, 40, 90, 140, 190, 240, 290]
_GEMMA = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA |= {"query_pre_attn_scalar": 64, "tie_word_embeddings": False}  # tied, it repeats its last token for ever


def _shape(heads: int, kv_heads: int, head_dim: int, inner: int = 1024, **own: Any) -> dict[str, Any]:
    return {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
    } | own


MARKET: dict[str, dict[str, Any]] = {
    "llama": _shape(4, 2, 32),
    "qwen2": _shape(4, 4, 32),
    "qwen3": _shape(4, 2, 80, 896),
    "mistral": _shape(4, 1, 96, 896, sliding_window=64),
    "gemma2": _shape(4, 4, 64, 768, **_GEMMA),
    "gemma3_text": _shape(4, 1, 64, **_GEMMA),
    "phi3": _shape(2, 2, 64),
    "granite": _shape(2, 1, 128, 896),
}
"""Each has between 2 and 4 MiB of weights, which is two pages; as vLLM's images, which hold rotary tables besides,
three. Heads are of sizes that every engine has kernels for. Two layers: how often models are switched depends on how
fast a step is beside the time a token may take (Aegaeon, eq. 2), which is to be small on a slow machine too."""
if ENGINE == "vllm":  # which ties the embeddings of gemma2
    MARKET["glm4"] = _shape(4, 4, 64, 768)
    del MARKET["gemma2"]
if RANKS > 1:  # which need a head of KV each, and as many weights as one has elsewhere
    for shape in MARKET.values():
        shape["intermediate_size"] *= RANKS
    for model_type in ("mistral", "gemma3_text", "granite"):
        MARKET[model_type]["num_key_value_heads"] = RANKS


def write(directory: Path) -> None:
    """Saves the market's checkpoints, a directory each."""
    for seed, (model_type, shape) in enumerate(MARKET.items()):
        changes = shape | {"max_position_embeddings": CONTEXT_TOKENS, "eos_token_id": END_TOKENS}
        checkpoints.write(directory / model_type, model_type, tokenizer=True, seed=seed, **changes)


def register_all(directory: Path, cache: Path) -> tuple[list[ModelSpec], list[ModelRefused]]:
    """Through the registrar, as a server does, which then finds the images in the cache."""

    async def outcomes() -> list[ModelSpec | ModelRefused]:
        sources = read_sources([str(directory)])
        with closing(instance_processes.fork_server(1, ENGINE)) as server:
            terms = Terms(str(cache), "float32", ENGINE, RANKS, limit_bytes=1 << 30)
            outcomes = register(sources, terms, fork_server=server)
            return [outcome async for _, outcome in outcomes]

    ended = asyncio.run(outcomes())
    specs = [outcome for outcome in ended if isinstance(outcome, ModelSpec)]
    return specs, [outcome for outcome in ended if isinstance(outcome, ModelRefused)]


@dataclass(frozen=True, slots=True)
class Greedy:
    """The output of `generate`. `margin` is the least lead that a chosen token had over the second best, in units of
    the spread of the logits."""

    tokens: list[int]
    margin: float

    @property
    def is_clear(self) -> bool:
        """Whether it does not hang on rounding, of which a batch of another size makes a tenth of that."""
        return self.margin > 3e-5


class Reference:
    """A checkpoint as transformers runs it, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint) if (checkpoint / "tokenizer.json").exists() else None
        ends = self.model.generation_config.eos_token_id
        self._ends = [ends] if isinstance(ends, int) else ends
        self.model.generation_config = GenerationConfig()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], *, max_tokens: int, min_tokens: int = 0, ignore_eos: bool = False) -> Greedy:
        how = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=min_tokens or None,
            eos_token_id=None if ignore_eos else self._ends,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = torch.tensor([prompt])
        attended = torch.ones_like(tokens)  # or generate takes tokens of the prompt for padding
        output = self.model.generate(tokens, attention_mask=attended, generation_config=how)
        return Greedy(output.sequences[0, len(prompt) :].tolist(), min(map(_lead, output.scores)))

    def clear_case(
        self, *of: str | int, length: int, max_tokens: int, begin: Sequence[int] = (), ignore_eos: bool = False
    ) -> tuple[list[int], Greedy]:
        """A prompt of so many drawn tokens behind those that it is to begin with, and the answer, which is clear."""
        for attempt in range(20):
            draws = Draws(0, *of, attempt)
            prompt = [*begin, *(draws.below(VOCAB_SIZE) for _ in range(length))]
            answer = self.greedy(prompt, max_tokens=max_tokens, ignore_eos=ignore_eos)
            if answer.is_clear:
                return prompt, answer
        raise AssertionError(f"nothing is answered clearly: {of}")

    def answer(self, prompt: list[int], *, max_tokens: int) -> str:
        """The greedy answer's text. An end token has none."""
        tokens = self.greedy(prompt, max_tokens=max_tokens).tokens
        text: str = self.tokenizer.decode(tokens[:-1] if tokens[-1] in self._ends else tokens, skip_special_tokens=True)
        return text

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """`[len(tokens), vocab]`: row i is the distribution of what follows token i."""
        return torch.log_softmax(self.model(torch.tensor([tokens])).logits[0], -1)


def _lead(scores: torch.Tensor) -> float:
    best, second = scores[0].topk(2).values.tolist()
    finite = scores[0][scores[0].isfinite()]
    return float((best - second) / (finite.max() - finite.min()))
