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
from proxy.http.fields import Fields, Unsupported
from proxy.http.json_bounds import InnerJson, json_problem
from proxy.http.market import Served
from proxy.http.parameters import (
    ANY_OBJECT,
    AnyText,
    Anything,
    Flag,
    Items,
    Nested,
    Object,
    OneOf,
    RequiredNested,
    Text,
    refuse_unsupported,
    required,
)
from proxy.http.security.admission import who
from proxy.http.settings import trials_of
from proxy.http.structured.json_schemas import SCHEMA_BYTES_MAX, check_schema

GRAMMAR_CHARACTERS_MAX = SCHEMA_BYTES_MAX
CHOICES_MAX = 4096
ANY_JSON = Grammar("json_schema", '{"type":"object"}')
_FORMS = ("choice", "grammar", "json", "json_object", "regex", "structural_tag")


class ResponseFormat(Fields):
    type = required(OneOf(("text", "json_object", "json_schema", "structural_tag")))


class PlainFormat(ResponseFormat):
    type = required(OneOf(("text", "json_object")))


class NamedSchema(Fields):
    name = required(Text(None))
    description = AnyText()
    strict = Flag(False)
    schema = required(Object())


class JsonSchemaFormat(ResponseFormat):
    type = required(OneOf(("json_schema",)))
    json_schema = RequiredNested(NamedSchema)


class StructuralTagFormat(ResponseFormat):
    type = required(OneOf(("structural_tag",)))
    format = required(Object())


_GRAMMAR_TEXT = Text("", most_characters=GRAMMAR_CHARACTERS_MAX)


class StructuredOutputs(Fields):
    json = Anything({"anyOf": [ANY_OBJECT, _GRAMMAR_TEXT.schema()]})
    regex = Text("", most_characters=GRAMMAR_CHARACTERS_MAX)
    choice = Items({"type": "string", "minLength": 1}, most=CHOICES_MAX, least=1)
    grammar = Text("", most_characters=GRAMMAR_CHARACTERS_MAX)
    json_object = Flag(False, only=True)
    structural_tag = Anything({"anyOf": [ANY_OBJECT, _GRAMMAR_TEXT.schema()]})
    disable_any_whitespace = Unsupported(True)
    disable_additional_properties = Unsupported(False)
    whitespace_pattern = Unsupported()


class OutputFormatBody(Fields):
    response_format = Nested(ResponseFormat, (PlainFormat, JsonSchemaFormat, StructuralTagFormat))
    structured_outputs = Nested(StructuredOutputs, about=f"Exactly one of {', '.join(_FORMS)}")


class OutputFormat(msgspec.Struct, frozen=True):
    """`param` asked for it."""

    grammar: Grammar
    param: str


def read_structured(body: OutputFormatBody) -> OutputFormat | None:
    """None if the output is free. Raises UserError."""
    response = _read_response_format(body)
    outputs = _read_structured_outputs(body)
    if response and outputs:
        raise body.invalid("structured_outputs", "and 'response_format' are both given: send one of them")
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


def _read_response_format(body: OutputFormatBody) -> OutputFormat | None:
    form = body.response_format
    if form is None:
        return None
    kind, wanted = form.type, None
    declared: type[ResponseFormat] = PlainFormat
    if kind == "json_object":
        wanted = OutputFormat(ANY_JSON, "response_format")
    elif kind == "json_schema":
        declared, wanted = JsonSchemaFormat, _read_json_schema(form)
    elif kind == "structural_tag":
        declared, tag = StructuralTagFormat, StructuralTagFormat.format.of(form)
        wanted = OutputFormat(Grammar("structural_tag", _dumped({"type": kind, "format": tag})), "response_format")
    form.end(declared)
    return wanted


def _read_json_schema(form: ResponseFormat) -> OutputFormat:
    named = JsonSchemaFormat.json_schema.of(form)
    _, _, _, schema = named.name, named.description, named.strict, named.schema
    named.end()
    param = "response_format.json_schema.schema"
    check_schema(schema, param)
    return OutputFormat(Grammar("json_schema", _dumped(schema)), param)


def _read_structured_outputs(body: OutputFormatBody) -> OutputFormat | None:
    outputs = body.structured_outputs
    if outputs is None:
        return None
    given = [form for form in _FORMS if outputs.given(form)]
    if not given:
        refuse_unsupported(outputs, StructuredOutputs)
        outputs.end()
    if len(given) != 1:
        raise body.invalid("structured_outputs", f"must have exactly one of {', '.join(_FORMS)}")
    refuse_unsupported(outputs, StructuredOutputs)
    wanted = OutputFormat(_grammar(outputs, given[0]), f"structured_outputs.{given[0]}")
    outputs.end()
    return wanted


def _grammar(outputs: StructuredOutputs, form: str) -> Grammar:
    match form:
        case "json":
            return _json(outputs)
        case "json_object":
            if not outputs.json_object:
                raise outputs.invalid(form, "must be true, or left out")
            return ANY_JSON
        case "choice":
            return _choice(outputs)
        case "regex":
            return Grammar("regex", outputs.regex)
        case "grammar":
            return Grammar("ebnf", outputs.grammar)
    tag = outputs.structural_tag
    text = _dumped(tag) if isinstance(tag, dict) else _GRAMMAR_TEXT.check(tag, outputs, form)
    return Grammar("structural_tag", text)


def _json(outputs: StructuredOutputs) -> Grammar:
    schema = outputs.json
    if isinstance(schema, str):
        if len(schema) > SCHEMA_BYTES_MAX:
            raise outputs.invalid("json", f"is larger than {SCHEMA_BYTES_MAX} characters")
        try:
            schema = InnerJson().decoded(schema)
        except (ValueError, RecursionError) as error:
            raise outputs.invalid("json", f"is no JSON: {json_problem(schema.encode(), error)}") from None
    check_schema(schema, "structured_outputs.json")
    return Grammar("json_schema", _dumped(schema))


def _choice(outputs: StructuredOutputs) -> Grammar:
    choices = outputs.choice
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise outputs.invalid("choice", "must be a list of strings that are not empty")
    return Grammar("ebnf", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))


def _dumped(value: Any) -> str:
    return msgspec.json.encode(value).decode()
