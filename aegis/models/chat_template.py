"""Whether a chat template can be used at all, before a model with it is served."""

from __future__ import annotations

from pathlib import Path

from aegis.core.errors import ModelRefused
from aegis.models.image_directory import CHAT_TEMPLATE


def try_chat_template(checkpoint: Path) -> None:
    """Renders a conversation, if there is a template. Raises ModelRefused where it is none. One that objects to this
    conversation may take others: many want certain roles, or tools."""
    file = checkpoint / CHAT_TEMPLATE
    template = file.read_text(encoding="utf-8") if file.is_file() else _within_config(checkpoint)
    if template is None:
        return
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(
            conversations=[[{"role": "user", "content": "Hello"}]], chat_template=template, add_generation_prompt=True
        )
    except TemplateSyntaxError as error:
        raise ModelRefused(f"its chat template, line {error.lineno}: {str(error.message)[:200]}") from None
    except (MemoryError, RecursionError) as error:
        raise ModelRefused(f"its chat template cannot be rendered ({type(error).__name__})") from None
    except Exception:  # noqa: BLE001 - what it objects to is this conversation
        return


def _within_config(checkpoint: Path) -> str | None:
    """Where older checkpoints have it."""
    import json

    file = checkpoint / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    except (AttributeError, ValueError):
        return None
    return found if isinstance(found, str) else None
