"""Masked rows have no effect in TorchRL's own GRPOLoss."""

from __future__ import annotations

import pytest
import torch
from rollouts import make_collector, make_env, make_pipeline, make_policy
from torchrl.objectives.llm import GRPOLoss

from headrace.pipeline import Pipeline, TokenGRPOLoss, optimise, total_loss
from headrace.transforms import (
    BatchError,
    LengthWithin,
    LossWeight,
    MissingKeyError,
    RewardWithin,
    SampleFilter,
    ShuffleSplit,
    take_rows,
)

pytestmark = pytest.mark.torchrl


def gradient(policy, batch, **options) -> torch.Tensor:
    policy.zero_grad()
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_coeff=0.01, **options)
    total_loss(loss(batch)).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def total(terms, _):
    return total_loss(terms)


@pytest.fixture
def scene():
    """A policy in float64, and a processed batch for which its ratios are not 1."""
    policy = make_policy().double()
    batch = make_pipeline("~pipeline.stages.filter")(next(iter(make_collector(make_env(), policy=policy))))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    cut = [("headrace", key) for key in ("processed", "minibatch", "microbatch")]
    processed = batch.exclude(*cut, "num_tokens")
    processed["advantage"] = torch.randn(len(batch), 1, 1, dtype=torch.float64)
    processed["log_probs", "full"] = processed["log_probs", "full"].double()
    return policy, processed


def halve(batch):
    """A criterion that removes rollouts with odd ids."""
    return batch["rollout_id"].flatten() % 2 == 0


class Noted:
    """A distribution that notes which attributes are read."""

    def __init__(self, distribution, read: set[str]):
        self.distribution, self.read = distribution, read

    def __getattr__(self, name: str):
        self.read.add(name)
        return getattr(self.distribution, name)


@pytest.mark.parametrize("entropy", [False, True])
def test_grpo_loss_reads_the_attributes_of_a_distribution_on_the_page(scene, entropy):
    """docs/losses.md names log_prob and mask. The default options also need an entropy, or samples for it."""
    policy, batch = scene
    read, distribution = set[str](), policy.get_dist
    policy.get_dist = lambda rows, logits_key: Noted(distribution(rows), read)
    GRPOLoss(policy, masking_strategy="generic", entropy_bonus=entropy)(batch)
    assert {"log_prob", "mask"} <= read
    assert bool(read & {"entropy", "sample"}) == entropy
    assert read <= {"log_prob", "mask", "entropy", "sample", "rsample", "has_rsample"}


def test_masked_rows_have_no_gradient_and_are_not_in_the_denominator(scene):
    policy, batch = scene
    masked = SampleFilter(criterion=halve)(batch)
    without = take_rows(batch, halve(batch).nonzero().flatten())
    assert 0 < len(without) < len(batch)
    torch.testing.assert_close(gradient(policy, masked), gradient(policy, without), rtol=1e-12, atol=1e-15)
    assert (gradient(policy, masked) - gradient(policy, batch)).abs().max() > 1e-4


def test_masked_rows_leave_a_loss_without_a_loss_mask(scene):
    """With another mask of the loss, such as that of the strategy `sft`, NaN log-probabilities mask rows."""
    policy, batch = scene
    masked = SampleFilter(criterion=halve, loss_mask_key=("masks", "absent"))(batch)
    assert torch.equal(masked["masks", "all_assistant_mask"], batch["masks", "all_assistant_mask"])
    without = take_rows(batch, halve(batch).nonzero().flatten())
    torch.testing.assert_close(gradient(policy, masked), gradient(policy, without), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("options", [{"aggregation": "prompt_mean"}, {"kl_to_inference_coeff": 0.1}])
def test_terms_divided_by_rows_need_masked_rows_dropped(scene, options):
    """GRPOLoss's sample mean and its KL terms divide by all rows; a filter after the advantage drops them."""
    policy, batch = scene
    masked = SampleFilter(criterion=halve)(batch)
    gone = SampleFilter(criterion=LengthWithin(low=1), action="drop")(masked)
    without = take_rows(batch, halve(batch).nonzero().flatten())
    expected = gradient(policy, without, **options)
    torch.testing.assert_close(gradient(policy, gone, **options), expected, rtol=1e-12, atol=1e-15)


def test_an_empty_loss_mask_takes_no_step(scene):
    policy, batch = scene
    nothing = SampleFilter(criterion=RewardWithin(low=1e9))(batch)
    before = [p.clone() for p in policy.parameters()]
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False)
    assert optimise([nothing], loss, torch.optim.SGD(policy.parameters(), lr=1.0), reduce=total_loss) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_the_gradient_of_a_step_is_clipped(scene):
    policy, batch = scene
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False)
    before = torch.cat([p.detach().flatten() for p in policy.parameters()])
    optimise([batch], loss, torch.optim.SGD(policy.parameters(), lr=1.0), reduce=total, max_grad_norm=1e-3)
    after = torch.cat([p.detach().flatten() for p in policy.parameters()])
    assert (after - before).norm() == pytest.approx(1e-3, rel=1e-3)


def test_invalid_options_of_optimise_raise(scene):
    policy, batch = scene
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="max_grad_norm must be finite and > 0"):
        optimise([batch], total_loss, optimizer, max_grad_norm=-1.0)
    with pytest.raises(ValueError, match="transform must be a callable or one of 'pack', 'tree' or None"):
        optimise([batch], total_loss, optimizer, transform="trees")


def test_a_loss_without_weights_is_refused_unless_reduce_is_set(scene):
    policy, batch = scene
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    with pytest.raises(
        MissingKeyError, match=r"weighted_loss needs the key 'loss_weight'.*reduce=total_loss"
    ):
        optimise([batch.exclude("loss_weight")], loss, optimizer)
    assert optimise([batch.exclude("loss_weight")], loss, optimizer, reduce=total_loss) == 1


def test_a_sum_of_means_refuses_weighted_rows(scene):
    """A mean would ignore the weights. Rows with weights folded into the advantage have no loss weights."""
    policy, batch = scene
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    with pytest.raises(
        BatchError, match=r"the rows have loss weights, 'loss_weight'.*set fold on LossWeight"
    ):
        optimise([batch], loss, optimizer, reduce=total_loss)
    with pytest.raises(BatchError, match="the rows have loss weights, 'w'"):
        total_loss(loss(batch), batch.rename_key_("loss_weight", "w"), weight_key="w")
    folded = LossWeight(fold="token_mean")(batch.exclude("w"))
    assert optimise([folded], loss, optimizer, reduce=total_loss) == 1


def test_a_nan_gradient_takes_no_step(scene):
    policy, batch = scene
    batch["advantage"][0] = float("nan")
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False)
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(BatchError, match="must be finite; step 0"):
        optimise([batch], loss, torch.optim.SGD(policy.parameters(), lr=1.0), reduce=total)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_token_terms_sum_to_the_loss(scene):
    """GRPOLoss divides its KL terms by all positions, and its other terms by tokens."""
    policy, batch = scene
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"].nan_to_num() - 0.3
    options = {"masking_strategy": "generic", "kl_to_ref_coeff": 0.1, "kl_to_inference_coeff": 0.3}
    with torch.no_grad():
        ours, theirs = TokenGRPOLoss(policy, **options)(batch), GRPOLoss(policy, **options)(batch)
    for name, coeff in (("kl_to_ref", 0.1), ("kl_to_inference", 0.3)):
        found, penalty = getattr(ours, f"loss_{name}"), getattr(ours, name)
        torch.testing.assert_close(found, coeff * penalty, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.mean(), getattr(theirs, f"loss_{name}"), rtol=1e-12, atol=0)
        assert not penalty.squeeze(-1)[~batch["masks", "all_assistant_mask"]].any()
    mean = ours.loss_objective.sum() / batch["masks", "all_assistant_mask"].sum()
    torch.testing.assert_close(mean, theirs.loss_objective, rtol=1e-12, atol=1e-15)
    with pytest.raises(ValueError, match="needs aggregation='none'"):
        TokenGRPOLoss(policy, aggregation="token_mean")


def test_reference_log_probabilities_have_the_shape_of_the_policys(scene):
    """They may have a last dimension of size 1. Without them there is no term."""
    policy, batch = scene
    loss = TokenGRPOLoss(policy, masking_strategy="generic", kl_to_ref_coeff=0.1)
    key, found = ("next", "ref_log_probs", "full"), []
    near = batch["log_probs", "full"].nan_to_num() - 0.3
    for given in (near, near.unsqueeze(-1)):
        found.append(loss(batch.copy().set(key, given)).loss_kl_to_ref)
    assert torch.equal(*found)
    assert found[0].shape == (*near.shape, 1)
    with pytest.raises(ValueError, match=r"must have the policy's shape, \(\d+, \d+\); .* has \(\d+, 1\)"):
        loss(batch.copy().set(key, near[:, :1]))
    with pytest.raises(KeyError, match="the KL term needs"):
        loss(batch)


def test_each_term_of_grpo_loss_may_have_a_mean_of_its_own(scene):
    """The policy term is a mean over tokens, the KL term a mean over rows, in one or three micro-batches."""
    policy, batch = scene
    batch["next", "ref_log_probs", "full"] = batch["log_probs", "full"] - 0.1
    loss = TokenGRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, kl_to_ref_coeff=0.3)
    found = []
    for microbatches in (1, 3):
        split = ShuffleSplit(minibatches=1, microbatches=microbatches, shuffle=False)
        components = {"objective": {}, "kl_to_ref": {"unit": "sample"}}
        rows = LossWeight(components=components, dtype="float64")(split(batch))
        optimise([rows], loss, torch.optim.SGD(policy.parameters(), lr=0.0))
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    policy.zero_grad()
    terms, inside = loss(batch), batch["masks", "all_assistant_mask"]
    of_rows = terms.loss_kl_to_ref.squeeze(-1).sum(1) / inside.sum(1)
    (terms.loss_objective.sum() / inside.sum() + of_rows.mean()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()])
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-10, atol=1e-14)


def test_a_batch_or_a_pipeline_instead_of_minibatches_is_refused(scene):
    policy, batch = scene
    for given, name in ((batch, "TensorDict"), (Pipeline({}), "Pipeline")):
        with pytest.raises(TypeError, match=rf"needs .*; got one {name}\..*split_minibatches\(batch\)"):
            optimise(given, total_loss, torch.optim.SGD(policy.parameters(), lr=0.0))


def test_several_steps_in_one_batch_are_refused(scene):
    policy, batch = scene
    loss = GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    whole = LossWeight()(ShuffleSplit(minibatches=3, remainder="uneven")(batch))
    with pytest.raises(BatchError, match="holds 3: take one after the other"):
        optimise([whole], loss, torch.optim.SGD(policy.parameters(), lr=0.0))
