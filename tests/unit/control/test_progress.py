from aegis.control.progress import STEP_S_MAX, LoopProgress, Progress


def test_a_main_loop_that_turns_gets_on() -> None:
    loop_progress = LoopProgress()
    progress = Progress(loop_progress)
    first = progress.value(0.5, 0.1)
    loop_progress.passes += 1
    assert progress.value(1.0, 0.1) > first


def test_one_that_waits_for_ever_does_not() -> None:
    progress = Progress(LoopProgress())
    values = [progress.value(0.5 * n, 0.1 + 0.001 * n) for n in range(1, 10)]  # the thread itself uses a little
    assert len(set(values)) == 1


def test_a_long_step_gets_on_while_it_uses_the_processor() -> None:
    progress = Progress(LoopProgress())
    values = [progress.value(0.5 * n, 0.4 * n) for n in range(1, 21)]
    assert values == sorted(set(values))


def test_a_step_may_not_take_for_ever_however_busy_it_is() -> None:
    progress = Progress(LoopProgress())
    end = int(STEP_S_MAX) + 2
    values = [progress.value(float(n), float(n)) for n in range(end, 2 * end)]
    assert len(set(values[-2:])) == 1
