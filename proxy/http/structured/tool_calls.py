"""Finds the tool calls in a reply that arrives in pieces, in the forms that models are trained on.

Hermes and Qwen say `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; Llama 3 says
`{"name": …, "parameters": {…}}` and nothing else, some of them after `<|python_tag|>`; Mistral says `[TOOL_CALLS]` and
then a list of the former or, of late, `name[ARGS]{…}`. What is begun like a call and is none remains text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec
from msgspec import Struct

from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, held, text_parts


class Balance:
    """Finds the end of a JSON object that arrives in pieces: counts braces outside of strings. `depth` is how many are
    open already."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._escaped = False
        self._quoted = False

    def feed(self, text: str) -> int | None:
        """Goes on with `text`: how much of it belongs to the object, None if all of it does and there is more."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


_SHORT = r'"(?:[^"\\]|\\.){0,256}"'
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*({_SHORT})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_FIRST = re.compile(rf"\{{\s*({_SHORT})\s*:(?:\s*({_SHORT}))?")
_KEYS = frozenset({"arguments", "id", "name", "parameters", "type"})
_NAMED = re.compile(r"([\w.-]{1,128})(?:\[CALL_ID\][^\[\s]*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_BEGUN = re.compile(r"[\w.\-\[\]\s]{0,200}")
_BETWEEN = " \t\r\n,;[]"


class ToolForm(Struct, frozen=True):
    """Calls stand between `begin` and `end`; without an `end` they are the rest of the reply. `bare`: a reply that
    begins with a brace, or a list of them, is calls too."""

    begin: str
    end: str = ""
    bare: bool = False


HERMES = ToolForm("<tool_call>", "</tool_call>")
LLAMA = ToolForm("<|python_tag|>", bare=True)
MISTRAL = ToolForm("[TOOL_CALLS]")
LISTED = ToolForm("\0", bare=True)
"""Of a reply that is held to a list of calls: what is cut off before a call's arguments is no text."""


def form_of(chat_template: str) -> ToolForm | None:
    """None if the template has no tools, or their form is not known."""
    if "tools" not in chat_template:
        return None
    if MISTRAL.begin in chat_template:
        return MISTRAL
    if HERMES.begin in chat_template:
        return HERMES
    return LLAMA if LLAMA.begin in chat_template or '"parameters"' in chat_template else None


class CallFinder:
    """`most` calls are told, further ones dropped. Where a `bare` object may be a call or an answer, it is one that has
    the name of a tool and no other keys than calls have, or arguments; None: any name is that of a tool."""

    def __init__(self, form: ToolForm, most: int | None = None, names: Collection[str] | None = None) -> None:
        self.calls = 0
        self._form = form
        self._most = most
        self._names = names
        self._waiting = ""
        self._skipped = ""  # is text after all where no call follows
        self._balance = Balance()
        self._scanned = 0  # of what waits, in the object that has begun
        self._rest_depth = 0
        self._after_calls = False  # blanks there are no text
        self._state: Callable[[list[Part]], bool] = self._at_start if form.bare else self._in_text

    @property
    def held(self) -> int:
        """Characters of the text that wait for what follows."""
        return len(self._skipped) + len(self._waiting)

    def feed(self, text: str) -> list[Part]:
        self._waiting += text
        parts: list[Part] = []
        while self._waiting and self._state(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        """The rest: text that began like a call and is none; a call that was cut off, also in the mark that ends it,
        remains a call."""
        rest = "" if self._is_call_cut_off() else self._skipped + self._waiting
        self._skipped = self._waiting = ""
        return list(text_parts(rest))

    def _is_call_cut_off(self) -> bool:
        if self._state in (self._in_arguments, self._after_arguments) or (self.calls and not self._waiting):
            return True
        if self.calls and self._state == self._between and self._form.end.startswith(self._waiting):
            return True
        return self._form is LISTED and self._state != self._in_text

    # Each state takes what it can from what waits, and says whether to go on.

    def _at_start(self, parts: list[Part]) -> bool:
        bare = self._waiting.lstrip()
        if not bare or bare == "[":
            return False
        begins = bare.startswith("{") or re.match(r"\[\s*\{", bare)
        if not begins and re.fullmatch(r"\[\s*", bare):
            return False
        self._state = self._between if begins else self._in_text
        return True

    def _in_text(self, parts: list[Part]) -> bool:
        if self._after_calls:
            self._waiting = self._waiting.lstrip()
            self._after_calls = not self._waiting
        before, found, after = self._waiting.partition(self._form.begin)
        if found:
            told = before.rstrip()
            parts += text_parts(told)
            self._skipped = before[len(told) :] + self._form.begin
            self._waiting, self._state = after, self._between
            return True
        keep = held(before, self._form.begin)
        parts += text_parts(before[: len(before) - keep])
        self._waiting = before[len(before) - keep :]
        return False

    def _between(self, parts: list[Part]) -> bool:
        begin, end = self._form.begin, self._form.end
        while self._waiting[:1] in _BETWEEN or self._waiting.startswith(begin):
            if begin.startswith(self._waiting):
                return False
            length = len(begin) if self._waiting.startswith(begin) else 1
            self._skipped += self._waiting[:length]
            self._waiting = self._waiting[length:]
        if end and self._waiting.startswith(end):
            self._waiting = self._waiting[len(end) :]
            if begin in self._skipped:  # there is no call between the marks
                self._skipped += end
                self._become_text(parts)
            else:
                self._skipped, self._after_calls, self._state = "", True, self._in_text
        elif self._waiting.startswith("{"):
            self._balance, self._scanned, self._state = Balance(), 0, self._in_object
        elif named := _NAMED.match(self._waiting):
            self._begin(parts, named.group(1), named.end(), rest_depth=0)
        elif any(mark.startswith(self._waiting) for mark in (begin, end)) or _NAMED_BEGUN.fullmatch(self._waiting):
            return False
        else:
            self._become_text(parts)
        return True

    def _become_text(self, parts: list[Part]) -> None:
        parts += text_parts(self._skipped)
        self._skipped, self._state = "", self._in_text

    def _in_object(self, parts: list[Part]) -> bool:
        head = _HEAD.match(self._waiting)
        name = _string(head.group(1)) if head else None
        if head and name is not None and self._may_call(name):
            self._begin(parts, name, head.end(), rest_depth=1)
            return True
        if self._is_no_call():
            self._become_text(parts)
            return True
        length = self._balance.feed(self._waiting[self._scanned :])
        if length is None:
            self._scanned = len(self._waiting)
            return False
        length += self._scanned
        whole, self._waiting = self._waiting[:length], self._waiting[length:]
        call = _call(whole, bare=self._form.bare)
        if call is None or not self._may_call(call[0]):
            self._skipped += whole
            self._become_text(parts)
        else:
            self._append(parts, CallBegun(self.calls, call[0]), CallArguments(self.calls, call[1]))
            self.calls += 1
            self._skipped, self._state = "", self._between
        return True

    def _may_call(self, name: str) -> bool:
        return not self._form.bare or self._names is None or name in self._names

    def _is_no_call(self) -> bool:
        """Whether that is sure from how the object begins, in a form in which an answer may begin so too."""
        first = _FIRST.match(self._waiting) if self._form.bare else None
        if first is None:
            return False
        key, value = _string(first.group(1)), _string(first.group(2) or "")
        return key not in _KEYS or (key == "name" and value is not None and not self._may_call(value))

    def _begin(self, parts: list[Part], name: str, length: int, *, rest_depth: int) -> None:
        self._append(parts, CallBegun(self.calls, name))
        self._waiting, self._skipped = self._waiting[length:], ""
        self._balance, self._rest_depth, self._state = Balance(), rest_depth, self._in_arguments

    def _in_arguments(self, parts: list[Part]) -> bool:
        length = self._balance.feed(self._waiting)
        told = self._waiting[:length]
        self._append(parts, CallArguments(self.calls, told))
        self._waiting = self._waiting[len(told) :]
        if length is not None:
            self.calls += 1
            self._balance = Balance(self._rest_depth)
            self._state = self._after_arguments if self._rest_depth else self._between
        return length is not None

    def _after_arguments(self, parts: list[Part]) -> bool:
        """The rest of the object they were in says nothing."""
        length = self._balance.feed(self._waiting)
        self._waiting = "" if length is None else self._waiting[length:]
        if length is not None:
            self._state = self._between
        return length is not None

    def _append(self, parts: list[Part], *told: CallBegun | CallArguments) -> None:
        if self._most is None or self.calls < self._most:
            parts += told


def _string(quoted: str) -> str | None:
    try:
        return msgspec.json.decode(quoted, type=str)
    except ValueError:
        return None


class _Call(Struct):
    name: str
    arguments: dict[str, object] | None = None
    parameters: dict[str, object] | None = None


def _call(whole: str, *, bare: bool) -> tuple[str, str] | None:
    """Name and arguments, wherever in the object they are."""
    try:
        call = msgspec.json.decode(whole, type=_Call)
        keys = msgspec.json.decode(whole, type=dict[str, msgspec.Raw]).keys()
    except (ValueError, RecursionError):
        return None
    arguments = call.arguments if call.arguments is not None else call.parameters
    if bare and arguments is None and keys - _KEYS:
        return None
    return call.name, msgspec.json.encode(arguments or {}).decode()
