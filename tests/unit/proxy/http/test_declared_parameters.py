"""Parameters are declared once: what their schema allows is what is read of a client's value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from aegis.core.errors import UserError
from proxy.http.fields import Fields, Parameter, Unsupported
from proxy.http.parameters import (
    AnyText,
    Flag,
    Integer,
    Items,
    Nested,
    Number,
    Object,
    OneOf,
    RequiredNested,
    Text,
    refuse_unsupported,
    required,
    schema_of,
)
from proxy.http.request.messages import Content
from proxy.http.request.sampling import RequestId, StopStrings, Temperature
from proxy.http.structured.tools import ToolName


class Inner(Fields):
    size = required(Integer(None, low=0, high=9))
    shade = OneOf(("a", "b"))


class Probe(Fields):
    flag = Flag(False)
    integer = Integer(0, low=-3, high=5)
    number = Number(0.0, low=0, high=1)
    above = Number(1.0, low=0, high=1, open_low=True)
    text = Text(None, most_characters=3)
    any_text = AnyText()
    one_of = OneOf(("a", "b"))
    items = Items({}, most=2)
    objects = Object()
    inner = Nested(Inner)
    needed = required(Text(None))
    needed_inner = RequiredNested(Inner)
    temperature = Temperature(1.0, low=0, high=2)
    request_id = RequestId(None, most_characters=128)
    stop = StopStrings({"type": "string", "minLength": 1, "maxLength": 256}, most=16)
    tool_name = required(ToolName(None))
    content = Content()
    not_here = Unsupported(True, "x")


NAMES = sorted(Probe._names)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 10)
    | st.floats(-1, 3).filter(lambda value: not value.is_integer())
    | st.sampled_from(["", "a", "b", "x", "abc", "abcd", "a b", "\u00e9", "x" * 129, "x" * 257, 1e-6, 1e-5, 0.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["size", "shade", "type", "text", "other"]), inner, max_size=3)
        | st.fixed_dictionaries({"type": st.just("text"), "text": inner})
    ),
    max_leaves=4,
)


def is_read(name: str, values: dict[str, Any]) -> bool:
    probe = Probe(values)
    try:
        value = getattr(probe, name)
        if name == "not_here":
            refuse_unsupported(probe, Probe)
        if isinstance(value, Inner):
            _ = value.size, value.shade
            value.end()
    except UserError as error:
        assert error.param is not None and error.param.startswith(name)
        return False
    return True


@settings(max_examples=1000)
@given(st.sampled_from(NAMES), VALUES)
def test_what_a_schema_allows_is_read_and_nothing_else(name: str, value: Any) -> None:
    schema = schema_of(Probe)["properties"][name]
    assert is_read(name, {name: value}) == Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_to_be_given_is_refused_where_it_is_absent(name: str) -> None:
    parameter: Parameter[Any, Any] = getattr(Probe, name)
    assert is_read(name, {}) == (name not in schema_of(Probe)["required"]) == (not parameter.required)


def test_what_is_not_declared_is_unknown() -> None:
    with pytest.raises(UserError, match="unknown parameter 'integr'; did you mean 'integer'") as error:
        Probe({"integer": 1, "integr": 2}).end()
    assert error.value.param == "integr"
    Probe({"integer": 1, "not_here": 2}).end()


def test_no_parameter_hides_a_method() -> None:
    with pytest.raises(RuntimeError, match="__set_name__"):
        type("Bad", (Fields,), {"take": Flag(False)})
