"""The command line. Nothing heavy is imported before a command runs: `aegis --help` answers at once.

Exit codes: 0; 1 where a running server refuses; 2 for everything a user can mend, told in one line; 130 at Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from aegis import __version__
from aegis.client import AdminClient, Refused
from aegis.core.errors import UserError
from aegis.explain import explain
from aegis.sizes import format_size, parse_size
from bench.calibrate_command import calibrate
from bench.compare_command import compare as bench_compare
from bench.fidelity_command import fidelity as bench_fidelity
from bench.report.command import report as bench_report
from bench.report.command import timeline as bench_timeline
from bench.rivals_command import rivals as bench_rivals
from bench.serve_command import serve as bench_serve
from bench.simulate.command import simulate

_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False}

app = typer.Typer(name="aegis", **_PLAIN)
models = typer.Typer(help="List, add and remove the models of a running server.", **_PLAIN)
memory = typer.Typer(**_PLAIN)
bench = typer.Typer(help="Measure this machine, or any server.", **_PLAIN)
app.add_typer(models, name="models")
app.add_typer(memory, name="memory")
app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def aegis(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> int:
    """Serve a market of language models from a few devices, switching between them at the token level.

    \b
    Examples:
      aegis launch                                  the demo market on http://127.0.0.1:8000
      aegis launch --models ~/checkpoints           your own models
      aegis models list                             what a running server serves
      aegis memory                                  where its memory is
      aegis explain                                 why it did what it did
      aegis COMMAND --help                          options and examples of a command
    """
    if version:
        print(f"aegis {__version__}")
        raise typer.Exit
    return _help_unless_command(context)


@models.callback(invoke_without_command=True)
@bench.callback(invoke_without_command=True)
def _help_unless_command(context: typer.Context) -> int:
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


@app.command()
def launch(
    prefill: Annotated[str | None, typer.Option(metavar="N", help="Prefill instances. [default: 1]")] = None,
    decode: Annotated[str | None, typer.Option(metavar="N", help="Decode instances. [default: 1]")] = None,
    mixed: Annotated[
        str | None, typer.Option(metavar="N", help="Instances that prefill and decode, in place of both.")
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLES",
            help="auto: all instances prefill and decode; fixed: as --prefill and --decode say. If not given, as the "
            "policy is made for; least-slack: fixed where --prefill or --decode is given, else auto.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Scheduler: least-slack, aegaeon, serverlessllm, qlm, muxserve, dedicated, prefill-first or "
            "decode-first. [default: least-slack]",
        ),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="SLO", help="When tokens are due, in seconds. [default: ttft=10,tbt=0.1]")
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="A YAML file with a `models:` map, a checkpoint directory, a directory of those, or a hub id. "
            "May be repeated. [default: the demo market]",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the demo market, also beside other models.")] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Read settings from a YAML file.")] = None,
    device: Annotated[str | None, typer.Option(metavar="KIND", help="cpu or cuda. [default: cpu]")] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N", help="Devices that the instances are dealt to in turn. [default: 1]")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of each device, for weights and KV of its instances. [default: 1GiB]"),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for cached weights and KV of all instances. [default: 4GiB]"),
    ] = None,
    model_cache: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Part of the host memory for cached weights; half of it if not given."),
    ] = None,
    slab: Annotated[str | None, typer.Option(metavar="SIZE", help="Slab of KV blocks. [default: 2MiB]")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="auto, float32 or bfloat16; auto: as stored. [default: auto]")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="Port to listen on. [default: 8000]")] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error. [default: info]")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis to record requests in: redis://, rediss:// or unix://; off: none. Otherwise one is embedded.",
        ),
    ] = None,
    redis_prefix: Annotated[
        str | None, typer.Option(metavar="NAME", help="What its keys begin with. [default: aegis]")
    ] = None,
    debug_memory: Annotated[
        bool, typer.Option("--debug-memory", help="Check the accounting laws after every step (slow).")
    ] = False,
) -> int:
    """Launch the instances and serve until Ctrl-C.

    Each option can also be set as an environment variable (--device-memory: AEGIS_DEVICE_MEMORY) or in the file given
    to --config. Options win over variables, variables over the file.

    \b
    Examples:
      aegis launch
      aegis launch --prefill 1 --decode 2 --device-memory 2GiB --models ~/checkpoints
      aegis launch --models ./llama --models Qwen/Qwen3-0.6B --port 9000
      aegis launch --config configs/two_models.yaml --demo
    """
    options = dict(locals())
    from aegis.config_sources import load

    configuration = load(options | {"demo": demo or None, "debug_memory": debug_memory or None})
    from aegis.runtime.launch import main as run

    return run(configuration)


@app.command()
def demo() -> int:
    """Make the demo market and do not serve it.

    It has eight tiny models, each of which knows one passage by heart. They are kept in the cache directory and made
    only where they are missing. `aegis launch` does this by itself.

    \b
    Example:
      aegis demo
    """
    from aegis.models.cache import default_cache_dir
    from aegis.models.demo import demo_models, make_market

    make_market()
    for source in demo_models(default_cache_dir()):
        print(source.path)
    return 0


_Url = Annotated[str, typer.Option("--url", metavar="URL", help="Address of the server.")]
_URL = "http://127.0.0.1:8000"


@models.command("list")
def list_models(url: _Url = _URL) -> int:
    """List the models of a running server.

    \b
    Example:
      aegis models list --url http://127.0.0.1:9000
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("model", "state", "weights", "checkpoint"):
        table.add_column(title, overflow="fold")
    for model in AdminClient(url).models():
        state = ": ".join(str(model[key]) for key in ("state", "detail") if model.get(key))
        table.add_row(str(model.get("id")), state or "-", *(str(model.get(key) or "-") for key in ("weights", "root")))
    width = None if sys.stdout.isatty() else 10_000  # one line for each model where a program reads
    Console(markup=False, highlight=False, width=width).print(table)
    return 0


@models.command("add")
def add_model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint directory or hub id.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name for clients. [default: the source's]")] = None,
    url: _Url = _URL,
) -> int:
    """Add a model to a running server; it is registered beside serving.

    \b
    Examples:
      aegis models add ~/checkpoints/llama
      aegis models add Qwen/Qwen3-0.6B --name qwen
    """
    local = Path(source).expanduser()
    answer = AdminClient(url).add(str(local.resolve()) if local.is_dir() else source, name)
    print(f"{answer.get('id', name or source)} is {answer.get('state', 'added')}")
    return 0


@models.command("remove")
def remove_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name, as `aegis models list` shows it.")],
    url: _Url = _URL,
) -> int:
    """Remove a model from a running server.

    \b
    Example:
      aegis models remove qwen
    """
    AdminClient(url).remove(model)
    print(f"{model} is removed")
    return 0


@memory.callback(invoke_without_command=True)
def show_memory(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="As JSON, sizes in bytes.")] = False,
    url: _Url = _URL,
) -> int:
    """Show the memory of a running server, or move it.

    Per device: what is free, what each instance holds of it, KV slabs by shape and how much of them is waste; of the
    node: KV in host memory and the model cache. docs/memory.md explains it.

    \b
    Examples:
      aegis memory
      aegis memory --json --url http://127.0.0.1:9000
      aegis memory limit mixed-0 256MiB
    """
    if context.invoked_subcommand is not None:
        context.default_map = {command: {"url": url} for command in ("limit", "trim")}
        return 0
    import msgspec
    from rich.console import Console

    from aegis.memory_table import tables

    report = AdminClient(url).memory()
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0
    width = None if sys.stdout.isatty() else 10_000
    Console(markup=False, highlight=False, width=width).print(*tables(report), sep="\n")
    return 0


_Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its name, as `aegis memory` shows it.")]
_Timeout = Annotated[float, typer.Option("--timeout", metavar="S", help="Give up after so many seconds.")]


@memory.command("limit")
def limit_memory(
    instance: _Instance,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="What it may hold of its device's memory.")],
    timeout: _Timeout = 30.0,
    url: _Url = _URL,
) -> int:
    """Limit what an instance may hold, while it serves; done when it holds no more than that.

    Where it cannot be done in time nothing is changed. The size of the device or more lifts the limit.

    \b
    Examples:
      aegis memory limit mixed-0 256MiB
      aegis memory limit mixed-0 4GiB --timeout 60
    """
    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise UserError(f"SIZE: {error}") from None
    given_bytes = AdminClient(url).limit_memory(instance, nbytes, timeout_s=timeout)
    print(f"{instance} may hold {format_size(nbytes)}; it gave back {format_size(given_bytes)}")
    return 0


@memory.command("trim")
def trim_memory(instance: _Instance, timeout: _Timeout = 30.0, url: _Url = _URL) -> int:
    """Take back what an instance does not need now, down to the floor; done when it has given it.

    \b
    Example:
      aegis memory trim mixed-1
    """
    print(f"{instance} gave back {format_size(AdminClient(url).trim_memory(instance, timeout_s=timeout))}")
    return 0


_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")]


@bench.command("switch")
def bench_switch(json: _Json = None) -> int:
    """Measure activating models of 64 MiB to 1 GiB, beside a plain memcpy of as many bytes.

    \b
    Example:
      aegis bench switch --json bench/results/switch.json
    """
    from bench.switch import run

    run(json_path=json)
    return 0


@bench.command("memory")
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

    Each figure is printed beside what it has to be. The machine should have nothing else to do.

    \b
    Examples:
      aegis bench memory --json bench/results/memory.json
      aegis bench memory --only handing,swaps
    """
    from bench.memory import run

    run(json_path=json, only=only.split(",") if only else ())
    return 0


@bench.command("decode")
def bench_decode(json: _Json = None) -> int:
    """Measure decoding at batch 1, 8 and 32, beside transformers' own generate on the same checkpoint.

    \b
    Example:
      aegis bench decode --json bench/results/decode.json
    """
    from bench.decode import run

    run(json_path=json)
    return 0


app.command()(explain)
app.command()(simulate)


@bench.command("schedule")
def bench_schedule(json: _Json = None) -> int:
    """Measure what decisions take: placing requests in markets of two sizes, and planning a decode round.

    Each figure is printed beside what it has to be. The machine should have nothing else to do.

    \b
    Example:
      aegis bench schedule --json bench/results/schedule.json
    """
    from bench.schedule import run

    run(json_path=json)
    return 0


@bench.command("metadata")
def bench_metadata(json: _Json = None) -> int:
    """Measure what recording requests costs: 64 streams with the embedded Redis and without, in turns.

    The figure is printed beside what it has to be. The machine should have nothing else to do.

    \b
    Example:
      aegis bench metadata --json bench/results/metadata.json
    """
    from bench.metadata import run

    run(json_path=json)
    return 0


@bench.command("simulator")
def bench_simulator(
    json: _Json = None,
    large: Annotated[bool, typer.Option("--large", help="Also 1000 models on 1000 instances, 10⁶ requests")] = False,
) -> int:
    """Measure how many requests the simulator gets through per second, and how that changes with the size of a market.

    \b
    Example:
      aegis bench simulator --json bench/results/simulator.json
    """
    from bench.simulator import run

    run(json_path=json, large=large)
    return 0


bench.command("serve")(bench_serve)
bench.command("compare")(bench_compare)
bench.command("rivals")(bench_rivals)
bench.command("fidelity")(bench_fidelity)
app.command()(calibrate)
bench.command("report")(bench_report)
bench.command("timeline")(bench_timeline)


def main() -> None:
    """The `aegis` command."""
    try:
        sys.exit(app(prog_name="aegis", standalone_mode=False))
    except UserError as error:
        message, code = error.message, 1 if isinstance(error, Refused) else 2
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "aegis"
        message, code = f"{error.format_message().rstrip('.')}; see {command} --help", 2
    print("aegis:", " ".join(message.split()), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
