"""Structured output as clients ask for it: what is passed on, and what is refused by name."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from aegis.core.errors import UserError
from aegis.core.request import Grammar
from aegis.engine.grammar.trials import GrammarTrials
from proxy.http.structured.json_schemas import FORMATS, check_schema
from tests.unit.proxy.http.scripted import market, post, spec, word_text

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    opened = GrammarTrials()
    yield opened
    opened.close()


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | more}}


ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
    (response_format(SCHEMA), Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":")))),
    (response_format({"type": "null"}, description=""), Grammar("json_schema", '{"type":"null"}')),
    ({"structured_outputs": {"json": {"type": "null"}}}, Grammar("json_schema", '{"type":"null"}')),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, Grammar("json_schema", '{"type":"null"}')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_schema", '{"type":"object"}')),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["yes", 'n"é']}}, Grammar("ebnf", 'root ::= "yes" | "n\\"é"')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("ebnf", 'root ::= "a"')),
]


@pytest.mark.parametrize(("asked", "grammar"), ASKED, ids=str)
def test_what_is_asked_for_reaches_the_sampler(
    trials: GrammarTrials, asked: dict[str, Any], grammar: Grammar | None
) -> None:
    behind = market()
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        reply = post(behind, path, body | asked, trials=trials)
        assert reply.status_code == 200, reply.text
    assert [sampling.grammar for _, _, sampling in behind.submitted] == [grammar, grammar]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": 5}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format"),
    (response_format({"type": "x"}), "response_format.json_schema.schema.type"),
    (response_format({"type": ["x"]}), "response_format.json_schema.schema.type"),
    (response_format({"type": ["string", 5]}), "response_format.json_schema.schema.type"),
    (response_format({"type": ["string", "string"]}), "response_format.json_schema.schema.type"),
    (response_format({"type": "object", "required": [[]]}), "response_format.json_schema.schema.required"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": "root ::= root"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured_outputs.json.uniqueItems"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens"),
]


@pytest.mark.parametrize(("asked", "param"), REFUSED, ids=str)
def test_what_cannot_be_had_is_refused_by_name(trials: GrammarTrials, asked: dict[str, Any], param: str) -> None:
    error = error_of(post(market(), "/v1/chat/completions", CHAT | asked, trials=trials))
    assert error["param"] == param
    assert "\n" not in error["message"] and ".cc:" not in error["message"]


def test_a_grammar_without_an_output_that_ends_is_told_so(trials: GrammarTrials) -> None:
    asked = {"structured_outputs": {"grammar": "root ::= root"}}
    assert error_of(post(market(), "/v1/completions", COMPLETION | asked, trials=trials))["message"] == (
        "'structured_outputs.grammar' has no output that ends: every way through it needs one of its rules again"
    )


SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "object", "propertys": {}}, ".propertys"),
    ({"not": {}}, ".not"),
    ({"if": {}}, ".if"),
    ({"type": []}, ".type"),
    ({"type": "number", "multipleOf": 2}, ".multipleOf"),
    ({"type": "integer", "multipleOf": 2, "minimum": 3}, ".multipleOf"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, ".maxLength"),
    ({"maxLength": 3}, ".maxLength"),
    ({"allOf": [{"type": "null"}, {"type": "string"}]}, ".allOf"),
    ({"anyOf": [{"type": "null"}], "type": "string"}, ".type"),
    ({"anyOf": {"type": "null"}}, ".anyOf"),
    ({"$ref": "http://elsewhere/x"}, ".$ref"),
    ({"enum": ["a", 1], "type": "string"}, ".type"),
    ({"type": "object", "properties": {}, "required": ["b"]}, ".required"),
    ({"type": "object", "properties": {"b": {"items": 5}}}, ".properties.b.items"),
    ({"type": "array", "items": {"contains": {}}}, ".items.contains"),
    ({"$defs": {"x": {"not": {}}}}, ".$defs.x.not"),
    ({"type": "string", "format": "nonsense"}, ".format"),
    ({"type": "string", "format": "regex"}, ".format"),
    ({"type": ["string", "null"], "format": "iri"}, ".format"),
    ({"type": "string", "format": 5}, ".format"),
    ({"type": "string", "pattern": 5}, ".pattern"),
    ({"type": "string", "pattern": "a", "format": "date"}, ".pattern"),
    ({"type": "string", "maxLength": -1}, ".maxLength"),
    ({"type": "string", "minLength": 1.5}, ".minLength"),
    ({"type": "array", "items": {}, "minItems": -1}, ".minItems"),
    ({"type": "array", "items": {}, "maxItems": True}, ".maxItems"),
    ({"type": "object", "minProperties": None}, ".minProperties"),
    ({"type": "object", "properties": {"a": {"type": "object", "maxProperties": "1"}}}, ".properties.a.maxProperties"),
    ({"type": "array", "minItems": 2}, ".minItems"),
    ({"type": "array", "maxItems": 2}, ".maxItems"),
    ({"type": "array", "minItems": 2, "prefixItems": [{"type": "null"}]}, ".minItems"),
    ({"type": "object", "minProperties": 2}, ".minProperties"),
    ({"type": "object", "maxProperties": 2}, ".maxProperties"),
    ({"type": "object", "minProperties": 2, "properties": {"a": {"type": "null"}}}, ".minProperties"),
    (5, ""),
]


@pytest.mark.parametrize(("schema", "where"), SCHEMAS, ids=str)
def test_a_keyword_that_would_not_be_enforced_is_refused_by_its_path(schema: Any, where: str) -> None:
    error = error_of(post(market(), "/v1/completions", COMPLETION | {"structured_outputs": {"json": schema}}))
    assert error["param"] == "structured_outputs.json" + where


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 2, "maxItems": 3, "items": {}},
        {"type": "array", "minItems": 1, "prefixItems": [{"type": "null"}]},
        {"type": "array", "maxItems": 3, "prefixItems": [{"type": "null"}]},
        {"type": "array", "maxItems": 0},
        {"type": "object", "minProperties": 2, "additionalProperties": True},
        {"type": "object", "minProperties": 2, "patternProperties": {"a+": {"type": "null"}}},
        {"type": "object", "minProperties": 1, "properties": {"a": {"type": "null"}}},
        {"type": "string", "minLength": 0, "maxLength": 3},
    ],
    ids=str,
)
def test_counts_are_taken_where_they_can_be_kept(trials: GrammarTrials, schema: Any) -> None:
    asked = COMPLETION | {"structured_outputs": {"json": schema}}
    assert post(market(), "/v1/completions", asked, trials=trials).status_code == 200


def test_what_a_count_needs_is_said() -> None:
    asked = COMPLETION | {"structured_outputs": {"json": {"type": "array", "minItems": 2}}}
    message = error_of(post(market(), "/v1/completions", asked))["message"]
    assert message == "'structured_outputs.json.minItems' needs 'items' beside it: none are allowed without it"


FORMATTED = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "duration": "P1D",
    "email": "ann@example.org",
    "hostname": "a.b",
    "ipv4": "127.0.0.1",
    "ipv6": "1:2:3:4:5:6:7:8",
    "json-pointer": "/a/b",
    "relative-json-pointer": "1/a",
    "time": "03:04:05Z",
    "uri": "http://a/b",
    "uri-reference": "/a/b",
    "uri-template": "/a/{b}",
    "uuid": "01234567-89ab-cdef-0123-456789abcdef",
}


def test_the_formats_that_are_taken_are_those_that_are_enforced() -> None:
    assert set(FORMATTED) == set(FORMATS)
    for name, text in FORMATTED.items():
        check_schema({"type": "string", "format": name}, "s")
        grammar = xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "format": name}))
        assert _is_grammar_accept_string(grammar, json.dumps(text)), name
        assert not _is_grammar_accept_string(grammar, '"% %"'), name
    for name in ("idn-email", "idn-hostname", "iri", "iri-reference", "regex"):  # the others that JSON Schema names
        grammar = xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "format": name}))
        assert _is_grammar_accept_string(grammar, '"% %"'), f"{name} is enforced now: take it"


def test_a_schema_takes_a_time_that_is_proportional_to_its_size() -> None:
    """Whatever of its keywords is looked at together: the types and the values, here."""
    for types in ([f"t{i}" for i in range(4000)], ["null", "boolean", "array", "object", "integer", "number"] * 800):
        schema = {"type": types, "enum": ["a"] * 8000}
        began_s = time.monotonic()
        with pytest.raises(UserError, match=r"'s\.type'"):
            check_schema(schema, "s")
        assert time.monotonic() - began_s < 0.1
    began_s = time.monotonic()
    check_schema({"type": ["null", "boolean", "array", "object", "integer", "string"], "enum": ["a"] * 30_000}, "s")
    assert time.monotonic() - began_s < 0.1


def test_a_value_is_of_the_types_that_are_named() -> None:
    values = {"null": None, "true": True, "5": 5, "5.0": 5.0, "5.5": 5.5, "text": "x", "list": [], "object": {}}
    fitting = {
        "null": ["null"],
        "boolean": ["true"],
        "integer": ["5", "5.0"],
        "number": ["5", "5.0", "5.5"],
        "string": ["text"],
        "array": ["list"],
        "object": ["object"],
    }
    for kind, names in fitting.items():
        for name, value in values.items():
            try:
                check_schema({"type": kind, "const": value}, "s")
            except UserError:
                assert name not in names, (kind, name)
            else:
                assert name in names, (kind, name)


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Any = {"type": "null"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    assert "deep" in error_of(post(market(), "/v1/chat/completions", CHAT | response_format(schema)))["message"]


@pytest.mark.long
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not() -> None:
    hurried = GrammarTrials(compile_s=2)
    rules = [f'r{i} ::= [a-z]* r{(i + 1) % 3000} | "x" r{i * 7 % 3000}' for i in range(3000)]
    slow = {"structured_outputs": {"grammar": "\n".join(["root ::= r0", *rules])}}
    try:
        error = error_of(post(market(), "/v1/completions", COMPLETION | slow, trials=hurried))
        assert error["param"] == "structured_outputs.grammar"
        assert "to compile" in error["message"]
        quick = COMPLETION | {"structured_outputs": {"regex": "a"}}
        assert post(market(), "/v1/completions", quick, trials=hurried).status_code == 200
    finally:
        hurried.close()


@pytest.mark.parametrize("changes", [{"text": None}, {"spec": spec("m", eos_token_ids=())}], ids=str)
def test_a_model_without_tokenizer_or_end_token_has_no_structured_output(changes: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": [1, 2], "structured_outputs": {"regex": "a"}}
    behind = market()
    for name, value in changes.items():
        setattr(behind.served["m"], name, value)
    assert error_of(post(behind, "/v1/completions", body))["param"] == "structured_outputs.regex"


def test_words_that_carry_their_spaces_have_a_vocabulary_too(trials: GrammarTrials) -> None:
    behind = market(text=word_text())
    behind.served["m"].spec = spec("m", fingerprint="words", vocab_size=6, eos_token_ids=(0,))
    body = COMPLETION | {"prompt": "the", "structured_outputs": {"choice": ["cat"]}}
    assert post(behind, "/v1/completions", body, trials=trials).status_code == 200


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert "\n" not in error["message"]
    return error
