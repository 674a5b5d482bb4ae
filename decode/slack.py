"""The time by which a batch has to begin."""

from __future__ import annotations

from aegis.core.views import BatchView


def begin_by_ns(batch: BatchView) -> int:
    """The latest start with which no token that the batch waits for is late: its next deadline, less the time of a
    change to its model, of a step and, if it waits for a first token, of its prefills."""
    first, due = batch.first_due_ns, batch.due_ns
    by_ns = first - batch.prefill_ns if first is not None else due
    if by_ns is None or (due is not None and due < by_ns):
        by_ns = due
    assert by_ns is not None, "a batch that waits for no token"
    by_ns -= batch.step_ns  # and `until_first_run_ns`, without a call: with many models this is most of a plan
    if not batch.resident:
        by_ns -= batch.switch_ns
    return by_ns if batch.active else by_ns - batch.change_ns


def until_first_run_ns(batch: BatchView) -> int:
    """The time until its first run can begin."""
    return (0 if batch.resident else batch.switch_ns) + (0 if batch.active else batch.change_ns)
