"""A response, and the items of its output, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct, field

from proxy.http.openai.chat_replies import TokenLogprob

Progress = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


class MessageItem(Struct, frozen=True, tag="message"):
    id: str
    status: Progress
    content: list[OutputText] = field(default_factory=list)
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    id: str
    status: Progress
    content: list[ReasoningText] = field(default_factory=list)
    summary: list[Any] = field(default_factory=list)


class CallItem(Struct, frozen=True, tag="function_call"):
    id: str
    status: Progress
    call_id: str
    name: str
    arguments: str = ""


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(Struct, frozen=True):
    """`cached_tokens` of the prompt were not prefilled: their KV was kept from before."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """`reasoning_tokens`: with the marks around them."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct, frozen=True):
    reason: str


class ResponseError(Struct, frozen=True):
    code: str
    message: str


class ResponseObject(Struct, frozen=True, kw_only=True):
    """What was asked for is told again; `tools`, `text` and the like as the client gave them."""

    id: str
    created_at: int
    model: str
    status: Status = "in_progress"
    output: list[Item] = field(default_factory=list)
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    completed_at: int | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: Any = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    safety_identifier: Any = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: dict[str, Any] = field(default_factory=dict)
    tool_choice: Any = "auto"
    tools: list[Any] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: Any = None
    background: bool = False
    object: Literal["response"] = "response"


def said(output: Sequence[Item]) -> dict[str, Any]:
    """The items of an answer as one message of a chat, for the turns after it."""
    texts = [part.text for item in output if isinstance(item, MessageItem) for part in item.content]
    thoughts = [part.text for item in output if isinstance(item, ReasoningItem) for part in item.content]
    calls = [item for item in output if isinstance(item, CallItem)]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [call_message(call.call_id, call.name, call.arguments) for call in calls]
    return message


def call_message(call_id: str, name: Any, arguments: Any) -> dict[str, Any]:
    """A call as a chat's messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
