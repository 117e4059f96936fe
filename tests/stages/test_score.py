"""Rows are scored under the current policy, in passes of bounded size. Masked rows need no pass."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from batches import cut_rows
from fake_device import waits_of
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical

from headrace.pipeline import ConfigError, Pipeline, load_pipeline
from headrace.transforms import BatchError, MissingKeyError, RewardWithin, SampleFilter, ScoreRows

pytestmark = pytest.mark.slow

FULL, LOSS_MASK, ATTENTION = (
    ("tokens", "full"),
    ("masks", "all_assistant_mask"),
    ("masks", "all_attention_mask"),
)
LOG_PROB = ("log_probs", "full")
WORDS = 7
PLACED = ("gate", "collapse", "filter", "advantage", "split", "weight")  # placed by conf/rows/llm.yaml


class Bigram(nn.Module):
    """A model in which a token depends only on the token before. Padding and other rows change no score."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)))
        self.dropout = nn.Dropout(0.9)
        self.shapes: list[tuple[int, int]] = []

    def get_dist(self, batch, logits_key, mask_key=None):
        assert not torch.is_grad_enabled()
        tokens = batch[FULL]
        self.shapes.append(tuple(tokens.shape))
        logits = self.dropout(self.table[tokens])
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        assert (mask_key or LOSS_MASK) in batch.keys(True)
        return Categorical(logits=shifted)

    def says(self, row) -> list[float]:
        """The log-probabilities of one row's tokens after the first."""
        table = self.table.detach().log_softmax(-1)
        return [float(table[a, b]) for a, b in pairwise(row)]


some_rows = st.lists(
    st.tuples(
        st.lists(st.integers(1, WORDS - 1), min_size=1, max_size=4),
        st.lists(st.integers(1, WORDS - 1), max_size=4),
    ),
    min_size=1,
    max_size=7,
)


def dense(rows) -> TensorDict:
    width = max(len(prompt + response) for prompt, response in rows)
    batch = TensorDict({"rollout_id": torch.arange(len(rows))}, batch_size=[len(rows)])
    batch[FULL] = torch.tensor([[0] * (width - len(p + r)) + p + r for p, r in rows])
    batch[ATTENTION] = batch[FULL] > 0
    places = torch.arange(width, 0, -1)
    batch[LOSS_MASK] = places <= torch.tensor([[len(r)] for _, r in rows])
    return batch


def ragged(rows) -> TensorDict:
    batch = dense(rows)
    return cut_rows(batch, batch[ATTENTION], (FULL, ATTENTION, LOSS_MASK))


def expected(rows, actor) -> list[list[float]]:
    return [actor.says(p + r)[len(p) - 1 :] if r else [] for p, r in rows]


bounds = st.one_of(st.none(), st.integers(1, 5))


@given(some_rows, bounds)
def test_a_score_does_not_depend_on_other_rows_or_on_passes(rows, max_rows):
    for batch in (dense(rows), ragged(rows)):
        actor = Bigram()
        out = ScoreRows(actor=actor, max_rows=max_rows)(batch)
        for row, (found, wanted) in enumerate(zip(out.unbind(0), expected(rows, actor), strict=True)):
            trains = found[LOSS_MASK]
            assert found[LOG_PROB][trains].tolist() == pytest.approx(wanted, abs=1e-6), row
            assert found[LOG_PROB][~trains].isnan().all()
        assert all(n <= (max_rows or n) for n, _ in actor.shapes)
        assert sum(n for n, _ in actor.shapes) == sum(bool(response) for _, response in rows)


def test_removed_rows_need_no_pass():
    rows = [([1], [2, 3]), ([4], [5]), ([6], [1])]
    for action in ("mask", "exclude", "drop"):
        batch, actor = dense(rows), Bigram()
        batch["next", "reward"] = torch.tensor([0.0, 9.0, 9.0])
        pipeline = Pipeline(
            {
                "filter": SampleFilter(criterion=RewardWithin(high=1.0), action=action),
                "score": ScoreRows(actor=actor),
            }
        )
        run = pipeline.run(batch)
        assert (actor.shapes, run.metrics["score/scored"]) == ([(1, 3)], 1.0)
        assert run.batch[LOG_PROB].isfinite().sum() == 2


def test_the_mode_of_the_actor_is_restored_and_the_stage_has_no_state():
    actor = nn.Sequential(Bigram(), nn.Dropout())
    actor[0].dropout.eval()
    actor.get_dist = actor[0].get_dist
    modes = [module.training for module in actor.modules()]
    stage = ScoreRows(actor=actor)
    batch = stage(dense([([1], [2])]))
    assert [module.training for module in actor.modules()] == modes
    assert not batch[LOG_PROB].requires_grad
    assert not list(stage.parameters())
    assert not stage.state_dict()
    stage.train(), stage.eval()
    assert [module.training for module in actor.modules()] == modes
    actor.get_dist = lambda batch, logits_key: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stage(dense([([1], [2])]))
    assert [module.training for module in actor.modules()] == modes
    assert repr(ScoreRows(actor=actor, max_rows=2)) == "ScoreRows(actor=Sequential, max_rows=2)"


@pytest.mark.torchrl
def test_scores_of_the_demo_policy_equal_its_sampled_log_probabilities():
    from rollouts import make_collector, make_env, make_policy

    policy = make_policy()
    for batch in make_collector(make_env(), policy=policy):
        sampled, trains = batch[LOG_PROB].flatten(0, 1), batch[LOSS_MASK].flatten(0, 1)
        scored = ScoreRows(actor=policy, max_rows=4)(batch.exclude("log_probs"))[LOG_PROB]
        torch.testing.assert_close(scored[trains], sampled[trains], rtol=0, atol=1e-5)


def test_importance_weights_compare_the_scoring_policy_with_the_sampler():
    sampler, trainer = Bigram(), Bigram()
    with torch.no_grad():
        trainer.table.mul_(0.9)
    rows = [([1], [2, 3, 4]), ([4], [5, 2])]
    batch = dense(rows)
    batch.update({"group_id": [0, 0], "rollout_id": [0, 1], ("next", "reward"): [1.0, 0.0]})
    batch = ScoreRows(actor=sampler)(batch)
    order = "pipeline.order=[gate,collapse,filter,advantage,score,correction,split,weight]"
    overrides = ("pipeline=tis", "+stage@pipeline.stages.score=score", order)
    for actor in (sampler, trainer):
        pipeline = load_pipeline(*overrides, group_size=2, shuffle=False)
        pipeline.stages["score"].actor = actor
        weights = pipeline.run(batch).batch["importance_weight"][batch[LOSS_MASK]]
        assert bool((weights == 1).all()) == (actor is sampler)
        scores = (torch.tensor([*chain(*expected(rows, each))]) for each in (actor, sampler))
        ratios = next(scores) - next(scores)
        torch.testing.assert_close(weights, ratios.exp().clamp(max=2), rtol=1e-5, atol=0)


class Wrong:
    def __init__(self, value=0.0, width=0):
        self.value, self.width = value, width

    def get_dist(self, batch, logits_key):
        return self

    def log_prob(self, tokens):
        return torch.full((len(tokens), tokens.shape[1] + self.width), self.value)


def test_rows_that_cannot_be_scored_are_refused_with_their_ids():
    batch = dense([([1], [2, 3]), ([4], [5])])
    for value in (float("nan"), float("-inf")):
        with pytest.raises(
            BatchError, match=r"finite log-probabilities; found others in row 0 \(rollout 0\), row 1"
        ):
            ScoreRows(actor=Wrong(value))(batch)
    with pytest.raises(BatchError, match=r"each token, \(2, 3\); Wrong returned \(2, 4\).*pad_output=True"):
        ScoreRows(actor=Wrong(width=1))(batch)
    with pytest.raises(ValueError, match=r'policy that trains, .*pipeline.stages\["score"\].actor = actor'):
        ScoreRows()(batch)
    for place in (0, 1):  # padding, and the first token
        first = dense([([1], [2, 3]), ([4], [5])])
        first[LOSS_MASK][1, place] = True
        with pytest.raises(BatchError, match=r"no context to predict it from.*in row 1 \(rollout 1\)"):
            ScoreRows(actor=Bigram())(first)
    with pytest.raises(MissingKeyError, match=r"all_assistant_mask'\) \(loss_mask_key\)"):
        ScoreRows(actor=Bigram())(batch.exclude(LOSS_MASK))
    batch[LOSS_MASK] = batch[LOSS_MASK].float()
    with pytest.raises(BatchError, match="a loss mask is bool"):
        ScoreRows(actor=Bigram())(batch)


def test_an_order_with_a_misplaced_score_is_refused():
    with pytest.raises(ValueError, match="Put 'score' before 'split'"):
        load_pipeline("+stage@pipeline.stages.score=score", "pipeline.after.score=split")
    pipeline = load_pipeline("+stage@pipeline.stages.score=score", "pipeline.after.score=advantage")
    pipeline.stages["score"].actor = Bigram()
    assert "5. score: ScoreRows(actor=Bigram)" in repr(pipeline)


@pytest.mark.parametrize("recipe", ["grpo", "mis"])  # without and with stages that conf/rows does not place
def test_rows_llm_gives_an_order_or_names_the_stages_that_lack_a_place(recipe):
    words = (f"pipeline={recipe}", "rows=llm", "pipeline.stages.dense.pad_id=0")
    pipeline = load_pipeline(words[0])
    own = pipeline.order
    if added := [stage for stage in own if stage not in PLACED]:
        with pytest.raises(ConfigError, match=f"order must name each stage once; it lacks .*'{added[0]}'"):
            load_pipeline(*words)
        own = own[: own.index("split")]
        keys = [getattr(pipeline.stages[stage], "in_keys", ()) for stage in own]
        reading = [at for at, reads in enumerate(keys) if pipeline.log_prob_key in reads]
        own.insert(reading[0] if reading else len(own), "score")
        words += (f"pipeline.order=[dense,{','.join(own)},split,weight]",)
    else:
        own = [*own[: own.index("split")], "score"]
    assert load_pipeline(*words).order == ["dense", *own, "split", "weight"]


def test_an_actor_gets_the_attention_mask_of_torchrls_wrappers():
    """Without a mask, the wrappers find padding by its token id. But rows may be padded with any token."""

    class Attends(Bigram):
        def get_dist(self, batch, logits_key, mask_key=None):
            assert torch.equal(batch["masks", "all_attention_mask"], batch["masks", "mine"])
            return super().get_dist(batch, logits_key, mask_key)

    rows = ragged([([1, 2], [3]), ([4], [5, 6])])
    for row in rows.tensordicts:
        row["masks", "mine"] = row["masks"].pop("all_attention_mask")
    out = ScoreRows(actor=Attends(), attention_key=("masks", "mine"))(rows)
    assert ("masks", "all_attention_mask") not in out.tensordicts[0].keys(True)


class Even:
    """An actor that gives all tokens the same probability, and does not read them."""

    def get_dist(self, batch, logits_key):
        return self

    def log_prob(self, tokens):
        return -torch.ones(tokens.shape, device=tokens.device)


@pytest.mark.parametrize("make", [dense, ragged])
def test_device_reads_do_not_grow_with_rows_and_passes(make):
    stage, waits = ScoreRows(actor=Even(), max_rows=2), set()
    for number in (16, 128):
        batch = make([([1] * (1 + row % 3), [2] * (1 + row % 5)) for row in range(number)])
        waits.add(waits_of(stage, batch))
    (found,) = waits
    assert sum(found) <= 4
