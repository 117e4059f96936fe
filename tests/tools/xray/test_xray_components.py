"""The X-ray measures the declared weights of each component of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from composed import composed
from tensordict import TensorDict, TensorDictBase
from torch import nn

from headrace.pipeline import XRay, optimise, xray

pytestmark = pytest.mark.slow

LOSS, REAL, SEEN = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask"), ("masks", "seen")
SEGMENTS = (1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 1)
LENGTHS = (3, 9, 5, 4, 8, 2, 6, 7, 5, 3, 10, 4, 2, 6)
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 0.0, 0.0, 0.0, 0.3, 0.9, 0.0, 0.5)  # equal in the second group
ECHO = "{objective:{},seen:{unit:rollout,factor:0.05,loss_mask_key:[masks,seen]}}"
WITH_KL = "{objective:{},kl:{unit:sample,factor:0.1},seen:{unit:group,loss_mask_key:[masks,seen]}}"


def prepare(batch: TensorDictBase) -> None:
    """Add a mask of the tokens of the environment: tokens in the response that are not in the loss mask."""
    batch[SEEN] = batch[REAL] & ~batch[LOSS] & (batch[LOSS].cumsum(1) > 0)


def pipeline_of(components: str, cut: int, *more: str):
    words = (f"weight.components={components}", "weight.dtype=float64", "split.minibatches=1")
    stages = [f"pipeline.stages.{word}" for word in (*words, f"split.microbatches={cut}")]
    return composed("pipeline=grpo", *stages, *(f"pipeline.{word}" for word in more))


def loss_of(model: nn.Module, doubled: str):
    """The policy gradient at the ratio 1, and cross entropies at all tokens as the other terms."""

    def loss(batch: TensorDictBase) -> TensorDict:
        tokens = batch["tokens", "full"]
        logits = model(tokens)
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        log_prob = shifted.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        terms = {f"loss_{name}": -log_prob for name in batch["loss_weights"].keys()}
        terms["loss_objective"] = -log_prob * batch["advantage"].reshape(len(batch), -1)
        if doubled:
            terms[doubled] = 2 * terms[doubled]
        return TensorDict(terms)

    return loss


def measure(
    components: str, *more: str, declares: str = "", doubled: str = "", group: str | None = None, **options
) -> XRay:
    def step(model, batch, cut):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        minibatches = pipeline_of(components, cut, *more).minibatches(batch)
        optimise(minibatches, loss_of(model, doubled), optimizer, process_group=group)

    second = pipeline_of(declares or components, 1)
    given = {
        "cuts": (1, 2, 3, 4),
        "holes": True,
        "segments": SEGMENTS,
        "lengths": LENGTHS,
        "rewards": REWARDS,
    }
    return xray(step, second, **given | {"prepare": prepare} | options)


@pytest.mark.parametrize("components", [ECHO, WITH_KL])
def test_each_component_trains_its_declared_weights_in_any_number_of_micro_batches(components: str):
    found = measure(components, pad=("left", "right"))
    found.assert_uniform(1e-9)
    assert found.verdict == "the weights of the pipeline, in 8 of 8 runs"


def by_rollout(run, tokens: torch.Tensor) -> Sequence[float]:
    """For each rollout that has some of these tokens, the sum of their coefficients."""
    sums = torch.zeros(12, dtype=torch.float64).index_add(
        0, run.tokens.rollout, (run.coefficient * tokens).sum(1)
    )
    some = torch.zeros(12).index_add(0, run.tokens.rollout, tokens.sum(1).float()) > 0
    return sums[some].tolist()


def test_a_component_trains_its_tokens_of_a_masked_group():
    """The component is a mean over rollouts, times 0.05. All rollouts with its tokens have equal weights."""
    run = measure(ECHO, cuts=(3,)).runs[0]
    masked = (run.tokens.group == 1)[:, None]
    own = run.tokens.inside & (run.advantage == 1)
    shares = by_rollout(run, own)
    assert len(by_rollout(run, own & masked)) == 3  # the fourth rollout has a single token
    assert shares == pytest.approx([0.05 / len(shares)] * len(shares), rel=1e-9)
    assert not run.coefficient[masked & run.tokens.inside & ~own].any()


def test_a_wrong_weight_of_one_component_is_seen():
    with pytest.raises(AssertionError, match="tokens get 1 to 2 times the weight of the pipeline"):
        measure(ECHO, cuts=(2,), doubled="loss_seen").assert_uniform(1e-9)
    with pytest.raises(AssertionError, match=r"tokens get 0\.5 to 1 times the weight of the pipeline"):
        measure(ECHO, cuts=(2,), declares=ECHO.replace("0.05", "0.1")).assert_uniform(1e-9)


def test_two_ranks_train_the_weights_of_one_rank():
    more = ("process_group=world", "shared_ids=same")
    found = measure(ECHO, *more, group="world", ranks=(1, 2), cuts=(1, 2), gradients="reduced")
    found.assert_uniform(1e-9)
