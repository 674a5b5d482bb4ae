from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.core.ids import ModelId, RequestId
from aegis.core.request import Sampling
from aegis.core.rng import Stream
from aegis.engine.sampler import Sampler, argmax

MODEL = ModelId("m")
VOCAB = 24
DRAWS = 3000


def sampling(**options: object) -> Sampling:
    return Sampling(**{"max_tokens": 1 << 20, **options})  # type: ignore[arg-type]


samplings = st.builds(
    sampling,
    seed=st.integers(0, 5),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    presence_penalty=st.sampled_from([0.0, 1.0, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (5, -100.0))]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.just((1, 2)),
    logprobs=st.sampled_from([None, 0, 3]),
)
parameter_lists = st.lists(samplings, min_size=1, max_size=5)


def logits_of(row: int, at: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * row + at)) * 3


def adjusted(logits: torch.Tensor, parameters: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Bias, min_tokens and penalties, token by token."""
    out = logits.tolist()
    for token, bias in parameters.logit_bias:
        out[token] += bias
    if len(output) < parameters.min_tokens:
        for token in parameters.stop_token_ids:
            out[token] = -math.inf
    for token in range(VOCAB):
        if token in prompt or token in output:
            out[token] *= parameters.repetition_penalty if out[token] <= 0 else 1 / parameters.repetition_penalty
        out[token] -= parameters.frequency_penalty * output.count(token) + parameters.presence_penalty * (
            token in output
        )
    return out


def distribution(logits: list[float], parameters: Sampling) -> list[float]:
    """What a token is drawn from: temperature, min_p, top_k, top_p."""
    top = max(logits)
    weights = [math.exp((x - top) / parameters.temperature) for x in logits]
    weights = [w if w >= parameters.min_p else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[: parameters.top_k or None]
    mass = sum(weights[i] for i in kept)
    nucleus, before = [], 0.0
    for i in kept:
        if before < parameters.top_p * mass:
            nucleus.append(i)
        before += weights[i]
    total = sum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))]


@settings(deadline=None)
@given(parameter_lists, st.integers(1, 6))
def test_a_row_is_independent_of_its_batch(batch: list[Sampling], steps: int) -> None:
    together, alone = Sampler(), Sampler()
    requests = [RequestId(i) for i in range(len(batch))]
    for request, parameters in zip(requests, batch, strict=True):
        together.start(MODEL, request, [7, 8], (), parameters)
        alone.start(MODEL, request, [7, 8], (), parameters)
    for at in range(steps):
        logits = torch.stack([logits_of(row, at) for row in requests])
        expected = [alone.sample([row], logits_of(row, at)[None])[0] for row in requests]
        assert together.sample(requests, logits) == expected


@settings(deadline=None)
@given(samplings, st.integers(1, 8), st.integers(0, 8))
def test_a_replay_draws_the_same_tokens(parameters: Sampling, steps: int, cut: int) -> None:
    sampler, prompt, request = Sampler(), [7, 8, 8], RequestId(1)
    sampler.start(MODEL, request, prompt, (), parameters)
    whole = [sampler.sample([request], logits_of(0, at)[None])[0] for at in range(steps)]
    cut = min(cut, steps)
    sampler.stop(request)
    sampler.start(MODEL, request, prompt, [token.id for token in whole[:cut]], parameters)
    assert [sampler.sample([request], logits_of(0, at)[None])[0] for at in range(cut, steps)] == whole[cut:]


@settings(deadline=None)
@given(samplings, st.integers(1, 6))
def test_tokens_come_from_the_distribution_asked_for(parameters: Sampling, steps: int) -> None:
    sampler, prompt, request, output = Sampler(), [7, 8], RequestId(1), list[int]()
    sampler.start(MODEL, request, prompt, (), parameters)
    for at in range(steps):
        expected = adjusted(logits_of(0, at), parameters, prompt, output)
        token = sampler.sample([request], logits_of(0, at)[None])[0].id
        if parameters.temperature == 0:
            assert expected[token] == pytest.approx(max(expected), abs=1e-4)
        else:
            assert distribution(expected, parameters)[token] > 0
        output.append(token)


@pytest.mark.parametrize(
    "parameters",
    [
        sampling(),
        sampling(temperature=0.6),
        sampling(top_k=4),
        sampling(top_p=0.7),
        sampling(min_p=0.2),
        sampling(temperature=1.7, top_k=9, top_p=0.8, min_p=0.05),
        sampling(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.4, logit_bias=((4, 3.0),)),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all", "penalties"],
)
def test_frequencies_match_the_reference(parameters: Sampling) -> None:
    """Draw i of DRAWS requests with seeds of their own; Pearson's chi-squared within 5 standard deviations."""
    logits, prompt, output = logits_of(3, 0), [2, 9], [4, 4, 9, 11]
    sampler = Sampler()
    requests = [RequestId(i) for i in range(DRAWS)]
    for request in requests:
        sampler.start(MODEL, request, prompt, output, msgspec.structs.replace(parameters, seed=request))
    drawn = Counter(token.id for token in sampler.sample(requests, logits.expand(DRAWS, -1)))
    expected = distribution(adjusted(logits, parameters, prompt, output), parameters)
    likely = [token for token in range(VOCAB) if expected[token] * DRAWS >= 5]
    assert all(expected[token] > 0 for token in drawn)
    chi2 = sum((drawn[t] - expected[t] * DRAWS) ** 2 / (expected[t] * DRAWS) for t in likely)
    assert chi2 < len(likely) + 5 * math.sqrt(2 * len(likely))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_is_told_to_the_last_bit(dtype: torch.dtype) -> None:
    """The first of equals, and a NaN where there is one."""
    near = 1 + torch.finfo(dtype).eps
    rows = [[1, near, 0, near], [-torch.inf, 3, -torch.inf, 3], [-torch.inf] * 4, [2, torch.inf, torch.nan, 5]]
    assert argmax(torch.tensor(rows, dtype=torch.float64).to(dtype)).tolist() == [1, 1, 0, 2]


def test_errors_of_the_last_bits_hardly_ever_change_a_draw() -> None:
    """As they come of other shapes and after a replay, in a flat distribution, where near ties abound."""
    draws = torch.Generator().manual_seed(7)
    logits = torch.randn(DRAWS, 512, generator=draws) / 8
    noisy = logits * (1 + 2**-15 * torch.rand(DRAWS, 512, generator=draws))
    sampler, requests = Sampler(), [RequestId(i) for i in range(DRAWS)]

    def drawn(of: torch.Tensor) -> list[int]:
        for request in requests:
            sampler.start(MODEL, request, [7], (), sampling(seed=request))
        return [token.id for token in sampler.sample(requests, of)]

    assert drawn(noisy) == drawn(logits)


def test_each_token_of_the_vocabulary_has_its_number_of_the_stream() -> None:
    sampler, requests = Sampler(), [RequestId(i) for i in range(50)]
    for request in requests:
        sampler.start(MODEL, request, [7], [3, 3], sampling(seed=request + 5))
    logits = torch.stack([logits_of(row, 0) for row in requests])
    for request, row, token in zip(requests, logits.tolist(), sampler.sample(requests, logits), strict=True):
        stream = Stream(request + 5, "sample", 2)
        noisy = [logit - math.log(-math.log(((stream.bits64() >> 12) + 0.5) / 2**52)) for logit in row]
        assert token.id == max(range(VOCAB), key=noisy.__getitem__)


def test_greedy_takes_the_first_of_equals() -> None:
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [], (), sampling(temperature=0.0))
    sampler.start(MODEL, RequestId(2), [], (), sampling(temperature=0.0, logprobs=2))
    logits = torch.zeros(2, VOCAB)
    logits[:, [5, 9]] = 4.0
    plain, reported = sampler.sample([RequestId(1), RequestId(2)], logits)
    assert (plain.id, plain.logprob, plain.top) == (5, None, ())
    assert reported.id == 5
    assert len(reported.top) == 2


def test_stop_tokens_wait_for_min_tokens() -> None:
    parameters = sampling(temperature=0.0, min_tokens=2, stop_token_ids=(6,))
    logits = torch.zeros(1, VOCAB)
    logits[0, 6], logits[0, 3] = 9.0, 5.0
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [], (), parameters)
    assert [sampler.sample([RequestId(1)], logits)[0].id for _ in range(3)] == [3, 3, 6]


def test_sampling_leaves_the_logits_as_they_are() -> None:
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [1], (), sampling(repetition_penalty=2.0, logit_bias=((1, 5.0),), min_tokens=1))
    logits = logits_of(0, 0)[None]
    before = logits.clone()
    sampler.sample([RequestId(1)], logits)
    assert torch.equal(logits, before)


def test_prompt_logprobs_cover_long_prompts_and_not_replays() -> None:
    sampler, prompt = Sampler(), [i % VOCAB for i in range(600)]
    sampler.start(MODEL, RequestId(1), prompt, (), sampling(prompt_logprobs=1))
    assert sampler.wants_prompt(RequestId(1))
    logits = torch.stack([logits_of(1, at) for at in range(len(prompt) - 1)])
    tokens = sampler.prompt_logprobs(RequestId(1), logits, prompt[1:])
    expected = torch.log_softmax(logits, -1)
    assert [token.id for token in tokens] == prompt[1:]
    for at, token in enumerate(tokens):
        assert token.logprob == pytest.approx(float(expected[at, token.id]), abs=1e-5)
        assert token.top[0][0] == int(expected[at].argmax())
    sampler.start(MODEL, RequestId(2), prompt, [5], sampling(prompt_logprobs=1))
    assert not sampler.wants_prompt(RequestId(2))


def test_a_stopped_request_is_forgotten_and_unknown_ones_ignored() -> None:
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [], (), sampling())
    sampler.stop(RequestId(1))
    sampler.stop(RequestId(1))
    with pytest.raises(KeyError):
        sampler.sample([RequestId(1)], torch.zeros(1, VOCAB))


extreme = st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, 1.0])
extreme_samplings = st.builds(
    sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-310, 1.0]),
    top_p=st.sampled_from([5e-324, 1.0]),
    min_p=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 1]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1e-38, 1e-310]),
    min_tokens=st.sampled_from([0, 9]),
    stop_token_ids=st.sampled_from([(1,), tuple(range(VOCAB))]),
    logprobs=st.sampled_from([None, 2]),
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(extreme_samplings, st.lists(extreme, min_size=VOCAB, max_size=VOCAB)), min_size=1, max_size=3)
)
def test_any_logits_and_parameters_give_a_token_of_the_vocabulary(batch: list[tuple[Sampling, list[float]]]) -> None:
    sampler, requests = Sampler(), [RequestId(i) for i in range(len(batch))]
    for request, (parameters, _) in zip(requests, batch, strict=True):
        sampler.start(MODEL, request, [0, 3], [4], parameters)
    logits = torch.tensor([row for _, row in batch])
    for _ in range(2):
        assert all(0 <= token.id < VOCAB for token in sampler.sample(requests, logits))


@pytest.mark.parametrize("parameters", [sampling(temperature=0.0), sampling(), sampling(temperature=0.0, logprobs=0)])
def test_a_token_without_a_number_is_never_chosen(parameters: Sampling) -> None:
    logits = torch.full((1, VOCAB), math.nan)
    logits[0, 7] = -5.0
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [], (), parameters)
    assert sampler.sample([RequestId(1)], logits)[0].id == 7


def test_the_least_temperature_takes_the_likeliest() -> None:
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [], (), sampling(temperature=1e-310))
    assert sampler.sample([RequestId(1)], logits_of(0, 0)[None])[0].id == int(logits_of(0, 0).argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_everything_is_banned_nothing_is(temperature: float) -> None:
    parameters = sampling(temperature=temperature, top_k=1, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [], (), parameters)
    assert sampler.sample([RequestId(1)], logits_of(0, 0)[None])[0].id == int(logits_of(0, 0).argmax())


def test_ids_beyond_the_vocabulary_have_no_effect() -> None:
    within = sampling(repetition_penalty=1.3, min_tokens=3, stop_token_ids=(3,), logit_bias=((5, 1.0),), logprobs=0)
    beyond = VOCAB
    parameters = msgspec.structs.replace(within, stop_token_ids=(3, beyond), logit_bias=((5, 1.0), (beyond, 9.0)))
    sampler = Sampler()
    sampler.start(MODEL, RequestId(1), [2, 2], [8, 8], within)
    sampler.start(MODEL, RequestId(2), [2, beyond], [8, beyond], parameters)
    logits = torch.stack([logits_of(0, 0)] * 2)
    first, second = sampler.sample([RequestId(1), RequestId(2)], logits)
    assert first == second
