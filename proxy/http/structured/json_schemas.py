"""The JSON Schemas that structured output can enforce: every keyword is enforced, says nothing about values, or is
refused by name. XGrammar would silently ignore the keywords that are missing here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from aegis.core.errors import UserError
from proxy.http.errors import shown

DEPTH_MAX = 64
SCHEMA_BYTES_MAX = 1 << 17
ALL_OBJECTS = {"type": "object", "additionalProperties": True}

_ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_OF_TYPE = {
    "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
    "number": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}),
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems", "unevaluatedItems"}),
    "object": frozenset(
        {
            "additionalProperties",
            "maxProperties",
            "minProperties",
            "patternProperties",
            "properties",
            "propertyNames",
            "required",
            "unevaluatedProperties",
        }
    ),
}
FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "json-pointer",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
)
"""Those that XGrammar has a grammar for: of any other it takes every string."""

_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_OTHERS = {
    "Items": ("prefixItems", ("items", "unevaluatedItems"), "'items'"),
    "Properties": (
        "properties",
        ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        "'additionalProperties'",
    ),
}
"""Of what is counted: the keyword that lists it, those that allow more than the list has, and the one to advise."""

_ALONE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
_DEFINITIONS = ("$defs", "definitions")
_KNOWN = frozenset().union(_ANNOTATIONS, *_OF_TYPE.values(), _ALONE, _DEFINITIONS, ("type",))
_FORMS: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "integer": (int,),
    "number": (int, float),
}


def check_schema(schema: Any, param: str) -> None:
    """Raises UserError naming the keyword, by its path from `param`; of a larger one none is looked for."""
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES_MAX:
        raise UserError(f"{param!r} is larger than {SCHEMA_BYTES_MAX} characters", param=param)
    _check(schema, param, 0)


def _check(schema: Any, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise _refusal(path, f"must be a JSON Schema, not {shown(schema)}")
    if depth > DEPTH_MAX:
        raise _refusal(path[:200], f"is nested more than {DEPTH_MAX} deep")
    for keyword in schema.keys() - _KNOWN:
        raise _refusal(f"{path}.{keyword[:60]}", "is not supported: outputs cannot be held to it")
    types = _read_types(schema, path)
    _check_company(schema, path)
    _check_types(schema, path, types)
    _check_strings(schema, path)
    _check_counts(schema, path)
    _check_values(schema, path, types)
    for where, inner in _inner(schema, path):
        _check(inner, where, depth + 1)


def _check_company(schema: dict[str, Any], path: str) -> None:
    """Some keywords are enforced only where they are alone."""
    constraints = schema.keys() - _ANNOTATIONS - set(_DEFINITIONS)
    for keyword in _ALONE:
        others = constraints - {keyword, "type"} if keyword in ("const", "enum") else constraints - {keyword}
        if keyword in schema and others:
            raise _refusal(f"{path}.{min(others)}", f"is not supported beside {keyword!r}")
    if "$ref" in schema and not str(schema["$ref"]).startswith("#"):
        raise _refusal(f"{path}.$ref", "must begin with '#': nothing else is looked up")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) != 1:
        raise _refusal(f"{path}.allOf", "is supported with one entry only")
    lengths = constraints & {"maxLength", "minLength"}
    for keyword in constraints & {"format", "pattern"}:
        if lengths:
            raise _refusal(f"{path}.{min(lengths)}", f"is not supported beside {keyword!r}")
    if {"format", "pattern"} <= constraints:
        raise _refusal(f"{path}.pattern", "is not supported beside 'format'")
    if "multipleOf" in schema and (schema.get("type") != "integer" or len(constraints & _OF_TYPE["number"]) > 1):
        raise _refusal(f"{path}.multipleOf", "is supported for integers without bounds only")


def _check_types(schema: dict[str, Any], path: str, types: Collection[str]) -> None:
    for kind, keywords in _OF_TYPE.items():
        wanted = {"number", "integer"} if kind == "number" else {kind}
        for keyword in sorted(keywords & schema.keys()):
            if wanted.isdisjoint(types):
                raise _refusal(f"{path}.{keyword}", f"needs 'type': {kind!r} beside it")


def _check_strings(schema: dict[str, Any], path: str) -> None:
    for keyword in ("format", "pattern"):
        if keyword in schema and not isinstance(schema[keyword], str):
            raise _refusal(f"{path}.{keyword}", f"must be a string, not {shown(schema[keyword])}")
    if "format" in schema and schema["format"] not in FORMATS:
        told = f"{shown(schema['format'])} is not supported: leave it out, or use one of {', '.join(FORMATS)}"
        raise _refusal(f"{path}.format", told)


def _check_counts(schema: dict[str, Any], path: str) -> None:
    """XGrammar takes some counts below 0 for none, and an array or object with a count for one that has nothing but
    what is listed: it would refuse valid schemas, and hold `maxItems` alone to an empty array."""
    for keyword in _COUNTS:
        count = schema.get(keyword, 0)
        if type(count) is not int or count < 0:
            raise _refusal(f"{path}.{keyword}", f"must be an integer that is not negative, not {shown(count)}")
    for counted, (listing, others, advised) in _OTHERS.items():
        listed = schema.get(listing, ())
        known = len(listed) if isinstance(listed, list | dict) else 0
        most = 0 if known else schema.get(f"max{counted}", 0)
        if max(schema.get(f"min{counted}", 0), most) > known and not any(other in schema for other in others):
            keyword = f"min{counted}" if schema.get(f"min{counted}", 0) > known else f"max{counted}"
            allowed = f"only those of {listing!r} are" if known else "none are"
            raise _refusal(f"{path}.{keyword}", f"needs {advised} beside it: {allowed} allowed without it")


def _check_values(schema: dict[str, Any], path: str, types: Collection[str]) -> None:
    required, properties = schema.get("required"), schema.get("properties")
    for name in required if isinstance(required, list) else ():
        if not isinstance(properties, dict) or not isinstance(name, str) or name not in properties:
            raise _refusal(f"{path}.required", f"names {shown(name)}, which 'properties' lacks")
    values = schema.get("enum") if "enum" in schema else [schema["const"]] if "const" in schema else []
    wanted = {form for kind in types for form in _FORMS[kind]}
    for value in values if isinstance(values, list) and types else ():
        if type(value) not in wanted and not ("integer" in types and type(value) is float and value.is_integer()):
            raise _refusal(f"{path}.type", f"is not that of {shown(value)}")


def _read_types(schema: dict[str, Any], path: str) -> tuple[str, ...]:
    """Each once, so that there are few: every value is looked at for each."""
    if "type" not in schema:
        return ()
    given = schema["type"]
    types = given if isinstance(given, list) and given else [given]
    for index, kind in enumerate(types):
        if not isinstance(kind, str) or kind not in _FORMS:
            raise _refusal(f"{path}.type", f"must be one of {', '.join(_FORMS)}, or some of them, not {shown(kind)}")
        if kind in types[:index]:
            raise _refusal(f"{path}.type", f"names {kind!r} more than once")
    return tuple(types)


def _inner(schema: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword in ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema:
            yield f"{path}.{keyword}", schema[keyword]
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        entries = schema.get(keyword, [])
        if not isinstance(entries, list):
            raise _refusal(f"{path}.{keyword}", f"must be a list, not {shown(entries)}")
        yield from ((f"{path}.{keyword}[{index}]", entry) for index, entry in enumerate(entries))
    for keyword in (*_DEFINITIONS, "patternProperties", "properties"):
        entries = schema.get(keyword, {})
        if not isinstance(entries, dict):
            raise _refusal(f"{path}.{keyword}", f"must be an object, not {shown(entries)}")
        yield from ((f"{path}.{keyword}.{name[:60]}", entry) for name, entry in entries.items())


def objects_of(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of those of its values that are objects, with the references of `schema`; None if there are none."""
    objects: dict[str, Any] | None = _objects_of(schema, schema, set())
    return objects


def _objects_of(schema: Any, root: dict[str, Any], followed: set[str]) -> Any:
    """From one schema to another lead unions only: a reference that was `followed` before adds nothing."""
    if isinstance(schema, bool):
        return ALL_OBJECTS if schema else None
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        there, reference = _referred(schema["$ref"], root), str(schema["$ref"])
        if there is None or reference in followed:
            return schema if there is None else None
        followed.add(reference)
        return _objects_of(there, root, followed)
    given, values = schema.get("type"), schema.get("enum", [schema.get("const", {})])
    types = given if isinstance(given, list) else [given]
    if "object" not in types and all(isinstance(kind, str) and kind in _FORMS for kind in types):
        return None
    if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
        return None
    objects = schema | ({"type": "object"} if "object" in types else {})
    if isinstance(schema.get("enum"), list):
        objects["enum"] = [value for value in schema["enum"] if isinstance(value, dict)]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(entries := schema.get(keyword), list) and (keyword != "allOf" or len(entries) == 1):
            kept = [_objects_of(entry, root, followed) for entry in entries]
            objects[keyword] = [entry for entry in kept if entry is not None]
            return objects if objects[keyword] else None
    return objects | ALL_OBJECTS if given is None and not objects.keys() & _ALONE else objects


def _referred(reference: Any, root: dict[str, Any]) -> Any:
    """The schema that lies there; None if none is found."""
    found: Any = root
    names = reference.split("/") if isinstance(reference, str) else [""]
    for name in names[1:]:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if names[0] == "#" and isinstance(found, bool | dict) else None


def _refusal(path: str, problem: str) -> UserError:
    return UserError(f"{path!r} {problem}", param=path, code="unsupported_schema")
