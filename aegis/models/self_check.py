"""A model's output over paged KV compared with transformers' own, once, when it is registered.

Whatever an architecture hides from `probe` (state kept outside attention, positions it works out for itself, an
argument misread) shows here as different numbers, and the model is refused instead of answering nonsense.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import BrokenBarrierError

import numpy as np
import torch
from msgspec import Struct
from transformers import GenerationConfig, PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import Sampling, Token
from aegis.core.rng import Stream
from aegis.engine.block_table import BlockTable
from aegis.engine.parallel.group import ThreadGroup
from aegis.engine.protocol import Engine, KvRegion, Sampled, StepRow
from aegis.models.failures import LIBRARY_ERRORS, one_line

MakeEngine = Callable[..., Engine]
"""Called with the KV region and, of a model that ranks share out, by name with their `group`."""

STEPS = 6
_SHORT_TOKENS, _LONG_TOKENS = 5, 33
_WINDOW_MAX = 128  # a longer sliding window would need a prompt too long to be run in passing
_TOP = 8
_BLOCKS_PER_SLAB = 2
_TOLERANCE = {"float32": 2e-5, "float16": 0.006, "bfloat16": 0.04}
"""Largest median difference of log probabilities, in units of the spread of the logits: some ten times what rounding
makes of it. The median, because a router that is a rounding away from another expert makes single tokens differ."""


class _Reference(Struct, frozen=True):
    """The output of transformers: `logits [tokens, vocab]` before any processing, float32."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: torch.Tensor


def check(spec: ModelSpec, model: PreTrainedModel, make_engine: MakeEngine) -> None:
    """Runs two prompts of different lengths, the longer one past the sliding window if that is short, each at once and
    again in two chunks, then a few decoding steps of all together. `model` is the reference. Raises ModelRefused."""
    references = [_generate(model, prompt) for prompt in _prompts(spec, model)] * 2
    differences = _differences(spec, references, make_engine)
    worst = float(differences.median(-1).values.max())
    if not worst <= _TOLERANCE[spec.manifest.kv.dtype]:  # a NaN is no agreement either
        raise ModelRefused(
            "its output over paged KV is not what transformers computes: "
            f"log probabilities differ by {worst:.2g} of the logits' spread"
        )


def _differences(spec: ModelSpec, references: Sequence[_Reference], make_engine: MakeEngine) -> torch.Tensor:
    """`[references, STEPS]`. Of a model that ranks share out what the first one says; each is a thread."""
    if spec.manifest.ranks == 1:
        return _differences_of(spec, references, make_engine)
    groups = ThreadGroup.of(spec.manifest.ranks)

    def of_rank(group: ThreadGroup) -> torch.Tensor:
        try:
            return _differences_of(spec.shard(group.rank), references, partial(make_engine, group=group))
        except Exception:
            group.leave()
            raise

    with ThreadPoolExecutor(len(groups)) as threads:
        ranks = [threads.submit(of_rank, group) for group in groups]
    failures = [error for rank in ranks if (error := rank.exception())]
    if failures:
        raise next((error for error in failures if not isinstance(error, BrokenBarrierError)), failures[0])
    return ranks[0].result()


def _differences_of(spec: ModelSpec, references: Sequence[_Reference], make_engine: MakeEngine) -> torch.Tensor:
    weights = np.memmap(spec.image_path, mode="c")  # private: a forward pass may write its own rotary buffers
    memory, region, blocks = _kv_memory(spec.manifest.kv, [len(reference.prompt) + STEPS for reference in references])
    engine = make_engine(region)
    engine.attach(spec, weights.ctypes.data)
    differences = torch.zeros(len(references), STEPS)
    for i, step, sampled in _run(engine, spec.model, references, blocks):
        differences[i, step] = _difference(sampled.token, references[i].logits[step])
    engine.detach(spec.model)
    del memory, weights  # the engine used their addresses until here
    return differences


def _run(
    engine: Engine, model: ModelId, references: Sequence[_Reference], blocks: Sequence[BlockTable]
) -> Iterator[tuple[int, int, Sampled]]:
    """Yields the reference, the number of its token, and the engine's logits there. The engine is fed the reference's
    tokens, so a near tie that falls differently does not matter. The latter half is prefilled in two chunks."""
    sampling = Sampling(max_tokens=STEPS, temperature=0.0, logprobs=_TOP)
    for i, reference in enumerate(references):
        engine.start(model, RequestId(i), reference.prompt, (), sampling)
        start = len(reference.prompt) // 2 if 2 * i >= len(references) and engine.extends(model) else 0
        if start:
            engine.step(model, [StepRow(RequestId(i), reference.prompt[:start], 0, blocks[i], samples=False)])
        for sampled in engine.step(model, [StepRow(RequestId(i), reference.prompt[start:], start, blocks[i])]):
            assert sampled
            yield i, 0, sampled
    for step in range(1, STEPS):
        rows = [
            StepRow(RequestId(i), (reference.tokens[step - 1],), len(reference.prompt) + step - 1, blocks[i])
            for i, reference in enumerate(references)
        ]
        for i, sampled in enumerate(engine.step(model, rows)):
            assert sampled
            yield i, step, sampled
    for i in range(len(references)):
        engine.stop(RequestId(i))


def _difference(token: Token, logits: torch.Tensor) -> float:
    expected = torch.log_softmax(logits, -1)
    spread = float(logits.max() - logits.min())
    reported = [*token.top, (token.id, token.logprob)]
    worst = max(abs(logprob - float(expected[id])) for id, logprob in reported if logprob is not None)
    return worst / spread if spread else worst


def _prompts(spec: ModelSpec, model: PreTrainedModel) -> list[tuple[int, ...]]:
    window = getattr(model.config.get_text_config(), "sliding_window", None) or 0
    longest = window + _SHORT_TOKENS if window <= _WINDOW_MAX else 0
    room = spec.manifest.context_tokens - STEPS
    if room < 1:
        raise ModelRefused(f"its context of {spec.manifest.context_tokens} tokens is too short to serve")
    draws = Stream(0, "self-check")
    lengths = (min(_SHORT_TOKENS, room), min(max(_LONG_TOKENS, longest), room))
    return [tuple(draws.below(spec.manifest.vocab_size) for _ in range(length)) for length in lengths]


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompt: tuple[int, ...]) -> _Reference:
    plain = GenerationConfig(
        do_sample=False,
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        pad_token_id=0,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = torch.tensor([prompt])
    try:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=plain
        )  # no token is padding
    except LIBRARY_ERRORS as error:
        why = f"transformers cannot generate with it; see to its generation_config.json: {one_line(error)}"
        raise ModelRefused(why) from error
    return _Reference(prompt, tuple(output.sequences[0, len(prompt) :].tolist()), torch.cat(output.logits).float())


def _kv_memory(shape: KvShape, lengths: Sequence[int]) -> tuple[mmap.mmap, KvRegion, list[BlockTable]]:
    """Memory for sequences of these lengths, and their blocks: interleaved and descending, across slabs with a gap
    between them. It is full of NaNs, as memory that another model used may be."""
    counts = [shape.blocks_for(length) for length in lengths]
    slab_bytes = _BLOCKS_PER_SLAB * shape.block_bytes + shape.block_bytes // 2
    nbytes = -(-sum(counts) // _BLOCKS_PER_SLAB) * slab_bytes
    memory = mmap.mmap(-1, nbytes)
    filled = np.frombuffer(memory, dtype=np.uint8)
    filled[:] = 0xFF
    free = iter(range(sum(counts) - 1, -1, -1))
    owners: list[list[int]] = [[] for _ in counts]
    for nth in range(max(counts)):
        for owner, count in zip(owners, counts, strict=True):
            if nth < count:
                owner.append(next(free))
    return memory, KvRegion(filled.ctypes.data, nbytes, slab_bytes), [np.array(owner) for owner in owners]
