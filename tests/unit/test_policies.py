"""The registry of schedulers."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from aegis.config.values import PolicyName
from aegis.core.errors import UserError
from aegis.core.role import Roles
from aegis.policies import RECIPES, Site, recipe, with_step_tokens
from decode.policies.weighted_round_robin import WeightedRoundRobin

SITE = Site(memory_bytes=100)
PUBLISHED = ("aegaeon", "serverlessllm", "serverlessllm-oracle-sjf", "muxserve")


def test_who_has_an_oracle_says_so_in_its_name_and_is_not_run_live() -> None:
    for name, known in RECIPES.items():
        try:
            known.policy(SITE)
        except UserError as error:
            assert "oracle" in name and "only `aegis simulate`" in error.message
        else:
            assert "oracle" not in name
    assert list(get_args(PolicyName)) == [name for name in RECIPES if "oracle" not in name]


def test_turns_are_as_they_are_configured() -> None:
    turns = WeightedRoundRobin(q_max_ns=5)
    assert recipe("aegaeon").policy(Site(memory_bytes=1, turns=turns)) == turns


def test_of_static_places_only_s_partition_divides_memory_for_kv() -> None:
    divided, shared = (recipe(name).policy(SITE) for name in ("s-partition", "muxserve++"))
    assert divided.rules.divides_kv and not shared.rules.divides_kv
    assert replace(divided.rules, divides_kv=False) == shared.rules and not shared.rules.evicts


@pytest.mark.parametrize(
    ("name", "asked", "counted", "roles"),
    [
        ("aegaeon", None, False, Roles.FIXED),
        ("aegaeon", Roles.AUTO, True, Roles.AUTO),
        ("serverlessllm", None, True, Roles.AUTO),
        ("serverlessllm", Roles.FIXED, False, Roles.FIXED),
        ("least-slack", None, False, Roles.AUTO),
        ("least-slack", None, True, Roles.FIXED),
        ("least-slack", Roles.AUTO, True, Roles.AUTO),
    ],
)
def test_roles_are_as_asked_else_as_the_policy_is_made_for_else_as_instances_were_counted(
    name: str, asked: Roles | None, counted: bool, roles: Roles
) -> None:
    assert recipe(name).roles_of(asked, counted=counted) is roles


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_published_the_link_is_slow_and_late_requests_fail(name: str) -> None:
    known = recipe(name, as_published=True)
    assert (known.link_bytes_per_s, known.give_up_ns) == (16_600_000_000, 15_000_000_000)
    fixed = recipe(name)
    assert fixed.link_bytes_per_s is fixed.give_up_ns is None
    assert known.roles is fixed.roles is (Roles.FIXED if name == "aegaeon" else Roles.AUTO)


@pytest.mark.parametrize(
    ("name", "as_published", "message"),
    [
        ("serverlesslm", False, "unknown policy 'serverlesslm'; did you mean 'serverlessllm'?"),
        ("x", False, f"unknown policy 'x'; expected one of {', '.join(RECIPES)}"),
        ("qlm", True, "policy 'qlm' has no published setting"),
    ],
)
def test_what_there_is_not_is_refused(name: str, as_published: bool, message: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(name, as_published=as_published)
    assert caught.value.message == message and caught.value.param == "policy"


def test_only_policies_that_cut_prompts_take_a_bound_for_them() -> None:
    site = Site(memory_bytes=1 << 30)
    assert with_step_tokens(recipe("least-slack").policy(site), 7, "least-slack").rules.step_tokens == 7
    with pytest.raises(UserError) as caught:
        with_step_tokens(recipe("aegaeon").policy(site), 7, "aegaeon")
    assert "runs prompts as a whole" in caught.value.message
