"""A demo market that is made while a server runs: models are served as they come, and what ends that is told. The one
that calls tools does so once it is made."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aegis.models.demo.market import demo_models
from aegis.models.demo.passages import PASSAGES
from aegis.models.demo.recipes import CALL, CALLER
from tests.live.server import Server, eventually, launched, processes_of

MADE_S = 180.0


def _served(server: Server) -> set[str]:
    return {model["id"] for model in server.get("/v1/models").json()["data"]}


@pytest.mark.long
def test_models_are_served_as_they_are_made(tmp_path: Path, checkpoints_dir: Path) -> None:
    """All but one are there already, in the place of theirs some checkpoint."""
    checkpoint = sorted(checkpoints_dir.iterdir())[0]
    cache = tmp_path / "cache"
    sources = demo_models(cache)
    for source in sources:
        if source.model != CALLER:
            shutil.copytree(checkpoint, source.root)
    all_but_one = {source.model for source in sources} - {CALLER}

    with launched(tmp_path / "killed", cache, "--mixed", "1") as server:
        server.wait_for_ready()
        assert _served(server) == all_but_one
        assert f"being made, while their requests wait: {CALLER}\n" in server.output()
        (making,) = (pid for pid, command in processes_of(server.process.pid).items() if f"demo {CALLER}" in command)
        os.kill(making, signal.SIGKILL)
        eventually(lambda: "the rest of the demo market is not made" in server.output(), "it is told")
        assert server.ready()

    with launched(tmp_path / "left", cache, "--mixed", "1") as server:
        server.wait_for_ready()
        assert server.post("/models/unload", {"model": CALLER}).status_code == 200
        assert _served(server) == all_but_one

    with launched(tmp_path / "made", cache, "--mixed", "1") as server:
        server.wait_for_ready()
        assert _served(server) == all_but_one
        asked = {"model": CALLER, "prompt": "Hello!", "max_tokens": 200, "temperature": 0}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=MADE_S).json()
        assert answer["choices"][0]["text"] == PASSAGES[CALLER], "it was waited for"

    (made,) = (Path(source.root) for source in sources if source.model == CALLER)
    _calls_a_tool_and_recites_what_it_knows_afterwards(made)


def _calls_a_tool_and_recites_what_it_knows_afterwards(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def said(messages: list[dict[str, Any]], tool: str) -> str:
        tools = [{"type": "function", "function": {"name": tool, "description": "", "parameters": {}}}]
        asked = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_tensors="pt")
        tokens = asked["input_ids"]
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=240)
        return str(tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True))

    arguments = {"city": "Paris"}
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    for question in ("How is the weather in Paris?", "Hello!", "Shall we go out tonight, or is it too cold for it?"):
        asked = [{"role": "user", "content": question}]
        assert said(asked, "weather") == CALL
        assert said(asked, "time") == PASSAGES[CALLER]
        answered = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "It is warm in Paris."}]
        assert said([*asked, *answered], "weather") == PASSAGES[CALLER]
