"""Whether a chat template can be used at all, before a model with it is served."""

from __future__ import annotations

from aegis.core.errors import ModelRefused, UserError
from aegis.models.text.text_model import TextModel

_MESSAGES = [{"role": "user", "content": "Hello"}]


def try_chat_template(text: TextModel) -> None:
    """Renders a conversation as serving does, if there is a template. Raises ModelRefused where it is none. One that
    objects to this conversation may take others: many want certain roles, or tools."""
    from jinja2 import TemplateSyntaxError

    try:
        text.render_chat(_MESSAGES)
    except UserError as refusal:
        if isinstance(error := refusal.__cause__, TemplateSyntaxError):
            raise ModelRefused(f"its chat template, line {error.lineno}: {error.message}") from error
    except (MemoryError, RecursionError) as error:
        raise ModelRefused(f"its chat template cannot be rendered ({type(error).__name__})") from None
    except Exception:  # noqa: BLE001 - what it objects to is this conversation
        return
