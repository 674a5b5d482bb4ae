"""`aegis launch`, and `aegis demo`, which makes the market that `launch` serves by default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aegis.core.errors import UserError


def launch(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="A YAML file with settings, as --config.", show_default=False),
    ] = None,
    prefill: Annotated[str | None, typer.Option(metavar="N", help="Prefill instances. [default: 1]")] = None,
    decode: Annotated[str | None, typer.Option(metavar="N", help="Decode instances. [default: 1]")] = None,
    mixed: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Instances that prefill and decode, in place of both. Where none of the three is given: two, and on "
            "GPUs one for each.",
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLES",
            help="auto: all instances prefill and decode; fixed: as --prefill and --decode say. If not given, as the "
            "policy is made for; least-slack: fixed where --prefill or --decode is given, else auto.",
        ),
    ] = None,
    change_roles: Annotated[
        bool,
        typer.Option(
            "--change-roles",
            help="An instance changes between prefill and decode where one of them is short of instances for long.",
        ),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Scheduler: least-slack, aegaeon, serverlessllm, qlm, muxserve, prism, s-partition, "
            "muxserve++, muxwise, chunked-prefill, dedicated, prefill-first or decode-first. [default: least-slack]",
        ),
    ] = None,
    step_tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help="Tokens of prompts in one step, at most. As many as time allows if not given."),
    ] = None,
    migrate: Annotated[
        bool | None,
        typer.Option(
            "--migrate/--no-migrate",
            help="Models move, with their running requests, from instances that have no time for them. They do with "
            "least-slack and prism if neither is given.",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="SLO", help="When tokens are due, in seconds. [default: ttft=10,tbt=0.1,gap=0.5]"),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="A YAML file with a `models:` map, a checkpoint (its directory, or a GGUF file), a directory of "
            "those, a hub id, or an address: hf://org/name@revision, https://host/folder, s3://bucket/prefix. "
            "May be repeated. [default: the demo market]",
        ),
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Serve the demo market, also beside other models.")] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Read settings from a YAML file.")] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="cpu, cuda, or auto: cuda where there are GPUs. [default: auto]"),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Devices that the instances are dealt to in turn; on cuda, all if not given. [default: 1]"
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Processes of each instance, on a device each, that share every model out. [default: 1]"
        ),
    ] = None,
    lanes: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="An instance may divide its device and run two things side by side: auto, unless it shares a GPU with "
            "others; 2, also then; or off. [default: auto]",
        ),
    ] = None,
    peer_loads: Annotated[
        bool, typer.Option("--peer-loads", help="Weights that a turn waits for also come over other devices' links.")
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device, for weights and KV; on cuda nine tenths of what is free. [default: 1GiB]",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory for cached weights and KV of all instances. [default: 4GiB]"),
    ] = None,
    model_cache: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Part of the host memory for cached weights; half of it if not given."),
    ] = None,
    cache_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Disk for fetched checkpoints and weight images; no bound if not given."),
    ] = None,
    slab: Annotated[str | None, typer.Option(metavar="SIZE", help="Slab of KV blocks. [default: 2MiB]")] = None,
    prefix_reuse: Annotated[
        str | None,
        typer.Option(
            metavar="WHICH", help="on or off: keep KV of requests that end, for prompts that begin alike. [default: on]"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="auto, float32 or bfloat16; auto: as stored. [default: auto]")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="BITS", help="dense, int8, int4, int4-g64 or int4-g32: quantise linear weights. [default: dense]"
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="transformers, or vllm if installed. [default: transformers]")
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="H", help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[str | None, typer.Option(metavar="N", help="Port to listen on. [default: 8000]")] = None,
    proxies: Annotated[
        str | None, typer.Option(metavar="N", help="Processes that serve clients, on one port. [default: 1]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error. [default: info]")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="text, or json: an object a line. [default: text]")
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Also log what clients ask.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Requests need this key. Other users see options: rather AEGIS_API_KEY."),
    ] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="A file that holds it.")] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Changes of models or memory need this key; rather AEGIS_ADMIN_KEY."),
    ] = None,
    admin_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="A file that holds it.")] = None,
    ssl_certfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Clients connect over TLS: the certificate, PEM.")
    ] = None,
    ssl_keyfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="Its key, if that is in a file of its own, PEM.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="Web pages of this origin may ask; *: all. Repeatable.")
    ] = None,
    max_body: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A longer request is answered 413. [default: 4MiB]")
    ] = None,
    refuse_late: Annotated[
        bool, typer.Option("--refuse-late", help="Answer 429 to requests that there is no time for.")
    ] = False,
    pace: Annotated[
        str | None,
        typer.Option(
            metavar="PACE",
            help="Tokens of streams leave as they are made, or smooth: one by one, as a reader wants them. "
            "[default: made]",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        str | None,
        typer.Option(metavar="S", help="Running requests may take so long to finish at the end. [default: 3.0]"),
    ] = None,
    mqtt: Annotated[
        str | None, typer.Option(metavar="URL", help="MQTT broker, in place of an embedded one: mqtt://… or mqtts://…")
    ] = None,
    mqtt_prefix: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="First part of its topics. [default: aegis]")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis that records requests, in place of an embedded one: redis://, rediss:// or unix://; off: none.",
        ),
    ] = None,
    redis_prefix: Annotated[
        str | None, typer.Option(metavar="NAME", help="First part of its keys. [default: aegis]")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Send OpenTelemetry traces there, like http://127.0.0.1:4318.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Place the instances in a Ray cluster: HOST:PORT; auto: the one this machine is in, else as local; "
            "local: a new one.",
        ),
    ] = None,
    debug_memory: Annotated[
        bool, typer.Option("--debug-memory", help="Check the accounting laws after every step (slow).")
    ] = False,
) -> int:
    """Launch the instances and serve until Ctrl-C.

    Each option can also be set as an environment variable (--device-memory: AEGIS_DEVICE_MEMORY) or in a file. Options
    win over variables, variables over the file. The file is watched: models that are edited in it are added, changed
    and removed while the server runs.

    \b
    Examples:
      aegis launch
      aegis launch --prefill 1 --decode 2 --device-memory 2GiB --models ~/checkpoints
      aegis launch --models ./llama --models Qwen/Qwen3-0.6B --port 9000
      aegis launch configs/two_models.yaml --demo
    """
    options = dict(locals())
    from aegis.config.sources import config_file, load

    if file and config:
        raise UserError(f"{file} and --config {config}: give one file")
    options["config"] = options.pop("file") or config
    switches = ("demo", "change_roles", "peer_loads", "debug_memory", "log_prompts", "refuse_late")
    options |= {name: options[name] or None for name in switches}
    configuration, source = load(options), config_file(options)
    from aegis.launcher.launch import main as run

    return run(configuration, (source, lambda: load(options)) if source else None)


def demo(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these models of it.", show_default=False)
    ] = None,
) -> int:
    """Make the demo market and do not serve it.

    It has eight tiny models, each of which knows one passage by heart. They are kept in the cache directory and made
    only where they are missing. `aegis launch` does this by itself, and serves from the first ones on.

    \b
    Examples:
      aegis demo
      aegis demo lighthouse-llama
    """
    from aegis.models.cache import default_cache_dir
    from aegis.models.demo.market import demo_models, make_market

    wanted = names or [source.model for source in demo_models(default_cache_dir())]
    make_market(only=wanted)
    for source in demo_models(default_cache_dir()):
        if source.model in wanted:
            print(source.path)
    return 0
