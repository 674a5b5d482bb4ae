"""The tree of commands, and how what they raise is told. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.main

from aegis import __version__
from aegis.admin_client import Refused
from aegis.cli.config import check, schema
from aegis.cli.ctl import ctl
from aegis.cli.doctor import doctor
from aegis.cli.explain import explain
from aegis.cli.launch import demo, launch
from aegis.cli.memory import limit_memory, show_memory, trim_memory
from aegis.cli.models import add_model, list_models, remove_model, set_model, unload_model
from aegis.cli.top.command import top
from aegis.core.errors import UserError
from aegis.process.error_lines import flattened
from bench.calibration.command import calibrate
from bench.compare.command import compare
from bench.fidelity.command import fidelity
from bench.figures.command import figures
from bench.interference.command import interference
from bench.lab.commands import (
    bench_decode,
    bench_embeddings,
    bench_handover,
    bench_lanes,
    bench_llama_cpp,
    bench_lora,
    bench_memory,
    bench_metadata,
    bench_pace,
    bench_prefix,
    bench_prompts,
    bench_quantised,
    bench_schedule,
    bench_simulator,
    bench_start,
    bench_structured,
    bench_switch,
    bench_token_path,
)
from bench.lab.proxy.command import proxy
from bench.overload.command import overload
from bench.plan.command import plan
from bench.report.command import report, timeline
from bench.rivals.command import rivals
from bench.serve.command import serve
from bench.simulate.command import simulate

_PLAIN: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS)
"""Of a path that a user gave, wherever it is looked at."""

_PATH_CHARACTERS_MAX = 300
_INVALID = re.compile(r"Invalid value for '([^']+)'(?: / '[^']+')*: (.+)", re.DOTALL)

app = typer.Typer(name="aegis", **_PLAIN | {"add_completion": True})
models = typer.Typer(help="List, add, change, unload and remove the models of a running server.", **_PLAIN)
memory = typer.Typer(**_PLAIN)
config = typer.Typer(help="The configuration file, without launching anything.", **_PLAIN)
bench = typer.Typer(help="Measure any server, and compare and report what was measured.", **_PLAIN)
lab = typer.Typer(help="Measure the parts of aegis on this machine, each beside its limit or its rivals.", **_PLAIN)
app.add_typer(models, name="models")
app.add_typer(memory, name="memory")
app.add_typer(config, name="config")
app.add_typer(bench, name="bench")
app.add_typer(lab, name="lab")
app.add_typer(ctl, name="ctl")


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
      aegis doctor                                  what is here, and what would run
      aegis models list                             the models of a running server
      aegis top                                     the activity of its instances
      aegis memory                                  the use of its memory
      aegis explain                                 the reasons of its decisions
      aegis ctl drain mixed-0                       a command to one of its instances
      aegis COMMAND --help                          options and examples of a command
    """
    if version:
        print(f"aegis {__version__}")
        raise typer.Exit
    return _help_unless_command(context)


@models.callback(invoke_without_command=True)
@config.callback(invoke_without_command=True)
@bench.callback(invoke_without_command=True)
@lab.callback(invoke_without_command=True)
def _help_unless_command(context: typer.Context) -> int:
    if context.invoked_subcommand is None:
        print(context.get_help())
    return 0


app.command("launch")(launch)
app.command("demo")(demo)
app.command("doctor")(doctor)
app.command("top")(top)
app.command("explain")(explain)
app.command("simulate")(simulate)
app.command("plan")(plan)
app.command("calibrate")(calibrate)

models.command("list")(list_models)
models.command("add")(add_model)
models.command("set")(set_model)
models.command("unload")(unload_model)
models.command("remove")(remove_model)

config.command("schema")(schema)
config.command("check")(check)

memory.callback(invoke_without_command=True)(show_memory)
memory.command("limit")(limit_memory)
memory.command("trim")(trim_memory)

_INSTRUMENTS = {
    "switch": bench_switch,
    "memory": bench_memory,
    "decode": bench_decode,
    "embeddings": bench_embeddings,
    "lora": bench_lora,
    "llama-cpp": bench_llama_cpp,
    "quantised": bench_quantised,
    "handover": bench_handover,
    "schedule": bench_schedule,
    "metadata": bench_metadata,
    "prefix": bench_prefix,
    "pace": bench_pace,
    "prompts": bench_prompts,
    "lanes": bench_lanes,
    "proxy": proxy,
    "start": bench_start,
    "token-path": bench_token_path,
    "structured": bench_structured,
    "simulator": bench_simulator,
}
for name, instrument in _INSTRUMENTS.items():
    lab.command(name)(instrument)
    bench.command(name, hidden=True)(instrument)  # its name before there was a lab

bench.command("serve")(serve)
bench.command("compare")(compare)
bench.command("interference")(interference)
bench.command("rivals")(rivals)
bench.command("overload")(overload)
bench.command("fidelity")(fidelity)
bench.command("figures")(figures)
bench.command("report")(report)
bench.command("timeline")(timeline)


def valued(arguments: list[str]) -> list[str]:
    """The arguments with `--ray` alone as `--ray auto`: Typer knows no options whose value may be left out."""
    full: list[str] = []
    for at, argument in enumerate(arguments):
        alone = argument == "--ray" and (at + 1 == len(arguments) or arguments[at + 1].startswith("-"))
        full += [argument, "auto"] if alone else [argument]
    return full


def _told(error: typer.TyperException) -> str:
    """The mistake in the form in which those of the configuration are told, without the library's own words."""
    mistake = error.format_message().rstrip(".")
    if found := _INVALID.fullmatch(mistake):
        given = [each["input"] for each in getattr(error.__cause__, "errors", list)()]
        if any(str(each).strip(" +-").lower() == "nan" for each in given):  # which is beyond all bounds for the library
            return f"{found[1]}: should be a number, not nan"
        told = found[2].removeprefix("Value error, ").removeprefix("Input ")
        return f"{found[1]}: {told.split(', unable to ')[0]}"
    return mistake


def _misplaced(option: str | None, context: typer.Context | None) -> str | None:
    """Where an unknown option belongs, if it is one of the group that the command is in."""
    group = context.parent if context else None
    if not context or not group or not any([option in each.opts for each in group.command.params]):
        return None
    return f"{option} is an option of {group.command_path}: give it before {context.info_name}"


def _forget_output() -> None:
    """What is left of it would be tried again at the end of the process, and told with a trace."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _system_refused(error: OSError) -> str:
    """Raises the error itself where it is none of a user's."""
    if error.filename and error.errno in _UNUSABLE:
        return f"{str(error.filename)[:_PATH_CHARACTERS_MAX]}: {error.strerror}"
    if error.filename or error.errno not in _FULL:
        raise error
    _forget_output()
    return f"the output cannot be written: {error.strerror}; make room there"


def built() -> Callable[..., Any]:
    """The tree of commands, which `run` runs."""
    return typer.main.get_command(app)


def _command_named(tree: Callable[..., Any], context: typer.Context | None) -> str:
    """The command that a mistake is about: the library does not say it of an option without its value."""
    if context is not None:
        return context.command_path
    words, within = ["aegis"], tree
    for word in sys.argv[1:]:
        command = getattr(within, "commands", {}).get(word)
        if command is not None:  # else it is an option of a group, or its value
            words.append(word)
            within = command
    return " ".join(words)


def run(tree: Callable[..., Any]) -> None:
    """Runs what the process was asked for, and ends it."""
    try:
        code = tree(valued(sys.argv[1:]), prog_name="aegis", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()
        sys.exit(code)
    except OSError as error:
        message, code = _system_refused(error), 2
    except UserError as error:
        message, code = error.message, 1 if isinstance(error, Refused) else 2
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        mistake = _misplaced(getattr(error, "option_name", None), context) or _told(error)
        message, code = f"{mistake}; see {_command_named(tree, context)} --help", 2
    print("aegis:", flattened(message), file=sys.stderr)
    sys.exit(code)
