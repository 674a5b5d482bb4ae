"""Least slack: who has the turn, for how long, and where requests go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as struct_replace

from aegis.core.decision import Plan, Why
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lane_views import Companion, Division, LanesView
from aegis.core.views import BatchView, Renewal, TurnRules, Work
from decode.policies.least_slack import LeastSlack
from decode.slack import begin_by_ns
from proxy.routing.decode_lists import DecodeLists
from proxy.routing.demand import Demand

_MS = 1_000_000
_S = 1_000 * _MS
POLICY = LeastSlack(migrate_share=0.5, turn_factor=0.5)
A, B, C = (ModelId(name) for name in "abc")
X, Y = InstanceId("x"), InstanceId("y")


def batch(
    number: int,
    due_ms: int | None = None,
    *,
    first_due_ms: int | None = None,
    prefill_ms: int = 0,
    step_ms: int = 10,
    switch_ms: int = 1600,
    resident: bool = True,
    turn_ms: int | None = None,
    savable_ms: int | None = None,
    in_time_ms: int | None = None,
    worth: float = 1.0,
    ran_ms: int | None = None,
    change_ms: int = 0,
    active: bool = False,
) -> BatchView:
    """Of a model of its own, due every 100 ms. Unless `in_time_ms` says else, it is in time if its deadline is."""
    view = BatchView(
        number,
        ModelId(f"m{number}"),
        step_ms * _MS,
        100 * _MS,
        switch_ms * _MS,
        change_ms * _MS,
        waiting=int(first_due_ms is not None),
        prefill_ns=prefill_ms * _MS,
        first_due_ns=None if first_due_ms is None else first_due_ms * _MS,
        due_ns=None if due_ms is None else due_ms * _MS,
        savable_due_ns=None if savable_ms is None else savable_ms * _MS,
        ttft_ns=10 * _S,
        active=active,
        resident=resident,
        there=resident,
        turn_ns=None if turn_ms is None else turn_ms * _MS,
    )
    by_ns = begin_by_ns(view)
    in_time_ns = (by_ns if by_ns >= 0 else None) if in_time_ms is None else in_time_ms * _MS
    ran_ns = -1 if ran_ms is None else ran_ms * _MS
    return struct_replace(view, in_time_by_ns=in_time_ns, worth=worth, ran_ns=ran_ns)


def order(*batches: BatchView) -> list[int]:
    return [turn.batch for turn in POLICY.plan(batches, 0)]


def test_who_has_to_begin_first_comes_first() -> None:
    assert order(batch(1, 900), batch(2, 300), batch(3, 600)) == [2, 3, 1]
    assert order(batch(1, 900), batch(2, 900, step_ms=20)) == [2, 1], "a longer step begins earlier"
    assert order(batch(1, 900), batch(2, 2100, resident=False)) == [2, 1], "and who has to be brought in first"
    assert order(batch(1, 900), batch(2, 3000, first_due_ms=1100, prefill_ms=300)) == [2, 1], "and who is prefilled"
    assert order(batch(2, 900), batch(1, 900)) == [1, 2]
    assert order(batch(1, 900), batch(2, 950, change_ms=100)) == [2, 1], "and who is changed to"
    assert order(batch(1, 900), batch(2, 950, change_ms=100, active=True)) == [1, 2]


def test_turns_are_longer_where_changes_are() -> None:
    """Where it is calm, too, although all weights are there."""
    for busy_ms in (10, 60):
        short, long = (
            POLICY.plan([batch(at, 900, switch_ms=300, step_ms=busy_ms, change_ms=ms) for at in (1, 2)], 0)[0]
            for ms in (0, 200)
        )
        assert short.quota_ns is not None and long.quota_ns is not None
        assert long.quota_ns > 1.2 * short.quota_ns


def test_where_not_everybody_can_be_on_time_the_most_tokens_are_saved() -> None:
    """Who is late is worth little."""
    lost, late, saved = batch(1, -900, worth=0.1), batch(2, -5, worth=0.9), batch(3, 600)
    assert order(lost, late, saved) == [1, 2, 3], "there is time for all"
    lost, late, saved = (struct_replace(each, step_ns=40 * _MS) for each in (lost, late, saved))
    assert order(lost, late, saved) == [2, 3, 1]


def test_who_is_shed_has_a_quantum_with_its_prefills() -> None:
    lost, saved = batch(1, first_due_ms=-900, prefill_ms=3000, step_ms=60, worth=0.1), batch(2, 600, step_ms=60)
    first, second = POLICY.plan([lost, saved], 0)
    assert (first.batch, first.quota_ns) == (2, 2 * _S) and (second.batch, second.quota_ns) == (1, 2 * _S)


def test_a_full_batch_that_is_kept_goes_on_until_somebody_has_to_begin() -> None:
    """The first two are of one model: its batch is full. A quantum is two seconds."""
    full = batch(1, 9000, step_ms=40, ran_ms=500)
    waits = struct_replace(batch(2, 9500, step_ms=40, worth=0.1), model=full.model)
    kept = batch(3, 3000, step_ms=40, ran_ms=100)
    assert order(full, waits, kept)[0] == 1
    plan = Plan((full, waits, kept), POLICY.plan((full, waits, kept), 0), 0)
    assert POLICY.why_turn(plan, 0).because.startswith("others of its model wait for its places")
    assert order(full, struct_replace(waits, model=ModelId("other")), kept)[0] == 3, "it has places left"
    assert order(struct_replace(full, ran_ns=50 * _MS), waits, kept)[0] == 3, "another one ran last"
    assert order(full, waits, batch(3, 1900, step_ms=40, ran_ms=100))[0] == 3, "it has to begin"
    assert order(full, waits, struct_replace(kept, step_ns=1))[0] == 3, "there is time for all"
    lost = struct_replace(full, in_time_by_ns=None, worth=0.01)
    assert order(lost, waits, kept)[0] == 3, "it is shed itself"
    put_off = batch(4, -36_500, step_ms=40, in_time_ms=None, worth=0.01, ran_ms=-1)
    assert order(full, waits, kept, put_off)[0] == 3, "another may be put off no longer than until it has to begin"
    assert order(full, waits, kept, struct_replace(put_off, due_ns=-20 * _S))[0] == 1
    saved = batch(3, 9500, step_ms=40)
    assert order(full, waits, saved)[0] == 2, "there is time to spare"


def test_the_running_batch_keeps_its_turn_for_a_quantum() -> None:
    """Half of √(1.6 s · 10 s)."""
    busy = [batch(number, 100, step_ms=30) for number in (1, 2)]
    assert order(*busy, batch(3, 5000, turn_ms=1999)) == [3, 1, 2]
    assert order(*busy, batch(3, 5000, turn_ms=2000)) == [1, 2, 3]
    assert [turn.quota_ns for turn in POLICY.plan(busy, 0)] == [2 * _S, 2 * _S]
    abreast = [struct_replace(each, abreast=0.5) for each in busy]
    assert [turn.quota_ns for turn in POLICY.plan(abreast, 0)] == [3 * _S, 3 * _S], "others wait for fewer turns"


@pytest.mark.parametrize(("gain", "prompt", "steps"), [(1.04, False, False), (1.09, True, False), (1.11, True, True)])
def test_another_batch_goes_on_beside_a_decode_for_more_gain_than_a_prompt(
    gain: float, prompt: bool, steps: bool
) -> None:
    """The prompt is short: it would not be cut."""
    first, second = (struct_replace(batch(number, 5000), gap_ns=_S) for number in (1, 2))
    for prefills, wanted in ((True, prompt), (False, steps)):
        companion = Companion(second, prefills, 1, [Division((500, 500), 1, 1, gain)])
        assert (POLICY.beside(LanesView(first, 1, [companion]), 0) is not None) is wanted


def test_a_turn_is_long_enough_to_fill_a_batch() -> None:
    """Where a switch takes next to nothing: half of √(90 ms · 10 s)."""
    turns = POLICY.plan([batch(number, 100, step_ms=90, switch_ms=1) for number in (1, 2)], 0)
    assert [turn.quota_ns for turn in turns] == [474_341_649] * 2


def test_turns_are_longer_where_prefills_are_lost_in_between() -> None:
    busy = [batch(at, first_due_ms=900, prefill_ms=2000, step_ms=60, switch_ms=1) for at in (1, 2)]
    calm = [struct_replace(each, step_ns=5 * _MS) for each in busy]
    for batches in (busy, calm):
        again = [struct_replace(each, again_ns=each.prefill_ns) for each in batches]
        once, more = (POLICY.plan(each, 0)[0].quota_ns for each in (batches, again))
        assert once is not None and more is not None and more > once + _S


def test_prefills_are_not_taken_from_the_quantum() -> None:
    (turn,) = POLICY.plan([batch(1, first_due_ms=100, prefill_ms=700, step_ms=70)], 0)
    assert turn.quota_ns == 2700 * _MS


PIECE_MS = 15  # the least of a prompt that is cut


def stream(number: int, *, waited_ms: int, savable_ms: int = 60_000, prompt_ms: int = 0) -> BatchView:
    """One whose streams had a token so long ago, at a gap target of 500 ms; a prompt of that length waits."""
    view = batch(number, savable_ms, savable_ms=savable_ms, first_due_ms=9_000 if prompt_ms else None)
    view = struct_replace(view, gap_ns=500 * _MS, stream_ns=-waited_ms * _MS)
    length_ns = prompt_ms * _MS
    view = struct_replace(view, piece_ns=length_ns if prompt_ms <= 250 else PIECE_MS * _MS)
    return struct_replace(view, prefill_ns=length_ns, prompt_ns=length_ns, prompt_rank_ns=length_ns or None)


def prompt(number: int, prompt_ms: int, *, at: int = 0, due_ms: int = 9_000, resident: bool = True) -> BatchView:
    """One of which nobody decodes."""
    view = batch(number, first_due_ms=due_ms, prefill_ms=prompt_ms, resident=resident)
    view = struct_replace(view, piece_ns=(prompt_ms if prompt_ms <= 250 else PIECE_MS) * _MS)
    return struct_replace(view, gap_ns=500 * _MS, prompt_ns=prompt_ms * _MS, prompt_rank_ns=(at + prompt_ms) * _MS)


def test_a_piece_ends_where_a_stream_that_is_there_needs_a_step() -> None:
    """Half its gap target after its last token, or in time for a token that can be saved, less the step itself."""
    long = prompt(1, 5_000, due_ms=1_000)
    for streams, free_ms in (
        ([stream(2, waited_ms=10)], 230),
        ([stream(2, waited_ms=100), stream(3, waited_ms=10)], 140),
        ([stream(2, waited_ms=10, savable_ms=120)], 110),
        ([struct_replace(stream(2, waited_ms=100), there=False)], 500),
        ([], 500),
    ):
        first, *_ = POLICY.plan([long, *streams], 0)
        assert (first.batch, first.pause, first.free_until_ns) == (1, False, free_ms * _MS)
    whole = replace(POLICY, rules=TurnRules(renewal=Renewal.ARRIVAL))
    assert {turn.free_until_ns for turn in whole.plan([long, stream(2, waited_ms=10)], 0)} == {None}, "it cuts none"


def test_a_piece_is_worth_two_steps() -> None:
    first, *_ = POLICY.plan([stream(1, waited_ms=240, prompt_ms=5_000)], 0)
    assert first.free_until_ns == 20 * _MS


def test_a_turn_pauses_for_a_step_of_streams_that_have_waited_for_half_their_gap() -> None:
    pause, first, *_ = POLICY.plan([prompt(1, 5_000, due_ms=1_000), stream(2, waited_ms=235)], 0)
    assert (pause.batch, pause.pause, pause.prefills, pause.decodes) == (2, True, False, True)
    assert (first.batch, first.pause) == (1, False)


def test_a_prompt_that_is_not_cut_begins_after_the_step_for_which_it_would_end_too_late() -> None:
    """And one that is cut, if its least piece would. The stream has waited for so long, and its step takes 10 ms."""
    for prompt_ms, waited_ms, pauses in ((200, 40, 0), (200, 41, 1), (250, 0, 1), (5_000, 225, 0), (5_000, 226, 1)):
        turns = POLICY.plan([prompt(1, prompt_ms, due_ms=1_000), stream(2, waited_ms=waited_ms)], 0)
        assert [turn.pause for turn in turns] == [True] * pauses + [False, False], (prompt_ms, waited_ms)
        assert prompt_ms > 250 or pauses or turns[0].free_until_ns is None, "nothing has to be cut"
    deep = struct_replace(prompt(1, 5_000, due_ms=1_000), piece_ns=300 * _MS)
    pause, turn, _ = POLICY.plan([deep, stream(2, waited_ms=10)], 0)
    assert pause.pause and turn.free_until_ns == 230 * _MS, "a piece is no longer for it where it has just paused"


def test_streams_take_half_of_the_time_at_most() -> None:
    """Fifteen with steps of 10 ms have one each every 300 ms instead of every 250; late tokens are not saved then."""
    long = struct_replace(prompt(1, 5_000, due_ms=1_000), worth=20.0)
    for waited_ms, pauses in ((280, 15), (270, 0)):
        many = [stream(number, waited_ms=waited_ms, savable_ms=1) for number in range(2, 17)]
        turns = POLICY.plan([long, *many], 0)
        assert [turn.pause for turn in turns] == [True] * pauses + [False] * 16
        assert pauses or turns[0].free_until_ns == 150 * _MS, "a piece takes as long as all steps"
    few = [stream(number, waited_ms=0, savable_ms=1) for number in range(2, 7)]
    assert [turn.pause for turn in POLICY.plan([long, *few], 0)] == [True] * 5 + [False] * 6


def test_a_prompt_that_fits_in_a_piece_comes_before_one_that_does_not() -> None:
    """Unless it came later than that by its length, or its model is away."""
    long = prompt(1, 5_000, due_ms=1_000)
    short, later = prompt(2, 200, at=4_700), prompt(3, 200, at=4_800)
    pause, first, *_ = POLICY.plan([long, later, short], 0)
    assert (pause.batch, pause.pause, pause.prefills, pause.decodes) == (2, True, True, False) and first.batch == 1
    for other in (later, prompt(2, 300), prompt(2, 200, resident=False)):
        assert not any(turn.pause for turn in POLICY.plan([long, other], 0))
    assert not any(turn.pause for turn in POLICY.plan([prompt(1, 250, due_ms=1_000), short], 0)), "the first fits too"


def test_who_has_time_to_spare_changes_sooner() -> None:
    """No longer than switching is worth."""
    (there,) = POLICY.plan([batch(1, 100)], 0)
    assert there.quota_ns == 30 * _MS
    turns = POLICY.plan([batch(1, 100), batch(2, 100, switch_ms=200, resident=False)], 0)
    assert [turn.quota_ns for turn in turns] == [830 * _MS] * 2


def lists() -> DecodeLists:
    """A step of A takes 40 % of the time, of B 20 % and of C 10 %, and each token 1 % more."""
    weights = {A: 40, B: 20, C: 10}
    made = DecodeLists(
        dict.fromkeys(weights, 1000), weights, lambda model, tokens: Demand(10_000 * (weights[model] + tokens), 0, 0)
    )
    made.up(X)
    made.up(Y)
    return made


def test_models_are_spread() -> None:
    made = lists()
    for request, model in enumerate((A, B, C)):
        work = Work(model, 1)
        made.add(POLICY.place(work, made), RequestId(request), work)
    assert [made.home(model) for model in (A, B, C)] == [X, Y, Y]


def test_nothing_in_flight_models_go_where_less_was_ever_placed() -> None:
    made = lists()
    made.add(X, RequestId(1), Work(A, 1))
    made.remove(X, RequestId(1))
    assert POLICY.place(Work(B, 1), made) == Y


def test_requests_follow_their_model_until_elsewhere_it_is_much_better() -> None:
    made = lists()
    made.add(X, RequestId(1), Work(B, 30))
    assert POLICY.place(Work(B, 1), made) == X
    made.add(X, RequestId(2), Work(B, 1))
    assert POLICY.place(Work(B, 1), made) == Y
    made.add(Y, RequestId(3), Work(B, 1))
    assert POLICY.place(Work(B, 1), made) == Y, "the last one of its model went there"


def test_a_model_with_no_requests_left_goes_where_the_pressure_is_least() -> None:
    made = lists()
    made.add(X, RequestId(1), Work(A, 1))
    made.remove(X, RequestId(1))
    assert POLICY.place(Work(A, 1), made) == X, "its weights may be there still"
    made.add(X, RequestId(2), Work(C, 1))
    assert POLICY.place(Work(A, 1), made) == Y


# --- and why ----------------------------------------------------------------------------------------------------------


def why(*batches: BatchView, at: int = 0) -> Why:
    return POLICY.why_turn(Plan(batches, POLICY.plan(batches, 0), 0), at)


def test_a_turn_is_explained_by_slack_cost_and_who_came_second() -> None:
    told = why(batch(1, 900), batch(2, first_due_ms=1500, prefill_ms=300, resident=False, switch_ms=450))
    assert told == Why(
        "must begin in 740 ms (first token due in 1.5 s, prefill 300 ms, step 10 ms, weights 450 ms); "
        "next m1, which must begin in 890 ms (next token due in 900 ms, step 10 ms)",
        slack_ns=740 * _MS,
        cost_ns=750 * _MS,
        lost="m1",
        lost_slack_ns=890 * _MS,
        lost_cost_ns=0,
    )
    assert why(batch(1, -20)).because == "had to begin 30 ms ago (next token due 20 ms ago, step 10 ms)"


def test_who_keeps_the_turn_says_how_much_of_it_is_left() -> None:
    busy = [batch(number, 100, step_ms=30) for number in (1, 2)]
    told = why(*busy, batch(3, 5000, turn_ms=500))
    assert told.because.startswith("has had 500 ms of at least 2 s; must begin in 4.99 s")
    assert (told.lost, told.lost_slack_ns) == ("m1", 70 * _MS)


@given(st.lists(st.tuples(st.integers(-5000, 5000), st.booleans(), st.booleans()), min_size=2, max_size=8), st.data())
def test_nobody_has_the_turn_before_one_with_less_slack_unless_it_keeps_it(
    drawn: list[tuple[int, bool, bool]], data: st.DataObject
) -> None:
    running = data.draw(st.none() | st.integers(0, len(drawn) - 1))
    batches = [
        batch(
            number,
            None if waits else due_ms,
            first_due_ms=due_ms if waits else None,
            prefill_ms=70 * waits,
            resident=resident,
            turn_ms=data.draw(st.integers(0, 3000)) if number == running else None,
        )
        for number, (due_ms, waits, resident) in enumerate(drawn)
    ]
    for at in range(len(batches) - 1):
        told = why(*batches, at=at)
        assert told.slack_ns is not None and told.lost_slack_ns is not None
        assert (told.slack_ns > told.lost_slack_ns) == told.because.startswith("has had")


def test_who_is_put_off_is_told() -> None:
    lost, saved = batch(1, -900, step_ms=60, worth=0.1), batch(2, 600, step_ms=60)
    told = why(lost, saved)
    assert told.because.startswith(
        "not everybody can be on time, and others make fewer tokens on time per second; must begin in 540 ms ("
    )
    assert told.lost == "m1"


def test_who_has_been_put_off_for_long_enough_is_told() -> None:
    lost, saved = batch(1, -900_000, step_ms=60, worth=0.1), batch(2, 600, step_ms=60)
    told = why(lost, saved)
    assert told.because.startswith("not everybody can be on time, and it has been put off for long enough; had to")
    assert told.lost == "m2"


def test_who_is_late_beside_others_in_time_is_told() -> None:
    beside, saved = batch(1, -900, step_ms=40, in_time_ms=800), batch(2, 600, step_ms=40)
    assert why(beside, saved, batch(3, 600, step_ms=60, worth=0.1)).because.startswith(
        "others that have to begin sooner are late already; must begin in 560"
    )


def why_place(made: DecodeLists, model: ModelId) -> tuple[str, str | None]:
    work = Work(model, 1)
    told = POLICY.why_place(work, made, POLICY.place(work, made))
    return told.because, told.lost


def test_a_place_is_explained_by_home_and_pressure() -> None:
    made = lists()
    assert why_place(made, B) == ("least pressed: its requests want 0 % of its time; y's want 0 %", Y)
    made.add(X, RequestId(1), Work(B, 30))
    assert why_place(made, B) == ("home of its model; y is 50 % freer, not more than the 50 % that a move needs", Y)
    made.add(X, RequestId(2), Work(B, 1))
    assert why_place(made, B) == ("51 % freer than its model's home x, more than the 50 % that a move needs", X)
    made.add(Y, RequestId(3), Work(B, 1))
    assert why_place(made, B) == ("home of its model, and least pressed", None)
    made.remove(Y, RequestId(3))
    made.add(Y, RequestId(4), Work(A, 40))
    assert why_place(made, B)[0] == "29 % freer than its model's home y, more than nothing, and none are left at home"


def test_a_model_whose_batch_is_full_is_served_elsewhere_too() -> None:
    policy, made = replace(POLICY, migrate_share=20.0), lists()
    made.add(X, RequestId(1), Work(B, 990))
    assert policy.place(Work(B, 10), made) == X
    assert policy.place(Work(B, 11), made) == Y
    made.add(Y, RequestId(2), Work(B, 11))
    assert policy.place(Work(B, 10), made) == Y, "and stays there while that has room"
    made.add(Y, RequestId(3), Work(B, 985))
    assert policy.place(Work(B, 10), made) == X, "with room nowhere the pressure decides"


def test_a_second_batch_at_home_is_joined_only_while_that_is_least_pressed() -> None:
    """It would take its turns from the first one."""
    policy, made = replace(POLICY, migrate_share=20.0), lists()
    made.add(Y, RequestId(1), Work(C, 999))
    made.add(X, RequestId(2), Work(B, 600))
    made.add(X, RequestId(3), Work(B, 600))
    assert policy.place(Work(B, 10), made) == Y
    told = policy.why_place(Work(B, 10), made, Y)
    assert told.because.endswith("freer than its model's home x, more than nothing, and it has 2 batches at home")
    made.add(Y, RequestId(4), Work(C, 999))
    assert policy.place(Work(B, 10), made) == X


def companion(of: BatchView, *, prefills: bool, step_ms: int) -> Companion:
    """Beside a decode whose steps take so long with half of the device."""
    division = Division((500, 500), step_ms * _MS, step_ms * _MS, 1.4)
    return Companion(of, prefills, 50 * _MS, [division])


def test_nothing_that_is_due_later_runs_beside_a_decode_whose_prompt_could_not() -> None:
    """That waits as long as anything is beside the decode, so for as long as both go on."""
    decoding, other = (struct_replace(batch(at, 200 * at), gap_ns=500 * _MS) for at in (1, 2))
    prompt = companion(decoding, prefills=True, step_ms=150)
    steps = companion(other, prefills=False, step_ms=20)
    alone = POLICY.beside(LanesView(decoding, 10 * _MS, [steps]), 0)
    assert alone is not None and alone.batch == 2
    assert POLICY.beside(LanesView(decoding, 10 * _MS, [prompt, steps]), 0) is None
    sooner = companion(struct_replace(other, due_ns=100 * _MS), prefills=False, step_ms=20)
    assert POLICY.beside(LanesView(decoding, 10 * _MS, [prompt, sooner]), 0) == alone


@pytest.mark.parametrize(("first_ms", "second_ms", "within_ms"), [(9000, 9000, 400), (9000, 1000, 140), (100, 900, 14)])
def test_another_batch_goes_on_beside_a_decode_for_a_part_of_the_shorter_ttft(
    first_ms: int, second_ms: int, within_ms: int
) -> None:
    """A prompt that arrives meanwhile waits for the end of that."""
    ttfts_ms = {1: first_ms, 2: second_ms}
    first, second = (struct_replace(batch(at, 5000), gap_ns=_S, ttft_ns=ttft * _MS) for at, ttft in ttfts_ms.items())
    choice = POLICY.beside(LanesView(first, 10 * _MS, [companion(second, prefills=False, step_ms=20)]), 0)
    assert choice is not None and choice.within_ns == within_ms * _MS


def test_nobody_in_time_is_slowed_down_for_who_is_late() -> None:
    """Who is late has to begin first, and under overload somebody always is."""
    decoding, waits, late = (struct_replace(batch(at, due), gap_ns=_S) for at, due in ((1, 500), (2, 400), (3, -900)))
    steps = {of.batch: companion(of, prefills=False, step_ms=20) for of in (waits, late)}
    prompt = companion(late, prefills=True, step_ms=20)
    choice = POLICY.beside(LanesView(decoding, 10 * _MS, [prompt, steps[3], steps[2]]), 0)
    assert choice is not None and choice.batch == 2
    assert POLICY.beside(LanesView(decoding, 10 * _MS, [prompt, steps[3]]), 0) is None
    own = POLICY.beside(LanesView(late, 10 * _MS, [prompt]), 0)
    assert own is not None and own.batch == 3, "but for its own prompt"


def test_the_largest_share_will_do_for_a_prompt_where_only_the_margin_of_the_guard_is_missing() -> None:
    """With a target of 100 ms for the steps of the decode."""
    stream = struct_replace(batch(1, 900), gap_ns=500 * _MS, tbt_ns=100 * _MS)
    for step_ms, chosen in ((109, True), (111, False)):
        choice = POLICY.beside(LanesView(stream, 60 * _MS, [companion(stream, prefills=True, step_ms=step_ms)]), 0)
        assert (choice is not None) is chosen
    steps = companion(struct_replace(batch(2, 900), gap_ns=500 * _MS, tbt_ns=100 * _MS), prefills=False, step_ms=109)
    assert POLICY.beside(LanesView(stream, 60 * _MS, [steps]), 0) is None, "not for a decode"


@pytest.mark.parametrize(
    ("slower", "due_ms", "runs"),
    [(4, 1000, True), (4, 700, False), (4, 100, True), (2, 700, True)],
    ids=["in time", "late by that", "late anyhow", "as soon as in pieces"],
)
def test_no_first_token_is_made_late_by_a_small_share(slower: int, due_ms: int, runs: bool) -> None:
    """Prompts of 200 ms in all, beside steps of 50 ms, between which pieces of 125 ms would take 280 ms for them."""
    stream = struct_replace(
        batch(1, 900), gap_ns=250 * _MS, tbt_ns=100 * _MS, prefill_ns=200 * _MS, first_due_ns=due_ms * _MS
    )
    division = Division((750, 250), 80 * _MS, 100 * slower * _MS, 1.4)
    prompt = Companion(stream, True, 100 * _MS, [division])
    assert (POLICY.beside(LanesView(stream, 50 * _MS, [prompt]), 0) is not None) is runs


def test_a_turn_whose_weights_are_on_their_way_pauses_for_streams() -> None:
    """Those that are there, in order; it is given first, or nothing would be loaded for it."""
    loading = struct_replace(batch(1, 100, turn_ms=0), there=False)
    away = batch(4, 400, resident=False)
    turns = POLICY.plan([loading, stream(2, waited_ms=10), away, stream(3, waited_ms=20)], 0)
    assert [(turn.batch, turn.prefills) for turn in turns if turn.pause] == [(2, False), (3, False)]
    assert turns[2].batch == 1 and all(turn.quota_ns == turns[2].quota_ns for turn in turns[:2])
    losing = struct_replace(stream(2, waited_ms=10), again_ns=_MS)
    assert not any(turn.pause for turn in POLICY.plan([loading, losing], 0)), "it would grow into room for others' KV"
    short = struct_replace(loading, switch_ns=9 * _MS)
    assert not any(turn.pause for turn in POLICY.plan([short, stream(2, waited_ms=10)], 0)), "a step takes longer"
    for front in (struct_replace(loading, turn_ns=None), struct_replace(loading, there=True)):
        assert not any(turn.pause for turn in POLICY.plan([front, stream(2, waited_ms=10), away], 0))
