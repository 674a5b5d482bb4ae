"""The configuration: what wins, what is refused and in which words."""

import re
from pathlib import Path
from typing import get_args

import pytest

from aegis.config.config import OPTIONS, Config, leaves, variable
from aegis.config.sources import load, look_at
from aegis.config.values import PolicyName
from aegis.core.errors import UserError
from aegis.policies import Site, recipe

ROOT = Path(__file__).parents[3]
TEXTS = (
    ("sources",),
    ("server", "host"),
    ("server", "admin_key"),
    ("server", "admin_key_file"),
    ("server", "api_key"),
    ("server", "ssl_certfile"),
    ("server", "ssl_keyfile"),
    ("server", "api_key_file"),
    ("mqtt", "prefix"),
    ("mqtt", "ca_file"),
    ("redis", "prefix"),
)  # any text is one for the configuration


def written(directory: Path, text: str) -> dict[str, Path]:
    file = directory / "aegis.yaml"
    file.write_text(text, encoding="utf-8")
    return {"config": file}


def refusal(options: dict[str, object], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load(options, environ or {})
    assert "\n" not in caught.value.message
    return caught.value.message


def test_nothing_given_serves_the_demo_market_with_one_instance_of_each_kind() -> None:
    config = load({}, {})
    assert config.serves_demo
    assert (config.instances.prefill, config.instances.decode, config.instances.counted) == (1, 1, False)
    assert (config.memory.device, config.memory.host) == (2**30, 4 * 2**30)
    assert (config.server.host, config.server.port, config.device, config.dtype) == ("127.0.0.1", 8000, "auto", "auto")
    assert (config.slo.ttft_ms, config.slo.tbt_ms) == (10_000, 100)


def test_options_win_over_variables_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "server: {port: 1, host: a, log_level: debug}\nscheduling: {decode: {q_max_s: 1}}")
    environ = {"AEGIS_PORT": "2", "AEGIS_HOST": "b", "AEGIS_SCHEDULING_DECODE_Q_MAX_S": "2.5"}
    config = load(file | {"port": "3"}, environ)
    assert (config.server.port, config.server.host, config.server.log_level) == (3, "b", "debug")
    assert config.scheduling.decode.q_max_s == 2.5
    assert config.scheduling.prefill.max_group_size == 8


def test_deadlines_are_told_in_seconds_and_what_is_not_named_stays(tmp_path: Path) -> None:
    file = written(tmp_path, "slo: {ttft_ms: 1, tbt_ms: 50}")
    config = load(file | {"slo": "ttft=2"}, {"AEGIS_SLO": "ttft=3", "AEGIS_SLO_TBT_MS": "30"})
    assert (config.slo.ttft_ms, config.slo.tbt_ms) == (2_000, 30)


@pytest.mark.parametrize("text", ["ttft=soon", "tbt=0", "2"])
def test_deadlines_that_are_none_are_refused_by_the_name_of_the_option(text: str) -> None:
    assert refusal({"slo": text}).startswith("--slo: ")
    assert refusal({}, {"AEGIS_SLO": text}).startswith("AEGIS_SLO: ")


def test_the_file_itself_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = written(tmp_path, "device: cuda")
    assert load({}, {"AEGIS_CONFIG": str(file["config"])}).device == "cuda"


def test_every_key_has_a_variable_of_its_own() -> None:
    variables = [variable(path) for path, _ in leaves()]
    assert len(set(variables)) == len(variables) >= len(OPTIONS)


@pytest.mark.parametrize("path", [path for path, _ in leaves() if path not in TEXTS], ids=".".join)
def test_a_bad_variable_is_named(path: tuple[str, ...]) -> None:
    assert refusal({}, {variable(path): "bad"}).startswith(f"{variable(path)}: ")


@pytest.mark.parametrize("option", [name for name, path in OPTIONS.items() if path not in TEXTS])
def test_a_bad_option_is_named(option: str) -> None:
    assert refusal({option: "bad"}).startswith(f"--{option.replace('_', '-')}: ")


@pytest.mark.parametrize(
    "origin",
    ["foo", "https://x.y/z", "https://x.y/", "x.y:80", "HTTPS://x.y", "https://X.y", "https://x.y:443", "", " *"],
)
def test_what_no_browser_sends_as_its_origin_is_refused(origin: str, tmp_path: Path) -> None:
    told = f"{origin!r} is no origin that a browser sends; write it like https://chat.example.com"
    assert refusal({"cors_origin": ["*", origin]}).startswith(f"--cors-origin: {told}")
    file = written(tmp_path, f"server: {{cors_origins: ['{origin}']}}")
    assert f"line 1: server.cors_origins.0: {told}" in refusal(file)


def test_origins_of_web_pages() -> None:
    origins = (
        "*",
        "https://chat.example.com",
        "http://localhost:3000",
        "http://[::1]:8080",
        "tauri://localhost",
        "null",
    )
    assert load({}, {"AEGIS_CORS_ORIGIN": ", ".join(origins[:-2])}).server.cors_origins == origins[:-2]
    assert load({"cors_origin": list(origins[:3])}, {}).server.cors_origins == origins[:3]
    assert load({"cors_origin": list(origins[4:])}, {}).server.cors_origins == origins[4:]


@pytest.mark.parametrize("otlp", ["foo", "127.0.0.1:4318", "grpc://127.0.0.1:4317", "http:///v1"])
def test_a_collector_of_traces_has_an_address(otlp: str) -> None:
    assert refusal({"otlp": otlp}) == (
        "--otlp: should be the address of a collector of traces, like http://127.0.0.1:4318"
    )


@pytest.mark.parametrize(
    ("option", "empty"), [("host", ""), ("api_key", ""), ("admin_key", ""), ("models", [""]), ("models", ["a", ""])]
)
def test_what_is_empty_is_said_to_be(option: str, empty: object) -> None:
    assert refusal({option: empty}) == f"--{option.replace('_', '-')}: is empty"


@pytest.mark.parametrize("prefix", ["", "a/+", "#", "/a", "a b"])
def test_a_prefix_of_topics_has_no_wildcards(prefix: str) -> None:
    assert refusal({"mqtt_prefix": prefix}) == (
        "--mqtt-prefix: should be of letters, digits and . _ -, with / between parts"
    )


def test_a_bad_address_of_a_broker_is_told_without_its_password() -> None:
    assert refusal({"mqtt": "http://me:s3cret@broker"}).startswith("--mqtt: should begin with mqtt://")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sever: {port: 1}", "sever: unknown key; did you mean server?"),
        ("server: {prot: 1}", "server.prot: unknown key; did you mean port?"),
        ("models: {a: {path: /x, slo: {ttft: 1}}}", "models.a.slo.ttft: unknown key; did you mean ttft_ms?"),
        ("models: {a: {}}", "models.a: should have one of path, hub and url"),
        ("models: {a: {path: /x, hub: y}}", "models.a: should have one of path, hub and url"),
        ("models: {'a b': {path: /x}}", "models.a b: is no model name"),
        ("models: {é: {path: /x}}", "models.é: is no model name"),
        ("models: [a]", "models: should be a mapping"),
        ("server: 8000", "server: should be a mapping"),
        ("server: {cors_origins: foo}", "server.cors_origins: should be a list, not 'foo'"),
        ("server: {host: ''}", "server.host: is empty"),
        ("api_keys: {me: {key: ''}}", "api_keys.me.key: is empty"),
        ("sources: ['']", "sources.0: is empty"),
        (
            "models: {a: {path: /x, limits: {concurrent: -1}}}",
            "limits.concurrent: should be greater than or equal to 0",
        ),
        ("server: {port: true}", "server.port: should be a number, not true"),
        ("server: {port: 1.5}", "server.port: should be a valid integer"),
        ("server: {port: 65536}", "server.port: should be less than or equal to 65535, not 65536"),
        ("instances: {decode: 0}", "instances.decode: should be greater than or equal to 1, not 0"),
        ("instances: {mixed: 2, decode: 1}", "instances: mixed instances prefill and decode: leave out either"),
        ("instances: {mixed: 2, roles: fixed}", "instances: mixed instances prefill and decode: give prefill and"),
        ("instances: {roles: some}", "instances.roles: should be 'auto' or 'fixed', not 'some'"),
        ("scheduling: {decode: {q_max_s: .inf}}", "scheduling.decode.q_max_s: should be a finite number"),
        ("slo: {tbt_ms: -1}", "slo.tbt_ms: should be greater than or equal to 0.001, not -1"),
        ("slo: {ttft_ms: 1.0e+300}", "slo.ttft_ms: should be less than or equal to 86400000, not 1e+300"),
        ("memory: {device: 5 parsecs}", "memory.device: '5 parsecs' is no size; write it like 512MiB"),
        ("memory: {device: 1MiB}", "memory: device (1MiB) is too little: the smallest model takes 4MiB"),
        ("memory: {slab: 3MiB}", "memory: slab (3MiB) should be a multiple of 2MiB"),
        ("memory: {model_cache: 4GiB}", "memory: model_cache (4GiB) leaves nothing of host for KV"),
        ("models: {a: {path: /x, pin: 3}}", "models.a.pin: should be a valid boolean"),
        ("dtype: int8", "dtype: should be 'auto', 'float32' or 'bfloat16', not 'int8'"),
        ("demo: maybe", "demo: should be a valid boolean"),
        ("a: 1\na: 2", " line 2: not readable as YAML: key 'a' is given twice"),
        ("a: 1\n? [b]\n: 2", " line 2: not readable as YAML: a key should be a word"),
        ("a: [", " line 1: not readable as YAML"),
        ("- a", "should hold keys and values"),
        ("\0", "not readable as YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_name_and_the_key(tmp_path: Path, text: str, complaint: str) -> None:
    file = written(tmp_path, text)
    message = refusal(file)
    assert message.startswith(f"{file['config']}:")
    assert complaint in message


def test_a_section_that_is_none_is_told_also_where_an_option_sets_a_part_of_it(tmp_path: Path) -> None:
    file = written(tmp_path, "server: 8000")
    assert refusal(file | {"port": "1"}) == f"{file['config']}: line 1: server: should be a mapping"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert (
        refusal({"config": tmp_path / "none.yaml"})
        == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"
    )
    assert refusal({"config": tmp_path}) == f"{tmp_path}: cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("models:\n  a: {path: ~nobody.at.all/x}\n", "models.a.path"),
        ("server:\n  admin_key_file: ~nobody.at.all/x\n", "server.admin_key_file"),
        ("sources:\n- ~nobody.at.all/x\n", "sources"),
    ],
)
def test_a_path_of_no_user_is_told_with_its_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=rf"c\.yaml: line \d: {re.escape(key)}: ~nobody\.at\.all/x: [^\n]+$"):
        load({"config": file}, {})


def test_the_first_of_several_mistakes_is_told_and_the_others_counted(tmp_path: Path) -> None:
    assert refusal(written(tmp_path, "demo: x\ndevice: y\ndtype: z")).endswith("(and 2 more)")


def test_options_that_do_not_fit_each_other_are_both_named() -> None:
    message = refusal({"device_memory": "2MiB", "slab": "4MiB"})
    assert message == (
        "--device-memory, --slab: device (2MiB) is too little: the smallest model takes 6MiB, a page of weights and a "
        "slab of KV (4MiB); raise it"
    )


@pytest.mark.parametrize(
    ("text", "given", "told"),
    [
        ("server: {port: 80}", {"device_memory": "1MiB"}, "--device-memory: device (1MiB) is too little"),
        ("server: {port: 80}", {"mixed": "2", "prefill": "1"}, "--prefill, --mixed: mixed instances "),
        ("server: {port: 80}", {"policy": "aegaeon", "step_tokens": "64"}, "--policy, --step-tokens: policy "),
        ("scheduling: {policy: aegaeon}", {"step_tokens": "64"}, "FILE: line 1: scheduling.policy, --step-tokens: "),
        ("instances: {prefill: 1}", {"mixed": "2"}, "FILE: line 1: instances, --mixed: mixed instances "),
        ("memory: {device: 1MiB}", {"device_memory": "2MiB"}, "--device-memory: device (2MiB) is too little"),
        ("memory: {device: 1MiB}", {"port": "1"}, "FILE: line 1: memory: device (1MiB) is too little"),
        ("a:\nscheduling: {step_tokens: 5, policy: qlm}", {}, "FILE: line 2: scheduling.step_tokens: policy 'qlm' "),
    ],
)
def test_a_file_is_named_only_where_it_has_to_do_with_it(
    text: str, given: dict[str, str], told: str, tmp_path: Path
) -> None:
    options = written(tmp_path, text)
    assert refusal(options | given).startswith(told.replace("FILE", str(options["config"])))


def test_options_that_have_nothing_to_do_with_it_are_not_named() -> None:
    given = {"peer_loads": False, "port": "1", "migrate": True}
    assert refusal({"prefill": "1", "mixed": "2"} | given).startswith("--prefill, --mixed: mixed instances ")
    assert refusal({"ray": "auto", "devices": "2"} | given).startswith("--devices, --ray: in a Ray cluster ")
    assert refusal({"engine": "vllm"} | given, {"AEGIS_TENSOR_PARALLEL_SIZE": "2"}).startswith(
        "AEGIS_TENSOR_PARALLEL_SIZE, --engine: the vllm engine "
    )


def test_a_limit_of_0_is_none(tmp_path: Path) -> None:
    limits = "{requests_per_minute: 0, tokens_per_minute: 5, concurrent: 0}"
    file = written(
        tmp_path, f"models: {{a: {{hub: x, limits: {limits}}}}}\napi_keys: {{b: {{key: c, limits: {limits}}}}}"
    )
    config = load(file, {})
    for found in (config.models["a"].limits, config.api_keys["b"].limits):
        assert (found.requests_per_minute, found.tokens_per_minute, found.concurrent) == (None, 5, None)


def test_memory_that_holds_no_model_is_told_with_what_is_needed() -> None:
    assert refusal({"device_memory": "1"}) == (
        "--device-memory: device (1B) is too little: the smallest model takes 4MiB, a page of weights and a slab of KV "
        "(2MiB); raise it"
    )
    assert refusal({"device_memory": "2MiB"}).startswith("--device-memory: device (2MiB) is too little")
    assert load({"device_memory": "4MiB"}, {}).memory.device == 4 << 20
    assert refusal({"host_memory": "1"}) == (
        "--host-memory: host (1B) is too little: each instance takes two slabs of KV (2MiB each) of it, beside "
        "model_cache; raise it"
    )


def test_half_of_the_host_memory_is_the_model_cache_unless_it_is_said_how_much() -> None:
    assert load({"host_memory": "3GiB"}, {}).memory.cache_bytes == 3 << 29
    assert load({"model_cache": "20MiB"}, {}).memory.cache_bytes == 20 << 20


def test_keys_without_a_value_count_as_not_given(tmp_path: Path) -> None:
    assert load(written(tmp_path, "server:\nmemory:\n  device:\n"), {}) == Config()
    assert load(written(tmp_path, ""), {}) == Config()


def test_models_of_the_file_and_their_own_deadlines(tmp_path: Path) -> None:
    text = """
    models:
      near: {path: here/llama, slo: {tbt_ms: 50}}
      far: {hub: Qwen/Qwen3-0.6B, dtype: bfloat16, pin: true}
    slo: {ttft_ms: 2000}
    """
    config = load(written(tmp_path, text), {})
    near, far = config.models["near"], config.models["far"]
    assert not config.serves_demo
    assert (near.path, near.hub, near.dtype) == (str(tmp_path / "here/llama"), None, None)
    assert (near.slo.ttft_ms, near.slo.tbt_ms) == (None, 50)
    assert (far.path, far.hub, far.dtype) == (None, "Qwen/Qwen3-0.6B", "bfloat16")
    assert (near.pin, far.pin) == (False, True)


def test_models_on_the_command_line_take_the_place_of_those_in_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "models: {a: {hub: x}}\nsources: [y]")
    assert (set(load(file, {}).models), load(file, {}).sources) == ({"a"}, ("y",))
    for config in (load(file | {"models": ["v", "w"]}, {}), load(file, {"AEGIS_MODELS": "v,w"})):
        assert (config.models, config.sources) == ({}, ("v", "w"))


def test_paths_in_a_file_start_there_and_hub_ids_stay(tmp_path: Path) -> None:
    config = load(written(tmp_path, "sources: [./here, ../there, /else, org/name]"), {})
    assert config.sources == (str(tmp_path / "here"), f"{tmp_path}/../there", "/else", "org/name")
    assert load(written(tmp_path, "mqtt: {ca_file: ca.pem}"), {}).mqtt.ca_file == str(tmp_path / "ca.pem")


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda file: file.name)
def test_the_examples_are_valid(file: Path) -> None:
    load({"config": file}, {})


def test_the_demo_example_spells_the_defaults_out() -> None:
    config = load({"config": ROOT / "configs/demo.yaml"}, {})
    assert config == Config(demo=True) and not config.instances.counted


def test_the_url_of_redis_is_a_secret() -> None:
    config = load({"redis": "redis://:geheim@host:1/0"}, {})
    assert "geheim" not in repr(config) + config.model_dump_json()
    assert config.redis.url and config.redis.url.get_secret_value().endswith(":geheim@host:1/0")
    assert not config.redis.off
    assert load({}, {"AEGIS_REDIS": "off"}).redis.off


@pytest.mark.parametrize("url", ["http://:geheim@host:1/0", "geheim", ""])
def test_what_is_no_url_of_redis_is_refused_without_being_told(url: str) -> None:
    told = refusal({"redis": url})
    assert told.startswith("--redis: ")
    assert "geheim" not in told


@pytest.mark.parametrize("prefix", ["", "a b", "a:b", "x" * 65, "ä"])
def test_a_prefix_is_a_plain_name(prefix: str) -> None:
    with pytest.raises(UserError, match="--redis-prefix"):
        load({"redis_prefix": prefix}, {})
    assert refusal({"redis_prefix": prefix}) == "--redis-prefix: should be of letters, digits and . _ -, 64 at most"


@pytest.mark.parametrize(
    ("devices", "ranks", "groups"), [("1", "1", 1), ("4", "2", 2), ("1", "2", 1), ("3", "2", 1), ("2", "1", 2)]
)
def test_devices_are_taken_in_groups_of_ranks(devices: str, ranks: str, groups: int) -> None:
    assert load({"devices": devices, "tensor_parallel_size": ranks}, {}).device_count == groups


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("server: {port: '8000'}", "server.port: should be a number, not the text '8000'"),
        ("memory: {idle_s: '2.5'}", "memory.idle_s: should be a number, not the text '2.5'"),
        ("server: {log_prompts: 'true'}", "server.log_prompts: should be a valid boolean, not 'true'"),
        ("scheduling: {migrates: 1}", "scheduling.migrates: should be a valid boolean, not 1"),
        ("models: {m: {path: x, priority: '1'}}", "models.m.priority: should be a number, not the text '1'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_a_file(tmp_path: Path, text: str, told: str) -> None:
    given = written(tmp_path, text)
    line = f"{given['config']}: line 1: {told}"
    assert refusal(dict(given)) == line and look_at(given["config"]) == [line]


def test_options_and_variables_are_texts_of_any_type_and_yaml_has_no_exponents(tmp_path: Path) -> None:
    config = load({"port": "8001"} | written(tmp_path, "memory: {idle_s: 1e3}"), {"AEGIS_LOG_PROMPTS": "1"})
    assert (config.server.port, config.server.log_prompts, config.memory.idle_s) == (8001, True, 1000.0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"devices": "5", "mixed": "2"}, "--devices: 3 of 5 devices would have no instance; give 2 devices at most"),
        ({"devices": "8"}, "--devices: 6 of 8 devices would have no instance; give 2 devices at most"),
        ({"devices": "5", "tensor_parallel_size": "2"}, "--devices: 1 of 5 devices would have no instance; give 4"),
        ({"redis": "off", "redis_prefix": "x"}, "--redis, --redis-prefix: nothing is recorded where redis is off"),
    ],
)
def test_what_has_no_effect_is_refused(given: dict[str, object], told: str) -> None:
    assert refusal(given).startswith(told)


def test_what_redis_keeps_has_no_effect_without_it_and_what_the_server_keeps_has(tmp_path: Path) -> None:
    assert "leave out ttl_s, or redis" in refusal({}, {"AEGIS_REDIS": "off", "AEGIS_REDIS_TTL_S": "5"})
    assert load({"redis": "off"}, {"AEGIS_REDIS_RESPONSES_TTL_S": "0"}).redis.off


def test_proxies_are_bounded() -> None:
    assert refusal({"proxies": "65"}) == "--proxies: should be less than or equal to 64, not '65'"
    assert load({"proxies": "64"}, {}).server.proxies == 64


def test_vllm_shares_no_model_out() -> None:
    assert "leave out tensor_parallel_size" in refusal({"engine": "vllm", "tensor_parallel_size": "2"})
    assert "peer_loads is for instances of one" in refusal({"peer_loads": True, "tensor_parallel_size": "2"})
    assert "tensor_parallel_size" in refusal({"tensor_parallel_size": "0"}).replace("-", "_")


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_policies_that_cut_prompts_take_a_bound_for_steps_and_others_refuse_it(policy: str) -> None:
    options = {"policy": policy, "step_tokens": "64"}
    if recipe(policy).policy(Site(memory_bytes=1 << 30)).rules.chunk_tokens is None:
        assert "leave out step_tokens" in refusal(options)
    else:
        assert load(options, {}).scheduling.step_tokens == 64


def test_models_move_as_the_policy_has_it_unless_it_is_said() -> None:
    assert load({}, {}).scheduling.migrates is None
    assert load({"migrate": False}, {}).scheduling.migrates is False
    assert load({}, {"AEGIS_MIGRATE": "on"}).scheduling.migrates is True


def test_a_bound_for_steps_is_refused_where_prefill_instances_run_prompts_as_a_whole() -> None:
    apart = {"policy": "muxwise", "roles": "fixed", "prefill": "1", "decode": "1", "step_tokens": "64"}
    assert "leave out step_tokens, or roles" in refusal(apart)


@pytest.mark.parametrize(
    ("said", "lanes"),
    [("off", "off"), (False, "off"), ("1", "off"), (1, "off"), ("2", "2"), (2, "2"), ("auto", "auto")],
)
def test_lanes_are_words_or_numbers(said: object, lanes: str) -> None:
    assert load({"lanes": said}, {}).instances.lanes == lanes


@pytest.mark.parametrize("said", ["3", "0", "on", "many", "-2"])
def test_other_numbers_of_lanes_are_refused_in_one_line(said: str) -> None:
    assert "lanes" in refusal({"lanes": said})
    assert "\n" not in refusal({"lanes": said})


@pytest.mark.parametrize("address", ["somewhere", "ray://host:10001", "host:", ":1", "host:port", ""])
def test_what_leads_to_no_ray_cluster_is_refused(address: str) -> None:
    assert "HOST:PORT" in refusal({"ray": address})


def test_in_a_ray_cluster_devices_are_not_counted() -> None:
    assert "leave out devices" in refusal({"ray": "auto", "devices": "2"})


def test_in_a_ray_cluster_devices_do_not_carry_parts_of_each_other_s_loads() -> None:
    assert "peer_loads is for devices of one machine" in refusal({"ray": "auto", "peer_loads": True})
    assert load({"ray": "auto", "peer_loads": False}, {}).ray.address == "auto"
