"""Clients of a running server: they leave, they sample, they stop, they ask for logprobs, they chat."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any

import httpx
import openai
import pytest
import torch

from aegis.core.rng import Stream as Draws
from tests.checkpoints import VOCAB_SIZE
from tests.live.market import MARKET, Reference
from tests.live.server import Server, eventually
from tests.live.streams import Body, Stream, client_of, run_all, until

MODELS = list(MARKET)
LONG: Body = {"max_tokens": 1400, "ignore_eos": True, "temperature": 0}
LOGPROB_TOLERANCE = 1e-4


def ids(name: str, count: int) -> list[int]:
    draws = Draws(0, "clients", name)
    return [draws.below(VOCAB_SIZE) for _ in range(count)]


def whole(server: Server, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


# --- leaving --------------------------------------------------------------------------------------------------------


def test_clients_that_leave_in_mid_stream_free_their_memory_and_disturb_nobody(
    server: Server, references: dict[str, Reference]
) -> None:
    before = server.metrics()
    staying = [
        {"model": m, "prompt": ids(m, 20), "max_tokens": 40, "ignore_eos": True, "temperature": 0} for m in MARKET
    ]
    leaving = [{"model": m, "prompt": ids(m, 60)} | LONG for m in MARKET]

    async def leave(stream: Stream, client: httpx.AsyncClient) -> None:
        running = asyncio.create_task(stream.run(client))
        await until(lambda: len(stream.tokens) >= 2, "a few tokens")
        assert not stream.done
        running.cancel()
        await asyncio.wait([running])

    async def main() -> list[Stream]:
        async with client_of(server.url) as client:
            stay = [Stream(body) for body in staying]
            leavers = [leave(Stream(body), client) for body in leaving]
            await asyncio.gather(*leavers, *(stream.run(client) for stream in stay))
            return stay

    for stream in asyncio.run(main()):
        expected = references[stream.body["model"]].greedy(stream.body["prompt"], max_tokens=40, ignore_eos=True)
        assert stream.tokens == expected.tokens
    after = server.wait_for_freed_memory()
    assert after.total("request_failure_total", reason="cancelled") - before.total(
        "request_failure_total", reason="cancelled"
    ) == len(leaving)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_before_its_whole_reply_frees_its_memory(server: Server, path: str) -> None:
    before = server.metrics().total("request_failure_total", reason="cancelled")
    asked: Body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}

    async def main() -> None:
        async with client_of(server.url) as client:
            task = asyncio.create_task(client.post(path, json={"model": "llama", "n": 4} | asked | LONG))
            await asyncio.to_thread(eventually, lambda: server.metrics().total("num_requests_running"), "it runs")
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())
    after = server.wait_for_freed_memory()
    assert after.total("request_failure_total", reason="cancelled") - before == 4


def test_fifty_clients_that_connect_and_vanish_harm_nothing(server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps({"model": "granite", "prompt": ids("vanish", 30), "stream": True} | LONG).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: aegis\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    message = head % len(body) + body
    reset = struct.pack("ii", 1, 0)  # linger for no time: closing it resets the connection
    for n in range(50):
        with socket.create_connection((host, int(port))) as connection:
            if n % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            connection.sendall(message[: len(message) * (n % 5) // 4])
    server.wait_for_freed_memory()
    assert whole(server, model="granite", prompt=[5], max_tokens=2)["usage"]["completion_tokens"] >= 1


# --- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_seeded_request_gets_the_same_tokens_alone_and_among_others(server: Server) -> None:
    seeded: Body = {"model": "qwen3", "prompt": ids("seeded", 12), "max_tokens": 40, "ignore_eos": True}
    seeded |= {"seed": 7, "temperature": 1.3, "top_p": 0.95, "top_k": 100, "min_p": 0.001, "presence_penalty": 0.5}
    (alone,) = run_all(server.url, [seeded])
    others = [
        {"model": MODELS[n % 8], "prompt": ids(f"other {n}", 5 + 3 * n), "max_tokens": 30, "seed": n} for n in range(24)
    ]
    others += [seeded | {"prompt": ids(f"neighbour {n}", 7 + n), "seed": n} for n in range(8)]
    among, *_ = run_all(server.url, [seeded, *others])
    assert len(alone.tokens) == 40
    assert among.tokens == alone.tokens
    (other_seed,) = run_all(server.url, [seeded | {"seed": 8}])
    assert other_seed.tokens != alone.tokens


def test_choices_of_one_request(server: Server, references: dict[str, Reference]) -> None:
    body = {"model": "phi3", "prompt": ids("choices", 9), "max_tokens": 20, "return_token_ids": True}
    greedy = whole(server, **body, n=3, temperature=0)["choices"]
    expected = references["phi3"].greedy(body["prompt"], max_tokens=20)
    assert [choice["token_ids"] for choice in greedy] == [expected.tokens] * 3
    assert [choice["index"] for choice in greedy] == [0, 1, 2]
    sampled = whole(server, **body, n=3, seed=5, temperature=1.5)
    assert whole(server, **body, seed=5, temperature=1.5)["choices"][0] == sampled["choices"][0]
    assert len({tuple(choice["token_ids"]) for choice in sampled["choices"]}) == 3
    assert sampled["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in sampled["choices"])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, stream: bool) -> None:
    body: Any = {"model": "mistral", "prompt": ids("stop", 10), "max_tokens": 60, "temperature": 0}
    text = client.completions.create(**body, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[len(text) // 2 :][:3]
    reply: Any = client.completions.create(
        **body, stop=["never said", stop], stream=stream, extra_body={"ignore_eos": True}
    )
    choices = [choice for part in (reply if stream else [reply]) for choice in part.choices]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


# --- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gemma2", "qwen2"])
def test_logprobs_are_those_of_transformers(server: Server, references: dict[str, Reference], model: str) -> None:
    prompt = ids("logprobs", 25)
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    choice = whole(server, **body, logprobs=3, return_token_ids=True)["choices"][0]
    tokens = choice["token_ids"]
    expected = references[model].logprobs(prompt + tokens)[len(prompt) - 1 : -1]
    _close(choice["logprobs"]["token_logprobs"], expected.gather(1, torch.tensor(tokens)[:, None])[:, 0])


def test_alternatives_are_those_of_transformers(server: Server, references: dict[str, Reference]) -> None:
    reference = references["granite"]
    messages = [{"role": "user", "content": "the mat"}]
    prompt = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    body = {"model": "granite", "messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    choice = whole(server, "/v1/chat/completions", **body, logprobs=True, top_logprobs=4)["choices"][0]
    told = [[entry["logprob"] for entry in token["top_logprobs"]] for token in choice["logprobs"]["content"]]
    expected = reference.logprobs(prompt + choice["token_ids"])[len(prompt) - 1 : -1].topk(4).values
    for row, best in zip(told, expected, strict=True):
        _close(row, best)


def test_an_echoed_prompt_has_the_logprobs_of_transformers(server: Server, references: dict[str, Reference]) -> None:
    reference = references["gemma3_text"]
    text = "the cat sat on the mat and ran"
    prompt = reference.tokenizer(text).input_ids
    choice = whole(
        server, model="gemma3_text", prompt=text, max_tokens=3, temperature=0, echo=True, logprobs=1, ignore_eos=True
    )["choices"][0]
    assert choice["text"].startswith(text)
    logprobs = choice["logprobs"]
    expected = references["gemma3_text"].greedy(prompt, max_tokens=3, ignore_eos=True)
    tokens = prompt + expected.tokens
    assert "".join(logprobs["tokens"][: len(prompt)]) == text
    assert logprobs["token_logprobs"][0] is None
    own = reference.logprobs(tokens)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    _close(logprobs["token_logprobs"][1:], own)


def _close(told: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(told), expected, rtol=1e-4, atol=LOGPROB_TOLERANCE)


# --- the official client --------------------------------------------------------------------------------------------


def test_the_openai_client_completes(client: openai.OpenAI, references: dict[str, Reference]) -> None:
    text = "the hat and the cat"
    reference = references["llama"]
    body: Any = {"model": "llama", "prompt": text, "max_tokens": 30, "temperature": 0}
    reply = client.completions.create(**body)
    assert reply.choices[0].text == reference.answer(reference.tokenizer(text).input_ids, max_tokens=30)
    parts = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for part in parts for choice in part.choices) == reply.choices[0].text
    assert parts[-1].usage == reply.usage


def test_the_openai_client_chats_through_the_template(client: openai.OpenAI, references: dict[str, Reference]) -> None:
    messages: Any = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "ran"}]
    messages += [{"role": "user", "content": "again"}]
    reference = references["qwen3"]
    prompt = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    body: Any = {"model": "qwen3", "messages": messages, "max_completion_tokens": 30, "temperature": 0}
    reply = client.chat.completions.create(**body)
    assert reply.choices[0].message.content == reference.answer(prompt, max_tokens=30)
    assert reply.usage and reply.usage.prompt_tokens == len(prompt)
    parts = list(client.chat.completions.create(**body, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == reply.choices[0].message.content


def test_the_openai_client_lists_the_models(client: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == sorted(MARKET)
