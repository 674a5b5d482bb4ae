"""The grammars of an instance: each compiled once, in a thread beside the steps, and kept while it is used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.core.request import Grammar
from aegis.device.image_directory import TOKENIZER
from aegis.engine.grammar.token_masks import GrammarPosition, SlowTime

if TYPE_CHECKING:
    from aegis.engine.grammar.compiler import Compiled, Vocabulary

CACHE_BYTES = 256 << 20
_MOST = 1024
"""Grammars that are kept, however small: all are looked through for each new one."""


class Grammars:
    """Nothing of XGrammar is imported before the first grammar comes."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._cache_bytes = cache_bytes
        self._specs: dict[ModelId, ModelSpec] = {}
        self._vocabularies: dict[ModelId, Vocabulary] = {}  # the thread's
        self._compiled: OrderedDict[tuple[ModelId, Grammar], Future[Compiled]] = OrderedDict()
        self._times = (SlowTime(), SlowTime())  # so that others' grammars cost no output in JSON
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def add(self, spec: ModelSpec) -> None:
        """Grammars for the model can be compiled from now on."""
        self._specs[spec.model] = spec

    def remove(self, model: ModelId) -> None:
        if self._specs.pop(model, None):
            for key in [key for key in self._compiled if key[0] == model]:
                del self._compiled[key]
            self._thread.submit(self._vocabularies.pop, model, None)

    def ready(self, model: ModelId, grammar: Grammar | None) -> bool:
        """Whether the grammar is ready; if not, its compilation begins. True if the model is not there."""
        return grammar is None or model not in self._specs or self._future(model, grammar).done()

    def begin(self, model: ModelId, grammar: Grammar, generated: Sequence[int]) -> GrammarPosition:
        """The state of an output that has come as far as `generated`."""
        ends, compiled = self._specs[model].manifest.eos_token_ids, self._future(model, grammar)
        if compiled.done() and compiled.exception():  # the next output tries again: an image may have been away
            del self._compiled[model, grammar]
        return GrammarPosition(compiled, generated, ends, self._times[grammar.kind == "json_schema"])

    def _future(self, model: ModelId, grammar: Grammar) -> Future[Compiled]:
        key = (model, grammar)
        if key not in self._compiled:
            self._trim()
            self._compiled[key] = self._thread.submit(self._compile, self._specs[model], grammar)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def _compile(self, spec: ModelSpec, grammar: Grammar) -> Compiled:
        from aegis.engine.grammar.compiler import compile_grammar, read_vocabulary

        if spec.model not in self._vocabularies:
            text = (Path(spec.directory) / TOKENIZER).read_text(encoding="utf-8")
            manifest = spec.manifest
            vocabulary = read_vocabulary(text, size=manifest.vocab_size, ends=manifest.eos_token_ids)
            self._vocabularies[spec.model] = vocabulary
        return compile_grammar(self._vocabularies[spec.model], grammar)

    def _trim(self) -> None:
        """Forgets the least recently used grammars, as long as the others are too many or take too much; outputs that
        hold one keep it. One that is being compiled stays."""
        sizes = {key: _nbytes(key[1], future) for key, future in self._compiled.items()}
        total, count = sum(sizes.values()), len(sizes)
        for key, nbytes in sizes.items():
            if total <= self._cache_bytes and count < _MOST:
                return
            if self._compiled[key].done():
                total, count = total - nbytes, count - 1
                del self._compiled[key]


def _nbytes(grammar: Grammar, future: Future[Compiled]) -> int:
    """The bytes that a grammar takes here, its text included: that may be far longer than what is made of it."""
    compiled = future.result().nbytes if future.done() and not future.exception() else 0
    return len(grammar.text) + compiled
