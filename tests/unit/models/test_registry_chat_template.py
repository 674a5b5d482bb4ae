"""A chat template that is none is refused with its line; one that objects to a sample is none of our business."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis.core.errors import ModelRefused
from aegis.models.registry import try_chat_template
from aegis.models.text.text_model import TextModel
from tests import checkpoints


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("template")
    checkpoints.write_tokenizer(directory)
    return directory


def tried(directory: Path, template: str | None) -> None:
    file = directory / "chat_template.jinja"
    file.unlink(missing_ok=True)
    if template is not None:
        file.write_text(template)
    text = TextModel.load(directory)
    assert text is not None
    try_chat_template(text)


@pytest.mark.parametrize(
    "template",
    [
        None,
        checkpoints.CHAT_TEMPLATE,
        "{{ raise_exception('only tools') }}",
        "{{ nothing.of.this }}",
        "{{ messages[5].content | upper }}",
        "{{ 1 // 0 }}",
        "{{ bos_token + strftime_now('%Y') }}",
    ],
)
def test_a_template_is_taken_whatever_it_says_of_the_sample(directory: Path, template: str | None) -> None:
    tried(directory, template)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("\n\n{% endfor %}", "its chat template, line 3: .*endfor"),
        ("{% for m in messages %}", "its chat template, line 1: Unexpected end of template"),
        ("{{ messages | no_such_filter }}", "its chat template, line 1: No filter named"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"cannot be rendered \(RecursionError\)"),
        ("{{ ''.join(['x'] * 10 ** 17) }}", r"cannot be rendered \(MemoryError\)"),
    ],
)
def test_what_is_no_template_is_refused(directory: Path, template: str, said: str) -> None:
    with pytest.raises(ModelRefused, match=said):
        tried(directory, template)
