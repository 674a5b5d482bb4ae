"""Reading the YAML files a simulation is described by."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from aegis.config.yaml_file import read_mapping
from aegis.core.errors import UserError

_Schema = TypeVar("_Schema", bound=BaseModel)


def read(file: Path, schema: type[_Schema]) -> _Schema:
    """The contents of `file`, by `schema`. Raises UserError: one line with the file, the key and the expected value."""
    try:
        return schema.model_validate(read_mapping(file))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = [part for part in first["loc"] if part != "[key]"]
        key = ".".join(str(part) for part in location)
        match first["type"]:
            case "extra_forbidden":
                known = ", ".join(_keys_at(schema, location[:-1]))
                reason = "unknown key" + (f"; known are {known}" if known else "")
            case "model_type" | "dict_type" | "model_attributes_type":
                reason = "should be a mapping"
            case "missing":
                reason = "is missing"
            case "string_pattern_mismatch":
                reason = "is no model name; use letters, digits and . : / @ + - _"
            case "value_error":
                reason = str(first["ctx"]["error"])
            case _:
                reason = f"{str(first['msg']).removeprefix('Input ')}, not {first['input']!r}"
        raise UserError(f"{file}: {key}: {reason}" if key else f"{file}: {reason}") from None


def _keys_at(schema: type[BaseModel], location: list[int | str]) -> list[str]:
    """The keys a mapping may have; none where the location leads through a map of the user's own names."""
    for part in location:
        field = schema.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        schema = field.annotation
    return list(schema.model_fields)
