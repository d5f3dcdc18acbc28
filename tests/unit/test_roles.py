"""Roles of replicas: the same for everybody who sees the same replicas, and never a kind that nobody serves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthrus_serve.policy.roles import Split, replicas_serving
from orthrus_serve.types import ReplicaId, RequestKind

splits = st.builds(Split, embed=st.integers(1, 9), generate=st.integers(1, 9))
replica_lists = st.lists(st.text("abcdef0123456789", min_size=1, max_size=6).map(ReplicaId), unique=True, max_size=20)


def roles(replicas: list[ReplicaId], split: Split) -> dict[ReplicaId, RequestKind]:
    """The role of each replica, where each has one."""
    kinds: tuple[RequestKind, ...] = ("embed", "generate")
    return {replica: kind for kind in kinds for replica in replicas_serving(kind, replicas, split)}


@given(replica_lists, splits, st.randoms())
def test_the_order_in_which_replicas_are_met_does_not_matter(replicas, split, rng):
    shuffled = rng.sample(replicas, len(replicas))
    for kind in ("embed", "generate"):
        assert replicas_serving(kind, replicas, split) == replicas_serving(kind, shuffled, split)


@given(replica_lists, splits)
def test_of_two_or_more_replicas_each_has_one_role_and_both_roles_are_held(replicas, split):
    embed, generate = (replicas_serving(kind, replicas, split) for kind in ("embed", "generate"))
    if len(replicas) < 2:
        assert embed == generate == replicas
    else:
        assert embed
        assert generate
        assert sorted([*embed, *generate]) == sorted(replicas)


@given(splits, st.integers(1, 4))
def test_at_full_size_and_its_multiples_the_split_is_exact(split, times):
    whole = (split.embed + split.generate) * times
    assert split.num_embed(whole) == split.embed * times


@given(splits, st.integers(2, 40))
def test_the_number_of_embedding_replicas_is_the_nearest(split, num_replicas):
    exact = num_replicas * split.embed / (split.embed + split.generate)
    nearest = min(max(exact, 1), num_replicas - 1)
    assert abs(split.num_embed(num_replicas) - nearest) <= 0.5


@given(replica_lists.filter(lambda replicas: len(replicas) > 2), splits, st.data())
def test_when_a_replica_goes_at_most_one_other_changes_its_role(replicas, split, data):
    gone = data.draw(st.sampled_from(replicas))
    before, after = roles(replicas, split), roles([one for one in replicas if one != gone], split)
    assert sum(before[replica] != kind for replica, kind in after.items()) <= 1


@pytest.mark.parametrize(("num_replicas", "num_embed"), [(2, 1), (3, 1), (4, 1), (6, 2), (8, 2)])
def test_one_to_three_on_other_numbers_of_replicas(num_replicas, num_embed):
    assert Split(1, 3).num_embed(num_replicas) == num_embed


@given(replica_lists, splits)
def test_prompts_are_computed_where_embeddings_are_and_answers_where_generations_are(replicas, split):
    for kind in ("embed", "generate"):
        assert replicas_serving("generate", replicas, split, "decode") == replicas_serving("generate", replicas, split)
        assert replicas_serving(kind, replicas, split, "prefill") == replicas_serving("embed", replicas, split)
