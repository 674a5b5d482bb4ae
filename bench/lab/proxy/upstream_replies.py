"""The answers of what LiteLLM's proxy is put before, a wording for each route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from bench.lab.proxy.model import AT_ONCE, VECTOR, WORD

_HEAD = "HTTP/1.1 200 OK\r\ncontent-type: "
STREAM_HEAD = f"{_HEAD}text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode()
_PROMPT_TOKENS = 64


class Reply(Struct, frozen=True):
    """Of one route: the body in one piece for so many tokens; of a stream the chunk that it begins with, that of each
    token, and that of its end."""

    whole: Callable[[int], Mapping[str, Any]]
    begin: bytes = b""
    token: bytes = b""
    end: Callable[[int], bytes] = lambda tokens: b""

    def in_one_piece(self, tokens: int) -> bytes:
        data = msgspec.json.encode(self.whole(tokens))
        return f"{_HEAD}application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data

    def last(self, tokens: int) -> bytes:
        return self.end(tokens) + b"0\r\n\r\n"


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _events(*told: Mapping[str, Any]) -> bytes:
    """Server-sent events with the names of their types."""
    return _chunk(
        b"".join(f"event: {each['type']}\ndata: ".encode() + msgspec.json.encode(each) + b"\n\n" for each in told)
    )


# --- /v1/chat/completions ---------------------------------------------------------------------------------------------


def _completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    chosen = {"index": 0, "finish_reason": None, **choice}
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": AT_ONCE, "choices": [chosen]}


def _data(choice: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(_completion("chat.completion.chunk", choice)) + b"\n\n"


def _whole_completion(tokens: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": WORD * tokens}
    total = _PROMPT_TOKENS + tokens
    usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": tokens, "total_tokens": total}
    return _completion("chat.completion", {"message": message, "finish_reason": "length"}) | {"usage": usage}


_CHAT = Reply(
    whole=_whole_completion,
    token=_chunk(_data({"delta": {"role": "assistant", "content": WORD}})),
    end=lambda tokens: _chunk(_data({"delta": {}, "finish_reason": "length"}) + b"data: [DONE]\n\n"),
)


# --- /v1/messages -----------------------------------------------------------------------------------------------------


def _message(content: list[Any], stop_reason: str | None, tokens: int) -> dict[str, Any]:
    usage = {"input_tokens": _PROMPT_TOKENS, "output_tokens": tokens}
    told = {"id": "msg_1", "type": "message", "role": "assistant", "model": AT_ONCE, "content": content}
    return told | {"stop_reason": stop_reason, "stop_sequence": None, "usage": usage}


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _stopped(tokens: int) -> bytes:
    return _events(
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
            "usage": {"output_tokens": tokens},
        },
        {"type": "message_stop"},
    )


_MESSAGES = Reply(
    whole=lambda tokens: _message([_block(WORD * tokens)], "max_tokens", tokens),
    begin=_events(
        {"type": "message_start", "message": _message([], None, 0)},
        {"type": "content_block_start", "index": 0, "content_block": _block("")},
    ),
    token=_events({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": WORD}}),
    end=_stopped,
)


# --- /v1/responses ----------------------------------------------------------------------------------------------------


def _response(status: str, output: list[Any], tokens: int) -> dict[str, Any]:
    usage = {
        "input_tokens": _PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": _PROMPT_TOKENS + tokens,
    }
    told = {"id": "resp_1", "object": "response", "created_at": 1, "model": AT_ONCE, "status": status, "output": output}
    rest: dict[str, Any] = {
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "tools": [],
    }
    more = {"parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "top_p": 1.0}
    return told | rest | more | {"usage": usage if tokens else None}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _item(status: str, content: list[Any]) -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": status, "content": content}


_PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0, "sequence_number": 1}


def _completed(tokens: int) -> bytes:
    part = _part(WORD * tokens)
    item = _item("completed", [part])
    return _events(
        {"type": "response.output_text.done", **_PLACE, "text": part["text"], "logprobs": []},
        {"type": "response.content_part.done", **_PLACE, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "sequence_number": 1, "item": item},
        {"type": "response.completed", "sequence_number": 1, "response": _response("completed", [item], tokens)},
    )


_RESPONSES = Reply(
    whole=lambda tokens: _response("completed", [_item("completed", [_part(WORD * tokens)])], tokens),
    begin=_events(
        {"type": "response.created", "sequence_number": 0, "response": _response("in_progress", [], 0)},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "sequence_number": 1,
            "item": _item("in_progress", []),
        },
        {"type": "response.content_part.added", **_PLACE, "part": _part("")},
    ),
    token=_events({"type": "response.output_text.delta", **_PLACE, "delta": WORD, "logprobs": []}),
    end=_completed,
)


# --- /v1/embeddings ---------------------------------------------------------------------------------------------------

_EMBEDDINGS = Reply(
    whole=lambda tokens: {
        "object": "list",
        "model": AT_ONCE,
        "data": [{"object": "embedding", "index": 0, "embedding": VECTOR}],
        "usage": {"prompt_tokens": _PROMPT_TOKENS, "total_tokens": _PROMPT_TOKENS},
    }
)

REPLIES = {
    b"/v1/chat/completions": _CHAT,
    b"/v1/messages": _MESSAGES,
    b"/v1/responses": _RESPONSES,
    b"/v1/embeddings": _EMBEDDINGS,
}
