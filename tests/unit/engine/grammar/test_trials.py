"""Grammars are tried out in a process beside the server: what is found is remembered, and callers take turns."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.request import Grammar
from aegis.engine.grammar import trials as module
from aegis.engine.grammar.trials import WAITING_MAX, GrammarTrials
from tests.unit.proxy.http.scripted import byte_text, spec

MANIFEST = spec("m").manifest
TEXT = byte_text()


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    opened = GrammarTrials(compile_s=2)
    yield opened
    opened.close()


def slow(number: int) -> Grammar:
    """One that takes minutes."""
    rules = [f'r{i} ::= [a-z]* r{(i + 1) % 3000} | "x{number}" r{i * 7 % 3000}' for i in range(3000)]
    return Grammar("ebnf", "\n".join(["root ::= r0", *rules]))


async def problem(trials: GrammarTrials, grammar: Grammar, caller: str = "") -> str | None:
    return await trials.problem(MANIFEST, TEXT.to_json, grammar, caller)


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def test_a_process_with_thousands_of_files_open_is_answered() -> None:
    with ExitStack() as opened:
        for _ in range(1100):
            opened.enter_context(Path(os.devnull).open())
        trials = GrammarTrials(compile_s=2)
        opened.callback(trials.close)
        assert asyncio.run(problem(trials, regex("a+"))) is None


@pytest.mark.long
def test_the_time_in_which_a_large_vocabulary_is_read_is_not_the_first_grammars() -> None:
    size = 1 << 18
    tree = json.loads(TEXT.to_json())
    vocab = tree["model"]["vocab"]
    vocab |= {f"{n:x}": 1000 + n for n in range(size - 1000) if f"{n:x}" not in vocab}
    trials = GrammarTrials(compile_s=1)
    manifest = replace(MANIFEST, vocab_size=size)
    told = asyncio.run(trials.problem(manifest, lambda: json.dumps(tree), regex("a+")))
    trials.close()
    assert told is None


IGNORED = ["a$b", "a^b", "(^a)|(b$)", "^^a$$", r"\A a\Z", "a" + "$b" * 2000]


@pytest.mark.parametrize("text", IGNORED, ids=lambda text: text[:12])
def test_what_would_be_ignored_is_refused(trials: GrammarTrials, text: str) -> None:
    told = asyncio.run(problem(trials, regex(text)))
    assert told and told.startswith("would not be held to as it is written: ") and len(told) < 300
    schema = Grammar("json_schema", f'{{"type":"string","pattern":"{text}"}}'.replace("\\", "\\\\"))
    assert asyncio.run(problem(trials, schema))


OVERLAPPING = '{"oneOf": [{"type": "string"}, {"type": "object"}]}'


def test_one_of_several_schemas_counts_as_any_of_them_and_hides_nothing_that_is_ignored(trials: GrammarTrials) -> None:
    assert asyncio.run(problem(trials, Grammar("json_schema", OVERLAPPING))) is None
    both = f'{{"type": "array", "prefixItems": [{OVERLAPPING}, {{"type": "string", "pattern": "a$b"}}]}}'
    assert asyncio.run(problem(trials, Grammar("json_schema", both)))


@pytest.mark.parametrize("text", ["^abc$", "a+?", "^a|b$", r"\d+\w\s", "(?:ab){2,}", ""])
def test_what_is_held_to_passes(trials: GrammarTrials, text: str) -> None:
    assert asyncio.run(problem(trials, regex(text))) is None


@pytest.mark.long
def test_what_takes_long_to_follow_is_refused() -> None:
    rules = [f's{n} ::= {" | ".join(f"s{(n + k) % 9} s{(2 * n + k) % 9}" for k in range(9))} | "a"' for n in range(9)]
    patient = GrammarTrials(compile_s=60)  # that following it is slow is found before the time for compiling is over
    told = asyncio.run(problem(patient, Grammar("ebnf", "\n".join(["root ::= s0", *rules]))))
    patient.close()
    assert told and told.startswith("takes too long to follow: ") and "\n" not in told


def test_a_caller_whose_outputs_were_slow_waits_with_its_own_grammars(
    trials: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Grammar("ebnf", 'root ::= "a" | "b"')
    trials.was_slow("careless")
    assert asyncio.run(problem(trials, own, "careless")) is None
    trials.was_slow("careless")
    with pytest.raises(UserError, match="took too long to follow") as refused:
        asyncio.run(problem(trials, own, "careless"))
    assert refused.value.status == 429
    assert asyncio.run(problem(trials, own, "other")) is None
    assert asyncio.run(problem(trials, regex("ab"), "careless")) is None
    monkeypatch.setattr(module, "SLOW_WITHIN_S", 0.0)
    assert asyncio.run(problem(trials, own, "careless")) is None


@pytest.mark.long
def test_nobody_waits_for_more_than_one_grammar_of_another(trials: GrammarTrials) -> None:
    async def main() -> None:
        greedy = [asyncio.create_task(problem(trials, slow(i), "greedy")) for i in range(4)]
        await asyncio.sleep(0)
        assert await problem(trials, regex("a"), "other") is None
        assert sum(task.done() for task in greedy) <= 1
        assert await problem(trials, regex("c"), "greedy") is None
        assert sum(task.done() for task in greedy) <= 2
        for task in greedy:
            task.cancel()  # who leaves is waited for by nobody
        await asyncio.gather(*greedy, return_exceptions=True)
        assert await problem(trials, regex("b"), "greedy") is None

    asyncio.run(main())


def test_what_took_too_long_is_not_tried_again_at_once(trials: GrammarTrials) -> None:
    async def main() -> None:
        first, second = [await problem(trials, slow(100)) for _ in range(2)]
        assert first == second and first and first.startswith("takes more than 2 s")

    asyncio.run(main())
    assert trials._process is None  # killed, and not started again


def test_a_process_that_has_died_before_it_is_written_to_is_not_available_now() -> None:
    trials = GrammarTrials(compile_s=2)
    assert asyncio.run(problem(trials, regex("a"))) is None

    def dies() -> str:
        assert trials._process
        trials._process.kill()
        trials._process.wait()
        return TEXT.to_json()

    manifest = replace(MANIFEST, fingerprint="another")
    with pytest.raises(UserError, match="structured output is not available now") as caught:
        asyncio.run(trials.problem(manifest, dies, regex("a")))
    assert caught.value.status == 503
    assert asyncio.run(problem(trials, regex("b"))) is None, "another process is started"
    trials.close()


def test_who_has_many_waiting_is_told_so(trials: GrammarTrials) -> None:
    async def main() -> None:
        grammars = [slow(200), *(regex(f"a{i}") for i in range(WAITING_MAX + 1))]
        waiting = [asyncio.create_task(problem(trials, grammar, "greedy")) for grammar in grammars]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        refused = done.pop().exception()
        assert isinstance(refused, UserError) and (refused.status, refused.code) == (429, "too_many_grammars")
        for task in waiting:
            task.cancel()

    asyncio.run(main())
