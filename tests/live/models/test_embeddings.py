"""Models that pool beside a chat model, in memory for one of them at a time: over HTTP they say what
sentence-transformers says, and switches between them harm no stream."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests import checkpoints, embedders
from tests.live.server import SPLIT, Server, eventually, launched
from tests.long_forms import first_of

TEXTS = ("the cat sat on the mat", "a hat", "rain fell into seas of blue while they ran again over green hills", "then")
QUERY, DOCUMENTS = "green hills", ("the cat sat on a hat", "rain fell over green hills", "they ran again")
CLOSE = 1e-4
MEANS = {"pooling_mode_mean_tokens": True}
LAYOUTS = {"split": SPLIT, "mixed": ("--mixed", "1")}
PROMPT = [9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embedders")
    checkpoints.write(directory / "chat", "llama", tokenizer=True)
    embedders.write(directory / "bert", "bert", pooling=MEANS)
    embedders.write(directory / "qwen", "qwen3", pooling={"pooling_mode": "lasttoken"}, prompt="the cat ")
    embedders.write_reranker(directory / "ranker", "xlm-roberta")
    return directory


@pytest.fixture(scope="module", params=first_of(1, list(LAYOUTS)))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path, models_dir: Path
) -> Iterator[Server]:
    options = ["--models", str(models_dir), "--dtype", "float32", "--device-memory", "4MiB", "--debug-memory"]
    with launched(tmp_path_factory.mktemp("server"), cache, *options, *LAYOUTS[request.param]) as running:
        running.wait_for_ready()
        yield running
        running.wait_for_freed_memory()


def expected(models_dir: Path, name: str, texts: Sequence[str] = TEXTS) -> Any:
    reference = pytest.importorskip("sentence_transformers")
    return reference.SentenceTransformer(str(models_dir / name), device="cpu").encode(list(texts))


def embed(server: Server, model: str, **body: Any) -> Any:
    response = server.post("/v1/embeddings", {"model": model, "input": list(TEXTS)} | body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.json()


@pytest.mark.parametrize("name", ["bert", "qwen"])
def test_embeddings_are_those_of_sentence_transformers(server: Server, models_dir: Path, name: str) -> None:
    reply = embed(server, name)
    vectors = np.array([each["embedding"] for each in reply["data"]])
    assert np.abs(vectors - expected(models_dir, name)).max() < CLOSE
    assert [each["index"] for each in reply["data"]] == [0, 1, 2, 3] and reply["usage"]["total_tokens"] > len(TEXTS)


def test_the_openai_client_gets_them_too(server: Server, models_dir: Path) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    made = client.embeddings.create(model="bert", input=list(TEXTS))
    short = client.embeddings.create(model="bert", input=TEXTS[0], dimensions=8, encoding_format="float")
    whole = expected(models_dir, "bert")
    assert np.abs(np.array([each.embedding for each in made.data]) - whole).max() < CLOSE
    wanted = whole[0, :8] / np.linalg.norm(whole[0, :8])
    assert np.abs(np.array(short.data[0].embedding) - wanted).max() < CLOSE


def test_token_ids_are_embedded_as_the_text_they_are_of(server: Server) -> None:
    counted = [server.post("/tokenize", {"model": "bert", "prompt": text}).json()["tokens"] for text in TEXTS]
    of_tokens = embed(server, "bert", input=counted, encoding_format="base64")
    of_texts = embed(server, "bert", encoding_format="base64")
    decoded = [[_floats(each["embedding"]) for each in reply["data"]] for reply in (of_tokens, of_texts)]
    assert np.abs(np.array(decoded[0]) - np.array(decoded[1])).max() < CLOSE


def test_long_texts_are_cut_where_that_is_asked_for(server: Server, models_dir: Path) -> None:
    long = " ".join(embedders.WORDS * 5)
    refused = server.post("/v1/embeddings", {"model": "bert", "input": long})
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = embed(server, "bert", input=long, truncate=True)
    assert np.abs(np.array(cut["data"][0]["embedding"]) - expected(models_dir, "bert", [long])[0]).max() < CLOSE


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_as_a_cross_encoder_scores_them(server: Server, models_dir: Path, path: str) -> None:
    body = {"model": "ranker", "query": QUERY, "documents": list(DOCUMENTS), "top_n": 2, "return_documents": True}
    response = server.post(path, body)
    assert response.status_code == httpx.codes.OK, response.text
    scores = _scores(models_dir)
    best = sorted(range(len(DOCUMENTS)), key=lambda at: -scores[at])[:2]
    results = response.json()["results"]
    assert [each["index"] for each in results] == best
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[at] for at in best]
    assert max(abs(each["relevance_score"] - scores[each["index"]]) for each in results) < CLOSE


def test_pairs_are_scored(server: Server, models_dir: Path) -> None:
    reply = server.post("/v1/score", {"model": "ranker", "text_1": QUERY, "text_2": list(DOCUMENTS)}).json()
    scores = [each["score"] for each in reply["data"]]
    assert np.abs(np.array(scores) - _scores(models_dir)).max() < CLOSE


def test_the_example_at_the_start_is_for_a_model_that_generates(server: Server) -> None:
    _, _, example = server.output().partition("try it:\n")
    assert '"model": "chat"' in example.partition("\n")[0]


def test_each_route_says_which_models_it_is_for(server: Server) -> None:
    tasks = {each["id"]: each["task"] for each in server.get("/v1/models").json()["data"]}
    assert tasks == {"chat": "generate", "bert": "embed", "qwen": "embed", "ranker": "rerank"}
    asked = {
        "/v1/chat/completions": {"model": "bert", "messages": [{"role": "user", "content": "hat"}]},
        "/v1/completions": {"model": "ranker", "prompt": "hat"},
        "/v1/embeddings": {"model": "chat", "input": "hat"},
        "/v1/rerank": {"model": "bert", "query": "hat", "documents": ["hat"]},
        "/v1/score": {"model": "chat", "text_1": "hat", "text_2": "hat"},
    }
    for path, body in asked.items():
        response = server.post(path, body)
        assert response.status_code == httpx.codes.BAD_REQUEST, path
        error = response.json()["error"]
        assert error["code"] == "wrong_task" and error["param"] == "model" and "\n" not in error["message"], path


def test_streams_and_vectors_are_the_same_while_models_take_turns(server: Server) -> None:
    greedy = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    said = server.post("/v1/completions", greedy | {"return_token_ids": True}).json()["choices"][0]["token_ids"]
    alone = {name: embed(server, name, encoding_format="base64") for name in ("bert", "qwen")}
    before = server.metrics().total("model_switches_total")

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, verify=False) as client:
            calls = []
            for _ in range(6):
                calls.append(client.post("/v1/completions", json=greedy | {"return_token_ids": True}))
                for name in alone:
                    body = {"model": name, "input": list(TEXTS), "encoding_format": "base64"}
                    calls.append(client.post("/v1/embeddings", json=body))
                calls.append(client.post("/v1/score", json={"model": "ranker", "text_1": QUERY, "text_2": QUERY}))
            return list(await asyncio.gather(*calls))

    for response in asyncio.run(crowd()):
        assert response.status_code == httpx.codes.OK, response.text
        reply = response.json()
        if "choices" in reply:
            assert reply["choices"][0]["token_ids"] == said
        elif reply["model"] in alone:
            pairs = zip(reply["data"], alone[reply["model"]]["data"], strict=True)
            assert max(np.abs(_floats(a["embedding"]) - _floats(b["embedding"])).max() for a, b in pairs) < CLOSE
    assert server.metrics().total("model_switches_total") > before


@pytest.mark.long
def test_vectors_come_though_the_instance_that_makes_them_is_killed(server: Server) -> None:
    inputs = list(TEXTS) * 256
    instance = next(name for name in server.metrics().instances() if not name.startswith("decode"))
    alone = [_floats(each["embedding"]) for each in embed(server, "bert", encoding_format="base64")["data"]]

    async def killed() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, verify=False) as client:
            body = {"model": "bert", "input": inputs, "encoding_format": "base64"}
            asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
            await asyncio.to_thread(eventually, lambda: server.metrics().total("num_requests_running"), "some run")
            os.kill(server.pid_of(instance), signal.SIGKILL)
            return await asking

    response = asyncio.run(killed())
    assert response.status_code == httpx.codes.OK, response.text
    vectors = [_floats(each["embedding"]) for each in response.json()["data"]]
    assert np.abs(np.array(vectors) - np.array(alone * 256)).max() < CLOSE
    assert server.metrics().total("request_replays_total", model_name="bert") > 0
    server.wait_for_ready()


def _floats(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<f4")


def _scores(models_dir: Path) -> Any:
    ranker = pytest.importorskip("sentence_transformers").CrossEncoder(str(models_dir / "ranker"), device="cpu")
    return ranker.predict([(QUERY, document) for document in DOCUMENTS])
