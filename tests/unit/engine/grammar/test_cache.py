"""Output that is held to a grammar, on the real XGrammar with the tests' own tokenizer."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from xgrammar import GrammarMatcher

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec
from aegis.core.request import Failure, Grammar, Sampling
from aegis.engine.grammar import token_masks
from aegis.engine.grammar.cache import Grammars
from aegis.engine.grammar.compiler import GrammarRefused, Vocabulary, compile_grammar, read_vocabulary
from aegis.engine.grammar.token_masks import QUICK_NS, SlowTime, banned_here, banned_there
from aegis.engine.sampler import Sampler
from aegis.models.text.text_model import TextModel
from bench.lab.random_schemas import random_schema
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.json_schemas import satisfies

MODEL = ModelId("m")
END = 1
WIDTH = VOCAB_SIZE + 8  # as models pad their heads
FREE = Sampling(max_tokens=1 << 20, stop_token_ids=(END,))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("image")
    write_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def text(directory: Path) -> TextModel:
    loaded = TextModel.load(directory)
    assert loaded
    return loaded


@pytest.fixture(scope="module")
def vocabulary(text: TextModel) -> Vocabulary:
    return read_vocabulary(text.to_json(), size=WIDTH, ends=(END,))


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    manifest = Manifest(
        fingerprint="f",
        architecture="",
        dtype="float32",
        image_bytes=0,
        tensors=(),
        kv=KvShape((KvLayer(1, 8, 8),), "float32", 4),
        context_tokens=1 << 20,
        vocab_size=WIDTH,
        eos_token_ids=(END,),
        hidden_size=8,
        intermediate_size=8,
        parameters=0,
    )
    made = Grammars()
    made.add(ModelSpec(MODEL, manifest, str(directory), "", ""))
    return made


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def babble(sampler: Sampler, request: RequestId, seed: int, most: int = 4000) -> list[int]:
    """What comes of random logits, the end token left out."""
    generator = torch.Generator().manual_seed(seed)
    said: list[int] = []
    while len(said) < most:
        token = sampler.sample([request], torch.randn(1, WIDTH, generator=generator) * 3)[0].id
        if token == END:
            return said
        said.append(token)
    raise AssertionError("it does not end")


def spoken(grammars: Grammars, text: TextModel, grammar: Grammar, seed: int = 0, **changes: Any) -> str:
    sampler = Sampler(grammars)
    sampling = msgspec.structs.replace(FREE, grammar=grammar, seed=seed, **changes)
    sampler.start(MODEL, RequestId(seed), [5], (), sampling)
    return text.decode(babble(sampler, RequestId(seed), seed))


def test_200_random_schemas_are_satisfied(grammars: Grammars, text: TextModel) -> None:
    for seed in range(200):
        wanted = random_schema(random.Random(seed))
        value = json.loads(spoken(grammars, text, schema(wanted), seed, temperature=seed % 3 / 2))
        assert satisfies(value, wanted), (wanted, value)


def test_a_regular_expression_a_choice_and_a_grammar_are_kept_to(grammars: Grammars, text: TextModel) -> None:
    assert spoken(grammars, text, Grammar("regex", "(ab|cat){3}!")).removesuffix("!").replace("cat", "ab") == "ababab"
    assert spoken(grammars, text, Grammar("ebnf", 'root ::= "the hat" | "é"')) in ("the hat", "é")
    assert spoken(grammars, text, Grammar("ebnf", 'root ::= "(" root ")" | "x"')).strip("()") == "x"


def test_what_is_banned_otherwise_is_still_chosen_from_the_grammar(grammars: Grammars, text: TextModel) -> None:
    everything = tuple((token, -100.0) for token in range(WIDTH))
    assert spoken(grammars, text, Grammar("regex", "aaa"), logit_bias=everything, temperature=0.0) == "aaa"
    sampler = Sampler(grammars)
    sampler.start(MODEL, RequestId(1), [5], (), msgspec.structs.replace(FREE, grammar=Grammar("regex", "aa")))
    assert text.decode([sampler.sample([RequestId(1)], torch.full((1, WIDTH), torch.nan))[0].id]) in ("a", "aa")


def test_a_special_token_is_no_text(grammars: Grammars, text: TextModel) -> None:
    special = text.encode("<|user|>", add_special_tokens=False)
    assert len(special) == 1
    parameters = msgspec.structs.replace(FREE, grammar=Grammar("regex", r"<\|user\|>"), temperature=0.0)
    parameters = msgspec.structs.replace(parameters, logit_bias=((special[0], 100.0),))
    sampler = Sampler(grammars)
    sampler.start(MODEL, RequestId(1), [5], (), parameters)
    assert special[0] not in babble(sampler, RequestId(1), 0)


def test_a_replay_goes_on_where_it_was(grammars: Grammars) -> None:
    parameters = msgspec.structs.replace(FREE, grammar=schema(random_schema(random.Random(3))), seed=3)
    rows = torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(3))

    def run(sent: list[int]) -> list[int]:
        sampler, said = Sampler(grammars), list(sent)
        sampler.start(MODEL, RequestId(3), [5], sent, parameters)
        while not said or said[-1] != END:
            said.append(sampler.sample([RequestId(3)], rows[len(said)][None])[0].id)
        return said

    whole = run([])
    assert len(whole) > 4
    assert run(whole[: len(whole) // 2]) == whole


AMBIGUOUS = Grammar("ebnf", "\n".join(["root ::= s0", *(f's{n} ::= s0 s1 | s1 s2 | s2 s0 | "a"' for n in range(3))]))


def test_an_output_that_is_slow_has_a_problem_and_one_in_json_has_none(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_masks, "QUICK_NS", 100_000)
    monkeypatch.setattr(token_masks, "SPENT_AT_ONCE_NS", 5_000_000)
    sampler = Sampler(grammars)
    for request, grammar in ((1, AMBIGUOUS), (2, schema({"type": "string", "minLength": 400}))):
        sampler.start(MODEL, RequestId(request), [5], (), msgspec.structs.replace(FREE, grammar=grammar))
    logits = torch.zeros(2, WIDTH)
    logits[:, END] = -torch.inf
    for _ in range(300):
        sampler.sample([RequestId(1), RequestId(2)], logits)
        if sampler.problem(RequestId(1)):
            break
    assert sampler.problem(RequestId(1)) == Failure.SLOW_GRAMMAR
    sampler.sample([RequestId(1), RequestId(2)], logits)
    assert not sampler.problem(RequestId(2))


def test_slow_grammars_may_take_a_twentieth_of_the_time_together() -> None:
    now_ns = 0
    time = SlowTime(lambda: now_ns)
    slow, other, quick = (Future[Any]() for _ in range(3))
    for _ in range(1000):
        time.charge(quick, QUICK_NS)
    time.charge(other, 2 * QUICK_NS)
    for _ in range(3):
        assert not time.objection(slow)
        time.charge(slow, 160 * 10**6)
    time.charge(other, 50 * 10**6)
    assert time.objection(slow) == time.objection(other) == Failure.SLOW_GRAMMAR, "both had a part in it"
    assert time.objection(quick) == Failure.SLOW_GRAMMARS
    now_ns += 10**9
    assert not time.objection(quick) and not time.objection(slow)
    time.charge(slow, 60 * 10**6)
    now_ns += 10**12
    assert time.objection(slow) == Failure.SLOW_GRAMMAR, "it has had its part"
    assert not time.objection(other)


def test_rows_without_a_grammar_are_not_touched_by_their_neighbours(grammars: Grammars) -> None:
    together, alone = Sampler(grammars), Sampler(grammars)
    held = msgspec.structs.replace(FREE, grammar=Grammar("regex", "a*"))
    together.start(MODEL, RequestId(1), [5], (), held)
    for sampler in (together, alone):
        sampler.start(MODEL, RequestId(2), [5], (), msgspec.structs.replace(FREE, seed=9))
    logits = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    assert together.sample([RequestId(1), RequestId(2)], logits)[1] == alone.sample([RequestId(2)], logits[1:])[0]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar("regex", "(("), "regular expression …'position 3: The parenthesis is not closed'"),
        (Grammar("regex", "a{3,2}"), "regular expression …'Lower bound is larger than upper bound: 3 > 2'"),
        (Grammar("ebnf", "root ::= x"), "grammar …'line 1, column 10: Rule \"x\" is not defined'"),
        (Grammar("ebnf", f"root ::= {'x' * 500}"), f"grammar …'line 1, column 10: Rule \"{'x' * 95}…'"),
        (Grammar("json_schema", '{"type": "x"}'), "JSON Schema …'Unsupported type \"x\"'"),
        (Grammar("json_schema", '{"type": "string", "pattern": "("}'), "JSON Schema …'The parenthesis is not closed'"),
        (
            Grammar("json_schema", '{"type": "string", "minLength": -1}'),
            "JSON Schema …'Invalid repetition range {-1, -1}'",
        ),
        (Grammar("structural_tag", "{}"), "structural tag …'Structural tag must have a format field'"),
    ],
    ids=str,
)
def test_what_does_not_compile_says_why_in_a_line(vocabulary: Vocabulary, grammar: Grammar, why: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        compile_grammar(vocabulary, grammar)
    what, _, reason = why.partition(" …")
    assert str(refused.value) == f"is no {what} that outputs can be held to; XGrammar says {reason}"


PATTERN = '{"type": "string", "pattern": "^\\\\ud83d\\\\ude00$"}'


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", r"[\ud800]"),
        Grammar("regex", r"a\ud83d\ude00"),
        Grammar("regex", r"[\u{0D800}-\u{dfff}]"),
        Grammar("ebnf", r'root ::= "\U0000dfff"'),
        Grammar("ebnf", r'root ::= "[^" [\ud800]*'),
        Grammar("json_schema", PATTERN),
        Grammar(
            "structural_tag",
            f'{{"type": "structural_tag", "format": {{"type": "json_schema", "json_schema": {PATTERN}}}}}',
        ),
    ],
    ids=str,
)
def test_a_surrogate_is_no_character_and_is_refused(vocabulary: Vocabulary, grammar: Grammar) -> None:
    with pytest.raises(
        GrammarRefused, match=r"^names half of a surrogate pair \(\\ud800 to \\udfff\), which no text has; "
    ):
        compile_grammar(vocabulary, grammar)


@pytest.mark.parametrize(
    "regex", [r"[^\ud800-\udfff]", r"\\ud800", "ud800", r"[\u{d7ff}-\u{e000}]", r"\u{1d800}", "😀"]
)
def test_a_class_without_surrogates_and_what_looks_like_one_are_not(vocabulary: Vocabulary, regex: str) -> None:
    compile_grammar(vocabulary, Grammar("regex", regex))


@pytest.mark.parametrize("seed", range(20))
def test_json_in_a_structural_tag_is_written_as_that_of_a_schema_alone(vocabulary: Vocabulary, seed: int) -> None:
    schema = {"type": "array", "prefixItems": [random_schema(random.Random(seed)), {"const": "übe\\xfc\n😀"}]}
    alone = compile_grammar(vocabulary, Grammar("json_schema", json.dumps(schema)))
    form = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]}
    tagged = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    matchers = GrammarMatcher(alone.grammar), GrammarMatcher(compile_grammar(vocabulary, tagged).grammar)
    masks, draws = torch.zeros((2, -(-WIDTH // 32)), dtype=torch.int32), random.Random(seed)
    for _ in range(64):
        for row, matcher in enumerate(matchers):
            matcher.fill_next_token_bitmask(masks, row)
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, :WIDTH]
        allowed, also = (np.flatnonzero(row).tolist() for row in bits)
        assert allowed == [token for token in also if vocabulary.for_json.decoded_vocab[token] or token == END]
        token = draws.choice(allowed)
        if token == END:
            break
        assert all(matcher.accept_token(token) for matcher in matchers)


def test_a_grammar_is_compiled_once_and_the_least_used_is_forgotten(directory: Path, grammars: Grammars) -> None:
    spec = grammars._specs[MODEL]
    small = Grammars(cache_bytes=0)
    small.add(spec)
    first, second = Grammar("regex", "a"), Grammar("regex", "b")
    small.begin(MODEL, first, ()).fill(torch.zeros((1, -(-WIDTH // 32)), dtype=torch.int32), 0)
    assert small.ready(MODEL, first)
    small.begin(MODEL, second, ()).fill(torch.zeros((1, -(-WIDTH // 32)), dtype=torch.int32), 0)
    assert list(small._compiled) == [(MODEL, second)]
    small.remove(MODEL)
    assert not small._compiled


def test_what_could_not_be_compiled_is_tried_again_by_the_next_output(tmp_path: Path, grammars: Grammars) -> None:
    """The image of a lazy model may leave the disk while it is served, and comes back."""
    away, a = Grammars(), Grammar("regex", "a")
    away.add(msgspec.structs.replace(grammars._specs[MODEL], directory=str(tmp_path)))
    masks = torch.full((1, -(-WIDTH // 32)), -1, dtype=torch.int32)
    away._future(MODEL, a).exception()
    assert away.ready(MODEL, a), "its failure is that of a step"
    with pytest.raises(FileNotFoundError):
        away.begin(MODEL, a, ()).fill(masks, 0)
    write_tokenizer(tmp_path)
    away.begin(MODEL, a, ()).fill(masks, 0)
    assert np.unpackbits(masks.numpy().view(np.uint8)).sum() == 1


def test_a_long_text_counts_that_little_is_made_of(grammars: Grammars) -> None:
    small = Grammars(cache_bytes=1 << 20)
    small.add(grammars._specs[MODEL])
    for number in range(40):
        schema = {"type": "boolean", "description": f"{number} {'x' * (1 << 16)}"}
        compiled = small._future(MODEL, Grammar("json_schema", json.dumps(schema)))
        assert compiled.result().nbytes < 1 << 14
    assert len(small._compiled) <= 17


def test_masks_are_unpacked_alike_here_and_on_a_device() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (3, 5), generator=torch.Generator().manual_seed(0)).int()
    expected = [[word >> bit & 1 == 0 for word in row for bit in range(32)] for row in words.tolist()]
    for unpacked in (banned_here, banned_there):
        assert unpacked(words, torch.device("cpu")).tolist() == expected
