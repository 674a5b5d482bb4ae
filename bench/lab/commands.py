"""The commands of `aegis lab` and their options: switching, memory, decoding, scheduling and simulating."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")]


def bench_switch(json: _Json = None) -> int:
    """Measure activating models of 64 MiB to 1 GiB, beside a plain memcpy of as many bytes.

    \b
    Example:
      aegis lab switch --json bench/results/switch.json
    """
    from bench.lab.switching import run

    run(json_path=json)
    return 0


def bench_memory(
    json: _Json = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS",
            help="Some of pages, handing, swaps, fragmentation, sharing, churn, with commas. [default: all]",
        ),
    ] = None,
) -> int:
    """Measure how memory moves: between instances, to the host and back, under load. Takes minutes.

    Each figure is printed beside its bar. The machine should have nothing else to do.

    \b
    Examples:
      aegis lab memory --json bench/results/memory.json
      aegis lab memory --only handing,swaps
    """
    from bench.lab.memory.suite import run

    run(json_path=json, only=only.split(",") if only else ())
    return 0


def bench_decode(
    json: _Json = None,
    engine: Annotated[
        str, typer.Option(metavar="NAMES", help="transformers, vllm or both, with a comma.")
    ] = "transformers",
    peer: Annotated[str, typer.Option(metavar="NAME", help="transformers or vllm.")] = "transformers",
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Threads of each side.")] = 1,
) -> int:
    """Measure decoding at batch 1, 8 and 32, beside another way to run the same checkpoint.

    That is transformers' own generate; or stock vLLM, and then also how long replacing a model takes.

    \b
    Examples:
      aegis lab decode --json bench/results/decode.json
      aegis lab decode --engine vllm,transformers --peer vllm --json bench/results/vllm.json
    """
    run_decode(json_path=json, engines=engine.split(","), peer=peer, threads=threads)
    return 0


def bench_quantised(
    json: _Json = None,
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Threads of all kinds.")] = 1,
    tiny: Annotated[bool, typer.Option("--tiny", help="A small model, a few tokens, to see that it works.")] = False,
) -> int:
    """Measure a model of half a billion parameters with weights of 16, 8 and 4 bits.

    Decoding at batch 1, 8 and 32, a prompt of 512 tokens, bytes, and a switch. Takes minutes.

    \b
    Example:
      aegis lab quantised --json bench/results/quantised.json
    """
    from bench.lab.decode.quantised import Plan, run

    small = Plan(checkpoint="tiny", context=8, tokens=3, prompt=16, runs=1, switches=1, threads=threads)
    run(json, small if tiny else Plan(threads=threads))
    return 0


def bench_lora(
    json: _Json = None,
    adapters: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Adapters, each in a row.")] = 16,
    rank: Annotated[int, typer.Option(metavar="N", min=1, max=512, help="Rank of each.")] = 8,
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Threads of both sides.")] = 1,
    tiny: Annotated[bool, typer.Option("--tiny", help="A small model, a few tokens, to see that it works.")] = False,
) -> int:
    """Measure steps in which each row has a LoRA adapter of its own, against the same rows of their base alone.

    The figures are printed beside their bars. The machine should have nothing else to do.

    \b
    Example:
      aegis lab lora --json bench/results/lora.json
    """
    from bench.lab.decode.adapters import Plan, run

    small = Plan(checkpoint="tiny", adapters=adapters, rank=rank, context=8, tokens=3, runs=1, threads=threads)
    run(json, small if tiny else Plan(adapters=adapters, rank=rank, threads=threads))
    return 0


def bench_llama_cpp(
    json: _Json = None,
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Threads of each side.")] = 1,
    tiny: Annotated[bool, typer.Option("--tiny", help="A small model, a few tokens, to see that it works.")] = False,
) -> int:
    """Measure decoding beside llama.cpp: one checkpoint as BF16, Q8_0 and Q4_0, batch 1 and 8. Takes minutes.

    Needs llama-cpp-python, whose build takes minutes too, and gguf.

    \b
    Example:
      aegis lab llama-cpp --json llama_cpp.json
    """
    from bench.lab.decode.beside_llama_cpp import Plan, run

    small = Plan(checkpoints=("tiny",), context=8, tokens=3, runs=1, threads=threads)
    run(json, small if tiny else Plan(threads=threads))
    return 0


def run_decode(*, json_path: Path | None, engines: Sequence[str], peer: str, threads: int) -> None:
    """The suite that these options name. Raises UserError."""
    from typing import get_args

    import msgspec

    from aegis.core.errors import UserError
    from aegis.core.model import EngineName

    names = get_args(EngineName)
    if peer not in names:
        raise UserError(f"--peer {peer}: expected {' or '.join(names)}", param="peer")
    if unknown := [name for name in engines if name not in names]:
        raise UserError(f"--engine {unknown[0]}: expected {' or '.join(names)}, or both", param="engine")
    known = msgspec.convert(tuple(engines), tuple[EngineName, ...])
    if peer == "vllm":
        from bench.lab.decode.beside_vllm import Plan
        from bench.lab.decode.beside_vllm import run as beside_vllm

        beside_vllm(json_path, Plan(engines=known, threads=threads))
        return
    if known != ("transformers",):
        raise UserError("beside transformers only --engine transformers is measured; add --peer vllm", param="engine")
    from bench.lab.decode.beside_transformers import Plan as DecodePlan
    from bench.lab.decode.beside_transformers import run as beside_transformers

    beside_transformers(json_path, DecodePlan(threads=threads))


def bench_schedule(json: _Json = None) -> int:
    """Measure the time of decisions: placing requests in markets of two sizes, and planning a decode round.

    Each figure is printed beside its bar. The machine should have nothing else to do.

    \b
    Example:
      aegis lab schedule --json bench/results/schedule.json
    """
    from bench.lab.scheduling.suite import run

    run(json_path=json)
    return 0


def bench_metadata(json: _Json = None) -> int:
    """Measure the cost of recording requests: 64 streams with the embedded Redis and without, in turns.

    The figure is printed beside its bar. The machine should have nothing else to do.

    \b
    Example:
      aegis lab metadata --json bench/results/metadata.json
    """
    from bench.lab.metadata import run

    run(json_path=json)
    return 0


def bench_lanes(
    json: _Json = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=64, help="Tokens of the prompt.")] = 4000,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Rounds, of which medians are taken.")] = 5,
) -> int:
    """Measure a decode beside a long prompt, on a core each, against each alone and turns on both cores.

    Each figure is printed beside its bar. The machine should have nothing else to do; what others took of it is told.

    \b
    Example:
      aegis lab lanes --json bench/results/lanes.json
    """
    from bench.lab.lanes import Plan, run

    run(json_path=json, plan=Plan(prompt_tokens=tokens, rounds=rounds))
    return 0


def bench_prefix(json: _Json = None) -> int:
    """Measure the time that prefix reuse saves a second chat turn: time to first token of both turns, with and without.

    The figures are printed beside their bars. The machine should have nothing else to do.

    \b
    Example:
      aegis lab prefix --json bench/results/prefix.json
    """
    from bench.lab.prefix_reuse import run

    run(json_path=json)
    return 0


def bench_embeddings(json: _Json = None) -> int:
    """Measure texts a second through /v1/embeddings, beside sentence-transformers with the same checkpoint.

    \b
    Example:
      aegis lab embeddings --json embeddings.json
    """
    from bench.lab.embeddings import run

    run(json_path=json)
    return 0


def bench_handover(json: _Json = None) -> int:
    """Measure the speed of KV from node to node over Ray, beside a plain socket copy of the same bytes.

    Starts two Ray nodes on this machine; as root, in network namespaces of their own. Each figure is printed beside
    what it has to be. The machine should have nothing else to do.

    \b
    Example:
      aegis lab handover --json bench/results/handover.json
    """
    from bench.lab.cluster.handover import run

    run(json_path=json)
    return 0


def bench_prompts(json: _Json = None) -> int:
    """Measure how many prompts per second a model takes when 32 come at once: sharing steps, and one by one, in turns.

    The answers of both have to be the same. The figures are printed beside their bars.

    \b
    Example:
      aegis lab prompts --json bench/results/prompts.json
    """
    from bench.lab.prompts import run

    run(json_path=json)
    return 0


def bench_pace(
    json: _Json = None,
    streams: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Streams at a time.")] = 16,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="How long a window of one pace is.")] = 30.0,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Windows of each pace.")] = 2,
    tbt: Annotated[
        float, typer.Option(metavar="S", min=0.001, help="The time between tokens that readers want.")
    ] = 0.1,
    device_memory: Annotated[str, typer.Option(metavar="SIZE", help="Of the one device.")] = "32MiB",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write when tokens came.")] = None,
) -> int:
    """Measure the gaps that readers see where models take turns: as tokens are made, and at a smooth pace.

    Both paces are had from one server, in turn. The figures are printed beside their bars.

    \b
    Examples:
      aegis lab pace
      aegis lab pace --tbt 0.05 --seconds 60
    """
    from aegis.core.model import Slo
    from bench.lab.pace import OPTIONS, run

    options, slo = (*OPTIONS, "--device-memory", device_memory), Slo(tbt_ns=round(tbt * 1e9))
    run(json, streams=streams, window_s=seconds, rounds=rounds, options=options, slo=slo, trace=trace)
    return 0


def bench_start(
    json: _Json = None,
    kills: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Instances that are killed.")] = 11,
    streams: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Streams that run meanwhile.")] = 4,
    prefill: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Instances that prefill.")] = 6,
    decode: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Instances that decode.")] = 10,
) -> int:
    """Measure a server's start: to its first token, its memory, and until an instance that was killed serves again.

    The demo market has to be made before. Each figure is printed beside its bar.

    \b
    Examples:
      aegis demo && aegis lab start
      aegis lab start --kills 30 --json start.json
    """
    from bench.lab.start import run

    run(json, kills=kills, streams=streams, options=("--prefill", str(prefill), "--decode", str(decode)))
    return 0


def bench_token_path(
    json: _Json = None,
    with_ray: Annotated[bool, typer.Option("--with-ray", help="Have the instances in a Ray cluster.")] = False,
    redis: Annotated[str | None, typer.Option(metavar="URL", help="Your Redis, on this machine.")] = None,
    mqtt: Annotated[str | None, typer.Option(metavar="URL", help="Your broker, on this machine.")] = None,
) -> int:
    """Watch with strace to whom a server sends what while it decodes: by the token, and now and then.

    Redis, the broker and Ray are stopped for 5 s meanwhile, also yours. Each figure is printed beside what it has to
    be.

    \b
    Examples:
      aegis lab token-path --json token_path.json
      aegis lab token-path --with-ray --redis redis://127.0.0.1:6379/5 --mqtt mqtt://127.0.0.1
    """
    from bench.lab.token_path import run

    services = [("--redis", redis), ("--mqtt", mqtt)]
    run(json_path=json, ray=with_ray, options=[word for name, url in services if url for word in (name, url)])
    return 0


def bench_structured(json: _Json = None) -> int:
    """Measure the cost of a JSON schema per token, and check 200 answers against schemas drawn at random.

    The figures are printed beside their bars. The machine should have nothing else to do.

    \b
    Example:
      aegis lab structured --json bench/results/structured.json
    """
    from bench.lab.structured_output import run

    run(json_path=json)
    return 0


def bench_simulator(
    json: _Json = None,
    large: Annotated[bool, typer.Option("--large", help="Also 1000 models on 1000 instances, 10⁶ requests")] = False,
) -> int:
    """Measure how many requests per second the simulator simulates, and how that changes with the size of a market.

    \b
    Example:
      aegis lab simulator --json bench/results/simulator.json
    """
    from bench.lab.scheduling.simulator_speed import run

    run(json_path=json, large=large)
    return 0
