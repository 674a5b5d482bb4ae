"""The environment of instances: how many threads each computes with, and what it keeps of compiled products."""

from __future__ import annotations

import os

import pytest

from aegis.node.instance_processes import environment_for


@pytest.mark.parametrize(
    ("cores", "processes", "threads", "threads_for_lanes"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1), (3, 1, 1, 2), (4, 1, 2, 2), (4, 2, 1, 2), (16, 1, 8, 8), (16, 7, 2, 2)],
)
def test_threads_are_shared_out_and_two_lanes_have_two_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, threads: int, threads_for_lanes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment_for(processes)["OMP_NUM_THREADS"] == str(threads)
    assert environment_for(processes, lanes=True)["OMP_NUM_THREADS"] == str(threads_for_lanes)


def test_what_the_user_says_of_threads_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert environment_for(1, lanes=True)["OMP_NUM_THREADS"] == "1"


def test_compiled_products_are_few_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    told = environment_for(1)
    assert (told["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], told["LRU_CACHE_CAPACITY"]) == ("7", "8")
