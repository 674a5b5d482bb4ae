"""The names of single tokens in logprobs."""

from __future__ import annotations

from aegis.models.text.text_model import TextModel

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def name_of(text: TextModel | None, token: int) -> str:
    """The token's own text, special tokens by their names; without a tokenizer its id in vLLM's notation."""
    if text is None:
        return f"token_id:{token}"
    return text.decode([token], skip_special_tokens=False)


def bytes_of(name: str) -> list[int] | None:
    """None if the token is a part of a character, and `name` not its bytes therefore."""
    return None if _REPLACEMENT in name else list(name.encode())
