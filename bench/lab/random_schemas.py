"""JSON Schemas drawn at random, of what structured output supports."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def random_schema(draws: random.Random, depth: int = 3) -> Schema:
    """No deeper than `depth`; its values are short."""
    scalar = [_string, _integer, _number, _enum, lambda _: {"type": draws.choice(["boolean", "null"])}, _pattern]
    if depth == 0 or draws.random() < 0.3:
        return draws.choice(scalar)(draws)
    return draws.choice([_array, _object, _object, _any_of])(draws, depth - 1)


def _string(draws: random.Random) -> Schema:
    least = draws.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + draws.randrange(1, 9)}


def _pattern(draws: random.Random) -> Schema:
    return {"type": "string", "pattern": draws.choice(["^[a-z]{2,5}$", "^(cat|hat)-[0-9]{3}$", "^x?y?z$"])}


def _integer(draws: random.Random) -> Schema:
    least = draws.randrange(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + draws.randrange(2000)}


def _number(draws: random.Random) -> Schema:
    least = draws.randrange(-50, 50)
    return {"type": "number", "minimum": least, "maximum": least + draws.randrange(1, 100)}


def _enum(draws: random.Random) -> Schema:
    return {"enum": draws.sample(["a", "the cat", 'x"y\n', "é", "😀", 0, 7, True, None], draws.randrange(1, 5))}


def _array(draws: random.Random, depth: int) -> Schema:
    least = draws.randrange(3)
    items = random_schema(draws, depth)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + draws.randrange(3)}


def _object(draws: random.Random, depth: int) -> Schema:
    names = draws.sample(["a", "b", "name", "über", "a b", 'q"'], draws.randrange(1, 5))
    properties = {name: random_schema(draws, depth) for name in names}
    required = [name for name in names if draws.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any_of(draws: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(draws, depth) for _ in range(draws.randrange(1, 4))]}
