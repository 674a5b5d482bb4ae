"""What is refused before anything is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aegis.core.errors import UserError
from bench.interference.refusals import refuse_too_long, refuse_unmeasurable
from bench.interference.suite import SHORT_TOKENS, Setting
from bench.serve.models import Card

SETTING = Setting(
    base_url="http://u", model="a", other="b", prompts=(512, 100), stream_tokens=600, repeat=1, seed=0, label=""
)
LEAST = 600 + SHORT_TOKENS


@pytest.mark.parametrize(("own", "other"), [(LEAST, 513), (None, 513), (LEAST, None)])
def test_what_fits_the_contexts_is_not_refused(own: int | None, other: int | None) -> None:
    refuse_too_long(SETTING, Card("a", max_model_len=own), [Card("b", max_model_len=other)])


def test_what_does_not_is_told_with_its_option_and_the_most_that_fits() -> None:
    other = r"^--prompts: 512 tokens are too many, 'b' has a context of 512, 1 of it for the answer; give at most 511$"
    with pytest.raises(UserError, match=other):
        refuse_too_long(SETTING, Card("a", max_model_len=LEAST), [Card("b", max_model_len=512)])
    stream = r"^--tokens: 600 tokens are too many, 'a' has a context of 649, 50 of it for the prompt; give at most 599$"
    with pytest.raises(UserError, match=stream):
        refuse_too_long(SETTING, Card("a", max_model_len=LEAST - 1), [])


def test_an_address_that_no_server_can_have_is_not_asked() -> None:
    with pytest.raises(UserError, match=r"^--base-url: 'http://a\.\.b' is no address of a server"):
        refuse_unmeasurable(replace(SETTING, base_url="http://a..b"))


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_be_that_of_the_api(end: str) -> None:
    with pytest.raises(UserError, match=r"^no server at http://127\.0\.0\.1:1 \("):
        refuse_unmeasurable(replace(SETTING, base_url=f"http://127.0.0.1:1{end}"))
