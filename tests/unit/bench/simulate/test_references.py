"""Our crossings beside published ones."""

from bench.simulate.references import CLAIMS, REFERENCES, compare
from bench.simulate.study import Curve
from bench.simulate.suites import SUITES, Form
from bench.simulate.sweep import Crossing


def test_all_that_is_published_belongs_to_a_suite() -> None:
    panels = {suite.name + panel.name for suite in SUITES.values() for panel in suite.panels}
    assert set(REFERENCES) <= panels
    assert set(CLAIMS) <= set(SUITES)
    assert all(suite.form is Form.CURVES or name in CLAIMS for name, suite in SUITES.items())


def test_a_difference_is_told_where_both_cross() -> None:
    curves = [Curve("serverlessllm", (), Crossing(at=22.0)), Curve("serverlessllm-oracle-sjf", (), Crossing(at=15.0))]
    told = {each.policy: each for each in compare("fig11b", curves, as_published=True)}
    assert sorted(told) == ["serverlessllm", "serverlessllm-oracle-sjf"]  # of the others there is no curve
    assert (told["serverlessllm"].theirs, told["serverlessllm"].difference_percent) == ("18", 22.2)
    assert (told["serverlessllm-oracle-sjf"].theirs, told["serverlessllm-oracle-sjf"].difference_percent) == (
        "< 16",
        None,
    )


def test_policies_as_published_and_mended_ones_are_not_compared() -> None:
    curves = [Curve("aegaeon", (), Crossing(at=70.0))]
    sources = [{each.source for each in compare("fig11a", curves, as_published=flag)} for flag in (False, True)]
    assert all(sources)
    assert not sources[0] & sources[1]
