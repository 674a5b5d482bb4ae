"""How far the launches of a prompt's layers run ahead of a GPU, which is played."""

from __future__ import annotations

from aegis.engine.gpu.layer_pace import LayerPace


class Playing:
    """A GPU that runs what was launched only when it is waited for."""

    def __init__(self) -> None:
        self.launched = 0
        self.run = 0

    @property
    def ahead(self) -> int:
        return self.launched - self.run

    def record(self) -> Event:
        self.launched += 1
        return Event(self, self.launched)


class Event:
    def __init__(self, gpu: Playing, number: int) -> None:
        self._gpu = gpu
        self._number = number

    def synchronize(self) -> None:
        self._gpu.run = max(self._gpu.run, self._number)


def test_no_more_layers_than_allowed_lie_before_a_slow_gpu() -> None:
    gpu = Playing()
    pace = LayerPace(gpu.record, ahead=3)
    ahead = list[int]()
    for _ in range(10):
        pace.layer()
        ahead.append(gpu.ahead)
    assert ahead == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]


def test_all_has_been_run_when_it_is_finished_and_the_next_prompt_begins_anew() -> None:
    gpu = Playing()
    pace = LayerPace(gpu.record, ahead=2)
    for _ in range(5):
        pace.layer()
    pace.finish()
    assert gpu.ahead == 0
    pace.layer()
    pace.layer()
    assert gpu.ahead == 2
