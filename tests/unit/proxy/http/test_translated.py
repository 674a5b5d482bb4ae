"""Errors of a request that another one was made of name the parameters of the first."""

from __future__ import annotations

import pytest

from aegis.core.errors import UserError
from proxy.http.translated import Translated

NAMES = {
    "messages": "input",
    "stop": "stop_sequences",
    "response_format.json_schema": "text.format",
    ".parameters": ".schema",
}


@pytest.mark.parametrize(
    ("message", "param", "told", "named"),
    [
        ("'messages[3].content' is wrong", "messages[3].content", "'input[3].content' is wrong", "input[3].content"),
        ("'stop' and 'top_p'", "stop", "'stop_sequences' and 'top_p'", "stop_sequences"),
        (
            "'response_format.json_schema.schema.a' is none",
            "response_format.json_schema.schema.a",
            "'text.format.schema.a' is none",
            "text.format.schema.a",
        ),
        ("'tools[1].function.parameters.a'", "tools", "'tools[5].schema.a'", "tools"),
        ("'tools[0]' is wrong", "tools[0].function.name", "'tools[2]' is wrong", "tools[2].name"),
        (
            "'response_format.json_schema.schema.$ref' is none",
            "response_format.json_schema.schema.$ref",
            "'text.format.schema.$ref' is none",
            "text.format.schema.$ref",
        ),
        ("'top_p' must be a number, not 'tools[99]'", "top_p", "'top_p' must be a number, not 'tools[99]'", "top_p"),
        ("the prompt is too long", None, "the prompt is too long", None),
    ],
)
def test_parameters_have_their_other_names(message: str, param: str | None, told: str, named: str | None) -> None:
    with pytest.raises(UserError) as raised, Translated({}, (2, 5)).renamed(NAMES):
        raise UserError(message, status=429, param=param, code="c", kind="k", retry_after_s=5, reason="r")
    error = raised.value
    assert (error.message, error.param) == (told, named)
    assert (error.status, error.code, error.kind, error.retry_after_s, error.reason) == (429, "c", "k", 5, "r")
