"""The contract that every exported transform keeps, including the pipeline."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from batches import batch_of, no_rows
from policies import OLD, with_old
from recipes import of
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch.distributions import Categorical

from headrace.pipeline import Pipeline
from headrace.transforms import (
    GAE,
    BatchError,
    BatchTransform,
    BatchWhitening,
    BestOf,
    ByColumn,
    CombineIds,
    CompletenessGate,
    DenseRows,
    DifficultyWeight,
    Diverged,
    FanOutCollapse,
    GroupRelativeAdvantage,
    LengthPenalty,
    LogRatio,
    LossWeight,
    MergeTurns,
    MissingKeyError,
    OverlongPunishment,
    ProcessedTwiceError,
    RelativeLength,
    RewardScale,
    RewardsToGo,
    RewardsVary,
    RewardWithin,
    RolloutCorrection,
    Rows,
    RunningBaseline,
    SampleFilter,
    ScoreRows,
    ShuffleSplit,
    SignFactors,
    StateAdvantage,
    TokenAdvantage,
    TokenFilter,
    TopShare,
    TrainSharedOnce,
    TreeAdvantage,
    TurnAdvantage,
    TurnDiscount,
)
from headrace.transforms.table import COLUMNS
from headrace.transforms.table.schema import COUNTED, IN_LOSS, PADDING, RETURN, REWARD

REAL = ("masks", "all_attention_mask")


class Uniform:
    """An actor that gives all ten tokens the same probability."""

    def get_dist(self, batch: TensorDict, logits_key: str) -> Categorical:
        return Categorical(logits=torch.zeros(*batch["tokens", "full"].shape, 10))


# Functions that make one stage of each class, and a filter for each action.
STAGES: dict[str, Callable[[], BatchTransform]] = {
    "dense": lambda: DenseRows(pad_id=9),
    "gate": lambda: CompletenessGate(group_size=3, on_incomplete="drop"),
    "collapse": lambda: FanOutCollapse(),
    "filter-mask": lambda: SampleFilter(criterion=RewardWithin(high=5 / 16)),
    "filter-exclude": lambda: SampleFilter(
        criterion=RewardWithin(high=5 / 16), action="exclude", unit="rollout"
    ),
    "filter-drop": lambda: SampleFilter(criterion=RewardsVary(), action="drop", unit="group"),
    "advantage": lambda: GroupRelativeAdvantage(rollout_key=None),
    "score": lambda: ScoreRows(actor=Uniform(), max_rows=3),
    "split": lambda: ShuffleSplit(minibatches=2, remainder="uneven", seed=5),
    "split-microbatches": lambda: ShuffleSplit(
        minibatches=2, microbatches=2, unit="sample", balance="attention", remainder="uneven"
    ),
    "split-budget": lambda: ShuffleSplit(minibatches=1, max_tokens=9, rank=0, unit="group", remainder="pad"),
    "split-carry": lambda: ShuffleSplit(minibatch_size=8, unit="sample", remainder="carry"),
    "filter-best": lambda: SampleFilter(criterion=BestOf(k=2, by="efficiency"), action="exclude"),
    "weight": lambda: LossWeight(unit="rollout"),
    "weight-turn": lambda: LossWeight(unit="turn", turn_key="group_id"),
    "weight-turn-inside": lambda: LossWeight(unit="turn", turn_index_key="turn_index"),
    "weight-fold": lambda: LossWeight(unit="constant", length=9, fold="token_mean"),
    "merge": lambda: MergeTurns(),
    "once": lambda: TrainSharedOnce(),
    "overlong": lambda: OverlongPunishment(max_length=4, cache=2),
    "length": lambda: LengthPenalty(coefficient=0.1),
    "relative-length": lambda: RelativeLength(coefficient=1.0),
    "reward-scale": lambda: RewardScale(scale=2.0, high=9.0),
    "whitening": lambda: BatchWhitening(per="sample"),
    "whitening-rollout": lambda: BatchWhitening(per="rollout"),
    "turn-discount": lambda: TurnDiscount(discount=0.5),
    "to-go": lambda: RewardsToGo(discount=0.5),
    "states": lambda: StateAdvantage(weight=1.0, state_key="rollout_id"),
    "turns": lambda: TurnAdvantage(turn_rewards="token", discount=0.5),
    "turns-rows": lambda: TurnAdvantage(turn_index_key=None),
    "tree": lambda: TreeAdvantage(),
    "tree-parents": lambda: TreeAdvantage(forks="parent", baseline="leave_one_out"),
    "peers": lambda: CombineIds(keys=["group_id", "rollout_id"]),
    "running": lambda: RunningBaseline(baseline_key="group_id"),
    "signs": lambda: SignFactors(positive=0.5),
    "difficulty": lambda: DifficultyWeight(),
    "filter-diverged": lambda: SampleFilter(
        criterion=Diverged(estimator="k1", level="sum", high=1.002, unit="rollout"), action="exclude"
    ),
    "correction": lambda: RolloutCorrection(),
    "correction-rollout": lambda: RolloutCorrection(level="sequence", unit="rollout"),
    "token-filter": lambda: TokenFilter(criterion=Diverged(estimator="k1", level="token", high=1.001)),
    "token-filter-all": lambda: TokenFilter(
        criterion=Diverged(estimator="k1", high=1.001, judges="negative"), denominator="all"
    ),
    "token-advantage": lambda: TokenAdvantage(term=LogRatio(centre="batch"), factor=0.5),
    "token-advantage-multiply": lambda: TokenAdvantage(term=TopShare(share=0.5), how="multiply"),
    "by-column": lambda: ByColumn(
        column="group_id",
        stages={group: GroupRelativeAdvantage(shift=group / 8, rollout_key=None) for group in range(40)},
    ),
    "pipeline": lambda: Pipeline(
        {
            "gate": CompletenessGate(group_size=3, on_incomplete="drop"),
            "collapse": FanOutCollapse(),
            "filter": SampleFilter(criterion=RewardWithin(high=5 / 16), action="drop"),
            "advantage": GroupRelativeAdvantage(),
            "split": ShuffleSplit(minibatches=2, remainder="uneven", seed=5),
            "weight": LossWeight(),
        }
    ),
}
if find_spec("torchrl"):  # these stages use TorchRL's arithmetic
    STAGES |= {"gae": lambda: GAE(gamma=0.5, lam=0.5), "gae-turn": lambda: GAE(unit="turn")}
NAMES = list(STAGES)


def every(law: Callable) -> Callable[[], None]:
    """Mark a law of all stages. One test tries the law with each stage."""

    def test() -> None:
        for name in NAMES:
            with of(name):
                law(name)

    test.__name__, test.__doc__ = law.__name__, law.__doc__
    return test


def rows() -> TensorDict:
    """Two complete groups of three rollouts, one with a fan-out, and a rollout of an incomplete group.

    One reward is above 5/16, the bound of the filters.

    The batch has the columns of earlier stages, for stages that need them.
    """
    return made_once().clone()


@cache
def made_once() -> TensorDict:
    rewards = [reward / 16 for reward in (1, 2, 2, 9, 3, 3, 3, 4)]
    batch = batch_of(rewards, [0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 2, 3, 4, 5, 6])
    batch["masks", "all_assistant_mask"][:, :2] = torch.tensor([False, True])  # no token predicts the first
    batch[RETURN] = torch.tensor(rewards)
    batch[REWARD] = torch.tensor(rewards)
    batch["advantage"] = torch.linspace(-1, 1, 8).view(8, 1, 1)
    batch["advantage"][2] = batch["advantage"][1]  # two rows of one rollout
    batch["turn_index"] = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0])[:, None].expand(8, 4).contiguous()
    batch["turn_reward"] = torch.linspace(0, 1, 32).view(8, 4)
    batch["parent_id"] = torch.full((8,), -1)  # ids of rollouts are text in some tests
    return with_old(batch)


@cache
def of_rows(name: str) -> TensorDict:
    """The result of a stage for :func:`rows`."""
    return STAGES[name]()(rows())


def same(a: TensorDict, b: TensorDict) -> bool:
    if set(a.keys(True, True)) != set(b.keys(True, True)) or a.shape != b.shape:
        return False
    pairs = [(a.get(key), b.get(key)) for key in a.keys(True, True)]
    return all(
        torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        if isinstance(x, torch.Tensor)
        else list(x) == list(y)
        for x, y in pairs
    )


@every
def test_the_input_is_unchanged(name):
    batch, untouched = rows(), rows()
    memory = {key: batch.get(key).data_ptr() for key in batch.keys(True, True) if key != "prompt_text"}
    STAGES[name]()(batch)
    assert same(batch, untouched)
    assert {key: batch.get(key).data_ptr() for key in memory} == memory


@every
def test_a_locked_input_is_accepted(name):
    batch = rows().lock_()
    assert same(STAGES[name]()(batch), of_rows(name))


@every
def test_unknown_columns_and_strings_stay_with_their_rows(name):
    batch, out = rows(), of_rows(name)
    numbers = [int(deep[0, 0]) // 6 for deep in out["stranger", "deep"]]
    assert torch.equal(out["stranger", "deep"], batch["stranger", "deep"][numbers])
    assert list(out["prompt_text"]) == [batch["prompt_text"][i] for i in numbers]
    assert torch.equal(out["tokens", "full"], batch["tokens", "full"][numbers])


@cache
def ragged_rows() -> TensorDict:
    """The rows in a lazy stack. Row n has n + 2 tokens."""
    ragged = []
    for number, row in enumerate(rows().unbind(0)):
        row["tokens", "full"] = torch.arange(number + 2)
        mask = torch.ones(number + 2, dtype=torch.bool)
        row["masks"] = TensorDict({"all_assistant_mask": mask.cumsum(0) > 1, "all_attention_mask": mask})
        for key in ("log_probs", "teacher_log_probs", "ref_log_probs", "entropy", "values", "sum_pi_squared"):
            row[key, "full"] = torch.zeros(number + 2)
        row["turn_index"] = row["turn_index"][:1].expand(number + 2)
        row["turn_reward"] = torch.zeros(number + 2)
        row[OLD] = torch.zeros(number + 2)
        ragged.append(row)
    return lazy_stack(ragged)


@every
def test_lazy_stacks_of_ragged_rows_are_accepted(name):
    out, dense = STAGES[name]()(ragged_rows()), of_rows(name)
    assert out.shape == dense.shape
    lengths = [len(row["tokens", "full"]) for row in out.unbind(0)]
    expected = [int(deep[0, 0]) // 6 + 2 for deep in dense["stranger", "deep"]]
    if name == "dense":
        lengths = out["masks", "all_attention_mask"].sum(1).tolist()
    if name in ("split-microbatches", "split-budget", "weight-fold"):  # lengths differ
        assert sorted(lengths) == sorted(expected)
        return
    assert lengths == expected
    if name.startswith("token-advantage"):  # the advantage is as long as the row
        assert [row["advantage"].shape for row in out.unbind(0)] == [(n, 1) for n in expected]
        return
    if name in ("turns", "tree", "tree-parents", "gae", "gae-turn"):  # per token
        assert [len(row["advantage"]) for row in out.unbind(0)] == expected
    elif "advantage" in dense.keys() and dense["advantage"].shape[1] == 1:
        assert torch.equal(torch.stack([row["advantage"] for row in out.unbind(0)]), dense["advantage"])


@every
def test_an_empty_batch_is_returned_unchanged(name):
    for empty in (no_rows(rows()), LazyStackedTensorDict(stack_dim=0)):
        assert STAGES[name]()(empty) is empty


@every
def test_a_batch_of_envs_by_time_is_flattened(name):
    batch = rows()
    assert same(STAGES[name]()(batch.reshape(2, 4)), of_rows(name))


@every
def test_a_stage_survives_pickling_and_copying_of_its_state(name):
    stage = STAGES[name]()
    stage(rows())
    twin = pickle.loads(pickle.dumps(stage))
    restored = STAGES[name]()
    restored.load_state_dict(stage.state_dict())
    later = rows()  # another batch: a restored split does not train the same batch again
    later["rollout_id"] += 100
    expected = stage(later)
    assert same(twin(later), expected)
    assert same(restored(later), expected)


@every
def test_dtype_and_device_are_kept(name):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        batch = rows()
        for key in (("next", "reward"), REWARD, RETURN, "advantage", "turn_reward"):
            batch[key] = batch[key].to(dtype)
        out = STAGES[name]()(batch)
        for key in batch.keys(True, True):
            if key == "prompt_text" or (key == "advantage" and name == "weight-fold"):
                continue
            wider = [torch.float32] if key in (REWARD, RETURN, "advantage") else []
            assert out.get(key).dtype in (batch.get(key).dtype, *wider)
            assert out.get(key).device == batch.get(key).device
        if "advantage" in out.keys() and name != "weight-fold":  # half precision cannot hold a weight
            assert out["advantage"].dtype in (dtype, torch.promote_types(dtype, torch.float32))


@pytest.mark.torchrl
@every
def test_forward_equals_call_and_inverse_is_the_identity(name):
    assert same(STAGES[name]()._call(rows()), of_rows(name))
    batch = rows()
    if name == "pipeline":  # rows of a buffer must come from the pipeline
        batch = STAGES[name]()(batch)
    assert same(STAGES[name]().inv(batch), batch)


@every
def test_a_pipelines_output_is_refused(name):
    done = of_rows("pipeline")
    with pytest.raises(ProcessedTwiceError, match=f"got {len(done)} rows"):
        STAGES[name]()(done)


@pytest.mark.torchrl
@every
def test_an_environment_is_refused(name):
    from torchrl.envs import TransformedEnv
    from torchrl.envs.transforms import Compose
    from torchrl.testing.mocking_classes import CountingEnv

    with pytest.raises(TypeError, match=r"whole batches.*Collector\(postproc=...\)"):
        TransformedEnv(CountingEnv(), STAGES[name]())
    with pytest.raises(TypeError, match="whole batches"):
        TransformedEnv(CountingEnv(), Compose(STAGES[name]()))


def test_the_error_for_an_unknown_option_lists_all_options():
    said = (
        r"no option 'epsilon' \(did you mean 'eps'.*\?\); its options are baseline, .*, eps, .*, reward_key"
    )
    with pytest.raises(TypeError, match=said):
        GroupRelativeAdvantage(epsilon=1)


@every
def test_an_input_that_is_not_a_batch_is_refused(name):
    with pytest.raises(TypeError, match=r"takes a TensorDict of rows, got dict.*decide"):
        STAGES[name]()({"reward": 1})
    with pytest.raises(BatchError, match=r"batch size \[\]"):
        STAGES[name]()(rows()[0])


@every
def test_options_are_attributes_and_printed(name):
    stage = STAGES[name]()
    assert repr(stage).startswith(type(stage).__name__)
    if not isinstance(stage, Pipeline):
        copy = type(stage)(**{option: getattr(stage, option) for option in options_of(stage)})
        assert repr(copy) == repr(stage)


def options_of(stage: BatchTransform) -> list[str]:
    import inspect

    parameters = inspect.signature(type(stage)).parameters.values()
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    return [p.name for p in parameters]


# The columns that each stage requires. If one is missing, `checks` of the table or the stage says what to do.
POLICIES = [OLD, ("log_probs", "full"), ("masks", "all_assistant_mask")]
NEEDED = {
    "dense": [("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")],
    "gate": ["group_id", "rollout_id"],
    "collapse": [("next", "reward"), "rollout_id", "group_id"],
    "filter-mask": [("next", "reward")],
    "filter-exclude": [("next", "reward"), "rollout_id"],
    "filter-drop": [("next", "reward"), "group_id"],
    "advantage": [("next", "reward"), "group_id"],
    "by-column": [("next", "reward"), "group_id"],
    "score": [("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")],
    "split": ["rollout_id"],
    "split-microbatches": [("masks", "all_attention_mask")],
    "split-budget": ["group_id", ("masks", "all_attention_mask")],
    "split-carry": [],
    "filter-best": [REWARD, "group_id", "rollout_id", ("masks", "all_assistant_mask")],
    "weight": ["rollout_id", ("masks", "all_assistant_mask")],
    "weight-turn": ["rollout_id", "group_id", ("masks", "all_assistant_mask")],
    "weight-turn-inside": ["turn_index", ("masks", "all_assistant_mask")],
    "weight-fold": ["rollout_id", "advantage", ("masks", "all_assistant_mask")],
    "merge": ["rollout_id", ("tokens", "full"), REAL, ("masks", "all_assistant_mask")],
    "once": ["rollout_id", ("tokens", "full"), REAL, ("masks", "all_assistant_mask")],
    "overlong": [("masks", "all_assistant_mask"), "rollout_id", REWARD],
    "length": [("masks", "all_assistant_mask"), "rollout_id", REWARD],
    "relative-length": [("masks", "all_assistant_mask"), "rollout_id", "group_id", REWARD],
    "reward-scale": [REWARD],
    "whitening": ["advantage"],
    "whitening-rollout": ["advantage", "rollout_id"],
    "turn-discount": ["advantage", "rollout_id"],
    "to-go": [("next", "reward"), "rollout_id"],
    "states": ["advantage", "group_id", "rollout_id", RETURN],
    "turns": ["turn_index", "turn_reward", "group_id", "rollout_id", ("next", "reward")],
    "turns-rows": ["group_id", "rollout_id", ("next", "reward")],
    "tree": [("tokens", "full"), REAL, "group_id", "rollout_id", ("next", "reward")],
    "tree-parents": ["parent_id", ("tokens", "full"), REAL, "group_id", "rollout_id", ("next", "reward")],
    "peers": ["group_id", "rollout_id"],
    "running": [REWARD, "advantage", "group_id", "rollout_id"],
    "signs": ["advantage"],
    "gae": [("values", "full"), ("masks", "all_assistant_mask"), "rollout_id", ("next", "reward")],
    "gae-turn": [("values", "full"), "turn_index", "rollout_id", ("next", "reward")],
    "difficulty": [REWARD, "advantage", "group_id", "rollout_id"],
    "filter-diverged": [*POLICIES, "rollout_id"],
    "correction": [*POLICIES, "advantage"],
    "correction-rollout": [*POLICIES, "advantage", "rollout_id"],
    "token-filter": POLICIES,
    "token-filter-all": [*POLICIES, "advantage"],
    "token-advantage": [
        "advantage",
        ("masks", "all_assistant_mask"),
        ("teacher_log_probs", "full"),
        ("log_probs", "full"),
    ],
    "token-advantage-multiply": ["advantage", ("masks", "all_assistant_mask"), ("entropy", "full")],
    "pipeline": ["group_id", "rollout_id", ("next", "reward")],
}


def needed(name: str) -> list:
    assert name in NEEDED, f"{name}: a line of NEEDED, the columns that it requires"
    return NEEDED[name]


@every
def test_a_missing_column_is_named_with_advice(name):
    for key in needed(name):
        batch = rows()
        if REWARD not in needed(name):
            batch = batch.exclude(REWARD)  # without the column, the collected reward is read
        if name.startswith("weight"):
            batch = batch.exclude(("log_probs", "full"))
        STAGES[name]()(batch)  # with the column there is no error
        with pytest.raises(MissingKeyError, match=r"(keys?|column)\)|put \w+ before it") as info:
            STAGES[name]()(batch.exclude(key))
        assert repr(key) in str(info.value)


# With the options of STAGES these two stages count rows. By default they count rollouts.
BY_ROLLOUT = {"advantage": GroupRelativeAdvantage, "whitening": BatchWhitening}
# Stages whose result depends on the number of rows on purpose.
COUNT_ROWS = {
    "turns": "a turn on two rows is an error",
    "turns-rows": "each row is a turn",
    "split": "the number of rows decides how the batch is cut",
    "split-microbatches": "as split",
    "split-budget": "as split",
    "split-carry": "as split",
    "pipeline": "as split",
}


@every
def test_a_rollout_of_more_rows_changes_no_other_rollout(name):
    """Rollout 0 gets eight more rows without tokens in the loss, so means over tokens do not change."""
    batch = rows()
    batch["number"] = torch.arange(8)
    fanned = batch[torch.cat([torch.arange(8), torch.zeros(8, dtype=torch.int64)])]
    fanned["masks", "all_assistant_mask"][8:] = False
    make = BY_ROLLOUT.get(name, STAGES[name])
    before = others(make()(batch))
    if name == "turns":
        with pytest.raises(BatchError, match="each turn of a rollout must be on one row"):
            make()(fanned)
        return
    after = others(make()(fanned))
    changed = [
        key for key in before.keys(True, True) if key not in after.keys(True) or not alike(before, after, key)
    ]
    if name in COUNT_ROWS:
        assert changed, "the stage counts no rows: remove its line from COUNT_ROWS"
        return
    assert not changed, (
        f"{changed} of other rollouts changed with the number of rows of rollout 0. Take statistics over "
        "rows.voters, not over rows, or give the reason in COUNT_ROWS"
    )


OVER_GROUPS = ["merge", "once", "whitening", "whitening-rollout", "running", "pipeline"]
OVER_GROUPS += ["token-advantage", "token-advantage-multiply"]


@every
def test_a_stage_decides_about_each_group_alone_if_it_says_so(name):
    """Splits and weights say so, because they change no advantage."""
    assert STAGES[name]().within_groups == (name not in OVER_GROUPS), "set within_groups, or edit OVER_GROUPS"
    if name in OVER_GROUPS or name.startswith(("split", "weight")):
        return
    batch = rows().exclude("prompt_text")
    whole = STAGES[name]()(batch)
    its, alone = whole[whole["group_id"] == 0], STAGES[name]()(batch[batch["group_id"] == 0])
    assert all(alike(its, alone, key) for key in its.keys(True, True))


# Stages that compute an advantage, and the columns that they read, but that later stages may change.
COMPUTED = dict.fromkeys(
    ("advantage", "by-column", "states", "turns", "turns-rows", "tree", "tree-parents"), ()
)
COMPUTED |= {"running": (), "difficulty": ()} | dict.fromkeys(("gae", "gae-turn"), POLICIES[2:])
COMPUTED |= dict.fromkeys(("token-advantage", "token-advantage-multiply"), (POLICIES[2], REWARD))


@every
def test_no_later_stage_may_change_what_an_advantage_is_computed_from(name):
    stage = STAGES[name]()
    if name.startswith(("correction", "split", "pipeline")):
        return  # the weights of a correction are final, and so are the rows that a split carries
    read = {*stage.in_keys} - {*stage.out_keys, *COMPUTED[name]} if name in COMPUTED else set()
    assert {*stage.final_keys} == read, (
        "set final_keys, and add a stage that computes an advantage to COMPUTED"
    )


# These options accept rollouts without a reward, which the stages refuse by default.
WITHOUT_REWARDS = {
    "collapse": lambda: FanOutCollapse(missing="mask"),
    "advantage": lambda: GroupRelativeAdvantage(missing="skip"),
}
# Stages with a metric that counts rows without a reward on purpose.
COUNT_UNREWARDED = {
    "filter-mask": "a row without a reward is not kept",
    "filter-exclude": "as filter-mask",
    "filter-best": "a rollout without a reward is kept",
    "advantage": "these rows have the advantage 0, and `unscorable` counts them",
}


@every
def test_a_metric_of_rewards_leaves_out_rollouts_without_a_reward(name):
    """Only a metric that no reward changes, such as a count, may count rollouts without a reward."""
    make = WITHOUT_REWARDS.get(name, STAGES[name])
    try:
        unrewarded = metrics_with(make(), torch.nan)
    except BatchError as refusal:
        if "must be finite" not in str(refusal):
            raise
        return
    absent = metrics_with(make(), None)
    counted = [metric for metric, found in unrewarded.items() if found != absent[metric]]
    scored = [metrics_with(make(), reward / 16) for reward in (0, 2, 9)] if counted else []
    counted = [metric for metric in counted if any(each[metric] != unrewarded[metric] for each in scored)]
    if name in COUNT_UNREWARDED:
        assert counted, "no metric counts them: remove the line from COUNT_UNREWARDED"
        return
    assert not counted, (
        f"{counted} count a rollout without a reward. Leave out rows whose reward is NaN, or give the reason "
        "in COUNT_UNREWARDED"
    )


def metrics_with(stage: BatchTransform, reward: float | None) -> dict[str, str]:
    """The metrics of the stage if rollout 1 has this reward. With None, rollout 1 is absent."""
    batch = rows()
    its = batch["rollout_id"] == 1
    for key in (("next", "reward"), REWARD, RETURN):
        batch[key][its] = torch.nan if reward is None else reward
    pipeline = stage if isinstance(stage, Pipeline) else Pipeline({"stage": stage})
    found = pipeline.run(batch if reward is not None else batch[~its]).metrics
    return {metric: repr(value) for metric, value in found.items() if metric.startswith("stage/")}


def others(out: TensorDict) -> TensorDict:
    """The rows of all rollouts except 0, in the order of the batch."""
    stay = out["rollout_id"] != 0
    if PADDING in out.keys(True):
        stay &= ~out[PADDING]
    return out[stay][out["number"][stay].argsort()]


def alike(a: TensorDict, b: TensorDict, key) -> bool:
    """Whether a column is equal up to rounding. Sums may have different numbers of terms."""
    x, y = a.get(key), b.get(key)
    if not isinstance(x, torch.Tensor):
        return list(x) == list(y)
    return x.shape == y.shape and torch.allclose(x.double(), y.double(), equal_nan=True)


@every
def test_a_stage_declares_the_columns_that_it_writes(name):
    """Exceptions are token columns that ``rows.leave`` masks, and the column that excludes empty rollouts."""
    stage, batch = STAGES[name](), rows()
    if isinstance(stage, Pipeline):
        return  # its stages declare their columns
    allowed = [*stage.out_keys, COUNTED, *(POLICIES[1:] if stage.reasons else [])]
    if name == "token-filter":
        allowed += POLICIES[1:]  # the filter masks tokens as rows.leave does
    if name == "merge":
        allowed.append("advantage")  # the same numbers, for each token of the merged row
    out = of_rows(name)
    batch = batch[[int(deep[0, 0]) // 6 for deep in out["stranger", "deep"]]]
    for key in out.keys(True, True):
        written = key not in batch.keys(True) or not alike(out, batch, key)
        assert not written or key in allowed, f"{name} writes {key!r}, which is not in its out_keys"


@every
def test_a_stage_declares_the_columns_that_it_reads(name):
    """An option can give a column another name only if the column is declared."""
    stage = STAGES[name]()
    lacking = [] if isinstance(stage, Pipeline) else undeclared(stage, rows())  # its stages declare them
    assert not lacking, lacking


def undeclared(stage: BatchTransform, batch: TensorDict) -> list[str]:
    """The columns that a stage and its criterion read but do not declare.

    A stage declares the roles that it reads, and has the reward in `in_keys`. A criterion declares its roles,
    and has all columns of the batch that it reads in `in_keys`.
    """
    read, key = set[tuple[str, object]](), Rows.key

    def recorded(self: Rows, role) -> object:
        read.add((self.reader, role))
        return key(self, role)

    table = stage.read_table(batch, stage._own_ranks())  # not recorded: these reads are for all stages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "key", recorded)
        if stage.knows_the_table():
            stage.work_on(table.seen_by(stage))
        else:
            stage(batch)
    own = [*getattr(stage, "of_values", {}).values(), stage]
    parts = {type(part).__name__: part for part in (getattr(stage, "criterion", None), *own)}
    lacking = []
    columns = set(batch.keys(True, True))
    for reader, role in sorted(read, key=repr):
        part, is_role = parts[reader], isinstance(role, str) and role in COLUMNS
        if is_role and not hasattr(part, f"{role}_key"):
            lacking.append(f"{reader}: add {role!r} to its columns")
            continue
        reads = getattr(part, f"{role}_key") if is_role else role
        if reads in columns and reads not in part.in_keys and (part not in own or role == "reward"):
            lacking.append(f"{reader}: add {f'self.{role}_key' if is_role else repr(role)} to its in_keys")
    return lacking


def test_the_error_for_a_missing_column_names_only_an_option_that_the_stage_has():
    class Voting(BatchTransform, columns=("reward",)):
        def decide(self, rows: Rows) -> None:
            rows["tone" if len(rows) == 1 else "rollout"]

    batch = TensorDict({"rid": [4, 5], ("next", "reward"): [0.0, 7.0]}, batch_size=[2])
    with pytest.raises(MissingKeyError, match=r"'rollout_id'; .* add 'rollout' to the `columns`"):
        Voting()(batch)
    with pytest.raises(MissingKeyError, match=r"needs the key 'tone'; the batch has \[.*'rid'\]$"):
        Voting()(batch[:1])


@every
def test_a_stage_keeps_nothing_of_a_batch(name):
    """``vars(stage)`` is unchanged, unless the stage declares a state."""
    stage = STAGES[name]()
    before = dict(vars(stage))
    inside = {
        key: dict(vars(each)) for key, each in getattr(stage, "stages", {}).items() if not each.stateful
    }
    for _ in range(2):
        stage(rows())
    if not stage.stateful and not isinstance(stage, Pipeline):
        assert vars(stage) == before
    assert inside == {
        key: dict(vars(each)) for key, each in getattr(stage, "stages", {}).items() if not each.stateful
    }


@every
def test_only_stateful_stages_change_their_state_dict(name):
    stage = STAGES[name]()
    empty = repr(stage.state_dict())
    stage(rows())
    has_state = any(part.stateful for part in stage.modules() if isinstance(part, BatchTransform))
    assert (repr(stage.state_dict()) != empty) == has_state


@every
def test_rows_that_leave_are_dropped_or_masked_with_a_reason(name):
    """No other row of the batch is dropped or masked."""
    stage = STAGES[name]()
    batch = rows()
    batch["number"] = torch.arange(8)
    run = stage.run(batch) if isinstance(stage, Pipeline) else Pipeline({"stage": stage}).run(batch)
    out, reasons = run.batch, run.ledger.names
    if isinstance(stage, Pipeline):
        assert int((run.ledger.reason == 0).sum()) == len(out) == 6  # the gate drops row 7, the filter row 3
        return
    assert {f"stage/{reason}" for reason in stage.reasons} == {r for r in reasons if r.startswith("stage/")}
    leaves = {
        row["row"] for reason in reasons if reason.startswith("stage/") for row in run.ledger.rows(reason)
    }
    padding = out.get(PADDING, torch.zeros(len(out), dtype=torch.bool))
    here = set(out["number"][~padding].tolist())
    if next(iter(stage.reasons.values()), "dropped") in ("dropped", "carried"):
        assert here == set(range(8)) - leaves
    else:
        assert here == set(range(8))
        assert {row for row in range(8) if not out[IN_LOSS][row]} == leaves
    if name in ("gate", "filter-best", "filter-mask", "filter-exclude", "filter-drop", "filter-diverged"):
        assert leaves, "the batch of this test has no row that leaves"


@every
def test_an_unset_id_is_named(name):
    for key in ("group_id", "rollout_id"):
        if key not in needed(name) or name.startswith("pipeline"):
            continue
        if key == getattr(STAGES[name](), "state_key", None):
            continue  # the column is a state here, with any labels
        batch = rows()
        batch[key] = torch.full((8,), -1)
        with pytest.raises(BatchError, match=rf"{key} ≥ 0; found -1 at row 0"):
            STAGES[name]()(batch)
