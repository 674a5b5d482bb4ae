"""The order of copies."""

from aegis.core.copy_order import served, urgency
from aegis.core.effects import StreamName


def test_kv_of_the_turn_comes_before_its_weights_and_both_before_what_is_for_later() -> None:
    wanted = [urgency(StreamName.SWAP_IN), urgency(StreamName.WEIGHTS), urgency(StreamName.PREFETCH)]
    assert wanted == sorted(set(wanted))
    assert urgency(StreamName.SWAP_IN, ahead=True) == urgency(StreamName.PREFETCH)
    assert urgency(StreamName.SWAP_OUT) == urgency(StreamName.SWAP_IN), "somebody waits for the room, or the KV"


def test_only_the_most_urgent_are_served() -> None:
    assert served([2, 1, 2]) == 1
    assert served([2]) == 2
