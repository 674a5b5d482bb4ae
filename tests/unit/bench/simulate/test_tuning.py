"""The search for a rival's best parameters, and what they are of a simulation."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from aegis.policies import RECIPES, Site
from aegis.sim.gpu_costs import gpu
from bench.simulate.contenders import APART, rivals
from bench.simulate.setting import Setting, pool_of, run
from bench.simulate.tuning import GRIDS, Knob, Parameters, climb, described, fitted, with_parameters

ONE, TWO = Knob("one", (1, 2, 3, 4), 2), Knob("two", (10, 20, 30), 20)
WORKLOAD = "poisson:models=3,rps=0.5,duration=5"


def scored(best: Parameters) -> Callable[[Parameters], float]:
    return lambda parameters: 0.9 - sum(abs(parameters[name] - value) for name, value in best.items()) / 100


@pytest.mark.parametrize("best", [{"one": 4, "two": 10}, {"one": 1, "two": 30}, {"one": 2, "two": 20}])
def test_the_best_parameters_are_found_whichever_way_they_lie(best: dict[str, float]) -> None:
    tuned = climb((ONE, TWO), scored(best))
    assert tuned.parameters == best
    assert tuned.probes[0].parameters == {"one": 2, "two": 20}
    tried = [tuple(probe.parameters.items()) for probe in tuned.probes]
    assert len(tried) == len(set(tried))
    assert max(probe.attainment for probe in tuned.probes) == 0.9


def test_a_knob_is_moved_again_when_another_one_has_changed_what_is_best() -> None:
    def score(parameters: Parameters) -> float:
        one, two = parameters["one"], parameters["two"]
        return (two if one <= 2 else 0) / 1000 + (one / 10 if two == 30 else 0)

    assert climb((ONE, TWO), score).parameters == {"one": 4, "two": 30}


def test_of_what_scans_the_best_is_found_behind_worse_ones() -> None:
    def score(parameters: Parameters) -> float:
        return {1: 0.5, 2: 0.4, 3: 0.1, 4: 0.8}[int(parameters["one"])] + parameters["two"] / 1000

    assert climb((ONE, TWO), score).parameters == {"one": 1, "two": 30}
    assert climb((TWO, replace(ONE, scans=True)), score).parameters == {"two": 30, "one": 4}


@pytest.mark.parametrize(("most", "tried"), [(1, 1), (3, 3), (24, 9)])
def test_no_more_is_tried_than_is_allowed(most: int, tried: int) -> None:
    assert len(climb((ONE, TWO), scored({"one": 4, "two": 10}), most=most).probes) <= tried
    assert len(climb((ONE, TWO), scored({"one": 4, "two": 10}), most=most).probes) >= min(most, 3)


def test_where_all_is_on_time_or_nothing_changes_it_stays_as_it_is() -> None:
    assert len(climb((ONE, TWO), lambda parameters: 1.0).probes) == 1
    assert climb((ONE, TWO), lambda parameters: 0.5).parameters == {"one": 2, "two": 20}


def test_every_split_of_few_gpus_is_one_step_from_the_next() -> None:
    for gpus, splits in ((2, [1]), (6, [1, 2, 3]), (16, [2, 3, 4, 5, 6, 7, 8])):
        share, *_ = fitted(GRIDS["aegaeon"], gpus)
        placed = [with_parameters(Setting(policy="", mixed=gpus), {share.name: value}) for value in share.values]
        assert [setting.prefill for setting in placed] == splits
        assert all(setting.prefill + setting.decode == gpus for setting in placed)
        assert share.default in share.values


def test_all_rivals_with_parameters_are_tuned_and_each_parameter_reaches_what_is_simulated() -> None:
    assert {contender.policy for contender in rivals() if not contender.knobs} == {"serverlessllm-oracle-sjf"}
    site, memory = Site(memory_bytes=1 << 40), gpu("h800").memory_bytes
    for contender in rivals():
        plain = pool_of(contender.of(Setting(policy="", workload=WORKLOAD)))
        for knob in contender.knobs:
            value = next(each for each in knob.values if each != knob.default)
            setting = with_parameters(contender.of(Setting(policy="", workload=WORKLOAD)), {knob.name: value})
            pool = pool_of(setting)
            if knob.name == "prefill_share":
                assert (pool.prefills, pool.decodes) == (2, 14)
            elif knob.name == "max_group_size":
                assert pool.recipe.prefill(site).max_group_size == value
            else:
                assert repr(pool.recipe.policy(site)) != repr(plain.recipe.policy(site))
    weights = with_parameters(Setting(policy="muxserve", workload=WORKLOAD), {"weights_share": 0.5})
    assert pool_of(weights).recipe.policy(site).weights_bytes_max == memory // 2  # type: ignore[attr-defined]


def test_defaults_are_those_of_the_policies() -> None:
    setting = Setting(policy="", workload=WORKLOAD)
    for contender in rivals():
        defaults = {knob.name: knob.default for knob in contender.knobs}
        plain, tuned = contender.of(setting), with_parameters(contender.of(setting), defaults)
        site = Site(memory_bytes=gpu("h800").memory_bytes, left=int)
        assert repr(pool_of(plain).recipe.policy(site)) == repr(pool_of(tuned).recipe.policy(site))
        assert run(plain).records == run(tuned).records
    assert set(APART) <= set(RECIPES)


def test_what_is_not_as_it_was_is_described() -> None:
    assert described({"prefill_share": 0.1875, "max_batch": 64, "q_max_s": 8}, 16) == "3+13, Q_MAX 8 s"
    assert described({"prefill_share": 0.1875, "max_batch": 128}) == "prefill 18.8%, batches of 128"
    everything = {"max_group_size": 4, "switching_share": 0.1, "slice_ms": 25, "weights_share": 0.875}
    assert described(everything) == "groups of 4, switching 10%, slices of 25 ms, weights 87.5%"
