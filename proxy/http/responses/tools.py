"""The tools of a response request, as chat has them."""

from __future__ import annotations

from typing import Any, Protocol

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.ignored import Ignored


class ToolFields(Protocol):
    """A body with the parameters of tools."""

    @property
    def tools(self) -> Any: ...

    @property
    def tool_choice(self) -> Any: ...

    def invalid(self, name: str, problem: str) -> UserError: ...


Tools = dict[int, dict[str, Any]]
"""By their places in the request."""


def read_tools(body: ToolFields, ignored: Ignored) -> Tools:
    """Functions; tools of other types are ignored. Raises UserError."""
    tools: Tools = {}
    for index, tool in enumerate(body.tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise body.invalid(where, f"must be an object with 'type' and 'name', not {shown(tool)}")
        if tool.get("type") != "function":
            ignored.add(where, shown(tool.get("type")).strip("'"))
            continue
        names = ("name", "description", "parameters", "strict")
        tools[index] = {"type": "function", "function": {name: tool.get(name) for name in names}}
    return tools


def read_tool_choice(body: ToolFields, tools: Tools, ignored: Ignored) -> tuple[Any, Tools]:
    """`tool_choice` as chat has it, and the tools that may be called. Raises UserError."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice, tools
    if not isinstance(choice, dict):
        raise body.invalid("tool_choice", f"must be none, auto, required or an object, not {shown(choice)}")
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}, tools
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not all(isinstance(each, dict) for each in allowed):
            raise body.invalid("tool_choice.tools", f"must be a list of tools, not {shown(allowed)}")
        names = [each.get("name") for each in allowed if each.get("type") == "function"]
        known = [tool["function"]["name"] for tool in tools.values()]
        if unknown := [name for name in names if name not in known]:
            raise body.invalid("tool_choice.tools", f"name {shown(unknown[0])}, which is not among 'tools'")
        return choice.get("mode", "auto"), {at: tool for at, tool in tools.items() if tool["function"]["name"] in names}
    ignored.add("tool_choice", shown(choice.get("type")).strip("'"))
    return "auto", tools
