"""The command line: what it says, and with which exit code."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer.main

from aegis import __version__
from aegis.cli.commands import app, valued
from aegis.config.config import OPTIONS, Config, SloTargets, leaves
from aegis.config.sizes import format_size
from proxy.http.settings import TlsFiles
from tests.certificates import make_certificate
from tests.long_forms import first_of, first_rows_of
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import market

HEAVY = {"fastapi", "httpx", "numpy", "pydantic", "rich", "torch", "transformers", "uvicorn", "yaml", "zmq"}


def commands(group: Any = None, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    group = group or typer.main.get_command(app)
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


@pytest.mark.parametrize("path", first_of(6, [path for path, _ in commands()]), ids=" ".join)
def test_every_command_has_help(aegis: Any, path: tuple[str, ...]) -> None:
    run = aegis(*path, "--help")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith(f"Usage: {' '.join(('aegis', *path))} ")


@pytest.mark.parametrize(
    "path",
    first_of(6, [path for path, command in commands() if not hasattr(command, "commands") and not command.hidden]),
)
def test_every_command_shows_examples_that_call_it(aegis: Any, path: tuple[str, ...]) -> None:
    examples = aegis(*path, "--help").out.split("Example", 1)[1]
    assert f"aegis {' '.join(path)}" in examples


def test_what_is_hidden_is_an_instrument_of_the_lab_by_its_former_name() -> None:
    found = dict(commands())
    hidden = {path: command for path, command in found.items() if getattr(command, "hidden", False)}
    assert {path[0] for path in hidden} == {"bench"}
    assert {path[1] for path in hidden} == {path[1] for path in found if path[:1] == ("lab",) and len(path) > 1}
    for (_, name), command in hidden.items():
        assert [option.name for option in command.params] == [option.name for option in found["lab", name].params]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, aegis.cli.main\n"
        "sys.argv = ['aegis', '--help']\n"
        "try: aegis.cli.main.main()\n"
        "finally: print('loaded:', *{name.split('.')[0] for name in sys.modules})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(out.split("loaded:")[1].split())
    assert "typer" in loaded
    assert not loaded & HEAVY


def test_the_version(aegis: Any) -> None:
    run = aegis("--version")
    assert (run.code, run.out) == (0, f"aegis {__version__}\n")


@pytest.mark.parametrize(("typed", "completed"), [("aegis laun", "launch"), ("aegis launch --ssl-k", "--ssl-keyfile")])
def test_a_shell_completes_commands_and_options(typed: str, completed: str) -> None:
    asked = {"_AEGIS_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    command = [sys.executable, "-m", "aegis.cli.main"]
    told = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True)
    assert told.stdout.split() == [completed]


@pytest.mark.parametrize("group", first_of(2, [(), ("models",), ("config",), ("bench",), ("lab",)]))
def test_a_group_alone_prints_its_help(aegis: Any, group: tuple[str, ...]) -> None:
    run = aegis(*group)
    assert run.code == 0
    assert run.out == aegis(*group, "--help").out


def spelled_slo(slo: SloTargets) -> str:
    return f"ttft={slo.ttft_ms / 1000:g},tbt={slo.tbt_ms / 1000:g},gap={slo.gap_ms / 1000:g}"


def test_the_options_of_launch_are_those_of_the_configuration_with_the_same_defaults() -> None:
    fields = dict(leaves()) | {OPTIONS["slo"]: Config.model_fields["slo"]}
    told = {parameter.name: parameter.help or "" for parameter in dict(commands())[("launch",)].params}
    assert set(told) - {"help"} == {*OPTIONS, "config", "file"}
    for option, path in OPTIONS.items():
        if match := re.search(r"\[default: (.+)\]", told[option]):
            value = fields[path].default
            spelled = {
                str(value),
                format_size(value) if isinstance(value, int) else "",
                "the demo market" * (not value),
                spelled_slo(value) if isinstance(value, SloTargets) else "",
            }
            assert match[1] in spelled, option
        else:
            assert not fields[path].default, option


@pytest.mark.parametrize(
    ("arguments", "line"),
    first_rows_of(
        13,
        [
            (["launch", "--prot", "1"], "No such option: --prot"),
            (["ctl", "--url", "u", "move"], "Missing argument 'MODEL'; see aegis ctl move --help"),
            (["memory", "--url", "u", "trim", "m", "--timeout"], "requires an argument; see aegis memory trim --help"),
            (["bench", "serve", "--map", "x"], "aegis: --map: 'x' is not one of 'name', 'round-robin'; see"),
            (["ctl", "drain", "m", "--url", "u"], "--url is an option of aegis ctl: give it before drain"),
            (["lunch"], "No such command 'lunch'"),
            (["plan", "--link", "nan"], "aegis: --link: should be a number, not nan; see aegis plan --help"),
            (
                ["plan", "--link", "inf"],
                "aegis: --link: should be less than or equal to 1000000; see aegis plan --help",
            ),
            (["launch", "--port"], "Option '--port' requires an argument"),
            (["launch", "a.yaml", "extra"], "unexpected extra argument"),
            (["launch", "a.yaml", "--config", "b.yaml"], "a.yaml and --config b.yaml: give one file"),
            (["models", "add"], "Missing argument 'SOURCE'"),
            (["launch", "--port", "http"], "--port: should be a valid integer"),
            (["launch", "--device-memory", "lots"], "--device-memory: 'lots' is no size"),
            (["launch", "--config", "/nowhere/aegis.yaml"], "/nowhere/aegis.yaml: cannot be read"),
            (["models", "list", "--url", "localhost:8000"], "'localhost:8000' is no address of a server"),
            (["models", "add", ""], "SOURCE is empty; give a directory"),
            (["models", "set", "llama"], "nothing to change; see aegis models set --help"),
            (["models", "set", "llama", "--slo", ""], "--slo: '' is no limit"),
            (["ctl", "--timeout", "0", "drain", "x"], "--timeout: should be above 0 and at most 3600, not 0"),
            (
                ["ctl", "--mqtt", "mqtts://127.0.0.1:1", "--mqtt-ca", "/dev/null", "drain", "x"],
                "--mqtt-ca: there is no file /dev/null",
            ),
            (["ctl", "--timeout", "nan", "drain", "x"], "--timeout: should be above 0 and at most 3600, not nan"),
            (["ctl", "--timeout", "3601", "add"], "--timeout: should be above 0 and at most 3600, not 3601"),
            (["memory", "trim", "m", "--timeout", "nan"], "--timeout: should be above 0 and at most 3600, not nan"),
            (["memory", "limit", "m", "1GiB", "--timeout", "inf"], "--timeout: should be above 0 and at most 3600"),
            (
                ["ctl", "--mqtt", "mqtt://127.0.0.1:1", "--mqtt-prefix", "a/#", "drain", "x"],
                "--mqtt-prefix: should be of letters, digits and . _ -, with / between parts",
            ),
            (["bench", "serve", "--url", "localhost"], "--base-url: 'localhost' is no address"),
            (["bench", "serve", "--url", "http://a..b"], "--base-url: 'http://a..b' is no address of a server"),
            (
                ["bench", "interference", "--model", "m", "--url", "http://127.0.0.1:101951"],
                "--base-url: 'http://127.0.0.1:101951' is no address of a server",
            ),
            (["bench", "timeline", "--url", "http://[::1"], "--url: 'http://[::1' is no address of a server"),
            (["ctl", "--url", "http://a..b", "drain", "x"], "--url: 'http://a..b' is no address of a server"),
            (["memory", "limit", "decode-0"], "Missing argument 'SIZE'"),
            (["memory", "limit", "decode-0", "lots"], "SIZE: 'lots' is no size"),
            (["models", "add", "~nobody.at.all/x"], "SOURCE: ~nobody.at.all/x: Could not determine home directory"),
            (["models", "add", "x" * 300], f"SOURCE: {'x' * 300}: File name too long"),
            (["bench", "report", "x" * 300], f"aegis: {'x' * 300}: File name too long"),
            (["memory", "limit", "decode-0", "9999999999TiB"], "SIZE: '9999999999TiB' is no size that memory can have"),
            (["ctl", "limit", "decode-0", "0"], "SIZE: '0' is no size that memory can have"),
            (
                ["memory", "trim", "decode-0", "--timeout", "soon"],
                "--timeout: should be a valid number; see aegis memory trim",
            ),
            (["memory", "--url", "localhost:8000"], "'localhost:8000' is no address of a server"),
            (["top"], "aegis top needs a terminal"),
            (["explain", "--url", "localhost:8000"], "'localhost:8000' is no address of a server"),
            (["explain", "decisions.jsonl", "--follow"], "are of a running server: leave out FILE"),
            (["explain", "/nowhere/decisions.jsonl"], "/nowhere/decisions.jsonl: No such file"),
            (
                ["simulate", "--trace-dir"],
                "aegis: Option '--trace-dir' requires an argument; see aegis simulate --help",
            ),
            (["explain", "--request", "mine"], "aegis: --request: should be a valid integer; see aegis explain --help"),
            (
                ["explain", "--last", "0"],
                "aegis: --last: should be greater than or equal to 1; see aegis explain --help",
            ),
        ],
    ),
)
def test_a_mistake_costs_one_line_and_exit_code_2(aegis: Any, arguments: list[str], line: str) -> None:
    run = aegis(*arguments)
    assert run.code == 2
    assert run.out == ""
    assert re.fullmatch(r"aegis: [^\n]+\n", run.err)
    assert line in run.err


def test_switches_that_are_not_given_leave_variables_as_they_are(aegis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    switches = [each.name for each in dict(commands())[("launch",)].params if each.default is False]
    assert "peer_loads" in switches
    for name in switches:
        monkeypatch.setenv(f"AEGIS_{name.upper()}", "bad")
        assert aegis("launch").err.startswith(f"aegis: AEGIS_{name.upper()}: should be a valid boolean")
        monkeypatch.delenv(f"AEGIS_{name.upper()}")


@pytest.mark.long
def test_an_address_that_cannot_be_listened_on_costs_one_line_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option, value in (("--port", port), ("--host", "no.such.host.invalid")):
            command = [sys.executable, "-m", "aegis.cli.main", "launch", option, value]
            done = subprocess.run(command, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (2, "")
            assert re.fullmatch(rf"aegis: cannot listen on [^\n]*{value}[^\n]*; choose another {option}\n", done.stderr)


def test_an_output_that_is_full_costs_one_line_too() -> None:
    for arguments in (["--help"], ["--version"], ["config", "schema"]):
        command = [sys.executable, "-m", "aegis.cli.main", *arguments]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.stderr == "aegis: the output cannot be written: No space left on device; make room there\n"
        assert done.returncode == 2


class Answers(BaseHTTPRequestHandler):
    """A server that answers by a table and notes what it was asked."""

    table: ClassVar[dict[str, tuple[int, str]]] = {}
    asked: ClassVar[list[Any]] = []

    def do_GET(self) -> None:
        status, body = self.table[f"{self.command} {self.path}"]
        length = int(self.headers.get("Content-Length", 0))
        self.asked.append(json.loads(self.rfile.read(length)) if length else None)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Silence."""


@pytest.fixture
def server() -> Iterator[str]:
    Answers.table.clear()
    Answers.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_models_are_listed_one_a_line_however_long_their_names(aegis: Any, server: str) -> None:
    root = "/checkpoints/" + "x" * 150
    served = [{"id": "a[b]", "state": "loaded", "weights": "disk", "root": root}, {"id": "c", "root": None}]
    Answers.table["GET /v1/models"] = (200, json.dumps({"data": served}))
    lines = aegis("models", "list", "--url", server).out.splitlines()
    assert [line.split() for line in lines] == [
        ["model", "state", "weights", "checkpoint"],
        ["a[b]", "loaded", "disk", root],
        ["c", "-", "-", "-"],
    ]


def test_a_model_that_failed_is_listed_with_the_reason(aegis: Any, server: str) -> None:
    failed = {"id": "x", "state": "failed", "detail": "a shard is missing", "root": "/x"}
    Answers.table["GET /v1/models"] = (200, json.dumps({"data": [failed]}))
    assert "failed: a shard is missing" in aegis("models", "list", "--url", server).out


def test_models_are_added_and_removed(aegis: Any, server: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers.table |= {
        "POST /models/load": (200, '{"id": "llama", "state": "loaded"}'),
        "POST /models/evict": (200, "{}"),
        "POST /models/unload": (200, "{}"),
    }
    (tmp_path / "llama").mkdir()
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert aegis("models", "add", "llama", "--url", server).out == "llama is loaded\n"
    assert aegis("models", "add", "m.gguf", "--url", server).code == 0
    assert aegis("models", "add", "org/name", "--name", "n", "--url", server + "/").code == 0
    assert aegis("models", "add", "llama", "--name", "tuned", "--base", "b", "--url", server).code == 0
    assert aegis("models", "unload", "llama", "--url", server).out.startswith("llama leaves memory: ")
    assert aegis("models", "remove", "llama", "--url", server).out == "llama is removed\n"
    assert Answers.asked == [
        {"source": str(tmp_path / "llama")},
        {"source": str(tmp_path / "m.gguf")},
        {"source": "org/name", "name": "n"},
        {"source": str(tmp_path / "llama"), "name": "tuned", "base": "b"},
        {"model": "llama"},
        {"model": "llama"},
    ]


def test_memory_is_shown_as_tables_and_as_json(aegis: Any, server: str) -> None:
    none = {"held_bytes": 0, "fragmentation": 0.0, "shapes": []}
    host = {"capacity_bytes": 2 << 20, "leased_bytes": 0, "free_bytes": 2 << 20, "orphaned_bytes": 0}
    host |= {"kept_bytes": 0, "slabs": none}
    cache = {"capacity_bytes": 0, "used_bytes": 0, "images": [], "counters": {"hits": 3}}
    report = {"devices": [], "host_kv": host, "model_cache": cache}
    Answers.table["GET /debug/memory"] = (200, json.dumps(report))
    lines = aegis("memory", "--url", server).out.splitlines()
    assert lines[0] == "host KV: 2 MiB, 0 leased, 2 free, 0 of lost instances, 0 kept for prompts to come"
    assert "model cache: 0 MiB, 0 used; 3 hits" in lines
    assert json.loads(aegis("memory", "--json", "--url", server).out) == report


@pytest.mark.parametrize("body", ["{}", '{"devices": 3}'])
def test_memory_of_a_server_that_is_no_aegis_is_not_shown(aegis: Any, server: str, body: str) -> None:
    Answers.table["GET /debug/memory"] = (200, body)
    run = aegis("memory", "--url", server)
    assert (run.code, run.err) == (2, f"aegis: {server} answers, but is no aegis server of this version\n")


def memory_with(instance: str, *, limit_bytes: int | None) -> str:
    """The report of a server with one instance, on a device of 128 MiB."""
    ranges = {"weights_reserved_bytes": 0, "weights_placed_bytes": 0, "kv_reserved_bytes": 0, "weights": []}
    sizes = dict.fromkeys(
        ("held_bytes", "wish_bytes", "weights_bytes", "kv_bytes", "unused_bytes", "returning_bytes"), 0
    )
    none = {"held_bytes": 0, "fragmentation": 0.0, "shapes": []}
    here = {"instance": instance, "limit_bytes": limit_bytes, "idle": True, "ranges": ranges}
    here |= {"transfers_in_flight": {}} | sizes
    device = dict.fromkeys(("device", "free_bytes", "wiping_bytes", "floor_bytes", "page_bytes"), 0)
    host = dict.fromkeys(("capacity_bytes", "leased_bytes", "free_bytes", "orphaned_bytes", "kept_bytes"), 0)
    return json.dumps(
        {
            "devices": [device | {"capacity_bytes": 128 << 20, "instances": [here], "slabs": none}],
            "host_kv": host | {"slabs": none},
            "model_cache": {"capacity_bytes": 0, "used_bytes": 0, "images": [], "counters": {}},
        }
    )


def test_memory_is_limited_and_trimmed(aegis: Any, server: str) -> None:
    Answers.table |= {
        "POST /debug/memory/limit": (200, '{"instance": "decode-0", "given_back_bytes": 25165824}'),
        "POST /debug/memory/trim": (200, '{"instance": "decode-0", "given_back_bytes": 0}'),
    }
    asked = ("memory", "limit", "decode-0", "0.25GiB", "--timeout", "2", "--url", server)
    Answers.table["GET /debug/memory"] = (200, memory_with("decode-0", limit_bytes=256 << 20))
    assert aegis(*asked).out == "decode-0 may hold 256MiB; it gave back 24MiB\n"
    Answers.table["GET /debug/memory"] = (200, memory_with("decode-0", limit_bytes=None))
    assert aegis(*asked).out == "decode-0 has no limit any more: its device has 128MiB; it gave back 24MiB\n"
    Answers.table["GET /debug/memory"] = (200, memory_with("decode-1", limit_bytes=None))
    assert aegis(*asked).out == "decode-0 may hold 256MiB; it gave back 24MiB\n"
    assert aegis("memory", "--url", server, "trim", "decode-0").out == "decode-0 gave back 0B\n"
    limit = {"instance": "decode-0", "limit": 256 << 20, "timeout_s": 2}
    assert Answers.asked == [limit, None] * 3 + [{"instance": "decode-0", "timeout_s": 30}]


def test_a_refusal_of_the_server_is_told_in_its_words_with_exit_code_1(aegis: Any, server: str) -> None:
    Answers.table["POST /models/unload"] = (404, '{"error": {"message": "no model \'x\'"}}')
    run = aegis("models", "remove", "x", "--url", server)
    assert (run.code, run.err) == (1, "aegis: no model 'x'\n")


def test_no_server_is_one_line_and_exit_code_2(aegis: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        url = f"http://127.0.0.1:{once.getsockname()[1]}"
    run = aegis("models", "list", "--url", url)
    assert run.code == 2
    assert re.fullmatch(rf"aegis: no server at {url} \([^\n]+\); is `aegis launch` running there\?\n", run.err)


@pytest.mark.parametrize(
    ("command", "port"),
    [
        (("models", "list"), 1),
        (("models", "list", "--url", "http://127.0.0.1:2"), 2),
        (("memory", "--url", "http://127.0.0.1:2", "trim", "x"), 2),
        (("memory", "trim", "x"), 1),
        (("ctl", "drain", "x"), 1),
        (("models", "remove", "x"), 1),
        (("explain",), 1),
        (("calibrate", "--out", "/tmp/x"), 1),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_variable_gives_the_address_where_no_option_does(
    aegis: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], port: int
) -> None:
    monkeypatch.setenv("AEGIS_URL", "http://127.0.0.1:1")
    says = ", as AEGIS_URL says" if port == 1 else ""
    assert aegis(*command).err.startswith(f"aegis: no server at http://127.0.0.1:{port}{says} (")


@pytest.mark.parametrize("command", [("bench", "serve"), ("bench", "interference", "--model", "x")], ids=" ".join)
def test_so_it_does_for_measuring(aegis: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.setenv("AEGIS_URL", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 " in aegis(*command).err


def test_an_empty_variable_is_as_none(aegis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_URL", "")
    assert aegis("models", "list", "--url", "").err.startswith("aegis: --url: '' is no address of a server")
    monkeypatch.setattr("aegis.server_url.DEFAULT_URL", "http://127.0.0.1:1")
    assert aegis("models", "list").err.startswith("aegis: no server at http://127.0.0.1:1 (")


def test_a_variable_that_gives_none_is_refused_by_its_name(aegis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_URL", "localhost")
    run = aegis("models", "list")
    assert (run.code, run.err.partition(";")[0]) == (2, "aegis: AEGIS_URL: 'localhost' is no address of a server")
    there = aegis("memory", "trim", "x", "--url", "http://127.0.0.1:1")
    assert there.err.startswith("aegis: no server at http://127.0.0.1:1 (")


def test_who_names_a_broker_needs_no_address(aegis: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AEGIS_URL", "localhost")
    assert "AEGIS_URL" not in aegis("ctl", "--mqtt", "mqtt://127.0.0.1:1", "drain", "x").err


@pytest.mark.parametrize(
    "command", [("models", "list"), ("bench", "serve"), ("bench", "interference", "--model", "x")], ids=" ".join
)
def test_a_server_without_tls_is_said_to_have_none(aegis: Any, server: str, command: tuple[str, ...]) -> None:
    secure = server.replace("http:", "https:")
    run = aegis(*command, "--url", secure)
    assert (run.code, run.err) == (2, f"aegis: the server at {secure} speaks http://, not https://\n")


@pytest.fixture(scope="module")
def secure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a certificate that vouches for itself."""
    certificate, key = (tmp_path_factory.mktemp("tls") / name for name in ("certificate.pem", "key.pem"))
    make_certificate(certificate, key)
    with serving(market(), tls=TlsFiles(str(certificate), str(key))) as url:
        yield url


@pytest.mark.parametrize("command", [("models", "list"), ("bench", "serve")], ids=" ".join)
def test_a_server_with_tls_is_not_said_to_be_none(aegis: Any, secure_server: str, command: tuple[str, ...]) -> None:
    run = aegis(*command, "--url", secure_server)
    told = f"the certificate of the server at {secure_server} is not trusted (self-signed certificate); SSL_CERT_FILE="
    assert (run.code, run.err.startswith(f"aegis: {told}")) == (2, True), run.err
    plain = secure_server.replace("https:", "http:")
    run = aegis(*command, "--url", plain)
    told = f"the server at {plain} hung up without an answer; does it speak https://, or has it ended?"
    assert (run.code, run.err) == (2, f"aegis: {told}\n")


def test_the_directory_of_results_is_made_before_time_is_spent(aegis: Any, server: str, tmp_path: Path) -> None:
    Answers.table["GET /v1/models"] = (200, '{"data": []}')
    made = tmp_path / "of" / "results"
    run = aegis("bench", "serve", "--save-result", "--result-dir", str(made), "--url", server)
    assert (run.err, made.is_dir()) == (f"aegis: {server} serves no models\n", True)
    (tmp_path / "file").touch()
    run = aegis("bench", "serve", "--save-result", "--result-dir", str(tmp_path / "file" / "in"), "--url", server)
    assert run.err == f"aegis: cannot make the directory {tmp_path}/file/in: Not a directory\n"
    assert (run.code, len(Answers.asked)) == (2, 1)


@pytest.mark.parametrize("option", ["--model", "--other"])
def test_a_model_that_is_not_served_is_told_with_its_option(aegis: Any, server: str, option: str) -> None:
    Answers.table["GET /v1/models"] = (200, '{"data": [{"id": "a"}]}')
    named = {"--model": "a", "--other": "a"} | {option: "nope"}
    run = aegis("bench", "interference", *[word for pair in named.items() for word in pair], "--url", server)
    assert (run.code, run.err) == (2, f"aegis: {option}: 'nope' is not served; those that are: a\n")


def test_prompts_beyond_a_context_are_refused_before_any_is_sent(aegis: Any, server: str) -> None:
    cards = [{"id": "a", "max_model_len": 16384}, {"id": "b", "max_model_len": 2048}]
    Answers.table["GET /v1/models"] = (200, json.dumps({"data": cards}))
    run = aegis("bench", "interference", "--model", "a", "--other", "b", "--url", server)
    assert run.code == 2
    assert run.err.startswith("aegis: --prompts: 12000 tokens are too many, 'b' has a context of 2048")
    assert Answers.asked == [None]


@pytest.mark.parametrize("body", ["<html>", "[]", "{}"])
def test_a_server_that_is_no_aegis_is_said_to_be_none(aegis: Any, server: str, body: str) -> None:
    Answers.table["GET /v1/models"] = (200, body)
    run = aegis("models", "list", "--url", server)
    assert (run.code, run.err) == (2, f"aegis: {server} answers, but is no aegis server\n")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["launch", "--ray"], ["launch", "--ray", "auto"]),
        (["launch", "--ray", "--port", "1"], ["launch", "--ray", "auto", "--port", "1"]),
        (["launch", "--ray", "host:6379"], ["launch", "--ray", "host:6379"]),
        (["launch"], ["launch"]),
    ],
)
def test_ray_alone_is_auto(given: list[str], meant: list[str]) -> None:
    assert valued(given) == meant
