"""Whether grammars compile, and soon enough: asked of a process beside the server, which is killed where they do not.

The process is started by the first grammar. It knows what it was told of vocabularies until it is killed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from time import monotonic

from aegis.core.errors import UserError
from aegis.core.model import Manifest
from aegis.core.request import Grammar
from aegis.engine.grammar_messages import Tried, Try, read, write

COMPILE_S = 5.0
START_S = 60.0
PASSED_MAX = 4096
VOCABULARIES_MAX = 16


class GrammarTrials:
    """Threads may share it; grammars are tried one by one."""

    def __init__(self, compile_s: float = COMPILE_S) -> None:
        self._compile_s = compile_s
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._told: OrderedDict[str, None] = OrderedDict()  # vocabularies that the process knows
        self._passed: OrderedDict[tuple[str, Grammar], None] = OrderedDict()

    def problem(self, manifest: Manifest, tokenizer_json: Callable[[], str], grammar: Grammar) -> str | None:
        """What there is against the grammar for this model, if anything, from a verb on. Waits as long as trying
        takes; raises UserError where that cannot be done."""
        key = (manifest.fingerprint, grammar)
        if key in self._passed:
            return None
        with self._lock:
            problem = self._ask(manifest, tokenizer_json, grammar)
            if problem is None:
                self._passed[key] = None
                if len(self._passed) > PASSED_MAX:
                    self._passed.popitem(last=False)
            return problem

    def close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.kill()
            self._process.communicate()
        self._process = None
        self._told.clear()

    def _ask(self, manifest: Manifest, tokenizer_json: Callable[[], str], grammar: Grammar) -> str | None:
        if self._process and self._process.poll() is not None:
            self.close()
        process = self._process or self._start()
        name = manifest.fingerprint
        tokenizer = None if name in self._told else tokenizer_json()
        assert process.stdin
        write(process.stdin, Try(name, grammar, tokenizer, manifest.vocab_size, manifest.eos_token_ids))
        self._told[name] = None
        if len(self._told) > VOCABULARIES_MAX:
            self._told.popitem(last=False)
        tried = self._answer(process, self._compile_s)
        if tried is None:
            self.close()
            return f"takes more than {self._compile_s:g} s or too much memory to compile"
        return tried.problem

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "aegis.engine.grammar_trial"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"OMP_NUM_THREADS": "1", **os.environ}
        )
        if self._answer(self._process, START_S) is None:
            self.close()
            raise UserError("structured output is not available now", status=503, code="grammar_unavailable")
        return self._process

    def _answer(self, process: subprocess.Popen[bytes], timeout_s: float) -> Tried | None:
        """None where it does not come in time, or the process has died."""
        assert process.stdout
        until = monotonic() + timeout_s
        ready, _, _ = select.select([process.stdout], [], [], max(until - monotonic(), 0))
        return read(process.stdout, Tried) if ready else None
