"""Chat templates: the prompt for a conversation, as the model's own template renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aegis.core.errors import UserError
from aegis.device.image_directory import CHAT_TEMPLATE, TOKENIZER_CONFIG
from aegis.process.error_lines import flattened

_REASON_CHARACTERS = 300
"""The part that is shown of a template's own words, which may be of any length."""


def render(
    template: str | None,
    special: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt. `special` are the special tokens by name, and `variables` go to the template besides. Raises
    UserError if there is no template, or if the template refuses the messages."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    if template is None:
        raise UserError("the model has no chat template: use /v1/completions", param="messages", code="no_template")
    try:
        rendered, _ = render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **{**special, **variables},
        )
    except (TemplateError, TypeError, ValueError) as error:
        reason = flattened(str(error)[: 2 * _REASON_CHARACTERS])[:_REASON_CHARACTERS]
        raise UserError(f"the model's chat template refuses the messages: {reason}", param="messages") from error
    text: str = rendered[0]
    return text


def read_special_tokens(directory: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, which templates refer to by these names."""
    file = directory / TOKENIZER_CONFIG
    if not file.is_file():
        return {}
    found: dict[str, str] = {}
    for key, value in json.loads(file.read_text(encoding="utf-8")).items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def read_chat_template(directory: Path) -> str | None:
    """None if the checkpoint had none."""
    file = directory / CHAT_TEMPLATE
    return file.read_text(encoding="utf-8") if file.is_file() else None
