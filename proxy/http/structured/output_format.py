"""The constraint that a client puts on its output: `response_format` and `structured_outputs`, from JSON to a
`Grammar`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fastapi import Request

from aegis.core.errors import UserError
from aegis.core.request import Grammar
from proxy.http.client_disconnect import while_connected
from proxy.http.errors import shown
from proxy.http.fields import Fields
from proxy.http.json_bounds import InnerJson
from proxy.http.market import Served
from proxy.http.security.admission import who
from proxy.http.settings import trials_of
from proxy.http.structured.json_schemas import SCHEMA_BYTES_MAX, check_schema

GRAMMAR_CHARACTERS_MAX = SCHEMA_BYTES_MAX
CHOICES_MAX = 4096
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_FORMS = ("choice", "grammar", "json", "json_object", "regex", "structural_tag")


class OutputFormat(msgspec.Struct, frozen=True):
    """`param` asked for it."""

    grammar: Grammar
    param: str


def read_structured(fields: Fields) -> OutputFormat | None:
    """None if the output is free. Raises UserError."""
    response = _read_response_format(fields)
    outputs = _read_structured_outputs(fields)
    if response and outputs:
        raise fields.refusal("structured_outputs", "and 'response_format' are both given: send one of them")
    return response or outputs


async def check_grammar(request: Request, served: Served, wanted: OutputFormat) -> None:
    """Raises UserError if the model's output cannot be held to it, ClientGone where nobody waits any more."""
    text, manifest = served.text, served.spec.manifest
    if text is None or not manifest.eos_token_ids:
        lacks = "tokenizer" if text is None else "end token"
        message = f"{wanted.param!r} needs a model with one, and {served.spec.model!r} has no {lacks}"
        raise UserError(message, param=wanted.param, code="unsupported_parameter")
    if len(wanted.grammar.text) > GRAMMAR_CHARACTERS_MAX:
        raise UserError(f"{wanted.param!r} is larger than {GRAMMAR_CHARACTERS_MAX} characters", param=wanted.param)
    trying = trials_of(request).problem(manifest, text.to_json, wanted.grammar, who(request))
    if problem := await while_connected(request.receive, trying):
        raise UserError(f"{wanted.param!r} {problem}", param=wanted.param, code="invalid_grammar")


def _read_response_format(fields: Fields) -> OutputFormat | None:
    if not fields.given("response_format"):
        return None
    form = fields.nested("response_format")
    kind = form.required_text("type")
    if kind not in _FORMATS:
        raise form.refusal("type", f"must be one of {', '.join(_FORMATS)}, not {shown(kind)}")
    wanted = None
    if kind == "json_object":
        wanted = OutputFormat(ANY_OBJECT, "response_format")
    elif kind == "json_schema":
        wanted = _read_json_schema(form)
    elif kind == "structural_tag":
        tag = form.mapping("format")
        if tag is None:
            raise form.refusal("format", "is required")
        wanted = OutputFormat(Grammar("structural_tag", _dumped({"type": kind, "format": tag})), "response_format")
    form.end()
    return wanted


def _read_json_schema(form: Fields) -> OutputFormat:
    named = form.nested("json_schema")
    named.required_text("name")
    named.text("description", None, most_characters=4096)
    named.flag("strict")
    schema = named.mapping("schema")
    if schema is None:
        raise named.refusal("schema", "is required")
    named.end()
    param = "response_format.json_schema.schema"
    check_schema(schema, param)
    return OutputFormat(Grammar("json_schema", _dumped(schema)), param)


def _read_structured_outputs(fields: Fields) -> OutputFormat | None:
    if not fields.given("structured_outputs"):
        return None
    outputs = fields.nested("structured_outputs")
    given = [form for form in _FORMS if outputs.given(form)]
    if len(given) != 1:
        raise fields.refusal("structured_outputs", f"must have exactly one of {', '.join(_FORMS)}")
    outputs.unsupported("disable_any_whitespace", (True,))
    outputs.unsupported("disable_additional_properties", (False,))
    outputs.unsupported("whitespace_pattern")
    wanted = OutputFormat(_grammar(outputs, given[0]), f"structured_outputs.{given[0]}")
    outputs.end()
    return wanted


def _grammar(outputs: Fields, form: str) -> Grammar:
    match form:
        case "json":
            return _json(outputs)
        case "json_object":
            if not outputs.flag(form):
                raise outputs.refusal(form, "must be true, or left out")
            return ANY_OBJECT
        case "choice":
            return _choice(outputs)
        case "structural_tag" if isinstance(tag := outputs.take(form), dict):
            return Grammar("structural_tag", _dumped(tag))
    text = outputs.text(form, "", most_characters=GRAMMAR_CHARACTERS_MAX)
    return Grammar({"grammar": "ebnf", "regex": "regex"}.get(form, "structural_tag"), text)  # type: ignore[arg-type]


def _json(outputs: Fields) -> Grammar:
    schema = outputs.take("json")
    if isinstance(schema, str):
        if len(schema) > SCHEMA_BYTES_MAX:
            raise outputs.refusal("json", f"is larger than {SCHEMA_BYTES_MAX} characters")
        try:
            schema = InnerJson().decoded(schema)
        except (ValueError, RecursionError) as error:
            raise outputs.refusal("json", f"is no JSON: {shown(str(error))}") from None
    check_schema(schema, "structured_outputs.json")
    return Grammar("json_schema", _dumped(schema))


def _choice(outputs: Fields) -> Grammar:
    choices = outputs.items("choice", most=CHOICES_MAX)
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise outputs.refusal("choice", "must be a list of strings that are not empty")
    return Grammar("ebnf", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _dumped(value: Any) -> str:
    return msgspec.json.encode(value).decode()
