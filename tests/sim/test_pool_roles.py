"""Pools whose instances prefill or decode: limits, fixed sizes, and what systems make of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_plays import CLUSTER, S, burst, cluster, made

from livescale.common.errors import UserError
from livescale.lab.commands.pool_choices import parse_model
from livescale.sim.pools.configs import build_config
from livescale.sim.pools.limits import PooledModel, PooledRoles, PoolError
from livescale.sim.pools.runs import PoolRun, lead_ns, run_pool
from livescale.sim.pools.systems import SYSTEMS, find_system
from livescale.values.scaling_policies import ROLES
from livescale.values.types import Outcome

MODEL = PooledModel("m", "llama-3-8b", roles=PooledRoles())


@given(
    least=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    most=st.tuples(st.none() | st.integers(1, 20), st.none() | st.integers(1, 20)),
)
def test_each_role_has_limits_and_leaves_room_for_the_other(
    least: tuple[int, int], most: tuple[int | None, int | None]
) -> None:
    roles = PooledRoles(least[0], most[0], least[1], most[1])
    model = PooledModel("m", "llama-3-8b", roles=roles)
    tops = [16 - least[1 - i] if top is None else top for i, top in enumerate(most)]
    if any(low > top for low, top in zip(least, tops, strict=True)):
        with pytest.raises(PoolError, match="instances at least, and at most"):
            build_config(made(count=8), [model], SYSTEMS["livescale"])
        return
    (policy,) = build_config(made(count=8), [model], SYSTEMS["livescale"]).policies
    assert tuple(limits.role for limits in policy.roles) == ROLES
    for limits, low, top, other in zip(policy.roles, least, tops, least[::-1], strict=True):
        assert (limits.instances_min, limits.instances_max) == (low, min(top, 16 - other))
    assert policy.instances_min == sum(least)


@given(
    split=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    count=st.integers(2, 16),
)
def test_a_fixed_pool_is_divided_as_the_model_says(split: tuple[int, int], count: int) -> None:
    model = PooledModel("m", "llama-3-8b", roles=PooledRoles(split=split))
    prefill, decode = counts(model, f"fixed:{count}")
    assert prefill + decode == count
    assert min(prefill, decode) >= 1
    wanted = count * split[0] / sum(split)
    assert abs(prefill - wanted) <= 0.5 or min(prefill, decode) == 1


def test_fixed_pools_with_roles() -> None:
    model = PooledModel("m", "llama-3-8b", roles=PooledRoles(split=(10, 6)))
    assert counts(model, "fixed-full") == (10, 6)
    assert counts(model, "fixed-half") == (5, 3)
    assert counts(model, "fixed:7+2") == (7, 2)
    both = build_config(made(), [PooledModel("m", "llama-3-8b")], find_system("fixed:3+1"))
    assert (both.policies[0].instances_min, both.policies[0].roles) == (4, ())
    with pytest.raises(PoolError, match="1 instance is none for each role"):
        counts(model, "fixed:1")
    with pytest.raises(PoolError, match=r"fixed:9\+8 needs 17 devices"):
        counts(model, "fixed:9+8")


def test_a_pool_without_room_for_both_roles_is_refused() -> None:
    model = PooledModel("m", "llama-3-8b", roles=PooledRoles(3, None, 2, None))
    with pytest.raises(PoolError, match=r"3 prefill and 2 decode instances.*room for 4"):
        build_config(made(), [model], SYSTEMS["livescale"])


def test_the_flag_names_limits_of_both_roles() -> None:
    for text, roles in (
        ("prefill=2-14,decode=1-2,split=10+6", PooledRoles(2, 14, 1, 2, (10, 6))),
        ("prefill=3", PooledRoles(3, 3)),
        ("decode=2-", PooledRoles(decode_min=2)),
    ):
        expected = PooledModel("mistral-24b", "mistral-24b", 2, roles=roles)
        assert parse_model(f"mistral-24b,tp=2,{text}") == expected
    for text in ("prefill=", "decode=2-1-", "split=2", "split=0+1", "prefill=-3"):
        with pytest.raises(UserError, match="is not one of"):
            parse_model(f"llama-3-8b,{text}")
    with pytest.raises(UserError, match="roles replace min and max"):
        parse_model("llama-3-8b,min=2,prefill=1-2")
    with pytest.raises(ValueError, match="at least"):
        build_config(made(), [parse_model("llama-3-8b,prefill=3-2")], SYSTEMS["livescale"])


SYSTEMS_TRIED = (
    *("livescale", "livescale-bounds", "livescale-stop"),
    *("serverlessllm-30s", "allcache", "fixed:2+2"),
)


@pytest.mark.parametrize("name", SYSTEMS_TRIED)
def test_systems_serve_with_roles(name: str) -> None:
    """The same System value, of a model with roles: every request ends, at a decode instance."""
    run = play(name)
    assert [line.outcome for line in run.result.requests] == [Outcome.FINISHED] * 120
    prefill, decode = run.config.policies[0].roles
    counts = run.result.instances
    before = [count for count in counts if count.now_ns < run.started_ns]
    held = [before[-1], *counts[len(before) :]]
    for count in held:
        assert prefill.instances_min <= count.living - count.decode
        assert decode.instances_min <= count.decode <= decode.instances_max


def test_device_time_is_that_of_both_roles() -> None:
    run = play("fixed:2+2")
    assert run.device_ns() == 4 * (run.ended_ns - run.started_ns)


def counts(model: PooledModel, name: str) -> tuple[int, int]:
    """Prefill and decode instances of a fixed system on 16 devices."""
    (policy,) = build_config(made(count=8), [model], find_system(name)).policies
    for limits in policy.roles:
        assert limits.instances_min == limits.instances_max
    prefill, decode = (limits.instances_min for limits in policy.roles)
    return prefill, decode


def play(name: str) -> PoolRun:
    config = build_config(cluster(CLUSTER), [MODEL], find_system(name))
    return run_pool(config, {"m": burst(S)}, lead_ns(config), 0)
