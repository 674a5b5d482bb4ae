"""The published schemas of payloads are those of the messages."""

import json
import re
from pathlib import Path

import pytest

from aegis.control.commands import read
from aegis.control.messages import PAYLOADS, PROTOCOL, Add, Command, Order, json_schema
from aegis.control.topics import CLUSTER, Topics

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs/bus.md").read_text(encoding="utf-8")


def test_every_payload_has_a_schema_and_bears_the_protocol() -> None:
    definitions = json_schema()["$defs"]
    for payload in PAYLOADS:
        assert definitions[payload.__name__]["properties"]["protocol"] == {"type": "integer", "default": PROTOCOL}


def test_the_order_in_the_docs_can_be_read() -> None:
    (example,) = re.findall(r"-m '(.*)'", DOCS)
    order = read(example.encode(), "mixed-0")
    assert isinstance(order, Order)
    assert json.loads(example)["protocol"] == PROTOCOL


def test_every_topic_is_in_the_docs() -> None:
    topics = Topics("")
    names = [topics.claim, topics.beat, topics.state("NAME"), topics.heartbeat("NAME"), topics.commands("NAME")]
    names += [topics.replies("NAME", "CLIENT"), topics.commands(CLUSTER), topics.replies(CLUSTER, "CLIENT")]
    for name in names:
        assert f"`{name.removeprefix('/')}`" in DOCS


def test_every_command_has_a_subcommand_in_the_docs() -> None:
    said = set(re.findall(r"^aegis ctl (\w+)", DOCS, flags=re.MULTILINE))
    tags = {command.__struct_config__.tag for command in (*Command.__args__, Add)}
    assert said == {str(tag).removeprefix("set_") for tag in tags}


@pytest.mark.parametrize(
    ("topic", "about"),
    [
        ("lab/a/instances/mixed-0/state", ("mixed-0", "state")),
        ("lab/a/instances/mixed-0/replies/me", None),
        ("lab/instances/mixed-0/state", None),
        ("lab/a/instances//state", None),
        ("lab/a/cluster", None),
    ],
)
def test_topics_say_which_instance_they_are_about(topic: str, about: tuple[str, str] | None) -> None:
    assert Topics("lab/a").instance_of(topic) == about
