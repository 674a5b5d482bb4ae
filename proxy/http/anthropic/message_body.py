"""The parameters of `/v1/messages`, and the chat request that they make."""

from __future__ import annotations

from typing import Any

from aegis.models.text.text_model import TextModel
from proxy.http.anthropic.conversation import TurnList, read_system, read_turns
from proxy.http.anthropic.schemas import CHOICE, SYSTEM, THINKING, THINKING_KINDS, TOOL, TURN
from proxy.http.anthropic.tools import read_tool_choice, read_tools
from proxy.http.errors import shown
from proxy.http.fields import Schema
from proxy.http.ignored import Ignored
from proxy.http.parameters import Anything, Flag, Integer, Items, Object, required
from proxy.http.request.body import ModelBody
from proxy.http.request.late_instructions import told_by_user
from proxy.http.request.messages import MESSAGES_MAX
from proxy.http.request.sampling import STOP_CHARACTERS_MAX, STOPS_MAX, TOKENS_MAX, GenerationBody
from proxy.http.structured.tools import TOOLS_MAX, pass_over_strict
from proxy.http.translated import Translated

_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": STOP_CHARACTERS_MAX}
_NOT_SERVED = frozenset({"container", "context_management", "mcp_servers"})


class TokensBody(ModelBody):
    """What makes a prompt."""

    messages = required(TurnList(TURN, most=MESSAGES_MAX, least=1))
    system = Anything(SYSTEM, about="Text, or blocks of it")
    tools = Items(TOOL, most=TOOLS_MAX)
    tool_choice = Object(like=CHOICE)
    thinking = Object(like=THINKING)
    output_config = Object()
    output_format = Object()
    chat_template_kwargs = Object()
    cache_control = Anything({}, about="Without effect: what was kept of an earlier prompt is always reused")
    container = Anything({}, about="Ignored")
    context_management = Anything({}, about="Ignored")
    diagnostics = Anything({}, about="Ignored")
    inference_geo = Anything({}, about="Ignored")
    mcp_servers = Anything({}, about="Ignored")
    metadata = Object()
    service_tier = Anything({}, about="Ignored")
    speed = Anything({}, about="Ignored")


class MessageBody(TokensBody):
    max_tokens = required(Integer(None, low=1, high=TOKENS_MAX))
    stop_sequences = Items(_STOP, most=STOPS_MAX)
    stream = Flag(False)
    temperature = GenerationBody.temperature
    top_p = GenerationBody.top_p
    top_k = GenerationBody.top_k
    seed = GenerationBody.seed
    priority = GenerationBody.priority
    pace = GenerationBody.pace
    request_id = GenerationBody.request_id


_AS_IN_CHAT = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "priority", "pace", "request_id")


def chat_request(body: MessageBody, text: TextModel, ignored: Ignored) -> Translated:
    """Raises UserError."""
    translated = conversation_request(body, text, ignored)
    values = translated.values
    values |= {name: body.take(name) for name in _AS_IN_CHAT if body.given(name)}
    values["max_tokens"] = body.max_tokens
    if stops := body.stop_sequences:
        values["stop"] = stops
    if wanted := _output_format(body):
        values["response_format"] = wanted
    return translated


def conversation_request(body: TokensBody, text: TextModel, ignored: Ignored) -> Translated:
    """The part of it that makes the prompt. Raises UserError."""
    _ = body.metadata, body.output_config, body.output_format  # which add nothing to the prompt, and are objects
    messages = [*read_system(body), *read_turns(body, ignored)]
    values: dict[str, Any] = {
        "model": body.model,
        "messages": told_by_user(messages, text.chat_template or ""),
    }
    tools = read_tools(body, ignored)
    choice = read_tool_choice(body)
    pass_over_strict(tools, choice.get("tool_choice"), text, ignored)
    if tools:
        values |= {"tools": list(tools.values()), **choice}
    elif not body.tools and choice.get("tool_choice") not in (None, "auto", "none"):
        raise body.invalid("tool_choice", "needs 'tools'")
    variables = dict(body.chat_template_kwargs or {})
    thinks = _thinks(body)
    if thinks is not None and "enable_thinking" in (text.chat_template or ""):
        variables.setdefault("enable_thinking", thinks)
    if variables:
        values["chat_template_kwargs"] = variables
    for name in sorted(_NOT_SERVED):
        if body.take(name):
            ignored.add(name)
    return Translated(values, tuple(tools))


def _thinks(body: TokensBody) -> bool | None:
    """Whether the model is to reason; None: as it does by itself."""
    thinking = body.thinking
    if thinking is None:
        return None
    kind = thinking.get("type")
    if kind not in THINKING_KINDS:
        raise body.invalid("thinking.type", f"must be one of {', '.join(THINKING_KINDS)}, not {shown(kind)}")
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and budget is not None and (type(budget) is not int or budget < 1):
        raise body.invalid("thinking.budget_tokens", f"must be an integer of 1 or more, not {shown(budget)}")
    return bool(kind != "disabled")


def _output_format(body: TokensBody) -> dict[str, Any] | None:
    """The format as a chat request has it. Here it is in `output_config`, or under its older name."""
    config = body.output_config or {}
    name, wanted = "output_config.format", config.get("format")
    if wanted is None:
        name, wanted = "output_format", body.output_format
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        kind = wanted.get("type") if isinstance(wanted, dict) else wanted
        raise body.invalid(name, f"must be of type 'json_schema', not {shown(kind)}")
    schema = wanted.get("schema")
    if not isinstance(schema, dict):
        raise body.invalid(f"{name}.schema", f"must be an object, not {shown(schema)}")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
