"""The conversation of a message request, `system` and `messages`, as chat messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.fields import Fields
from proxy.http.ignored import Ignored
from proxy.http.parameters import Items
from proxy.http.request.late_instructions import users_as_one
from proxy.http.request.messages import CALLS_MAX

_BILLING = re.compile(r"x-anthropic-[a-z-]+:[^\n]*\n?")
"""A header that some clients put before their instructions. It differs from request to request: a prompt that began
with it would have no beginning in common with an earlier one, and nothing that was kept could be reused."""

_PICTURES = ("document", "image")


class TurnList(Items):
    """A list of turns that has at least one."""

    def check(self, value: Any, fields: Fields, name: str) -> list[Any]:
        turns = Items.check(self, value, fields, name)
        if not turns:
            raise fields.invalid(name, "must hold at least one message")
        return turns


class ConversationFields(Protocol):
    """A body with the parameters of a conversation."""

    @property
    def messages(self) -> list[Any]: ...

    @property
    def system(self) -> Any: ...

    def invalid(self, name: str, problem: str) -> UserError: ...


def read_system(body: ConversationFields) -> list[dict[str, Any]]:
    """The system message, if there is any text for it. Raises UserError."""
    system = body.system
    if system is None:
        return []
    texts = [system] if isinstance(system, str) else [text for _, text in _texts(body, "system", system)]
    if texts:
        texts[0] = _BILLING.sub("", texts[0], count=1) if _BILLING.match(texts[0]) else texts[0]
    texts = [text for text in texts if text]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def read_turns(body: ConversationFields, ignored: Ignored) -> list[dict[str, Any]]:
    """Raises UserError naming the message at fault."""
    messages = list[dict[str, Any]]()
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}]"
        if not isinstance(turn, dict):
            raise body.invalid(where, f"must be an object with 'role' and 'content', not {shown(turn)}")
        role, content = turn.get("role"), turn.get("content")
        if role == "assistant":
            messages.append(_answer(body, f"{where}.content", content, ignored))
        elif role == "user":
            messages += _asked(body, f"{where}.content", content, ignored)
        elif role == "system":
            texts = _texts(body, f"{where}.content", content)
            messages.append({"role": "system", "content": "\n".join(text for _, text in texts)})
        else:
            raise body.invalid(f"{where}.role", f"must be assistant, system or user, not {shown(role)}")
    if messages[-1]["role"] == "assistant":
        raise body.invalid(
            f"messages[{len(body.messages) - 1}]", "is the model's: an answer cannot be begun for it here"
        )
    return users_as_one(messages)


def _asked(body: ConversationFields, where: str, content: Any, ignored: Ignored) -> Iterator[dict[str, Any]]:
    """What a turn of the user says, and what tools gave back, in the order of the blocks; nothing is said too."""
    texts, silent = list[str](), True
    if isinstance(content, str):
        texts.append(content)
        content = []
    for at, block in _blocks(body, where, content):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(body, at, block))
        elif kind == "tool_result":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            yield _result(body, at, block, ignored)
            silent = False
        else:
            _pass_over(body, at, kind, ignored)
    if texts or silent:
        yield {"role": "user", "content": "\n".join(texts)}


def _result(body: ConversationFields, at: str, block: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        texts = list[str]()
        for inner, part in _blocks(body, f"{at}.content", content):
            if part.get("type") == "text":
                texts.append(_text(body, inner, part))
            else:
                _pass_over(body, inner, part.get("type"), ignored)
        content = "\n".join(texts)
    return {"role": "tool", "tool_call_id": _name(body, at, block, "tool_use_id"), "content": content or ""}


def _answer(body: ConversationFields, where: str, content: Any, ignored: Ignored) -> dict[str, Any]:
    """An earlier answer of the model's."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for at, block in _blocks(body, where, content):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(body, at, block))
        elif kind == "thinking":
            thoughts.append(_text(body, at, block, "thinking"))
        elif kind == "tool_use":
            calls.append(_call(body, at, block))
        elif kind != "redacted_thinking":
            _pass_over(body, at, kind, ignored)
    if len(calls) > CALLS_MAX:
        raise body.invalid(where, f"may call at most {CALLS_MAX} tools, not {len(calls)}")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _call(body: ConversationFields, at: str, block: dict[str, Any]) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise body.invalid(f"{at}.input", f"must be an object, not {shown(given)}")
    function = {"name": _name(body, at, block, "name"), "arguments": given}
    return {"id": _name(body, at, block, "id"), "type": "function", "function": function}


def _texts(body: ConversationFields, where: str, content: Any) -> list[tuple[str, str]]:
    """The text of each block, where there may be nothing but text."""
    if isinstance(content, str):
        return [(where, content)]
    found = list[tuple[str, str]]()
    for at, block in _blocks(body, where, content):
        if block.get("type") != "text":
            raise body.invalid(at, f"must be a block of type 'text', not {shown(block.get('type'))}: {_WHY}")
        found.append((at, _text(body, at, block)))
    return found


_WHY = "the models here read text only"


def _blocks(body: ConversationFields, where: str, content: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(content, list):
        raise body.invalid(where, f"must be a string or a list of blocks, not {shown(content)}")
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise body.invalid(f"{where}[{index}]", f"must be a block, an object with 'type', not {shown(block)}")
        yield f"{where}[{index}]", block


def _pass_over(body: ConversationFields, at: str, kind: Any, ignored: Ignored) -> None:
    """A block of another kind. Raises UserError if an answer without it would be about something else."""
    if kind in _PICTURES or not isinstance(kind, str):
        raise body.invalid(at, f"must be a block of text or of a tool, not {shown(kind)}: {_WHY}")
    ignored.add(at, kind)


def _text(body: ConversationFields, at: str, block: dict[str, Any], name: str = "text") -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise body.invalid(f"{at}.{name}", f"must be a string, not {shown(text)}")
    return text


def _name(body: ConversationFields, at: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise body.invalid(f"{at}.{name}", f"must be a string of 1 to 256 characters, not {shown(value)}")
    return value
