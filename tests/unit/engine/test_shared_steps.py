"""Rows of prompts, of pieces of them and of sequences that decode, in one step, make what each makes alone."""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from aegis.core.ids import RequestId
from aegis.core.request import Sampling
from aegis.engine.block_table import BlockTable
from aegis.engine.paged_attention import Decode, Kind, Mixed, Prefill
from aegis.engine.protocol import StepRow
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import KvViews
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.demo.recipes import RECIPES
from tests.long_forms import first_of
from tests.unit.engine.generation import GREEDY, Generation
from tests.unit.engine.images import Arena, Built, build
from tests.unit.engine.test_paged_attention import HEADS, LAYER, SHAPE, draw, kinds, reference
from tests.unit.engine.test_transformers_engine import ARCHITECTURES, TELLING, VOCAB, attached, make

LENGTHS = (40, 1, 7, 100, 16, 33)
NEW_TOKENS = 8
PIECES = (1, 7, 64)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4),
    st.lists(st.integers(0, 90), max_size=4),
    kinds,
    st.integers(0, 99),
)
def test_a_shared_step_follows_the_definition(
    prompts: list[tuple[int, int]], single: list[int], kind: Kind, seed: int
) -> None:
    """`prompts` have so many positions before, and run so many; over blocks scattered in memory that was full of
    NaN."""
    torch.manual_seed(seed)
    arena = Arena(slab_bytes=3 * SHAPE.block_bytes + 20, slabs=90, seed=seed)
    views = KvViews(arena.region, SHAPE)
    parts = [(before, before + count) for before, count in prompts]
    parts += [(at, at + 1) for at in sorted(single, reverse=True)]
    rows = [(start, stop, arena.take(SHAPE, stop)) for start, stop in parts]
    keys = [draw(stop, LAYER.heads, LAYER.key_dim) for _, stop in parts]
    values = [draw(stop, LAYER.heads, LAYER.value_dim) for _, stop in parts]
    for (start, _, blocks), key, value in zip(rows, keys, values, strict=True):
        if start:
            before = (part[:start].transpose(0, 1)[None] for part in (key, value))
            Prefill(views, Scratch(), 0, start, blocks).attend(1, draw(1, HEADS, start, LAYER.key_dim), *before, kind)
    ends = list(accumulate(stop - start for start, stop in parts))
    query = draw(1, HEADS, ends[-1], LAYER.key_dim)
    new = [
        torch.cat([each[start:stop] for each, (start, stop) in zip(of, parts, strict=True)]).transpose(0, 1)[None]
        for of in (keys, values)
    ]
    mixed = _step(views, rows, len(prompts)).attend(1, query, new[0], new[1], kind)
    assert mixed.shape == (1, ends[-1], HEADS, LAYER.value_dim)
    for (start, stop), end, key, value in zip(parts, ends, keys, values, strict=True):
        for at in {start, (start + stop) // 2, stop - 1}:
            here = end - stop + at
            expected = reference(query[0, :, here], key[: at + 1], value[: at + 1], kind)
            torch.testing.assert_close(mixed[0, here], expected, rtol=1e-4, atol=1e-5)


def _step(views: KvViews, rows: list[tuple[int, int, BlockTable]], prompts: int) -> Mixed:
    pieces = [Prefill(views, Scratch(), start, stop, blocks) for start, stop, blocks in rows[:prompts]]
    single = rows[prompts:]
    decode = Decode(views, Scratch(), [start for start, _, _ in single], [row[2] for row in single]) if single else None
    return Mixed(pieces, decode)


class Together:
    """Requests of one model, of which one more joins at each step. A step has the next piece of each prompt and a token
    of each sequence that decodes, unless they are done."""

    def __init__(self, engine: TransformersEngine, arena: Arena, built: Built, piece: int) -> None:
        self._engine = engine
        self._arena = arena
        self._built = built
        self._piece = piece
        self._ran: dict[RequestId, int] = {}
        self.runs: list[Generation] = []
        self.steps = 0
        self.mixed = 0  # those with a prompt and a sequence that decodes

    def join(self, prompt: list[int], sampling: Sampling) -> None:
        room = len(prompt) + NEW_TOKENS + 1
        number = RequestId(len(self.runs))
        run = Generation(self._built.spec.model, number, prompt, self._arena.take(self._built.manifest.kv, room))
        self._engine.start(run.model, number, prompt, (), sampling)
        self.runs.append(run)
        self._ran[number] = 0

    def step(self) -> bool:
        """Whether there was something to do."""
        rows = {run.request: self._row(run) for run in self.runs if len(run.tokens) < NEW_TOKENS}
        if not rows:
            return False
        self.steps += 1
        prompts = [run for run in self.runs if run.request in rows and not run.tokens]
        self.mixed += 0 < len(prompts) < len(rows)
        made = self._engine.step(self._built.spec.model, list(rows.values()))
        for (request, row), sampled in zip(rows.items(), made, strict=True):
            assert (sampled is not None) is row.samples
            self._ran[request] = row.stop
            if sampled:
                self.runs[request].tokens.append(sampled.token)
        return True

    def _row(self, run: Generation) -> StepRow:
        if run.tokens:
            return run.row()
        start = self._ran[run.request]
        stop = min(start + self._piece, len(run.prompt))
        return StepRow(run.request, run.prompt[start:stop], start, run.blocks, stop == len(run.prompt))


def drawn(length: int, seed: int) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(3, VOCAB) for _ in range(length)]


def check(built: Built, piece: int) -> None:
    engine, arena = attached(built)
    together = Together(engine, arena, built, piece)
    for number, length in enumerate(LENGTHS):
        together.join(drawn(length, number), GREEDY)
        together.step()
    while together.step():
        pass
    assert together.mixed > 2
    for run in together.runs:
        assert run.ids == built.greedy(run.prompt, NEW_TOKENS)


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        pytest.param(name, piece, marks=[pytest.mark.long] if piece != 7 and name not in TELLING else [])
        for name in ARCHITECTURES
        for piece in PIECES
    ],
)
def test_equals_transformers(name: str, piece: int, tmp_path: Path) -> None:
    check(make(name, tmp_path / name), piece)


@pytest.mark.parametrize("name", first_of(2, list(RECIPES)))
def test_the_demo_market_equals_transformers(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    own = recipe.settings | {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    check(build(AutoConfig.for_model(recipe.model_type, **own), tmp_path / name), 64)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make("llama", tmp_path_factory.mktemp("models") / "resident")


def sampled(built: Built, piece: int, *, alone: bool) -> list[list[tuple[int, float | None]]]:
    """Of requests that draw, with penalties, logprobs and lengths at which none may end."""
    together: list[Together] = []
    engine, arena = attached(built)
    for number, length in enumerate(LENGTHS):
        sampling = Sampling(
            max_tokens=99,
            seed=number,
            temperature=0.4 * (number % 3),
            top_p=0.9,
            presence_penalty=0.5 * (number % 2),
            repetition_penalty=1.2,
            logprobs=2,
            stop_token_ids=(5,),
            min_tokens=4,
        )
        if alone or not together:
            together.append(Together(*(attached(built) if alone else (engine, arena)), built, piece))
        together[-1].join(drawn(length, number), sampling)
        together[-1].step()
    for each in together:
        while each.step():
            pass
    return [[(token.id, token.logprob) for token in run.tokens] for each in together for run in each.runs]


@pytest.mark.parametrize("piece", first_of(2, [64, 7, 1]))
def test_what_is_drawn_does_not_depend_on_who_is_beside(llama: Built, piece: int) -> None:
    together, alone = sampled(llama, piece, alone=False), sampled(llama, piece, alone=True)
    for one, other in zip(together, alone, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other], abs=1e-4)
    assert len({token for run in together for token, _ in run}) > 8, "degenerate weights prove nothing"


def test_a_step_may_sample_nothing(llama: Built) -> None:
    engine, arena = attached(llama)
    prompts = [drawn(20, 1), drawn(30, 2)]
    blocks = [arena.take(llama.manifest.kv, 40) for _ in prompts]
    model = llama.spec.model
    for number, prompt in enumerate(prompts):
        engine.start(model, RequestId(number), prompt, (), GREEDY)
    for stop in (1, 15):  # of one token each, and of several
        start = 0 if stop == 1 else 1
        rows = [
            StepRow(RequestId(n), prompt[start:stop], start, blocks[n], samples=False)
            for n, prompt in enumerate(prompts)
        ]
        assert engine.step(model, rows) == [None, None]
    rows = [StepRow(RequestId(n), prompt[15:], 15, blocks[n]) for n, prompt in enumerate(prompts)]
    made = engine.step(model, rows)
    assert [each and [each.token.id] for each in made] == [llama.greedy(prompt, 1) for prompt in prompts]


def test_a_prompt_that_is_reported_on_is_alone(llama: Built) -> None:
    engine, arena = attached(llama)
    prompt = drawn(20, 1)
    model, blocks = llama.spec.model, arena.take(llama.manifest.kv, 40)
    for number in range(2):
        engine.start(model, RequestId(number), prompt, (), Sampling(max_tokens=4, prompt_logprobs=0, temperature=0.0))
    rows = [StepRow(RequestId(number), prompt, 0, blocks) for number in range(2)]
    with pytest.raises(AssertionError):
        engine.step(model, rows)
    (made,) = engine.step(model, rows[:1])
    assert made and len(made.prompt) == 19
