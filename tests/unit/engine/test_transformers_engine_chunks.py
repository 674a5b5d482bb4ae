"""A prefill in chunks is the same as a whole one, whatever happens between them."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from aegis.core.ids import RequestId
from aegis.core.request import Sampling
from aegis.engine import paged_attention
from aegis.engine.paged_attention import Kind, Prefill
from aegis.engine.protocol import StepRow
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import KvViews
from aegis.models.demo.recipes import RECIPES
from tests.long_forms import first_of
from tests.unit.engine.generation import Generation, begin, step
from tests.unit.engine.images import Arena, Built, build
from tests.unit.engine.test_paged_attention import HEADS, LAYER, SHAPE, draw, kinds, reference
from tests.unit.engine.test_transformers_engine import ARCHITECTURES, VOCAB, attached, make, telling_ones_first

NEW_TOKENS = 8
CUTS = {40: (16, 32), 100: (16, 17, 90), 150: (80,)}
"""Prompts and where they are cut: at the ends of blocks and within, before, in and behind windows."""


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 90), min_size=2, max_size=5, unique=True), kinds, st.integers(0, 99))
def test_chunks_follow_the_definition(stops: list[int], kind: Kind, seed: int) -> None:
    """Over blocks scattered in memory that was full of NaN."""
    torch.manual_seed(seed)
    stops = sorted(stops)
    arena = Arena(slab_bytes=3 * SHAPE.block_bytes + 20, slabs=60, seed=seed)
    views = KvViews(arena.region, SHAPE)
    blocks = arena.take(SHAPE, stops[-1])
    keys, values = (draw(stops[-1], LAYER.heads, dim) for dim in (LAYER.key_dim, LAYER.value_dim))
    for start, stop in pairwise([0, *stops]):
        query = draw(1, HEADS, stop - start, LAYER.key_dim)
        heads_first = (part[start:stop].transpose(0, 1)[None] for part in (keys, values))
        mixed = Prefill(views, Scratch(), start, stop, blocks).attend(1, query, *heads_first, kind)
        assert mixed.shape == (1, stop - start, HEADS, LAYER.value_dim)
        for at in (start, (start + stop) // 2, stop - 1):
            expected = reference(query[0, :, at - start], keys[: at + 1], values[: at + 1], kind)
            torch.testing.assert_close(mixed[0, at - start], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "scores"), [(1, 1 << 30), (7, 1 << 30), (512, 1), (512, 90 * HEADS * 5)])
def test_how_queries_are_cut_changes_nothing(rows: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "QUERY_ROWS", rows)
    monkeypatch.setattr(paged_attention, "SCORES", scores)
    check = test_chunks_follow_the_definition.hypothesis.inner_test  # type: ignore[attr-defined]
    for window in (None, 1, 20):
        for softcap in (None, 2.0):
            check([16, 48, 57, 90], Kind(None, window, softcap, None), 0)


def drawn(length: int, seed: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(3, VOCAB) for _ in range(length)]


@telling_ones_first
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    check(make(name, tmp_path / name))


@pytest.mark.parametrize("name", first_of(1, list(RECIPES)))
def test_the_demo_market_equals_transformers(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    own = recipe.settings | {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    check(build(AutoConfig.for_model(recipe.model_type, **own), tmp_path / name))


def check(built: Built) -> None:
    """Token for token, and as far as whole prefills are close to each other the same logprobs."""
    engine, arena = attached(built)
    sampling = Sampling(max_tokens=99, temperature=0.0, logprobs=5)
    for number, (length, cuts) in enumerate(CUTS.items()):
        prompt = drawn(length, number)
        whole = begin(engine, arena, built, 2 * number, prompt, room=NEW_TOKENS, sampling=sampling)
        parts = begin(engine, arena, built, 2 * number + 1, prompt, room=NEW_TOKENS, sampling=sampling, cuts=cuts)
        step(engine, [whole], NEW_TOKENS - 1)
        step(engine, [parts], NEW_TOKENS - 1)
        assert parts.ids == whole.ids == built.greedy(prompt, NEW_TOKENS)
        for one, other in zip(whole.tokens, parts.tokens, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make("llama", tmp_path_factory.mktemp("models") / "resident")


def test_between_two_chunks_others_run_and_kv_moves(llama: Built, tmp_path: Path) -> None:
    """Steps of the same model and a whole prefill of another one; then what is there lies in other blocks."""
    visitor = make("mistral", tmp_path / "visitor")
    engine, arena = attached(llama, visitor)
    views, shape = KvViews(arena.region, llama.manifest.kv), llama.manifest.kv
    beside = begin(engine, arena, llama, 1, drawn(20, 1), room=20)
    prompt, blocks = drawn(100, 2), arena.take(shape, 110)
    run = Generation(llama.spec.model, RequestId(2), prompt, blocks)
    engine.start(run.model, run.request, prompt, (), Sampling(max_tokens=9, temperature=0.0))
    for number, (start, stop) in enumerate(pairwise((0, 32, 64, 96))):
        engine.step(run.model, [StepRow(run.request, prompt[start:stop], start, run.blocks, samples=False)])
        step(engine, [beside], 3)
        other = begin(engine, arena, visitor, 10 + number, drawn(30, number), room=1)
        assert other.ids == visitor.greedy(other.prompt, 1)
        elsewhere = arena.take(shape, 110)
        here, there = (torch.from_numpy(views.units(each[: stop // 16])) for each in (run.blocks, elsewhere))
        views.blocks[there] = views.blocks[here].clone()
        views.blocks.index_fill_(0, here, torch.nan)
        run.blocks = elsewhere
    (last,) = engine.step(run.model, [StepRow(run.request, prompt[96:], 96, run.blocks)])
    assert last
    run.tokens.append(last.token)
    step(engine, [run, beside], 5)
    assert run.ids == llama.greedy(prompt, 6)
    assert beside.ids == llama.greedy(beside.prompt, len(beside.ids))


def test_where_kv_hangs_on_the_length_the_last_chunk_runs_all(tmp_path: Path) -> None:
    factors = [1.0 + at / 4 for at in range(8)]
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": factors, "rope_theta": 10_000.0}
    config = AutoConfig.for_model(
        "phi3",
        **ARCHITECTURES["phi3"],
        original_max_position_embeddings=64,
        rope_parameters=rope | {"original_max_position_embeddings": 64},
    )
    check(build(config, tmp_path / "phi3"))


def test_a_replay_may_be_cut_within_what_was_sent(llama: Built) -> None:
    engine, arena = attached(llama)
    prompt, sampling = drawn(20, 3), Sampling(max_tokens=60, seed=3, temperature=0.8, presence_penalty=0.5)
    whole = begin(engine, arena, llama, 1, prompt, room=60, sampling=sampling)
    step(engine, [whole], 40)
    again = begin(engine, arena, llama, 2, prompt, room=60, sampling=sampling, sent=whole.ids[:30], cuts=(16, 32, 48))
    step(engine, [again], 10)
    assert again.ids == whole.ids[:41]
    assert np.unique(whole.ids).size > 8, "degenerate weights prove nothing"
