"""`--workload`: what it accepts, what it refuses and how, and the same bytes everywhere."""

from __future__ import annotations

from dataclasses import astuple
from hashlib import sha256
from statistics import correlation

import pytest

from aegis.core.errors import UserError
from bench.workloads.spec import GENERATORS, describe, override, parse


def digest(text: str, seed: int = 7) -> str:
    """Of what is drawn: no priority is."""
    arrivals = parse(text, seed)
    assert not any(arrival.priority for arrival in arrivals)
    return sha256(repr([astuple(arrival)[:4] for arrival in arrivals]).encode()).hexdigest()[:16]


PINNED = {
    "poisson:models=5,rps=0.5,duration=100": "e3dbc109ca2f7e1c",
    "gamma:models=5,rps=0.5,duration=100,cv=4": "303048688b04c31b",
    "gamma:models=5,rps=0.5,duration=100,cv=0.5": "0efba212e0694af2",
    "market:models=5,rps=0.5,duration=100": "11c0d6811afee594",
    "artifact:models=5,rps=0.5,duration=100": "157c61e996c0ff39",
    "grid:models=5,rows=4": "cf1c555f7eb2359b",
    "poisson:models=2,duration=100,lengths=uniform,input=8-512,output=8-512": "bcb3577ad0233558",
    "poisson:models=2,duration=100,ix=2,ox=1.5": "d2ac5ea2608ed8ad",
}


@pytest.mark.parametrize("text", PINNED)
def test_the_same_seed_makes_the_same_bytes_on_every_machine(text: str) -> None:
    assert digest(text) == PINNED[text]
    assert digest(text, seed=8) != PINNED[text]


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generator_works_by_its_name_alone(name: str) -> None:
    arrivals = parse(name, 1)
    assert len(arrivals) > 500
    assert arrivals == sorted(arrivals, key=lambda arrival: (arrival.at_ns, arrival.model))
    assert {arrival.model for arrival in arrivals} <= {f"m{index:03d}" for index in range(80)}


def test_more_models_leave_the_others_as_they_were() -> None:
    few, many = parse("poisson:models=3", 1), parse("poisson:models=9", 1)
    assert [arrival for arrival in many if arrival.model < "m003"] == few


def test_lengths_do_not_change_the_times() -> None:
    plain, fixed = parse("poisson:models=3", 1), parse("poisson:models=3,lengths=fixed,input=5,output=6,ox=2", 1)
    assert [arrival.at_ns for arrival in plain] == [arrival.at_ns for arrival in fixed]
    assert {(arrival.input_tokens, arrival.output_tokens) for arrival in fixed} == {(5, 12)}


def test_lengths_do_not_follow_from_times() -> None:
    """What comes late is not longer: a model's two kinds of chance are apart."""
    first = {arrival.model: arrival for arrival in reversed(parse("poisson:models=3000,duration=100", 1))}
    at, tokens = zip(*((arrival.at_ns, arrival.input_tokens) for arrival in first.values()), strict=True)
    assert abs(correlation(at, tokens)) < 0.1


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ("poison", "workload", "unknown workload 'poison'; expected one of poisson, gamma, market, artifact, grid"),
        ("poisson:rp=1", "rp", "workload poisson has no key 'rp'; did you mean 'rps'?"),
        ("gamma:alpha=1", "alpha", "workload gamma has no key 'alpha'; expected one of models, rps, duration, cv,"),
        ("poisson:rps=abc", "rps", "workload key 'rps': expected a number from 1e-06 to 1e+06, got 'abc'"),
        ("poisson:rps=nan", "rps", "got 'nan'"),
        ("poisson:models=٣", "models", "expected a whole number from 1 to 100000, got '٣'"),
        ("poisson:rps=1_0", "rps", "got '1_0'"),
        ("poisson:rps=-1", "rps", "got '-1'"),
        ("poisson:models=2.5", "models", "expected a whole number from 1 to 100000, got '2.5'"),
        ("gamma:cv=0", "cv", "workload key 'cv': expected a number from 0.01 to 100, got '0'"),
        ("poisson:ox=0", "ox", "workload key 'ox': expected a number from 0.001 to 1000, got '0'"),
        ("poisson:rps", "rps", "workload key 'rps' has no value"),
        ("poisson:rps=1,rps=1", "rps", "workload key 'rps' is given twice"),
        ("poisson:lengths=x", "lengths", "expected sharegpt, fixed or uniform, got 'x'"),
        ("poisson:input=9", "input", "workload key 'input' needs lengths=fixed or lengths=uniform"),
        ("poisson:lengths=fixed,input=1-9", "input", "expected a whole number of tokens, 1 or more, got '1-9'"),
        ("poisson:lengths=fixed,output=0", "output", "expected a whole number of tokens, 1 or more, got '0'"),
        ("poisson:lengths=uniform,input=9-3", "input", "expected LOW-HIGH with 1 <= LOW <= HIGH, got '9-3'"),
        ("grid:lengths=fixed", "lengths", "workload grid has no key 'lengths'; expected one of models, rows, prompt,"),
        ("grid:rows=0", "rows", "workload key 'rows': expected a whole number from 1 to 65536, got '0'"),
        ("grid:models=100000,rows=128", None, "more than 20,000,000 requests; lower models or rows"),
        ("poisson:models=100000,rps=1e6", None, "more than 20,000,000 requests; lower models, rps or duration"),
    ],
)
def test_what_cannot_be_is_refused_by_key(text: str, param: str | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, 1)
    assert message in caught.value.message
    assert caught.value.param == param


def test_a_key_can_be_set_anew() -> None:
    assert override("poisson:models=3,rps=1", "models", "5") == "poisson:models=5,rps=1"
    assert override("poisson", "rps", "0.5") == "poisson:rps=0.5"
    with pytest.raises(UserError, match="no key 'cv'"):
        parse(override("poisson", "cv", "2"), 1)


def test_the_listing_names_every_key_with_its_default() -> None:
    listing = describe()
    assert "  rps       mean requests per second and model [0.037]\n" in listing
    for name in GENERATORS:
        assert f"\n{name}: " in listing
    for key in (
        "models",
        "duration",
        "cv",
        "alpha",
        "group",
        "gap",
        "rows",
        "prompt",
        "answer",
        "every",
        "lengths",
        "input",
        "output",
        "ix",
        "ox",
    ):
        assert f"\n  {key} " in listing
