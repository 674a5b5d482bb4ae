"""From logits to tokens, for rows of any batch with any parameters.

The order is: logit bias, min_tokens, penalties, grammar, temperature, min_p, top_k, top_p, draw. Each row depends on
its own logits and state alone, so a seeded request gets the same tokens whatever it is batched with: token i of a
request is the one whose logit and Gumbel noise are most together, the noise from `Stream(seed, "sample", i)` (Gumbel,
Statistical Theory of Extreme Values, 1954; the equivalence: Maddison et al., A* Sampling, NeurIPS'14, §2).

Logits differ in their last bits with the shape of the batch, and after a replay or on another GPU. Here an error e in
them changes a draw with a probability of about e. The inverse of a cumulative distribution would add e up over the
vocabulary, and twice as bad over a sorted one, where neighbours change places: a near tie of any two would do.

A batch of greedy rows costs one maximum, what else its rows ask for comes on top: a step of a small model has time for
few operations.

Whatever the logits and parameters, a token of the vocabulary comes out: a NaN counts as banned, an overflow as the
largest number, and where everything is banned, nothing is that the row's grammar allows.

All of it happens where the logits are. Everything the host has to know comes over in one piece at the end: that is the
one moment at which a step waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aegis.core.ids import ModelId, RequestId
from aegis.core.request import Failure, Sampling, Token
from aegis.core.rng import FACTORS, STEP, Stream
from aegis.engine.grammar.cache import Grammars
from aegis.engine.grammar.token_masks import GrammarPosition, Masks

PROMPT_CHUNK_TOKENS = 256
"""Prompt positions whose distributions are held at a time."""


@dataclass(slots=True, eq=False)
class _State:
    """A request as the sampler knows it. `counts` are of generated tokens, `seen` of prompt and generated ones."""

    sampling: Sampling
    prompt_tokens: int
    generated: int
    greedy: bool  # the likeliest token alone is asked for
    adjusts: bool  # logits are, before any grammar
    grammar: GrammarPosition | None
    history: tuple[int, ...]  # prompt and tokens generated before `start`, until the counts are made
    counts: torch.Tensor | None = field(default=None)  # [vocab], float32
    seen: torch.Tensor | None = field(default=None)  # [vocab], bool


def _penalised(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1.0


def _greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 and sampling.logprobs is None


def _adjusts(sampling: Sampling) -> bool:
    return _penalised(sampling) or bool(sampling.logit_bias) or sampling.min_tokens > 0


class Sampler:
    """The sampling state of every request that is being generated. `grammars` knows the models of those that have
    one."""

    __slots__ = ("_states", "grammars")

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._states: dict[RequestId, _State] = {}
        self.grammars = grammars or Grammars()

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        """The state after `generated`, which is what it was when these tokens were drawn one by one."""
        history = (*prompt, *generated) if _penalised(sampling) else ()
        grammar = self.grammars.begin(model, sampling.grammar, generated) if sampling.grammar else None
        greedy, adjusts = _greedy(sampling), _adjusts(sampling)
        self._states[request] = _State(sampling, len(prompt), len(generated), greedy, adjusts, grammar, history)

    def stop(self, request: RequestId) -> None:
        self._states.pop(request, None)

    def sampling(self, request: RequestId) -> Sampling:
        """The parameters it was started with."""
        return self._states[request].sampling

    def problem(self, request: RequestId) -> Failure | None:
        """The reason why its output cannot go on, if there is one."""
        grammar = self._states[request].grammar
        return grammar.problem if grammar else None

    def wants_prompt(self, request: RequestId) -> bool:
        """Whether this prefill reports prompt logprobs: a replay does not, they went out before its first token."""
        state = self._states[request]
        return state.sampling.prompt_logprobs is not None and state.generated == 0

    def prompt_logprobs(self, request: RequestId, logits: torch.Tensor, following: Sequence[int]) -> list[Token]:
        """Of the tokens of its prompt that follow those whose `logits [len(following), vocab]` these are."""
        top = self._states[request].sampling.prompt_logprobs
        assert top is not None
        tokens: list[Token] = []
        for first in range(0, len(following), PROMPT_CHUNK_TOKENS):
            there = following[first : first + PROMPT_CHUNK_TOKENS]
            report = _report(logits[first : first + len(there)], _sent(there, logits.device), top)
            tokens += _tokens(there, report.tolist(), [top] * len(there))
        return tokens

    def sample(self, requests: Sequence[RequestId], logits: torch.Tensor) -> list[Token]:
        """The next token of each request. `logits [len(requests), vocab]`, any float dtype; not changed."""
        states = [self._states[request] for request in requests]
        held = any(state.grammar for state in states)
        adjusts = any(state.adjusts for state in states)
        greedy = all(state.greedy for state in states)
        raw = logits if greedy and not (held or adjusts) else logits.float()
        masks = Masks([state.grammar for state in states], raw) if held else None
        adjusted = _adjust(states, raw) if adjusts else raw
        allowed = masks.applied(adjusted) if masks else adjusted
        if greedy:
            tokens = [Token(token) for token in _likeliest(allowed, raw, masks)]
        else:
            tokens = _reported(states, _choose(states, _drawable(allowed, raw, masks)), raw)
        for state, token in zip(states, tokens, strict=True):
            state.generated += 1
            if state.counts is not None and state.seen is not None:
                state.counts[token.id] += 1
                state.seen[token.id] = True
            if state.grammar:
                state.grammar.accept(token.id)
        return tokens


def _sent(values: Iterable[float], device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values, sent to the device without waiting for them to arrive."""
    return torch.tensor(list(values), dtype=dtype).to(device, non_blocking=True)


def _rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The rows of the tensor that are named, in ascending order; the tensor itself where they are all."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, _sent(rows, tensor.device))


def _reported(states: Sequence[_State], chosen: torch.Tensor, raw: torch.Tensor) -> list[Token]:
    """The chosen tokens, with logprobs where they are asked for."""
    wanted = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
    if not wanted:
        return [Token(token) for token in chosen.tolist()]
    tops = [states[row].sampling.logprobs or 0 for row in wanted]
    ids, *lines = _fetch(chosen, _report(_rows(raw, wanted), _rows(chosen, wanted), max(tops)))
    tokens = [Token(token) for token in ids]
    for row, told in zip(wanted, _tokens([ids[row] for row in wanted], lines, tops), strict=True):
        tokens[row] = told
    return tokens


def _fetch(chosen: torch.Tensor, report: torch.Tensor) -> list[list[Any]]:
    """The chosen ids, and the lines of the report, to the host at once."""
    values = torch.cat((chosen.double(), report.flatten())).tolist()
    width = report.shape[1]
    lines = [values[at : at + width] for at in range(len(chosen), len(values), width)]
    return [[int(value) for value in values[: len(chosen)]], *lines]


def _report(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> torch.Tensor:
    """A line for each row: the chosen token's logprob, then those of the `most` likeliest, best first, then their ids.
    In float64, which holds both exactly."""
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = logprobs.topk(min(most, logprobs.shape[1]), -1)
    return torch.cat((logprobs.gather(1, chosen[:, None]).double(), values.double(), ids.double()), 1)


def _tokens(chosen: Sequence[int], lines: Sequence[Sequence[float]], tops: Sequence[int]) -> Iterator[Token]:
    for token, line, top in zip(chosen, lines, tops, strict=True):
        most = len(line) // 2
        values, ids = line[1 : 1 + most][:top], [int(each) for each in line[1 + most :][:top]]
        yield Token(token, line[0], tuple(zip(ids, values, strict=True)))


def _adjust(states: Sequence[_State], raw: torch.Tensor) -> torch.Tensor:
    """Bias, min_tokens and penalties. `raw` itself is returned where nothing is asked for."""
    logits, vocab = raw, raw.shape[1]
    for row, state in enumerate(states):
        sampling = state.sampling
        biased = [(token, bias) for token, bias in sampling.logit_bias if token < vocab]
        early = state.generated < sampling.min_tokens
        banned = [token for token in sampling.stop_token_ids if token < vocab] if early else []
        if not (biased or banned):
            continue
        if logits is raw:
            logits = raw.clone()
        if biased:
            ids, biases = zip(*biased, strict=True)
            logits[row].index_add_(0, _sent(ids, raw.device), _sent(biases, raw.device, torch.float32))
        if banned:
            logits[row].index_fill_(0, _sent(banned, raw.device), -torch.inf)
    rows = [row for row, state in enumerate(states) if _penalised(state.sampling)]
    if rows:
        if logits is raw:
            logits = raw.clone()
        penalised = _penalise([states[row] for row in rows], _rows(logits, rows))
        logits.index_copy_(0, _sent(rows, raw.device), penalised)
    return logits


def _likeliest(logits: torch.Tensor, raw: torch.Tensor, masks: Masks | None) -> list[int]:
    """The likeliest token of each row. `logits` are those of `raw`, adjusted and masked."""
    if logits.is_cpu:
        values = _known_to_numpy(logits)
        best = values.argmax(1)  # a NaN is the largest
        ids: list[int] = best.tolist()
        fine = bool(np.isfinite(values[np.arange(len(best)), best]).all())
    else:
        most, first = logits.max(-1)
        ids, finite = torch.stack((first, most.isfinite())).tolist()
        fine = all(finite)
    return ids if fine else argmax(_drawable(logits, raw, masks)).tolist()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """`[rows]`. On a CPU numpy's takes a fourth of the time that torch's does, or a tenth."""
    return torch.from_numpy(_known_to_numpy(logits).argmax(1)) if logits.is_cpu else logits.argmax(-1)


def _known_to_numpy(logits: torch.Tensor) -> npt.NDArray[np.floating[Any]]:
    """The logits in their own precision, or in a greater one that NumPy knows."""
    values: npt.NDArray[np.floating[Any]] = (logits.float() if logits.dtype == torch.bfloat16 else logits).numpy()
    return values


def _drawable(logits: torch.Tensor, raw: torch.Tensor, masks: Masks | None) -> torch.Tensor:
    """`logits` with a finite maximum in every row: that of `raw` where everything is banned, under the same `masks`."""
    if logits.is_cpu and bool(logits.amax(-1).isfinite().all()):  # a GPU would have to be waited for
        return logits
    least, most = torch.finfo(logits.dtype).min, torch.finfo(logits.dtype).max
    logits = logits.nan_to_num(nan=-torch.inf, posinf=most, neginf=-torch.inf)
    barren = logits.amax(-1, keepdim=True) == -torch.inf
    finite = raw.nan_to_num(nan=least, posinf=most, neginf=least)
    return torch.where(barren, masks.applied(finite) if masks else finite, logits)


def _penalise(states: Sequence[_State], logits: torch.Tensor) -> torch.Tensor:
    """Repetition (Keskar et al., CTRL, 2019, §4.1) over prompt and output; presence and frequency over the output."""
    for state in states:
        if state.counts is None:
            _count(state, logits.shape[1], logits.device)
    counts = torch.stack([state.counts for state in states if state.counts is not None])
    seen = torch.stack([state.seen for state in states if state.seen is not None])

    def column(values: Iterable[float]) -> torch.Tensor:
        return _sent(values, logits.device, torch.float32)[:, None]

    repetition = column(state.sampling.repetition_penalty for state in states)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    logits = logits - counts * column(state.sampling.frequency_penalty for state in states)
    return logits - (counts > 0) * column(state.sampling.presence_penalty for state in states)


def _count(state: _State, vocab: int, device: torch.device) -> None:
    history = torch.tensor(state.history, dtype=torch.int64)
    output = history[state.prompt_tokens :]
    state.counts = torch.bincount(output, minlength=vocab)[:vocab].float().to(device, non_blocking=True)
    state.seen = (torch.bincount(history, minlength=vocab)[:vocab] > 0).to(device, non_blocking=True)
    state.history = ()


def _choose(states: Sequence[_State], logits: torch.Tensor) -> torch.Tensor:
    chosen = argmax(logits)
    rows = [row for row, state in enumerate(states) if state.sampling.temperature > 0]
    if rows:
        drawn = _draw([states[row] for row in rows], _rows(logits, rows))
        chosen = chosen.index_copy(0, _sent(rows, logits.device), drawn)
    return chosen


def _draw(states: Sequence[_State], logits: torch.Tensor) -> torch.Tensor:
    """Samples each row after temperature, min_p, top_k and top_p. `logits [len(states), vocab]`."""

    def column(values: Iterable[float]) -> torch.Tensor:
        return _sent(values, logits.device, torch.float64)[:, None]

    samplings = [state.sampling for state in states]
    logits = logits.double()
    behind = logits - logits.amax(-1, keepdim=True)  # before the temperature, which might overflow them
    scores = behind / column(sampling.temperature for sampling in samplings)
    if any(sampling.min_p for sampling in samplings):
        scores = scores.where(scores.exp() >= column(sampling.min_p for sampling in samplings), -torch.inf)
    if any(sampling.top_k or sampling.top_p < 1 for sampling in samplings):
        scores = _cut(samplings, scores, column)
    return argmax(scores + _gumbels(states, logits))


def _cut(
    samplings: Sequence[Sampling], scores: torch.Tensor, column: Callable[[Iterable[float]], torch.Tensor]
) -> torch.Tensor:
    """The scores, in which tokens beyond top_k and top_p are banned. The likeliest token stays."""
    ordered, ids = scores.sort(stable=True, dim=-1, descending=True)
    vocab = scores.shape[1]
    rank = torch.arange(vocab, device=scores.device)
    weights = ordered.exp().where(rank < column(sampling.top_k or vocab for sampling in samplings), 0)
    cumulative = weights.cumsum(-1)
    # The shortest prefix that reaches top_p: a token stays while the ones before it fall short.
    top_p = column(sampling.top_p for sampling in samplings)
    within = (cumulative - weights) < top_p * cumulative[:, -1:]
    stays = (weights > 0) & (within | (top_p >= 1))
    return torch.full_like(scores, -torch.inf).scatter(1, ids, ordered.where(stays, -torch.inf))


def _gumbels(states: Sequence[_State], logits: torch.Tensor) -> torch.Tensor:
    """A draw of the standard Gumbel distribution for each token: of the v-th of the vocabulary, from the v-th number of
    the row's stream, so that no row waits for the one before it. `[len(states), vocab]`, float64."""
    streams = [Stream(state.sampling.seed, "sample", state.generated) for state in states]
    starts = _sent([_signed(stream.state) for stream in streams], logits.device, torch.int64)[:, None]
    steps = torch.arange(1, logits.shape[1] + 1, device=logits.device) * _signed(STEP)
    bits = starts + steps  # which wraps around, as everything below
    bits = (bits ^ _shifted(bits, 30)) * _signed(FACTORS[0])
    bits = (bits ^ _shifted(bits, 27)) * _signed(FACTORS[1])
    bits ^= _shifted(bits, 31)
    uniform = (_shifted(bits, 12).double() + 0.5) / (1 << 52)  # between 0 and 1, and neither
    return -(-uniform.log()).log()


def _signed(bits: int) -> int:
    """The same 64 bits as an int64."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros; torch shifts the sign in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
