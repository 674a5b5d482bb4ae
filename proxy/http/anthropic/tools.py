"""The tools of a message request, as chat has them."""

from __future__ import annotations

from typing import Any, Protocol

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.ignored import Ignored

_CHOICES = {"any": "required", "auto": "auto", "none": "none"}


class ToolFields(Protocol):
    """A body with the parameters of tools."""

    @property
    def tools(self) -> Any: ...

    @property
    def tool_choice(self) -> dict[str, Any] | None: ...

    def invalid(self, name: str, problem: str) -> UserError: ...


def read_tools(body: ToolFields, ignored: Ignored) -> dict[int, dict[str, Any]]:
    """Those that the client runs, by their places; those that the vendor's server would run are ignored. Raises
    UserError."""
    tools = dict[int, dict[str, Any]]()
    for index, tool in enumerate(body.tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise body.invalid(where, f"must be an object with 'name' and 'input_schema', not {shown(tool)}")
        kind = tool.get("type")
        if kind is not None and kind != "custom" and "input_schema" not in tool:
            ignored.add(where, kind)
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise body.invalid(f"{where}.input_schema", f"must be an object, not {shown(schema)}")
        function = {name: tool.get(name) for name in ("name", "description", "strict")} | {"parameters": schema}
        tools[index] = {"type": "function", "function": function}
    return tools


def read_tool_choice(body: ToolFields) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls`, if they are given. Raises UserError."""
    choice = body.tool_choice
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        told: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        told = _CHOICES[kind]
    else:
        raise body.invalid("tool_choice.type", f"must be any, auto, none or tool, not {shown(kind)}")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise body.invalid("tool_choice.disable_parallel_tool_use", f"must be true or false, not {shown(alone)}")
    return {"tool_choice": told, "parallel_tool_calls": not alone}
