"""Requests of the shapes that coding agents send, with all that is not served here: none of it is refused, and what
matters is in the prompt, also where the chat template objects to a system that speaks late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.event_laws import check_messages, check_responses, events_of
from tests.unit.proxy.http.scripted import ScriptedMarket, byte_text, market, post, says

TEMPLATE = (
    "{% for t in tools %}<{{ t.function.name }}>{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
)
STERN = "{% for m in messages[1:] if m.role == 'system' %}{{ raise_exception('too late') }}{% endfor %}"


def asked(agent: str) -> tuple[dict[str, Any], dict[str, str]]:
    shape = json.loads((Path(__file__).parent / "coding_agents" / f"{agent}.json").read_text())
    return shape["body"], shape["headers"]


def prompt_of(behind: ScriptedMarket) -> str:
    return bytes(behind.submitted[0][1]).decode()


@pytest.mark.parametrize("template", [TEMPLATE, STERN + TEMPLATE], ids=["mild", "stern"])
def test_codex(template: str) -> None:
    body, headers = asked("codex")
    behind = market(says("all went well"), text=byte_text(template))
    reply = post(behind, "/v1/responses", body, headers=headers)
    assert reply.status_code == 200, reply.text
    check_responses(events_of(reply.text))
    assert prompt_of(behind) == (
        "<exec_command>[system]be a coding agent\nskills\npermissions[user]the directory"
        + ("\n" if template is not TEMPLATE else "[user]")
        + 'write the file[assistant]<tool_call>{"cmd": "ls"}</tool_call>[tool]Process exited with code 0'
    )
    ignored = reply.headers["x-aegis-ignored"]
    assert all(name in ignored for name in ("namespace", "custom", "web_search", "include")), ignored


@pytest.mark.parametrize("template", [TEMPLATE, STERN + TEMPLATE], ids=["mild", "stern"])
def test_claude_code(template: str) -> None:
    body, headers = asked("claude_code")
    behind = market(says("all went well"), text=byte_text(template))
    reply = post(behind, "/v1/messages?beta=true", body, headers=headers)
    assert reply.status_code == 200, reply.text
    check_messages(events_of(reply.text))
    assert prompt_of(behind) == (
        "<Bash>[system]be an agent\nbe brief[user]a reminder\nwrite the file"
        + ("\n" if template is not TEMPLATE else "[system]")
        + 'types of agents[assistant]<tool_call>{"command": "ls"}</tool_call>[tool]nothing'
    )
    ignored = reply.headers["x-aegis-ignored"]
    assert all(name in ignored for name in ("web_search", "context_management")), ignored
