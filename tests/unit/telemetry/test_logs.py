from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from aegis.telemetry.logs import LogSettings, log, log_text, setup

LOGGER = logging.getLogger("aegis.test")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    setup(LogSettings(), stream)
    yield stream
    root.handlers = handlers
    root.setLevel(level)


def test_an_event_is_one_line_of_names_and_values(lines: io.StringIO) -> None:
    log(LOGGER, logging.INFO, "request", {"status": 200, "path": "/v1/x y", "request_id": "r\n1", "empty": ""})
    stamp, rest = lines.getvalue().split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", stamp)
    assert rest == 'info aegis.test request status=200 path="/v1/x y" request_id="r 1" empty=""\n'


def test_no_value_looks_like_more_fields(lines: io.StringIO) -> None:
    log(LOGGER, logging.INFO, "request", {"path": '/" status=200 x="', "name": '"', "at": r"C:\x", "in": r"C:\a b"})
    assert lines.getvalue().split(" request ", 1)[1] == (
        r'path="/\" status=200 x=\"" name="\"" at=C:\x in="C:\\a b"' + "\n"
    )


def test_what_lies_below_the_level_is_not_logged(lines: io.StringIO) -> None:
    log(LOGGER, logging.DEBUG, "detail", {})
    assert lines.getvalue() == ""


def test_secrets_and_long_values_do_not_get_in(lines: io.StringIO) -> None:
    log(LOGGER, logging.INFO, "x", {"api_key": "sk-1", "prompt": "once upon", "reason": "y" * 1000})
    assert "sk-1" not in lines.getvalue()
    assert "once" not in lines.getvalue()
    assert "api_key=***" in lines.getvalue()
    assert len(lines.getvalue()) < 300


def test_an_exception_is_told_by_type_and_place_not_by_its_words(lines: io.StringIO) -> None:
    try:
        raise KeyError("once upon a time")
    except KeyError:
        log(LOGGER, logging.ERROR, "broke", {}, exc_info=True)
        LOGGER.exception("broke again")
    first, second = lines.getvalue().splitlines()
    assert "error=KeyError at=test_logs.py:" in first
    assert "error=KeyError" in second
    assert "once" not in lines.getvalue()


def test_as_json_every_line_is_an_object_with_the_same_and_numbers_are_numbers() -> None:
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    setup(LogSettings(format="json"), stream)
    try:
        log(LOGGER, logging.INFO, "request", {"status": 200, "took_ms": 1.5, "path": '/v1/"x"\n', "api_key": "sk-1"})
        log_text(LOGGER, "prompt", {"request_id": "r"}, "once\nupon")
        logging.getLogger("uvicorn").warning("a %s", "library's line")
    finally:
        root.handlers = handlers
        root.setLevel(level)
    request, prompt, other = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-.*Z", request.pop("time"))
    assert request == {
        "level": "info",
        "logger": "aegis.test",
        "event": "request",
        "status": 200,
        "took_ms": 1.5,
        "path": '/v1/"x" ',
        "api_key": "***",
    }
    assert prompt["text"] == "once upon"
    assert other["event"] == "a library's line"
