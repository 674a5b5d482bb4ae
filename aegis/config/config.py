"""The configuration of `aegis launch` as a model, its options and its variables.

`aegis.config.sources.load` fills it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from aegis.config.sizes import format_size
from aegis.config.values import (
    DEFAULT_POLICY,
    PREFIX_PATTERN,
    Count,
    CountOrNone,
    Deadline,
    Dtype,
    KeyName,
    Lanes,
    LogFormat,
    LogLevel,
    ModelName,
    PolicyName,
    Port,
    Positive,
    Priority,
    Proxies,
    RateLimit,
    Seconds,
    Section,
    Share,
    Size,
    Switch,
    Truth,
    of_a_broker,
    of_a_ray_cluster,
    of_web_pages,
    redis_url,
)
from aegis.core.errors import install_advice
from aegis.core.model import EngineName, Pace, WeightsName
from aegis.core.role import Roles


class SloTargets(Section):
    """Deadlines: token i of a request is due `ttft_ms + i * tbt_ms` after its arrival. Prompts are run in pieces, so
    that a stream beside them pauses no longer than `gap_ms`."""

    ttft_ms: Deadline = Field(default=10_000.0, description="Time to the first token, milliseconds")
    tbt_ms: Deadline = Field(default=100.0, description="Time between two tokens, milliseconds")
    gap_ms: Deadline = Field(default=500.0, description="Longest pause of a stream that runs, milliseconds")


class ModelSlo(Section):
    """A model's own deadlines; what is not set is the market's."""

    ttft_ms: Deadline | None = Field(default=None, description="Time to the first token, milliseconds")
    tbt_ms: Deadline | None = Field(default=None, description="Time between two tokens, milliseconds")
    gap_ms: Deadline | None = Field(default=None, description="Longest pause of a stream that runs, milliseconds")


class RateLimits(Section):
    """Limits per minute. An absent value or 0 means no limit; tokens are those of prompts and answers."""

    requests_per_minute: RateLimit = Field(default=None, description="Requests that begin in a minute; 0: no limit")
    tokens_per_minute: RateLimit = Field(
        default=None, description="Tokens of prompts and answers in a minute; 0: no limit"
    )
    concurrent: RateLimit = Field(default=None, description="Requests that are answered at one time; 0: no limit")


class ApiKey(Section):
    """One key of the `api_keys:` map, under the name of its holder."""

    key: SecretStr | None = Field(default=None, min_length=1, description="What is sent as Authorization: Bearer …")
    file: str | None = Field(default=None, description="A file that holds it, relative to the one it stands in")
    limits: RateLimits = Field(default=RateLimits(), description="What its requests together may use")

    @model_validator(mode="after")
    def _one_place(self) -> ApiKey:
        if (self.key is None) == (self.file is None):
            raise ValueError("should have either key or file")
        return self


class ModelEntry(Section):
    """One model of the `models:` map, under the name that clients use."""

    path: str | None = Field(
        default=None, description="Checkpoint directory or GGUF file, relative to the file it stands in"
    )
    hub: str | None = Field(default=None, description="Hub id, in place of a path")
    url: str | None = Field(
        default=None, description="Address in place of a path: hf://, https:// or s3://; docs/registries.md"
    )
    lazy: Truth = Field(default=False, description="Its weights are read, or fetched, at its first request")
    dtype: Dtype | None = Field(default=None, description="Serve it in this type; as `dtype` if not set")
    engine: EngineName | None = Field(default=None, description="What runs it; as `engine` if not set")
    weights: WeightsName | None = Field(default=None, description="Quantise it so; as `weights` if not set")
    base: str | None = Field(default=None, description="Of a LoRA adapter: the model it is run with; docs/adapters.md")
    slo: ModelSlo = Field(default=ModelSlo(), description="Its own deadlines")
    pin: Truth = Field(default=False, description="Keep its weights in the model cache, whatever others need")
    priority: Priority = Field(default=0, description="Added to that of each of its requests; the lower, the earlier")
    limits: RateLimits = Field(default=RateLimits(), description="What all its requests together may use")
    pace: Pace | None = Field(default=None, description="Of its streams; as `server.pace` if not set; requests may say")

    @model_validator(mode="after")
    def _one_place(self) -> ModelEntry:
        if sum(bool(place) for place in (self.path, self.hub, self.url)) != 1:
            raise ValueError("should have one of path, hub and url")
        return self


class Instances(Section):
    """The number of instances of each kind that are launched."""

    prefill: Count = Field(default=1, description="Prefill instances")
    decode: Count = Field(default=1, description="Decode instances")
    mixed: CountOrNone = Field(
        default=0,
        description="Instances that prefill and decode; then there are no others. Where none of the three is set: two, "
        "and on GPUs one for each",
    )
    roles: Roles | None = Field(
        default=None,
        description="auto: all prefill and decode; fixed: as prefill and decode say; left out: docs/policies.md",
    )
    change_roles: Truth = Field(
        default=False,
        description="An instance changes between prefill and decode where one of them is short of instances for long: "
        "docs/policies.md",
    )
    devices: Count = Field(
        default=1,
        description="Devices that the instances are dealt to in turn, which share them; if not set, all GPUs",
    )
    tensor_parallel_size: Count = Field(
        default=1, description="Processes of each instance, on a device each, that share every model out"
    )

    lanes: Lanes = Field(
        default="auto",
        description="An instance may divide its device and run two things side by side: auto, unless it shares a GPU "
        "with others; 2, also then, and with two threads at least on a CPU; off; docs/lanes.md",
    )
    peer_loads: Truth = Field(
        default=False,
        description="Weights that a turn waits for also come over idle links of other devices: docs/memory.md",
    )

    @model_validator(mode="after")
    def _one_kind_of_pool(self) -> Instances:
        if self.mixed and self.counted:
            raise ValueError("mixed instances prefill and decode: leave out either mixed, or prefill and decode")
        if self.mixed and self.roles is Roles.FIXED:
            raise ValueError("mixed instances prefill and decode: give prefill and decode where roles are fixed")
        if self.peer_loads and self.tensor_parallel_size > 1:
            raise ValueError("peer_loads is for instances of one process: leave it out with a tensor_parallel_size")
        if self.change_roles and (self.mixed or self.roles is Roles.AUTO):
            raise ValueError("change_roles is for prefill and decode instances: leave it out where all are mixed")
        return self

    @property
    def counted(self) -> bool:
        """Whether it was said how many prefill, or how many decode."""
        return bool(self.model_fields_set & {"prefill", "decode"})

    @property
    def count(self) -> int:
        """The number of instances of all kinds."""
        return self.mixed or self.prefill + self.decode


class Server(Section):
    """The address of the proxies, and what clients may do."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on")
    port: Port = Field(default=8000, description="Port to listen on")
    proxies: Proxies = Field(default=1, description="Processes that serve clients, on one port; 64 at most")
    log_level: LogLevel = Field(default="info", description="Lowest level that is logged")
    log_format: LogFormat = Field(
        default="text", description="text: a line of names and values; json: an object a line"
    )
    log_prompts: Truth = Field(default=False, description="Also log clients' prompts; no text is logged otherwise")
    api_key: SecretStr | None = Field(
        default=None, min_length=1, description="Requests need this key; api_keys has several, with names and limits"
    )
    api_key_file: str | None = Field(default=None, description="A file that holds it")
    admin_key: SecretStr | None = Field(
        default=None,
        min_length=1,
        description="Its senders may add and remove models and move memory; without one, this machine's users may",
    )
    admin_key_file: str | None = Field(default=None, description="A file that holds it")
    ssl_certfile: str | None = Field(
        default=None, description="Clients connect over TLS: PEM of the certificate, then of those that vouch for it"
    )
    ssl_keyfile: str | None = Field(default=None, description="PEM of its key, if that is in a file of its own")
    status_needs_key: Truth = Field(default=False, description="/health, /ready, /version and /metrics need a key, too")
    cors_origins: tuple[Annotated[str, AfterValidator(of_web_pages)], ...] = Field(
        default=(), description="Web pages of these origins may ask: https://chat.example.com, or * for all"
    )
    body_max: Size = Field(default=4 << 20, description="A longer request is answered 413")
    refuse_late: Truth = Field(
        default=False,
        description="A request that cannot be served in time by the schedulers' estimate is answered 429",
    )
    pace: Pace = Field(
        default="made",
        description="made: tokens of a stream leave as they are made; smooth: no earlier than a reader wants them; "
        "requests may say",
    )
    reader_timeout_s: Positive = Field(
        default=60.0, description="A client that takes nothing of an answer for so long is cut off"
    )
    shutdown_timeout_s: Seconds = Field(
        default=3.0, description="Running requests may take so long to finish when the server ends"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Server:
        for name in ("api_key", "admin_key"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"should have either {name} or {name}_file")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("ssl_keyfile is the key of a certificate: give ssl_certfile, too")
        return self


_PAGE_BYTES = 2 << 20
"""Of a device; weights take whole pages of it, and slabs consist of them."""


class Memory(Section):
    """The amounts of device and host memory that may be used."""

    device: Size = Field(
        default=1 << 30,
        description="Memory of each device, for weights and KV of its instances, which share it as needed; if not set, "
        "nine tenths of what is free on a GPU",
    )
    floor: Size = Field(default=64 << 20, description="Part of its device's memory that an idle instance keeps")
    idle_s: Positive = Field(default=30.0, description="An instance is trimmed to the floor when idle for so long")
    host: Size = Field(default=4 << 30, description="Host memory of the node: cached weights and KV")
    model_cache: Size | None = Field(
        default=None, description="Part of the host memory for weight images; half of it if not set"
    )
    cache_size: Size | None = Field(
        default=None,
        description="Disk for fetched checkpoints and weight images, of which those longest unused leave; not set: no "
        "bound; docs/registries.md",
    )
    slab: Size = Field(default=2 << 20, description="Slab of KV blocks of one shape; a multiple of 2MiB")
    prefix_reuse: Switch = Field(
        default="on", description="Keep the KV of requests that end, for prompts that begin alike: docs/prefix.md"
    )
    debug: Truth = Field(default=False, description="Check the accounting laws after every step")

    @model_validator(mode="after")
    def _slabs_fit(self) -> Memory:
        slab = format_size(self.slab)
        if self.slab % _PAGE_BYTES:
            raise ValueError(f"slab ({slab}) should be a multiple of {format_size(_PAGE_BYTES)}")
        least = _PAGE_BYTES + self.slab
        if self.device < least:
            raise ValueError(
                f"device ({format_size(self.device)}) is too little: the smallest model takes {format_size(least)}, a "
                f"page of weights and a slab of KV ({slab}); raise it"
            )
        if self.host < self.slab:
            raise ValueError(
                f"host ({format_size(self.host)}) is too little: each instance takes two slabs of KV ({slab} each) of "
                "it, beside model_cache; raise it"
            )
        if self.cache_bytes >= self.host:
            raise ValueError(f"model_cache ({format_size(self.cache_bytes)}) leaves nothing of host for KV")
        return self

    @property
    def cache_bytes(self) -> int:
        """Host memory for weight images; the rest of `host` is for KV."""
        return self.host // 2 if self.model_cache is None else self.model_cache


class Telemetry(Section):
    """The history that a server keeps for `/debug/spans`, `/debug/records` and `/debug/decisions`."""

    spans: Count = Field(default=200_000, description="Runs, copies and switches of instances that are remembered")
    records: Count = Field(default=50_000, description="Requests that are remembered after their end")
    decisions: CountOrNone = Field(
        default=10_000, description="Decisions that are remembered, with their reasons (`aegis explain`); 0: none"
    )
    token_times: Truth = Field(default=False, description="Also remember the time of each of their tokens")
    otlp: Annotated[str, Field(pattern=r"^https?://[^/]")] | None = Field(
        default=None,
        description="Collector of OpenTelemetry traces: http://127.0.0.1:4318; needs more packages, "
        f"{install_advice('otel')}",
    )


class Mqtt(Section):
    """The MQTT broker that says how instances are and takes commands; docs/bus.md."""

    url: Annotated[SecretStr, AfterValidator(of_a_broker)] | None = Field(
        default=None, description="MQTT broker: mqtt://user:password@host:1883, mqtts://…; its own if not set"
    )
    prefix: Annotated[str, Field(pattern=f"^{PREFIX_PATTERN}$")] = Field(
        default="aegis", description="First part of all topics; each cluster on a broker has its own"
    )
    ca_file: str | None = Field(default=None, description="Certificates to trust a broker by, in place of the system's")


class RedisSettings(Section):
    """The store of requests: a retry of a recorded request gets the answer of the first one (docs/distribution.md)."""

    url: Annotated[SecretStr, AfterValidator(redis_url)] | None = Field(
        default=None,
        description="redis://, rediss:// (TLS) or unix:// of a server of yours; one is embedded if not set; off: none",
    )
    prefix: str = Field(
        default="aegis",
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="First part of all keys; each cluster on a server has its own",
    )
    wait_s: Positive = Field(default=2.0, description="New requests wait so long for it and are then answered 503")
    ttl_s: Positive = Field(default=600.0, description="A record is kept for so long after the last change")
    responses_ttl_s: Seconds = Field(
        default=3600.0,
        ge=0,
        description="A response of /v1/responses is kept for so long; 0: none is, whatever it asks",
    )

    @model_validator(mode="after")
    def _off_has_no_settings(self) -> RedisSettings:
        if self.off and (unused := [name for name in ("prefix", "wait_s", "ttl_s") if name in self.model_fields_set]):
            raise ValueError(f"nothing is recorded where redis is off: leave out {unused[0]}, or redis")
        return self

    @property
    def off(self) -> bool:
        """Nothing is recorded, and a retry is a new request."""
        return self.url is not None and self.url.get_secret_value() == "off"


class RayCluster(Section):
    """Instances on one or several machines of a Ray cluster (docs/ray.md)."""

    address: Annotated[str, AfterValidator(of_a_ray_cluster)] | None = Field(
        default=None,
        description="auto: the cluster that this machine is part of, else a new one; local: a new one; or HOST:PORT; "
        f"needs more packages, {install_advice('ray')}",
    )
    cpus: Positive = Field(default=1.0, description="CPUs that Ray reserves for each process of an instance on CPUs")


class PrefillScheduling(Section):
    """Grouped first come, first served (Aegaeon, Algorithm 1)."""

    max_group_size: Count = Field(default=8, description="Requests that may ever join one group of a model")


class DecodeScheduling(Section):
    """Weighted round robin (Aegaeon, Algorithm 2, equations 2 and 3)."""

    q_max_s: Positive = Field(default=4.0, description="Longest turn of a batch, seconds")
    switching_share: Share = Field(
        default=0.05, description="Turns end earlier where switching would take less of a round than this; 0: never"
    )


class Scheduling(Section):
    """Constants of the schedulers."""

    policy: PolicyName = Field(default=DEFAULT_POLICY, description="Scheduler: docs/policies.md")
    step_tokens: Count | None = Field(
        default=None,
        description="Tokens of prompts in one step of an instance, at most; as many as time allows if not set",
    )
    migrates: Truth | None = Field(
        default=None,
        description="Models move, with their running requests, from instances that have no time for them to others: "
        "docs/moves.md. Not set: with least-slack and prism",
    )
    model_idle_s: Positive | None = Field(
        default=None,
        description="Weights of a model that had no request for so long leave all devices; not set: when their room is "
        "needed",
    )
    prefill: PrefillScheduling = PrefillScheduling()
    decode: DecodeScheduling = DecodeScheduling()


class Config(Section):
    """Everything that `aegis launch` is told."""

    models: dict[ModelName, ModelEntry] = Field(default={}, description="Models by the name clients use")
    api_keys: dict[KeyName, ApiKey] = Field(default={}, description="Keys by the name of who has them")
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="YAML of models, directories of checkpoints, hub ids, addresses"
    )
    demo: Truth = Field(default=False, description="Serve the demo market, also beside other models")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Kind of device: cpu or cuda; auto: cuda where there are GPUs"
    )
    dtype: Dtype = Field(default="auto", description="Type of weights and KV; auto: the checkpoint's, on cuda bfloat16")
    weights: WeightsName = Field(default="dense", description="Bits of linear weights: docs/quantised.md")
    engine: EngineName = Field(default="transformers", description="Engine that runs the models: docs/vllm.md")
    instances: Instances = Instances()
    server: Server = Server()
    memory: Memory = Memory()
    scheduling: Scheduling = Scheduling()
    slo: SloTargets = Field(default=SloTargets(), description="When tokens are due; as an option in seconds")
    telemetry: Telemetry = Telemetry()
    mqtt: Mqtt = Mqtt()
    redis: RedisSettings = RedisSettings()
    ray: RayCluster = RayCluster()

    @model_validator(mode="after")
    def _prompts_can_be_cut(self) -> Config:
        policy = self.scheduling.policy
        if self.scheduling.step_tokens is None or policy == "least-slack":
            return self
        if policy not in ("muxwise", "chunked-prefill"):
            raise ValueError(f"policy {policy!r} runs prompts as a whole, however long: leave out step_tokens")
        if self.instances.roles is Roles.FIXED:
            raise ValueError(f"prefill instances of {policy!r} run prompts as a whole: leave out step_tokens, or roles")
        return self

    @model_validator(mode="after")
    def _vllm_is_alone(self) -> Config:
        if self.engine == "vllm" and self.instances.tensor_parallel_size > 1:
            raise ValueError("the vllm engine cannot share models out: leave out tensor_parallel_size, or engine")
        return self

    @model_validator(mode="after")
    def _devices_are_of_one_machine(self) -> Config:
        if self.ray.address and "devices" in self.instances.model_fields_set:
            raise ValueError("in a Ray cluster each instance has a device of its own: leave out devices, or ray")
        if self.ray.address and self.instances.peer_loads:
            raise ValueError("peer_loads is for devices of one machine: leave out peer_loads, or ray")
        return self

    @model_validator(mode="after")
    def _devices_have_instances(self) -> Config:
        """Those that are named: on GPUs that are not, instances are on as many as they take."""
        named, most = self.instances.devices, self.instances.count * self.instances.tensor_parallel_size
        if "devices" in self.instances.model_fields_set and named > most:
            raise ValueError(
                f"{named - most} of {named} devices would have no instance; give {most} devices at most, or more "
                "instances"
            )
        return self

    @property
    def device_count(self) -> int:
        """Devices, or groups of them where each instance has one for each of its ranks; no more than instances, and in
        a Ray cluster as many."""
        if self.ray.address:
            return self.instances.count
        groups = max(1, self.instances.devices // self.instances.tensor_parallel_size)
        return min(groups, self.instances.count)

    @property
    def serves_demo(self) -> bool:
        """The demo market is what is served when nothing else is named."""
        return self.demo or not (self.models or self.sources)


Key = tuple[str, ...]

MAPS = ("models", "api_keys")
"""Keys whose own keys are names that users choose."""

LISTS: tuple[Key, ...] = (("sources",), ("server", "cors_origins"))
"""Keys with several values; a variable has them separated by commas."""

OPTIONS: dict[str, Key] = {
    "prefill": ("instances", "prefill"),
    "decode": ("instances", "decode"),
    "mixed": ("instances", "mixed"),
    "roles": ("instances", "roles"),
    "change_roles": ("instances", "change_roles"),
    "devices": ("instances", "devices"),
    "tensor_parallel_size": ("instances", "tensor_parallel_size"),
    "lanes": ("instances", "lanes"),
    "peer_loads": ("instances", "peer_loads"),
    "models": ("sources",),
    "demo": ("demo",),
    "device": ("device",),
    "device_memory": ("memory", "device"),
    "host_memory": ("memory", "host"),
    "model_cache": ("memory", "model_cache"),
    "cache_size": ("memory", "cache_size"),
    "slab": ("memory", "slab"),
    "prefix_reuse": ("memory", "prefix_reuse"),
    "dtype": ("dtype",),
    "weights": ("weights",),
    "engine": ("engine",),
    "host": ("server", "host"),
    "port": ("server", "port"),
    "proxies": ("server", "proxies"),
    "log_level": ("server", "log_level"),
    "log_format": ("server", "log_format"),
    "log_prompts": ("server", "log_prompts"),
    "api_key": ("server", "api_key"),
    "api_key_file": ("server", "api_key_file"),
    "admin_key": ("server", "admin_key"),
    "admin_key_file": ("server", "admin_key_file"),
    "ssl_certfile": ("server", "ssl_certfile"),
    "ssl_keyfile": ("server", "ssl_keyfile"),
    "cors_origin": ("server", "cors_origins"),
    "max_body": ("server", "body_max"),
    "refuse_late": ("server", "refuse_late"),
    "pace": ("server", "pace"),
    "shutdown_timeout": ("server", "shutdown_timeout_s"),
    "policy": ("scheduling", "policy"),
    "step_tokens": ("scheduling", "step_tokens"),
    "migrate": ("scheduling", "migrates"),
    "slo": ("slo",),
    "mqtt": ("mqtt", "url"),
    "mqtt_prefix": ("mqtt", "prefix"),
    "redis": ("redis", "url"),
    "redis_prefix": ("redis", "prefix"),
    "otlp": ("telemetry", "otlp"),
    "ray": ("ray", "address"),
    "debug_memory": ("memory", "debug"),
}
"""Command-line option → key. `--device-memory` is `AEGIS_DEVICE_MEMORY` in the environment; keys without an option
are set by their path: `AEGIS_SCHEDULING_DECODE_Q_MAX_S`. `--slo` sets keys of a section."""


def leaves(section: type[Section] = Config, path: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key that holds a value, with its field, in order of declaration; maps are not among them."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from leaves(kind, (*path, name))
        elif name not in MAPS:
            yield (*path, name), field


def variable(path: Key) -> str:
    """The environment variable that sets a key."""
    names = {path: name for name, path in OPTIONS.items()}
    return "AEGIS_" + names.get(path, "_".join(path)).upper()


def config_schema() -> dict[str, Any]:
    """The JSON Schema of the configuration, for editors and for `configs/schema.json`."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "aegis configuration"}
    return head | Config.model_json_schema() | head
