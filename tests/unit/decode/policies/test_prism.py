"""The decisions of Prism and of the static rivals of its evaluation."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import BatchView, Turn, Work
from decode.policies.prism import Prism, Prompt, fewest_late
from decode.policies.static_places import StaticPlaces
from tests.unit.decode.policies.test_placing import A, B, C, D, Pool, X, Y, Z

SLICE_NS, LOAD_NS = 50, 400
POLICY = Prism(slice_ns=SLICE_NS)


def batch(number: int, *, prompts: int = 0, resident: bool = True, **fields: int) -> BatchView:
    given = {"step_ns": 10, "tbt_ns": 100, "switch_ns": LOAD_NS, "ttft_ns": 1000} | fields
    return BatchView(
        number,
        ModelId(f"m{number}"),
        requests=(),
        waiting=prompts,
        resident=resident,
        **given,  # type: ignore[arg-type]
    )


def order(turns: list[Turn]) -> list[int]:
    return [turn.batch for turn in turns]


# --- arbitration ----------------------------------------------------------------------------------------------------


def late(prompts: list[Prompt], batches: list[int], now_ns: int) -> int:
    by_batch, missed = {prompt.batch: prompt for prompt in prompts}, 0
    for number in batches:
        now_ns += by_batch[number].takes_ns
        missed += now_ns > by_batch[number].due_ns
    return missed


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 15)), max_size=6), st.integers(0, 10))
def test_as_few_prompts_are_late_as_in_any_order(drawn: list[tuple[int, int]], now_ns: int) -> None:
    prompts = [Prompt(due_ns, takes_ns, number) for number, (due_ns, takes_ns) in enumerate(drawn)]
    least = min(late(prompts, list(each), now_ns) for each in permutations(range(len(prompts))))
    chosen = fewest_late(prompts, now_ns)
    assert sorted(chosen) == list(range(len(prompts))) and late(prompts, chosen, now_ns) == least


def test_prompts_run_by_deadline_and_the_longest_is_put_off_where_not_all_can_be_on_time() -> None:
    batches = [
        batch(1, prompts=1, first_due_ns=300, prefill_ns=250),
        batch(2, prompts=1, first_due_ns=320, prefill_ns=100),
        batch(3, prompts=2, first_due_ns=340, prefill_ns=200),
        batch(4),
    ]
    turns = POLICY.plan(batches, 0)
    assert order(turns) == [2, 3, 1] and not any(turn.decodes for turn in turns)
    came_first = Prism(arbitrates=False).plan(batches, 0)
    assert order(came_first) == [1, 2, 3]


def test_a_prompt_whose_weights_are_away_takes_their_load_too() -> None:
    batches = [
        batch(1, prompts=1, first_due_ns=300, prefill_ns=100, resident=False),
        batch(2, prompts=1, first_due_ns=310, prefill_ns=100),
    ]
    assert order(POLICY.plan(batches, 0)) == [2, 1]


# --- turns ----------------------------------------------------------------------------------------------------------


def test_resident_models_decode_in_slices_and_who_has_to_come_back_has_longer() -> None:
    batches = [batch(1, decoded_ns=9), batch(2, resident=False, decoded_ns=1), batch(3, decoded_ns=5)]
    turns = POLICY.plan(batches, 10)
    assert [(turn.batch, turn.quota_ns) for turn in turns] == [(3, SLICE_NS), (1, SLICE_NS), (2, 8 * LOAD_NS)]
    assert POLICY.plan(batches[:1], 10) == [Turn(1, None)]


def test_static_models_take_turns_and_prompts_run_as_they_came() -> None:
    policy = StaticPlaces(100, slice_ns=SLICE_NS)
    prompts = [
        batch(1, prompts=1, first_due_ns=900, ttft_ns=100),
        batch(2, prompts=1, first_due_ns=1000, ttft_ns=900),
        batch(3),
    ]
    assert order(policy.plan(prompts, 0)) == [2, 1]
    turns = policy.plan([batch(1, decoded_ns=9), batch(2, decoded_ns=3)], 10)
    assert [(turn.batch, turn.quota_ns) for turn in turns] == [(2, SLICE_NS), (1, SLICE_NS)]
    assert not policy.rules.evicts


# --- places ---------------------------------------------------------------------------------------------------------


def test_a_request_goes_where_its_model_has_some_or_had_else_where_pressure_is_least() -> None:
    pool = Pool()
    (first,) = pool.holds(X, A)
    pool.holds(Y, B)
    assert [pool.asks(POLICY, model) for model in (A, B, C)] == [X, Y, Z]
    pool.holds(Z, D)
    pool.holds(Y, C)
    pool.lists.remove(X, first)
    pool.holds(X, C, D)
    assert pool.asks(POLICY, A) == X, "its weights may still be there"
    pool.lists.down(X)
    assert pool.asks(POLICY, A) in (Y, Z)


def test_the_most_wanted_models_are_apart_whoever_comes_first() -> None:
    """B and C are to have a device each, and the third one is for what is left."""
    rates = {A: 1.0, B: 9.0, C: 8.0, D: 2.0}
    assert [Pool().asks(StaticPlaces(100, rates), model) for model in (A, B, C, D)] == [Z, X, Y, Z]
    pool = Pool()
    pool.holds(X, A)
    assert pool.places(StaticPlaces(100, rates), D, C, B) == [X, Z, Y], "where A is there is the least rate after two"


def test_rates_of_models_that_have_a_place_count_there() -> None:
    pool = Pool()
    pool.lists.down(Z)
    pool.holds(X, A)
    pool.holds(Y, D)
    assert pool.asks(StaticPlaces(100, {A: 9.0, D: 1.0, C: 3.0}), C) == Y, "where more bytes are"


def test_without_rates_the_fewest_bytes_decide_and_what_fits_nowhere_is_refused() -> None:
    pool = Pool()
    assert pool.places(StaticPlaces(30), A, D, B, C) == [X, Y, Z, X]
    assert Pool().asks(StaticPlaces(20), D) is None
    assert pool.asks(StaticPlaces(20), A) == X, "where it is"


def test_a_static_place_is_lost_with_its_instance() -> None:
    pool, policy = Pool(), StaticPlaces(100, {A: 1.0, B: 1.0})
    assert pool.places(policy, A) == [X]
    pool.lists.down(X)
    assert pool.asks(policy, A) in (Y, Z)
    assert policy.place(Work(B, 10), pool.lists) != InstanceId("X")
