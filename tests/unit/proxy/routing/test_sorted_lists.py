"""Lists that stay in order: the same as sorting anew."""

from hypothesis import given
from hypothesis import strategies as st

from proxy.routing.sorted_lists import renew, renew_in_place

entries = st.tuples(st.integers(0, 9), st.sampled_from("ab"))


@given(st.sets(entries), entries, st.data())
def test_what_is_renewed_is_in_its_own_place(
    known: set[tuple[int, str]], new: tuple[int, str], data: st.DataObject
) -> None:
    ordered = sorted(known)
    old = data.draw(st.sampled_from([None, *ordered]))
    gone, came = data.draw(st.sampled_from([(old, new), (old, None), (None, new)]))
    renew(ordered, gone, came)
    assert ordered == sorted([*(each for each in sorted(known) if each != gone), *([came] if came else [])])


@given(st.sets(st.integers(0, 9), min_size=1), st.data())
def test_a_new_one_in_the_same_place_takes_it(known: set[int], data: st.DataObject) -> None:
    ordered = [(number, 0) for number in sorted(known)]
    at = data.draw(st.integers(0, len(ordered) - 1))
    expected = [(number, int(place == at)) for place, (number, _) in enumerate(ordered)]
    renew_in_place(ordered, ordered[at], (ordered[at][0], 1))
    assert ordered == expected
    renew_in_place(ordered, ordered[at], None)
    assert ordered == expected[:at] + expected[at + 1 :]
