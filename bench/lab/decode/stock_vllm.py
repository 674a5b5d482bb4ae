"""Stock vLLM in a process of its own: `python -m bench.lab.decode.stock_vllm DIRECTORY DTYPE THREADS MAX_BATCH`.

Its engine, scheduler and model runner as a user has them in a program (`vllm.LLM`), with its defaults: compiled where
it compiles. Reads one `DecodeRequest` per line from standard input and answers each with a line.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import msgspec
from msgspec import Struct


class DecodeRequest(Struct, frozen=True):
    """`batch` sequences of `tokens` tokens each, all after the same prompt."""

    prompt: tuple[int, ...]
    batch: int
    tokens: int


class Answer(Struct, frozen=True):
    """`decoded` tokens were generated in `seconds`, in which all sequences were being decoded."""

    decoded: int
    seconds: float
    tokens: tuple[tuple[int, ...], ...]


def main(directory: str, dtype: str, threads: int, batch_max: int) -> None:
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # its log
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": str(threads)}
    import torch
    from vllm import LLM

    torch.set_num_threads(threads)
    llm = LLM(
        directory,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=batch_max,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
    )
    out.write(b"ready\n")
    for line in sys.stdin.buffer:
        answer = _answer(llm.llm_engine, msgspec.json.decode(line, type=DecodeRequest))
        out.write(msgspec.json.encode(answer) + b"\n")


def _answer(engine: Any, request: DecodeRequest) -> Answer:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=request.tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    for row in range(request.batch):
        engine.add_request(str(row), {"prompt_token_ids": list(request.prompt)}, sampling)
    rows: dict[str, list[int]] = {}
    times_s: list[tuple[float, int]] = []  # after each step in which all rows were decoded: tokens so far
    while engine.has_unfinished_requests():
        finished = False
        for output in engine.step():
            rows[output.request_id] = list(output.outputs[0].token_ids)
            finished = finished or output.finished
        if len(rows) == request.batch and (not finished or all(len(row) == request.tokens for row in rows.values())):
            times_s.append((time.perf_counter(), sum(map(len, rows.values()))))
    (first_s, before), (last_s, after) = times_s[0], times_s[-1]
    return Answer(after - before, last_s - first_s, tuple(tuple(rows[str(row)]) for row in range(request.batch)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
