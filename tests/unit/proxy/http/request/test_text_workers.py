"""A tokenizer or chat template that breaks its process breaks nothing else."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from aegis.core.errors import UserError
from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_messages import Rendered, TooManyCharacters, TooManyTokens
from proxy.http.request import text_workers
from proxy.http.request.text_workers import SHORT_CHARACTERS, TextWorkers, characters_of
from tests.long_forms import first_of
from tests.unit.proxy.http.scripted import byte_text

WAIT_S = 60.0
BETWEEN_S = 0.01
"""Two honest texts, or they would take a processor and a half."""

MESSAGES = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": ENDLESS,
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a list": "{{ [0] * 10 ** 11 }}",
    "a string": "{{ 'x' * 10 ** 10 }}",
    "a format": "{{ '%99999999999d' % 1 }}",
}


@pytest.fixture
def texts() -> Iterator[TextWorkers]:
    texts = TextWorkers(short_s=0.5, suspect_s=2.0, long_s=2.0, long_suspect_s=4.0)
    yield texts
    texts.close()


@pytest.fixture
def impatient() -> Iterator[TextWorkers]:
    """With less time for models that took long, where nothing but the end of a job is waited for."""
    texts = TextWorkers(short_s=0.5, suspect_s=0.7, long_s=1.0, long_suspect_s=1.0)
    yield texts
    texts.close()


@pytest.fixture
def patient() -> Iterator[TextWorkers]:
    """With all the time that a proxy gives them, where size is what matters."""
    texts = TextWorkers()
    yield texts
    texts.close()


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await asyncio.wait_for(work(), WAIT_S)

    return asyncio.run(main())


async def rendered(
    texts: TextWorkers,
    text: TextModel,
    caller: str = "",
    messages: list[dict[str, Any]] = MESSAGES,
    *,
    aside: bool = False,
) -> Any:
    return await texts.render(
        caller,
        text,
        messages,
        {},
        size=characters_of(messages),
        add_generation_prompt=True,
        characters_max=1000,
        tokens_max=1000,
        aside=aside,
    )


def test_a_conversation_becomes_text_and_tokens_as_the_model_has_them(texts: TextWorkers) -> None:
    text = byte_text()
    expected = text.render_chat(MESSAGES)
    assert run(lambda: rendered(texts, text)) == Rendered(
        expected, tuple(text.encode(expected, add_special_tokens=False))
    )


@pytest.mark.parametrize("template", first_of(2, list(HOSTILE.values())), ids=HOSTILE)
def test_a_template_that_takes_what_it_wants_is_given_up_and_others_go_on(
    impatient: TextWorkers, template: str
) -> None:
    hostile, honest = byte_text(template), byte_text()

    async def work() -> tuple[BaseException, Any]:
        giving_up = asyncio.create_task(rendered(impatient, hostile))
        await rendered(impatient, honest)
        while not giving_up.done():
            await asyncio.wait((giving_up,), timeout=BETWEEN_S)
            await rendered(impatient, honest)
        told = await rendered(impatient, honest)
        return giving_up.exception() or AssertionError(giving_up.result()), told

    error, told = run(work)
    assert isinstance(error, UserError) and error.status == 400, error
    assert "\n" not in error.message and len(error.message) < 400
    assert isinstance(told, Rendered)


def test_who_took_too_long_over_a_short_text_keeps_none_of_the_short_ones_waiting(texts: TextWorkers) -> None:
    hostile, honest = byte_text(ENDLESS), byte_text()

    async def work() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(UserError):
            await rendered(texts, hostile)
        assert texts._short.bars(hostile) and not texts._short.bars(honest)
        await rendered(texts, honest)
        again = [asyncio.create_task(rendered(texts, hostile)) for _ in range(3)]
        await asyncio.sleep(0)
        worst_s = 0.0
        while not again[0].done():
            await asyncio.wait(again[:1], timeout=BETWEEN_S)
            began_s = loop.time()
            await rendered(texts, honest)
            worst_s = max(worst_s, loop.time() - began_s)
        for task in again:
            task.cancel()
        await asyncio.gather(*again, return_exceptions=True)
        return worst_s

    assert run(work) < 1.5, "none waits until the process is killed"


@pytest.mark.long
def test_who_took_too_long_over_a_long_text_keeps_none_of_the_others_long_ones_waiting(texts: TextWorkers) -> None:
    hostile, honest = byte_text(ENDLESS), byte_text()
    long = [{"role": "user", "content": "x" * SHORT_CHARACTERS}]

    async def honest_long() -> None:
        assert isinstance(await texts.encode("honest", honest, ["x" * 20_000], special=False, tokens_max=30_000), tuple)

    async def work() -> int:
        await honest_long()
        attacks = [asyncio.create_task(rendered(texts, hostile, f"key {i}", long)) for i in range(12)]
        await asyncio.sleep(0.1)
        await honest_long()
        still = sum(not task.done() for task in attacks)
        for task in attacks:
            task.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
        return still

    assert run(work) > 8, "one is waited for, not twelve"


def test_a_caller_takes_turns_with_its_models_and_no_long_one_of_its_texts_waits_for_ever(texts: TextWorkers) -> None:
    honest, other = byte_text(), byte_text()
    done = list[str]()

    async def ask(text: TextModel, name: str, characters: int) -> None:
        await texts.encode("caller", text, ["x" * characters], special=False, tokens_max=1 << 20)
        done.append(name)

    async def work() -> None:
        tasks = [asyncio.create_task(ask(honest, "first", 20_000))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask(honest, "long", 90_000)))
        tasks += [asyncio.create_task(ask(honest, "small", 20_000)) for _ in range(8)]
        tasks.append(asyncio.create_task(ask(other, "other", 90_000)))
        await asyncio.gather(*tasks)

    run(work)
    assert done.index("other") <= 2
    assert done.index("long") <= 5


@pytest.mark.long
def test_a_tokenizer_that_takes_long_to_load_does_not_hold_up_short_texts(
    texts: TextWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, large = byte_text(), byte_text("x" * (24 << 20))
    monkeypatch.setattr(texts._short.process, "_load_s", 0.001)

    async def work() -> None:
        assert await texts.encode("", large, ["x"], special=False, tokens_max=1) == ((120,),)

    run(work)
    assert texts._short.bars(large) and not texts._short.bars(honest)


def test_templates_are_told_what_they_say_and_no_more(texts: TextWorkers) -> None:
    text = byte_text("{{ raise_exception('no ' * 10000) }}")
    with pytest.raises(UserError, match="refuses the messages: no no") as caught:
        run(lambda: rendered(texts, text))
    assert len(caught.value.message) < 400
    with pytest.raises(UserError, match="chat template"):
        run(lambda: rendered(texts, byte_text("{{ messages[7].content.x.y }}")))


def test_a_text_or_its_tokens_may_be_too_many(texts: TextWorkers) -> None:
    text = byte_text("{{ 'x' * 5000 }}")
    assert run(lambda: rendered(texts, text)) == TooManyCharacters(5000)
    assert run(lambda: texts.encode("", text, ["x" * 50], special=False, tokens_max=49)) == TooManyTokens(50)
    assert run(lambda: texts.encode("", text, ["x", ""], special=True, tokens_max=49)) == ((256, 120), ())


def shouting() -> TextModel:
    """Each of its tokens has 64 KiB of text."""
    tokenizer = Tokenizer(models.WordLevel({"a" * (1 << 16): 0, "<unk>": 1}, unk_token="<unk>"))
    return TextModel(tokenizer, {}, None)


@pytest.mark.long
def test_what_becomes_too_large_is_refused_and_not_held(patient: TextWorkers) -> None:
    huge = byte_text("{{ 'x' * (messages|length * 62914560) }}")

    async def ask(text: TextModel, tokens: int) -> str:
        return await patient.decode("", text, (0,) * tokens)

    def render(size: int) -> Any:
        generous = {"add_generation_prompt": True, "characters_max": 1 << 30, "tokens_max": 0}
        return run(lambda: patient.render("", huge, MESSAGES, {}, size=size, **generous))

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="more than 16 MiB") as caught:
        run(lambda: ask(shouting(), 960))
    assert caught.value.status == 400 and caught.value.code == "text_too_large"
    for size in (5, SHORT_CHARACTERS + 1):
        with pytest.raises(UserError, match="more than 16 MiB"):
            render(size)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 << 10
    assert len(run(lambda: ask(shouting(), 200))) > 200 << 16


def growing() -> TextModel:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * 5)
    return TextModel(tokenizer, {}, None)


def backtracking() -> TextModel:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(x+x+)+y"), "isolated")
    return TextModel(tokenizer, {}, None)


@pytest.mark.parametrize("text", first_of(1, [growing(), backtracking()]), ids=["growing", "backtracking"])
def test_a_tokenizer_that_takes_what_it_wants_is_given_up_too(impatient: TextWorkers, text: TextModel) -> None:
    encoding = lambda: impatient.encode("", text, ["a" * 10 + "x" * 60], special=True, tokens_max=10)  # noqa: E731
    with pytest.raises(UserError, match="time or memory to tokenize"):
        run(encoding)
    assert run(lambda: impatient.encode("", byte_text(), ["x"], special=False, tokens_max=1)) == ((120,),)


def test_whose_client_left_before_its_turn_is_not_done(impatient: TextWorkers) -> None:
    hostile, honest = byte_text(ENDLESS), byte_text()

    async def work() -> None:
        first = asyncio.create_task(rendered(impatient, hostile))
        await asyncio.sleep(0)
        left = [asyncio.create_task(rendered(impatient, hostile)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await rendered(impatient, honest)
        with pytest.raises(UserError):
            await first

    run(work)


def test_a_client_that_leaves_costs_no_process(texts: TextWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "LEFT_S", WAIT_S)  # however slow the machine is
    text = byte_text()

    async def work() -> None:
        await texts.count("", text, "x", special=False)
        before = texts._aside.process.pid
        left = asyncio.create_task(texts.count("", text, "the cat " * 10_000, special=False))
        while not texts._aside._working:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        left.cancel()
        await texts.count("", text, "x", special=False)
        assert texts._aside.process.pid == before

    run(work)


def test_what_nobody_waits_for_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_workers, "LEFT_S", 0.1)
    texts = TextWorkers(long_suspect_s=2 * WAIT_S)
    lane = texts._aside

    async def work() -> None:
        left = asyncio.create_task(rendered(texts, byte_text(ENDLESS), aside=True))
        while lane.process.pid is None:
            await asyncio.sleep(0.01)
        left.cancel()
        while lane._working:
            await asyncio.sleep(0.01)
        assert lane.process.pid is None

    run(work)


def test_a_process_that_was_killed_is_started_anew(texts: TextWorkers) -> None:
    text = byte_text()

    async def work() -> None:
        before = await rendered(texts, text)
        process = texts._short.process._process
        assert process
        process.kill()
        process.wait()
        assert await rendered(texts, text) == before

    run(work)


@pytest.mark.parametrize("value", [1 << 80, float("inf")])
def test_numbers_no_message_holds_are_refused_or_told(texts: TextWorkers, value: float) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x", "tool_calls": [value]}]
    try:
        assert isinstance(run(lambda: rendered(texts, byte_text(), messages=messages)), Rendered)
    except UserError as error:
        assert "too large" in error.message
