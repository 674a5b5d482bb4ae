"""The input of a response request as the messages of a chat."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.ignored import Ignored
from proxy.http.json_bounds import InnerJson
from proxy.http.responses.response_items import call_message

ITEMS_MAX = 4096
_TEXTS = ("input_text", "output_text", "text")
_UNREADABLE = ("input_audio", "input_file", "input_image")
_ROLES = ("assistant", "developer", "system", "user")
_WHY = "the models here read text only"
_PROMPTING = ("developer", "system")


class InputFields(Protocol):
    """A body with an input."""

    def take(self, name: str) -> Any: ...

    def invalid(self, name: str, problem: str) -> UserError: ...


class InputReader:
    """Reads the items one after the other. What the model said and called between two messages of others is one
    message of its own, as templates have it."""

    def __init__(self, body: InputFields, ignored: Ignored) -> None:
        self._body = body
        self._ignored = ignored
        self._inner = InnerJson()
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None  # that is still being put together
        self._thoughts = list[str]()  # of it

    def read(self) -> list[dict[str, Any]]:
        """Raises UserError naming the item at fault."""
        given = self._body.take("input")
        if isinstance(given, str):
            return [{"role": "user", "content": given}]
        if not isinstance(given, list):
            raise self._body.invalid("input", f"must be a string or a list of items, not {shown(given)}")
        if len(given) > ITEMS_MAX:
            raise self._body.invalid("input", f"may have at most {ITEMS_MAX} entries, not {len(given)}")
        for index, item in enumerate(given):
            at = f"input[{index}]"
            if not isinstance(item, dict):
                raise self._body.invalid(at, f"must be an object, not {shown(item)}")
            self._read(at, item)
        self._end_answer()
        return self._messages

    def _read(self, at: str, item: dict[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._read_message(at, item)
        elif kind == "reasoning":
            self._think(self._reasoning(at, item))
        elif kind in ("function_call", "custom_tool_call"):
            self._call(at, kind, item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = {"role": "tool", "tool_call_id": self._name(at, item, "call_id")}
            self._add(output | {"content": self._content(f"{at}.output", item.get("output"))})
        elif kind == "item_reference":
            raise self._body.invalid(at, "refers to an item: send the item, or 'previous_response_id'")
        elif kind in _UNREADABLE:
            raise self._body.invalid(at, f"must be a message of text, not {shown(kind)}: {_WHY}")
        elif isinstance(kind, str):
            self._ignored.add(at, kind)
        else:
            raise self._body.invalid(f"{at}.type", f"must be a string, not {shown(kind)}")

    def _read_message(self, at: str, item: dict[str, Any]) -> None:
        role, content = item.get("role"), self._content(f"{at}.content", item.get("content"))
        if role not in _ROLES:
            raise self._body.invalid(f"{at}.role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
        if role != "assistant":
            self._add({"role": role, "content": content})
            return
        if self._answer and (self._answer["content"] or "tool_calls" in self._answer):
            self._end_answer()
        self._answer = (self._answer or {"role": "assistant"}) | {"content": content}

    def _think(self, thought: str) -> None:
        if not thought:
            return
        if self._answer and (self._answer["content"] or "tool_calls" in self._answer):
            self._end_answer()
        self._answer = self._answer or {"role": "assistant", "content": ""}
        self._thoughts.append(thought)

    def _call(self, at: str, kind: str, item: dict[str, Any]) -> None:
        given = item.get("arguments" if kind == "function_call" else "input")
        if not isinstance(given, str):
            raise self._body.invalid(f"{at}.arguments", f"must be a string, not {shown(given)}")
        arguments: Any = {"input": given} if kind == "custom_tool_call" else self._arguments(at, given)
        call = call_message(self._name(at, item, "call_id"), self._name(at, item, "name"), arguments)
        self._answer = self._answer or {"role": "assistant", "content": ""}
        self._answer.setdefault("tool_calls", []).append(call)

    def _arguments(self, at: str, text: str) -> dict[str, Any]:
        """Calls that were cut off come back too: they count as having none."""
        arguments = self._inner.arguments(text)
        if arguments is None:
            self._ignored.add(f"{at}.arguments", "no JSON object")
        return arguments or {}

    def _reasoning(self, at: str, item: dict[str, Any]) -> str:
        """The text of reasoning; a summary stands for it where that is all there is. What is encrypted is nobody's
        here."""
        for name in ("content", "summary"):
            if item.get(name):
                return self._content(f"{at}.{name}", item[name], ("reasoning_text", "summary_text", "text"))
        return ""

    def _content(self, at: str, content: Any, kinds: tuple[str, ...] = _TEXTS) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise self._body.invalid(at, f"must be a string or a list of parts, not {shown(content)}")
        texts = list[str]()
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else part
            if kind == "refusal":
                kind, part = "text", {"text": part.get("refusal")}
            elif kind not in kinds:
                raise self._body.invalid(
                    f"{at}[{index}]", f"must be a part of type {kinds[0]!r}, not {shown(kind)}: {_WHY}"
                )
            text = part.get("text")
            if not isinstance(text, str):
                raise self._body.invalid(f"{at}[{index}].text", f"must be a string, not {shown(text)}")
            texts.append(text)
        return "\n".join(texts)

    def _name(self, at: str, item: dict[str, Any], name: str) -> str:
        value = item.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            raise self._body.invalid(f"{at}.{name}", f"must be a string of 1 to 256 characters, not {shown(value)}")
        return value

    def _add(self, message: dict[str, Any]) -> None:
        self._end_answer()
        self._messages.append(message)

    def _end_answer(self) -> None:
        if self._answer:
            thought = {"reasoning_content": "".join(self._thoughts)} if self._thoughts else {}
            self._messages.append(self._answer | thought)
            self._answer, self._thoughts = None, []


def prompt_messages(
    instructions: str | None, conversation: list[dict[str, Any]], *, knows_developers: bool
) -> list[dict[str, Any]]:
    """The conversation below its instructions. Those at its beginning are one message: many templates take no more.
    `knows_developers`: the template has their role; others pass over it, so they speak as the system there."""
    told = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*told, *conversation]
    if not knows_developers:
        messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
    first = next((at for at, each in enumerate(messages) if each["role"] not in _PROMPTING), len(messages))
    if first < 2:
        return messages
    texts = [each["content"] for each in messages[:first] if each["content"]]
    return [{"role": messages[0]["role"], "content": "\n".join(texts)}, *messages[first:]]


def kept_calls(message: dict[str, Any]) -> dict[str, Any]:
    """An answer with the arguments of its calls as objects: those of a call that was cut off are none."""
    for call in message.get("tool_calls", ()):
        function = call["function"]
        try:
            function["arguments"] = msgspec.json.decode(function["arguments"] or "{}", type=dict[str, Any])
        except (ValueError, RecursionError):
            function["arguments"] = {}
    return message
