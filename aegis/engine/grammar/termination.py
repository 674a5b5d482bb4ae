"""Whether a grammar derives any text that ends: `root ::= "a" root` goes on for ever, and `root ::= root` never begins.

A rule is productive where one of its choices is, a sequence where all its parts are. What is productive is found from
its leaves upwards, each expression once (the emptiness test of context-free grammars), in what XGrammar has parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aegis.core.request import Grammar
from aegis.engine.grammar.parsed import Kind, Parsed, parse

_LAST_CHARACTER = 0x10FFFF


def derives_a_text(grammar: Grammar) -> bool:
    """False if every way through the grammar goes on for ever. It must compile."""
    parsed = parse(grammar)
    expressions = len(parsed.grammar_expr_indptr)
    lacking: list[int] = []  # so many of the parts of each node have to be found productive yet; rules come last
    users: list[list[int]] = [[] for _ in range(expressions + len(parsed.rules))]
    for node, (lacks, parts) in enumerate(_nodes(parsed)):
        lacking.append(lacks)
        for part in parts:
            users[part].append(node)
    productive = [node for node, lacks in enumerate(lacking) if not lacks]
    while productive:
        for user in users[productive.pop()]:
            lacking[user] -= 1
            if not lacking[user]:
                productive.append(user)
    return lacking[expressions + parsed.root_rule_id] <= 0


def _nodes(parsed: Parsed) -> Iterator[tuple[int, Sequence[int]]]:
    """For each expression, then for each rule: how many of its parts it needs, and its parts. Expressions of kinds that
    always derive something need none."""
    first_rule = len(parsed.grammar_expr_indptr)
    for kind, values in parsed.expressions():
        match kind:
            case Kind.CHARACTERS:
                yield int(_has_none(values)), ()
            case Kind.RULE:
                yield 1, (first_rule + values[0],)
            case Kind.SEQUENCE:
                yield len(values), values
            case Kind.CHOICES:
                yield 1, values
            case Kind.REPEAT if values[1] > 0:
                yield 1, (first_rule + values[0],)
            case _:
                yield 0, ()
    for _, body, *_ in parsed.rules:
        yield 1, (body,)


def _has_none(characters: Sequence[int]) -> bool:
    """Whether a class has no character. It is told as whether it is negated, and its ranges with both ends."""
    negated, *ends = characters
    if not negated:
        return not ends
    next_character = 0
    for low, high in sorted(zip(ends[::2], ends[1::2], strict=True)):
        if low > next_character:
            return False
        next_character = max(next_character, high + 1)
    return next_character > _LAST_CHARACTER
