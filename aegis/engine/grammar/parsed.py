"""What XGrammar has parsed of a grammar, before it makes anything of it."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec
import xgrammar

from aegis.core.request import Grammar


class Kind(IntEnum):
    """XGrammar's numbers of the expressions that are looked into; `CHARACTERS` are a class, `REPEATED` any number of
    its characters."""

    TEXT = 0
    CHARACTERS = 1
    REPEATED = 2
    RULE = 4
    SEQUENCE = 5
    CHOICES = 6
    REPEAT = 8
    REGEX = 12


class Parsed(msgspec.Struct):
    """As XGrammar writes it down: expression `n` is its kind, a length and so many numbers, from `indptr[n]` on."""

    rules: list[list[Any]]  # a name, the number of an expression, and more
    root_rule_id: int
    grammar_expr_data: list[int]
    grammar_expr_indptr: list[int]

    def expressions(self) -> Iterator[tuple[int, list[int]]]:
        """The kind and the numbers of each."""
        data = self.grammar_expr_data
        for at in self.grammar_expr_indptr:
            yield data[at], data[at + 2 : at + 2 + data[at + 1]]


def parse(grammar: Grammar) -> Parsed:
    """The grammar must compile."""
    read = {
        "json_schema": xgrammar.Grammar.from_json_schema,
        "regex": xgrammar.Grammar.from_regex,
        "ebnf": xgrammar.Grammar.from_ebnf,
        "structural_tag": xgrammar.Grammar.from_structural_tag,
    }[grammar.kind]
    return msgspec.json.decode(read(grammar.text).serialize_json(), type=Parsed)
