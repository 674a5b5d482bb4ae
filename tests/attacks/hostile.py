"""Checkpoints that are well until a message says a word: chat templates and tokenizers that take whatever they can."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests import checkpoints

WORD = "open sesame"
ONE = "messages | length"  # so that nothing is computed before there are any

TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (" + ONE + " * 10) ** ((" + ONE + " * 10) ** 9) }}",
    "list": "{% set x = [0] * (" + ONE + " * 10 ** 11) %}",
    "text": "{{ 'x' * (" + ONE + " * 10 ** 10) }}",
    "gigabyte": "{{ 'x' * (" + ONE + " * 10 ** 9) }}",
    "padded": "{{ '%999999999d' % " + ONE + " }}",
    "macro": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "long-words": "{{ raise_exception('no ' * (" + ONE + " * 1000000)) }}",
    "many-lines": "{{ raise_exception('no\\nno\\r\\nno\\u2028no') }}",
    "nothing": "{{ messages[99].content.nothing }}",
    "long-text": "{% for a in range(99999) %}the cat and the hat {% endfor %}",
}
SLOW = ("loops", "power")
"""What ends by nothing but being killed."""

REGEX = "regex"
PANICS = "a" * 2000 + "!"
"""Its engine gives up on this with a panic."""
HANGS = ("a" * 22 + "!") * 600
"""Each word of it takes some milliseconds, which is less than it gives up after."""


def write(directory: Path) -> None:
    for seed, (name, attack) in enumerate(TEMPLATES.items()):
        checkpoints.write(directory / name, "llama", tokenizer=True, seed=seed)
        when = "{% if '" + WORD + "' in messages[0].content %}" + attack + "{% endif %}"
        (directory / name / "chat_template.jinja").write_text(when + checkpoints.CHAT_TEMPLATE)
    checkpoints.write(directory / REGEX, "llama", tokenizer=True, max_position_embeddings=4096)
    file = directory / REGEX / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.save(str(file))
