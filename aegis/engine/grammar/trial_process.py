"""The process that tries grammars out for a proxy, which may kill it when one takes too long.

Started as `python -m aegis.engine.grammar.trial_process`; ends when its standard input does.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

import numpy as np
import torch
from xgrammar import GrammarMatcher

from aegis.core.request import Grammar
from aegis.engine.grammar.compiler import Compiled, GrammarRefused, Vocabulary, compile_grammar, read_vocabulary
from aegis.engine.grammar.termination import derives_a_text
from aegis.engine.grammar.trial_messages import Tried, Try, read, write
from aegis.process.child import limit_memory

VOCABULARIES_MAX = 16
MEMORY_BYTES = 4 << 30  # beyond what the libraries take
COMPILED_BYTES_MAX = 64 << 20
FOLLOWED_TOKENS = 128
FOLLOW_S = 1.0  # of processor time: as a rule they take a hundredth of it
_SAID_BYTES = 1 << 20
_AS_ANY_OF = "falling back to anyOf semantics"
"""Said of each `oneOf` whose branches may overlap, which counts as `anyOf`, as users are told."""
ALONE_S = 60  # the longest that it outlives a proxy that was killed


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints
    vocabularies: OrderedDict[str, Vocabulary] = OrderedDict()
    limit_memory(MEMORY_BYTES, for_good=True)
    write(answers, Tried(None))
    while (asked := read(sys.stdin.buffer, Try)) is not None:
        if asked.tokenizer_json is not None:
            vocabularies[asked.vocabulary] = read_vocabulary(asked.tokenizer_json, size=asked.size, ends=asked.ends)
            if len(vocabularies) > VOCABULARIES_MAX:
                vocabularies.popitem(last=False)
        problem = _problem(vocabularies.get(asked.vocabulary), asked.grammar) if asked.grammar else None
        write(answers, Tried(problem))


def _problem(vocabulary: Vocabulary | None, grammar: Grammar) -> str | None:
    if vocabulary is None:
        return "cannot be tried out: the model's vocabulary is not known"
    signal.alarm(ALONE_S)
    try:
        with _overhearing() as said:
            compiled = compile_grammar(vocabulary, grammar)
        if warning := _warning(said[0]):
            return f"would not be held to as it is written: {warning}"
        if not derives_a_text(grammar):
            return "has no output that ends: every way through it needs one of its rules again"
        if tokens := _too_slow_after(compiled):
            return (
                f"takes too long to follow: {tokens} tokens took more than {FOLLOW_S:g} s; "
                "where a text can be derived in many ways, make them fewer"
            )
    except GrammarRefused as error:
        return str(error)
    finally:
        signal.alarm(0)
    if compiled.nbytes > COMPILED_BYTES_MAX:
        return f"takes more than {COMPILED_BYTES_MAX >> 20} MiB when it is compiled"
    return None


def _warning(said: str) -> str | None:
    """The first of what is ignored."""
    told = (line.partition("Warning: ")[2] for line in said.splitlines())
    return next((warning for warning in told if warning and _AS_ANY_OF not in warning), None)


def _too_slow_after(compiled: Compiled) -> int:
    """Follows outputs drawn at random: how many tokens there were when that took too long; 0 if it never did. A
    client may still find a way that is slow (`SlowTime`), but not by an oversight."""
    draws, began_s = random.Random(0), thread_time()
    matcher = GrammarMatcher(compiled.grammar)
    ends = set(matcher.stop_token_ids)
    mask = torch.zeros((1, -(-compiled.vocabulary.whole.vocab_size // 32)), dtype=torch.int32)
    for tokens in range(1, FOLLOWED_TOKENS + 1):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
        allowed = [token for token in np.flatnonzero(bits).tolist() if token not in ends]
        if not allowed or not matcher.accept_token(draws.choice(allowed)):
            matcher.reset()
        if thread_time() - began_s > FOLLOW_S:
            return tokens
    return 0


@contextmanager
def _overhearing() -> Iterator[list[str]]:
    """Gets the beginning of what a library writes to standard error meanwhile. XGrammar says there, and only there,
    what it ignores, a line for each."""
    said: list[str] = []
    file, stderr = os.memfd_create("stderr"), os.dup(2)
    os.dup2(file, 2)
    try:
        yield said
    finally:
        os.dup2(stderr, 2)
        said.append(os.pread(file, _SAID_BYTES, 0).decode(errors="replace"))
        os.close(stderr)
        os.close(file)


if __name__ == "__main__":
    main()
