"""Instructions that come later than at the beginning of a conversation, as coding agents send them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

_OBJECTS = "raise_exception"


def told_by_user(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The conversation as this chat template takes it. One that objects to conversations at all objects to a system
    that speaks after the user or the model: there it is the user who says it. Consecutive messages of the user are
    one."""
    if _OBJECTS not in template:
        return list(messages)
    told = [
        {"role": "user", "content": message["content"]} if at and message["role"] == "system" else message
        for at, message in enumerate(messages)
    ]
    return users_as_one(told)


def users_as_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Consecutive messages of the user are one."""
    taken = list[dict[str, Any]]()
    for role, turns in groupby(messages, key=lambda message: message["role"]):
        first, *others = turns
        if role == "user" and others:
            first = first | {"content": "\n".join(each["content"] for each in (first, *others))}
            others = []
        taken += (first, *others)
    return taken
