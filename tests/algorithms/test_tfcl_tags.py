"""TFCL's tags, pick masks, pruning, and the sub-models made of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gradients import gradient_of

from fedkace_flwr.algorithms import tfcl_tags as tags
from fedkace_flwr.networks.catalogue import seeded
from fedkace_flwr.networks.network import Blueprint


def test_the_binariser_gives_zeros_and_ones_and_lets_gradients_through():
    pick = torch.tensor([0.01, 0.005, 0.0051, -1.0], requires_grad=True)
    upstream = torch.tensor([1.0, -2.0, 3.0, 4.0])
    picked = tags.binarise(pick)
    assert picked.tolist() == [1.0, 0.0, 1.0, 0.0]
    picked.backward(upstream)
    assert torch.equal(gradient_of(pick), upstream)


def test_a_sub_model_computes_with_its_own_and_with_picked_earlier_weights_and_trains_no_others():
    owners = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int16)
    weights = torch.tensor([5.0, 2.0, 3.0, 4.0, 6.0], requires_grad=True)
    pick = torch.tensor([0.01, 0.01, 0.0, 0.01, 0.01], requires_grad=True)
    effective = tags.effective_weights(weights, owners, 2, tags.binarise(pick))
    assert effective.tolist() == [0.0, 2.0, 0.0, 4.0, 0.0]
    effective.backward(torch.full((5,), 10.0))
    assert gradient_of(weights).tolist() == [0.0, 0.0, 0.0, 10.0, 0.0]
    # The gradient of a pick mask is the upstream one times the frozen weight of earlier rounds.
    assert gradient_of(pick).tolist() == [0.0, 20.0, 30.0, 0.0, 0.0]


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 2.0]), min_size=1, max_size=40), st.data())
def test_pruning_keeps_exactly_so_many_and_none_smaller_than_what_it_frees(values, data):
    weights = torch.tensor(values)
    owned = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    count = data.draw(st.integers(0, len(values)))
    kept = tags.largest(weights, owned, count)
    assert int(kept.sum()) == min(count, int(owned.sum()))
    assert not bool((kept & ~owned).any())
    freed = owned & ~kept
    if bool(kept.any()) and bool(freed.any()):
        assert float(weights[kept].abs().min()) >= float(weights[freed].abs().max())


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_the_ramp_falls_from_all_to_the_quota(claimed, quota, one, other):
    assert tags.ramp(claimed, quota, 0.0) == claimed
    assert tags.ramp(claimed, quota, 1.0) == min(claimed, quota)
    early, late = sorted([one, other])
    assert tags.ramp(claimed, quota, early) >= tags.ramp(claimed, quota, late)


def test_the_ramp_is_cubic():
    assert tags.ramp(1000, 200, 0.5) == 200 + 800 // 8


def test_quotas_share_a_layer_out_and_leave_none_empty():
    assert tags.quotas([100, 432, 7], 10) == [10, 43, 1]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_packed_bits_come_back(bits):
    mask = torch.tensor(bits)
    packed = tags.pack_bits(mask)
    assert len(packed) == -(-len(bits) // 8)
    assert torch.equal(tags.unpack_bits(packed, len(bits)), mask)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet-v3-small", "cnn"])
def test_weights_read_and_written_make_the_same_network(name):
    one, other = (seeded(name, Blueprint(5, 8, 2), seed) for seed in (1, 2))
    one = one.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    tags.write_weights(other, *tags.read_weights(one))
    other = other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(one.eval()(images), other.eval()(images))
    assert sum(len(part) for part in tags.read_weights(one)) == sum(
        tensor.numel() for tensor in one.state_dict().values() if tensor.is_floating_point()
    )


@pytest.mark.parametrize("name", ["mobilenet-v3-small", "cnn"])
def test_a_claim_owns_the_weights_of_convolutions_and_not_their_biases(name):
    net = seeded(name, Blueprint(5, 8, 2), 1)
    weights, others = tags.read_weights(net)
    assert any(layer.bias is not None for layer in tags.convolutions(net))
    free = torch.full(weights.shape, 1, dtype=torch.int16)
    pick = torch.full(weights.shape, tags.PICK_START)
    claim = tags.Claim(net, weights, others, free, 1, pick, rounds=2, pick_rate=0.01)
    claim.prune()
    found, untagged, owners, _ = claim.read()
    assert torch.equal(untagged, others)
    assert torch.equal(found[owners == 1], weights[owners == 1]) and not found[owners == tags.FREE].any()
    sizes = [layer.weight[0].numel() * len(layer.weight) for layer in tags.convolutions(net)]
    assert int((owners == 1).sum()) == sum(tags.quotas(sizes, 2))
