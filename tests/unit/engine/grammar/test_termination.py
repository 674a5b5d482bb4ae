"""Grammars that derive no text that ends, and those that look like it."""

from __future__ import annotations

import json

import pytest

from aegis.core.request import Grammar
from aegis.engine.grammar.termination import derives_a_text

NEVER = [
    Grammar("ebnf", "root ::= root"),
    Grammar("ebnf", 'root ::= "a" root'),
    Grammar("ebnf", 'root ::= a "x"\na ::= b | "y" a\nb ::= a | "x" b'),
    Grammar("ebnf", "root ::= root{2,3}"),
    Grammar("ebnf", 'root ::= "a" root+'),
    Grammar("ebnf", "root ::= [^\\x00-\\U0010ffff]"),
    Grammar("regex", r"a[^\s\S]"),
    Grammar("json_schema", '{"$ref": "#"}'),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    Grammar(
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= root"}}),
    ),
]
ENDS = [
    Grammar("ebnf", 'root ::= "a" root | "b"'),
    Grammar("ebnf", 'root ::= ""'),
    Grammar("ebnf", "root ::= root{0,3}"),
    Grammar("ebnf", "root ::= root*"),
    Grammar("ebnf", "root ::= [^\\x00-\\U0010fffe]"),
    Grammar("ebnf", 'root ::= "a" b\nb ::= b | "x" c\nc ::= [a-z]'),
    Grammar("regex", r"[^\s\S]*"),
    Grammar("regex", ""),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}}'),
    Grammar("json_schema", '{"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}'),
    Grammar(
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
            }
        ),
    ),
]


@pytest.mark.parametrize("grammar", NEVER, ids=str)
def test_a_grammar_that_goes_on_for_ever_derives_nothing(grammar: Grammar) -> None:
    assert not derives_a_text(grammar)


@pytest.mark.parametrize("grammar", ENDS, ids=str)
def test_a_grammar_with_a_way_out_derives_a_text(grammar: Grammar) -> None:
    assert derives_a_text(grammar)
