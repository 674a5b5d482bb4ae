"""Instructions that come later than at the beginning of a conversation, as coding agents send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_OBJECTS = "raise_exception"


def told_by_user(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """The conversation as this chat template takes it. One that objects to conversations at all objects to a system
    that speaks after the user or the model: there it is the user who says it. Consecutive messages of the user are
    one."""
    if _OBJECTS not in template:
        return list(messages)
    taken = list[dict[str, Any]]()
    for at, message in enumerate(messages):
        if at and message["role"] == "system":
            message = {"role": "user", "content": message["content"]}
        last = taken[-1] if taken else None
        if last and last["role"] == message["role"] == "user":
            taken[-1] = last | {"content": f"{last['content']}\n{message['content']}"}
        else:
            taken.append(message)
    return taken
