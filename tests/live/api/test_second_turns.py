"""The second turn of a chat prefills what is new, through both APIs that are not OpenAI's old ones."""

from __future__ import annotations

from typing import Any

import anthropic
import openai

from tests.live.server import Server, eventually

GREEDY: Any = {"extra_body": {"temperature": 0}}
BILLED = "x-anthropic-billing-header: cc_version=2.1.0; cch={};"


def test_a_header_that_changes_does_not_keep_prompts_from_being_reused(roomy: Server) -> None:
    """The second turn prefills what is new, and no more: the bar is 0.3 of what it would be without."""
    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0) as client:

        def turn(number: int, messages: Any) -> Any:
            system: Any = [{"type": "text", "text": text} for text in (BILLED.format(number), "the hat sat on it")]
            return client.messages.create(model="qwen2", system=system, messages=messages, max_tokens=16, **GREEDY)

        question = "the cat and the hat sat " * 20
        before = roomy.metrics().total("prefix_kept_blocks_total")
        first = turn(1, [{"role": "user", "content": question}])
        eventually(lambda: roomy.metrics().total("prefix_kept_blocks_total") > before, "the first is kept")
        later: Any = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": "and"},
        ]
        second = turn(2, later).usage
    new, kept = second.input_tokens, second.cache_read_input_tokens
    assert new <= 0.3 * (new + kept), second


def test_a_second_turn_prefills_only_what_is_new(roomy: Server) -> None:
    """The bar is 0.3 of what it would be without."""
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0) as client:
        body: Any = {"model": "qwen3", "max_output_tokens": 16, "temperature": 0}
        before = roomy.metrics().total("prefix_kept_blocks_total")
        first = client.responses.create(input="the cat and the hat sat " * 20, **body)
        eventually(lambda: roomy.metrics().total("prefix_kept_blocks_total") > before, "the first is kept")
        second = client.responses.create(input="and", previous_response_id=first.id, **body)
    usage = second.usage
    assert usage
    cached = usage.input_tokens_details.cached_tokens
    assert usage.input_tokens - cached <= 0.3 * usage.input_tokens, usage
