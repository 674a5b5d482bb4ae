"""Whether a value satisfies a schema of `bench.lab.random_schemas`: written from the specification, not from the code
that enforces it."""

from __future__ import annotations

import re
from typing import Any

from bench.lab.random_schemas import Schema

_TYPES: dict[str, Any] = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def satisfies(value: Any, schema: Schema) -> bool:
    if "anyOf" in schema:
        return any(satisfies(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    match schema["type"]:
        case "integer":
            return type(value) is int and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "number":
            return type(value) in (int, float) and schema["minimum"] <= value <= schema["maximum"]
        case kind if not isinstance(value, _TYPES[kind]):
            return False
        case "string" if "pattern" in schema:
            return re.search(schema["pattern"], value) is not None
        case "string":
            return schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            fits = schema["minItems"] <= len(value) <= schema["maxItems"]
            return fits and all(satisfies(each, schema["items"]) for each in value)
        case "object":
            return _object_satisfies(value, schema)
    return True


def _object_satisfies(value: dict[str, Any], schema: Schema) -> bool:
    known = schema["properties"]
    if not set(schema["required"]) <= value.keys() or not value.keys() <= known.keys():
        return False
    return all(satisfies(each, known[name]) for name, each in value.items())
