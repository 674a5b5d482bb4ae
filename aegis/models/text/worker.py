"""The process that tokenizes texts and renders chat templates for a proxy, which kills it when a job takes too long:
tokenizers and templates are a checkpoint's, and texts a client's.

Started as `python -m aegis.models.text.worker MEMORY_BYTES NICENESS PROGRESS`, with a socket as standard input, which
it answers on, and a file to share, which says at which of the jobs it is; ends when the socket does, or its parent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys

import msgspec

from aegis.core.errors import UserError
from aegis.models.text.lean_templates import import_templates
from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_messages import (
    ANSWERS_BYTES_MAX,
    LENGTH_BYTES,
    Answer,
    Count,
    Counted,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Fit,
    Fitted,
    Job,
    Know,
    Known,
    Refused,
    Render,
    Rendered,
    TooLarge,
    TooManyCharacters,
    TooManyTokens,
    encoded,
    framed,
    read_conversation,
    read_requests,
)
from aegis.process.child import end_with_launcher, limit_memory, stand_back

JOB_S = 60
"""The longest that a job runs on where the proxy was killed and could not end it."""

READY = b"\1"
PROGRESS_BYTES = 4
_TRIMMED_BYTES = 1 << 18
"""A message that is larger may leave much memory behind that is free and still the process's."""

_libc = ctypes.CDLL(None)


def main(memory_bytes: int, niceness: int, progress_file: int) -> None:
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stand_back(niceness)
    import_templates()  # which the first conversation would wait for
    progress = mmap.mmap(progress_file, PROGRESS_BYTES)
    limit_memory(memory_bytes, for_good=True)
    asked = socket.socket(fileno=os.dup(0))
    asked.sendall(READY)
    known: dict[int, TextModel] = {}
    with asked.makefile("rb") as reader:
        while length := reader.read(LENGTH_BYTES):
            nbytes = int.from_bytes(length, "little")
            signal.alarm(JOB_S)
            try:
                answers = _answers(known, reader.read(nbytes), progress)
            except MemoryError:
                os._exit(1)
            signal.alarm(0)
            asked.sendall(answers)
            if nbytes + len(answers) > _TRIMMED_BYTES:
                del answers
                _libc.malloc_trim(0)


def _answers(known: dict[int, TextModel], data: bytes, progress: mmap.mmap) -> bytes:
    requests = read_requests(data)
    answers = list[msgspec.Raw]()
    for index, asked in enumerate(requests):
        progress[:] = index.to_bytes(PROGRESS_BYTES, "little")
        if isinstance(asked, Know):
            if asked.forget is not None:
                del known[asked.forget]
            known[asked.key] = TextModel.of(asked.source)
            answers.append(encoded(Known()))
        else:
            answers.append(_bounded(_done(known[asked.key], asked), ANSWERS_BYTES_MAX // len(requests)))
    return framed(answers)


def _bounded(answer: Answer, bytes_max: int) -> msgspec.Raw:
    message = encoded(answer)
    nbytes = memoryview(message).nbytes
    return message if nbytes <= bytes_max else encoded(TooLarge(nbytes))


def _done(text: TextModel, job: Job) -> Answer:
    match job:
        case Encode(texts=texts, special=special, tokens_max=tokens_max):
            return _encoded(text, texts, special=special, tokens_max=tokens_max)
        case Fit():
            return _fitted(text, job)
        case Count():
            tokens = text.encode(job.text, add_special_tokens=job.special)
            return Counted(len(tokens), msgspec.json.encode(tokens))
        case Decode():
            return Decoded(text.decode(job.tokens))
        case Render():
            return _rendered(text, job)


def _encoded(text: TextModel, texts: tuple[str, ...], *, special: bool, tokens_max: int) -> Encoded | TooManyTokens:
    found = []
    for each in texts:
        tokens = tuple(text.encode(each, add_special_tokens=special)) if each else ()
        if len(tokens) > tokens_max:
            return TooManyTokens(len(tokens))
        found.append(tokens)
    return Encoded(tuple(found))


def _fitted(text: TextModel, job: Fit) -> Fitted | TooManyTokens:
    found = text.fit(job.texts, job.most)
    longest = max((len(tokens) for tokens, _ in found), default=0)
    if longest > job.tokens_max:
        return TooManyTokens(longest)
    return Fitted(tuple([tuple(tokens) for tokens, _ in found]), tuple([at for _, at in found]))


def _rendered(text: TextModel, job: Render) -> Answer:
    try:
        asked = read_conversation(job.conversation)
        rendered = text.render_chat(asked.messages, add_generation_prompt=job.add_generation_prompt, **asked.variables)
    except UserError as error:
        return Refused(error.message)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a template does, the proxy is told
        return Refused(f"the model's chat template cannot render this conversation ({type(error).__name__})")
    if len(rendered) > job.characters_max:
        return TooManyCharacters(len(rendered))
    if not job.tokens_max:
        return Rendered(rendered, ())
    encoded = _encoded(text, (rendered,), special=False, tokens_max=job.tokens_max)
    return Rendered(rendered, encoded.texts[0]) if isinstance(encoded, Encoded) else encoded


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
