"""The tools of a chat request: what the template is told of them, and what holds the reply to calling them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.request import Grammar
from aegis.models.text.text_model import TextModel
from proxy.http.errors import shown
from proxy.http.fields import Fields, Schema
from proxy.http.ignored import Ignored
from proxy.http.parameters import (
    AnyText,
    Anything,
    Flag,
    Items,
    Nested,
    Object,
    OneOf,
    RequiredNested,
    Text,
    required,
    schema_of,
)
from proxy.http.structured.json_schemas import ALL_OBJECTS, check_schema, objects_of
from proxy.http.structured.output_format import OutputFormat
from proxy.http.structured.tool_calls import HERMES, LISTED, CallFinder, ToolForm, form_of

TOOLS_MAX = 512
_NAME_CHARACTERS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_CHOICES = ("none", "auto", "required")
_NOTHING = {"type": "object", "properties": {}}


class ToolName(Text[None]):
    """Letters, digits and a few signs."""

    def check(self, value: Any, fields: Fields, name: str) -> str:
        text = Text.check(self, value, fields, name)
        if len(text) > _NAME_CHARACTERS_MAX or not _NAME.fullmatch(text):
            raise fields.invalid(name, f"must be letters, digits, '_', '.' and '-' only, not {shown(text)}")
        return text

    def schema(self) -> Schema:
        return super().schema() | {"maxLength": _NAME_CHARACTERS_MAX, "pattern": f"^{_NAME.pattern}$"}


class ToolFunction(Fields):
    name = required(ToolName(None))
    description = AnyText()
    parameters = Object()
    strict = Flag(False)


class Tool(Fields):
    type = required(OneOf(("function",), problem="must be 'function': there are no other tools here"))
    function = required(Nested(ToolFunction))


class NamedFunction(Fields):
    name = required(Text(None))


class NamedChoice(Fields):
    type = required(OneOf(("function",), problem="must be 'function'"))
    function = RequiredNested(NamedFunction)


class AllowedTools(Fields):
    mode = required(OneOf(("auto", "required"), problem="must be auto or required"))
    tools = Items(NamedChoice, most=TOOLS_MAX, least=1)


class AllowedChoice(Fields):
    type = required(OneOf(("allowed_tools",), problem="must be 'allowed_tools'"))
    allowed_tools = RequiredNested(AllowedTools)


class ToolsBody(Fields):
    tools = Items(Tool, most=TOOLS_MAX)
    tool_choice = Anything({"anyOf": [{"enum": list(_CHOICES)}, schema_of(NamedChoice), schema_of(AllowedChoice)]})
    parallel_tool_calls = Flag(True)


class Tools(Struct, frozen=True):
    """`definitions` as the client gave them. `choice`: the model may call them, has to, or has to call `name`."""

    definitions: tuple[dict[str, Any], ...]
    choice: Literal["auto", "required", "named"]
    name: str
    parallel: bool
    form: ToolForm | None

    def finder(self) -> CallFinder | None:
        """None if the whole reply is one call's arguments."""
        most, names = None if self.parallel else 1, [tool["function"]["name"] for tool in self.definitions]
        if self.choice == "required":
            return CallFinder(LISTED, most, names)
        return CallFinder(self.form, most, names) if self.form and self.choice == "auto" else None

    def held_to(self) -> OutputFormat | None:
        """None if the reply is free."""
        functions = [tool["function"] for tool in self.definitions]
        if self.choice == "auto":
            strict = any(function.get("strict") for function in functions)
            return OutputFormat(_free_calls(functions, self.parallel), "tools") if strict else None
        if self.choice == "named":
            schema = next(_parameters(function) for function in functions if function["name"] == self.name)
        else:
            schema = _list_of_calls(functions, self.parallel)
        return OutputFormat(Grammar("json_schema", msgspec.json.encode(schema).decode()), "tools")

    def held_beside(self, answer: OutputFormat, text: TextModel) -> OutputFormat:
        """What the reply is held to where an answer has a format of its own: a call that has to be made is no answer,
        and one that the model may make comes in place of it, if the model's form of calls can be in a grammar."""
        if self.choice != "auto":
            return self.held_to() or answer
        if answer.grammar.kind != "json_schema" or not is_strict_kept(text):
            return answer
        functions = [tool["function"] for tool in self.definitions]
        return OutputFormat(_answer_or_calls(answer.grammar.text, functions, self.parallel), answer.param)


def read_tools(body: ToolsBody, text: TextModel) -> Tools | None:
    """None if there are none, or `tool_choice` is none. Raises UserError."""
    entries, parallel = body.tools, body.parallel_tool_calls
    choice, chosen = _read_choice(body, bool(entries))
    definitions = tuple(_read_tool(_tool(body, f"tools[{i}]", entry)) for i, entry in enumerate(entries))
    names = [definition["function"]["name"] for definition in definitions]
    if len(set(names)) < len(names):
        raise body.invalid("tools", "have the same name twice")
    if choice == "none" or not definitions:
        return None
    if unknown := [name for name in chosen if name not in names]:
        raise body.invalid("tool_choice", f"names {shown(unknown[0])}, which is not among 'tools'")
    chat_template = text.chat_template or ""
    if "tools" not in chat_template:
        raise body.invalid("tools", "are not in this model's chat template: it was not trained to call them")
    tools = Tools(definitions, choice, chosen[0] if choice == "named" else "", parallel, form_of(chat_template))
    _check(body, tools, text)
    if choice == "named" or not chosen:
        return tools
    return replace(tools, definitions=tuple([each for each in definitions if each["function"]["name"] in chosen]))


def is_strict_kept(text: TextModel) -> bool:
    """Whether a call that the model is free to make can be held to its schema."""
    return form_of(text.chat_template or "") is HERMES and not text.is_special(HERMES.begin)


def pass_over_strict(tools: Mapping[int, dict[str, Any]], choice: Any, text: TextModel, ignored: Ignored) -> None:
    """Demands no strict calls where they cannot be kept to: clients of APIs that are translated set it always, most of
    them without asking for it. `tools` are by their places there."""
    if choice not in (None, "auto", "none") or is_strict_kept(text):
        return
    for at, tool in tools.items():
        if tool["function"]["strict"]:
            tool["function"]["strict"] = None
            ignored.add(f"tools[{at}].strict")


def _check(body: ToolsBody, tools: Tools, text: TextModel) -> None:
    if tools.choice == "auto" and tools.form is None:
        raise body.invalid("tools", "are called in a form that is not known here: send 'tool_choice' 'required'")
    for index, tool in enumerate(tools.definitions):
        where = f"tools[{index}].function"
        function = tool["function"]
        strict = function.get("strict")
        if tools.choice != "auto" or strict:
            check_schema(function["parameters"], f"{where}.parameters")
        if tools.choice == "auto" and strict and not is_strict_kept(text):
            message = f"'{where}.strict' is kept to with 'tool_choice' 'required' or a named function only"
            raise UserError(message, param=f"{where}.strict", code="unsupported_parameter")


def _read_choice(body: ToolsBody, tools: bool) -> tuple[Any, tuple[str, ...]]:
    """With the names of the functions that may be called; none: all."""
    asked, names = body.tool_choice, tuple[str, ...]()
    if asked is None:
        return ("auto" if tools else "none"), ()
    if isinstance(asked, dict) and asked.get("type") == "allowed_tools":
        choice, names = _read_allowed(body.nested(AllowedChoice, "tool_choice", asked))
    elif isinstance(asked, dict):
        choice, names = "named", (_read_named(body.nested(NamedChoice, "tool_choice", asked)),)
    elif asked in _CHOICES:
        choice = asked
    else:
        raise body.invalid("tool_choice", f"must be none, auto, required or a named function, not {shown(asked)}")
    if not tools and (names or choice == "required"):
        raise body.invalid("tool_choice", "needs 'tools'")
    return choice, names


def _read_allowed(choice: AllowedChoice) -> tuple[str, tuple[str, ...]]:
    _, allowed = choice.type, choice.allowed_tools
    mode, entries = allowed.mode, allowed.tools
    if not entries:
        raise allowed.invalid("tools", "must name a function")
    names = list[str]()
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise allowed.invalid(f"tools[{index}]", f"must be a function with its type, not {shown(entry)}")
        names.append(_read_named(allowed.nested(NamedChoice, f"tools[{index}]", entry)))
    allowed.end()
    choice.end()
    return mode, tuple(names)


def _read_named(choice: NamedChoice) -> str:
    _, function = choice.type, choice.function
    name = function.name
    function.end()
    choice.end()
    return name


def _tool(body: ToolsBody, name: str, entry: Any) -> Tool:
    if not isinstance(entry, dict):
        raise body.invalid(name, f"must be an object with 'type' and 'function', not {shown(entry)}")
    return body.nested(Tool, name, entry)


def _read_tool(tool: Tool) -> dict[str, Any]:
    _, function = tool.type, tool.function
    told: dict[str, Any] = {"name": function.name}
    told["description"] = function.description or ""
    told["parameters"] = function.parameters or _NOTHING
    if objects_of(told["parameters"]) is None:
        problem = f"must be the schema of an object, as arguments of a call are, not {shown(told['parameters'])}"
        raise function.invalid("parameters", problem)
    if function.strict:
        told["strict"] = True
    function.end()
    tool.end()
    return {"type": "function", "function": told}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """What the arguments of a call are held to: an object, also where other values fit the schema."""
    whole: dict[str, Any] = function["parameters"]
    objects = objects_of(whole)
    assert objects is not None, "others are refused"
    if objects == whole:
        return whole
    return {**_moved(objects, "#/$defs/whole"), "$defs": {"whole": _moved(whole, "#/$defs/whole")}}


def _list_of_calls(functions: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """A list of objects with name and arguments; each tool's own definitions move with its schema."""
    defined = {f"tool{i}": _moved(_parameters(each), f"#/$defs/tool{i}") for i, each in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/tool{i}"}},
            "required": ["name", "arguments"],
        }
        for i, function in enumerate(functions)
    ]
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": defined}


def _tags(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A call of each, in the form of Hermes and Qwen."""
    return [
        {
            "begin": f'{HERMES.begin}\n{{"name": "{function["name"]}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": _parameters(function) if function.get("strict") else ALL_OBJECTS,
            },
            "end": f"}}\n{HERMES.end}",
        }
        for function in functions
    ]


def _free_calls(functions: list[dict[str, Any]], parallel: bool) -> Grammar:
    """Free text in which a call, once begun, is one of these."""
    return _tagged(
        {
            "type": "triggered_tags",
            "triggers": [HERMES.begin],
            "tags": _tags(functions),
            "stop_after_first": not parallel,
        }
    )


def _answer_or_calls(schema: str, functions: list[dict[str, Any]], parallel: bool) -> Grammar:
    calls = {
        "type": "tags_with_separator",
        "tags": _tags(functions),
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    answer = {"type": "json_schema", "json_schema": msgspec.json.decode(schema)}
    return _tagged({"type": "or", "elements": [answer, calls]})


def _tagged(form: dict[str, Any]) -> Grammar:
    return Grammar("structural_tag", msgspec.json.encode({"type": "structural_tag", "format": form}).decode())


def _moved(schema: Any, to: str) -> Any:
    """The schema with its references to itself as they are when it lies at `to`."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: to + value[1:] if key == "$ref" and isinstance(value, str) and value[:1] == "#" else _moved(value, to)
        for key, value in schema.items()
    }
