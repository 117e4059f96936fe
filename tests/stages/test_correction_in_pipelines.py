"""In a pipeline, a correction has the right position, numbers, loss and report."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest
import torch
from batches import batch_of
from composed import composed
from policies import MASK, OLD, SAMPLER, log_ratios, stated_divergence, stated_weights, with_old
from rich.console import Console
from tensordict import TensorDict, lazy_stack
from torch import nn

from headrace.pipeline import Pipeline, load_pipeline, optimise
from headrace.pipeline.tools.report import make_report, page_data, show_report
from headrace.transforms import (
    BatchError,
    BatchWhitening,
    Diverged,
    FanOutCollapse,
    Finite,
    GroupRelativeAdvantage,
    LogRatio,
    LossWeight,
    RelativeLength,
    RewardsToGo,
    RolloutCorrection,
    RunningBaseline,
    SampleFilter,
    ShuffleSplit,
    StateAdvantage,
    TokenAdvantage,
    TokenFilter,
    TreeAdvantage,
    TurnAdvantage,
    TurnDiscount,
    weighted_loss,
)

RECIPES = ("tis", "icepop", "mis", "opsm", "mlperf")
PAGE = (Path(__file__).parents[2] / "docs" / "correction.md").read_text()


def rewarded(rewards, groups, *, spread: float = 0.002, tokens: int = 6) -> TensorDict:
    batch = with_old(batch_of(rewards, groups, tokens=tokens), spread)
    batch["expected_rollouts"] = torch.tensor([groups.count(g) for g in groups])
    return batch


# -- the loss --------------------------------------------------------------------------------------------


@pytest.fixture
def scene():
    """A policy in float64, and rows of another sampler. The policy has moved, so that ratios are clipped."""
    from rollouts import make_collector, make_env, make_pipeline, make_policy

    policy = make_policy().double()
    batch = make_pipeline("~pipeline.stages.filter")(next(iter(make_collector(make_env(), policy=policy))))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    rows = batch.select(
        "tokens", "masks", "rollout_id", "group_id", "advantage", ("log_probs", "full")
    ).clone()
    rows["advantage"] = torch.randn(len(rows), 1, 1, dtype=torch.float64)
    rows[OLD] = rows[SAMPLER].double()
    rows[SAMPLER] = rows[OLD] + 0.5 * torch.randn_like(rows[OLD])
    return policy, rows


def grpo_loss(policy, **options) -> nn.Module:
    from torchrl.objectives.llm import GRPOLoss

    return GRPOLoss(policy, masking_strategy="generic", entropy_bonus=False, aggregation="none", **options)


def gradient(policy, total) -> torch.Tensor:
    policy.zero_grad()
    total.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.torchrl
@pytest.mark.parametrize(
    ("options", "clip_epsilon"),
    [
        ({}, 0.2),
        ({"level": "sequence"}, 0.01),
        ({"level": "mean", "bound": "zero", "low": 0.5}, (0.1, 0.3)),
    ],
)
def test_folding_equals_weighting_the_clipped_loss(scene, options, clip_epsilon):
    policy, batch = scene
    loss = grpo_loss(policy, clip_epsilon=clip_epsilon)
    loss.set_keys(sample_log_prob=OLD)
    corrected = RolloutCorrection(**options)(batch)
    weight = corrected["importance_weight"]
    inside = weight[batch[MASK]]
    assert float(inside.std()) > 0.01
    folded = gradient(policy, loss(corrected).loss_objective.sum())
    weighed = gradient(policy, (weight.unsqueeze(-1) * loss(batch).loss_objective).sum())
    assert float((folded - gradient(policy, loss(batch).loss_objective.sum())).abs().max()) > 1e-6
    torch.testing.assert_close(folded, weighed, rtol=1e-12, atol=1e-14)


@pytest.mark.torchrl
def test_a_loss_with_the_sampler_in_its_ratio_is_refused(scene):
    policy, batch = scene
    batch = LossWeight(dtype="float64")(RolloutCorrection()(batch))
    loss = grpo_loss(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    for its in (loss, torch.nn.DataParallel(loss)):
        with pytest.raises(BatchError, match=r"count twice.*set_keys\(sample_log_prob=\('old_log_probs'"):
            optimise([batch], its, optimizer)
    loss.set_keys(sample_log_prob=OLD)
    assert optimise([batch], loss, optimizer) == 1


@pytest.mark.torchrl
@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_rejected_tokens_have_the_declared_denominator(scene, denominator):
    """The gradient of the kept tokens is divided by their number, or by that of all tokens."""
    policy, batch = scene
    loss = grpo_loss(policy)
    loss.set_keys(sample_log_prob=OLD)
    criterion = Diverged(estimator="k1", level="token", high=1.3)
    keep = batch[MASK] & criterion(batch)
    stage = TokenFilter(criterion=criterion, denominator=denominator, log_prob_key=OLD)
    rows = LossWeight(log_prob_key=OLD, dtype="float64")(stage(batch))
    found = gradient(policy, weighted_loss(loss(rows), rows))
    terms = loss(batch).loss_objective
    over = keep if denominator == "kept" else batch[MASK]
    expected = gradient(policy, terms[keep].sum() / over.sum())
    assert 0 < int(keep.sum()) < int(batch[MASK].sum())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# -- orders ----------------------------------------------------------------------------------------------


def order(*names: str) -> Pipeline:
    possible = {
        "collapse": FanOutCollapse(),
        "advantage": GroupRelativeAdvantage(),
        "correction": RolloutCorrection(),
        "second": RolloutCorrection(importance_key="importance_weight"),
        "whitening": BatchWhitening(),
        "discount": TurnDiscount(discount=0.5),
        "exclude": SampleFilter(criterion=Diverged(high=0.1), action="exclude"),
        "mask": SampleFilter(criterion=Diverged(high=0.1)),
        "drop": SampleFilter(criterion=Diverged(high=0.1), action="drop"),
        "opsm": TokenFilter(criterion=Diverged(high=0.1, judges="negative")),
        "rows": SampleFilter(criterion=Diverged(high=0.1, judges="negative")),
        "tokens": TokenFilter(criterion=Diverged(high=0.1, level="token")),
        "all": TokenFilter(criterion=Diverged(high=0.1, level="token"), denominator="all"),
        "kept": TokenFilter(criterion=Diverged(high=0.1, level="token"), log_prob_key=OLD),
        "another": RolloutCorrection(importance_key="another"),
        "other_policy": RolloutCorrection(importance_key="other", old_log_prob_key="proximal"),
        "turns": TurnAdvantage(turn_rewards="none"),
        "turn_rows": TurnAdvantage(turn_index_key=None),
        "tree": TreeAdvantage(),
        "states": StateAdvantage(weight=1.0),
        "returns": RewardsToGo(),
        "running": RunningBaseline(),
        "length": RelativeLength(coefficient=1.0),
        "sum": FanOutCollapse(reward="sum"),
        "drop_rollouts": SampleFilter(criterion=Diverged(high=0.1), unit="rollout", action="drop"),
        "finite": SampleFilter(criterion=Finite(key=("next", "reward")), action="drop"),
        "split": ShuffleSplit(minibatches=1),
        "fold": LossWeight(fold="sum"),
    }
    return Pipeline({name: possible[name] for name in names})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["correction", "advantage"], "'correction' reads 'advantage', which 'advantage' writes later"),
        (
            ["advantage", "correction", "whitening"],
            "'whitening' adds to it later without weights",
        ),
        (["advantage", "correction", "discount"], "Put 'discount' before 'correction'"),
        (["advantage", "all", "whitening"], "Put 'whitening' before 'all'"),
        (["advantage", "correction", "second"], "'importance_weight', which 'second' writes later"),
        (["advantage", "split", "correction"], "'correction' comes after 'split'"),
        (
            ["advantage", "mask"],
            "would stay in the baseline.*Put 'mask' before 'advantage'",
        ),
        (["advantage", "drop"], "a rejected reward would stay in the baseline"),
        (["advantage", "exclude"], "rejects rows after 'advantage'|which 'exclude' writes later"),
        (["opsm", "advantage"], "'opsm' reads 'advantage', which 'advantage' writes later"),
        (["rows", "advantage"], "'rows' reads 'advantage', which 'advantage' writes later"),
        (["all", "advantage"], "'all' reads 'advantage', which 'advantage' writes later"),
        (["turns", "drop"], "a rejected reward would stay in the baseline"),
        (["tree", "mask"], "a rejected reward would stay in the baseline"),
        (["returns", "states", "drop"], "a rejected reward would stay in the baseline"),
        (["running", "drop"], "a rejected reward would stay in the baseline"),
        (["collapse", "length", "drop", "advantage"], "rejects rows after 'length' has compared"),
        (["advantage", "correction", "another"], "which would weight rows twice. Remove 'another'"),
        (["advantage", "kept", "split"], r"NaN in .*old_log_probs.*Set log_prob_key=\('log_probs', 'full'\)"),
        (["drop", "sum", "advantage"], "Put 'sum' before 'drop', or set unit='rollout'"),
        (["exclude", "sum", "advantage"], "which needs all rows of"),
        (["drop", "tree"], "which needs all rows of"),
        (["finite", "turn_rows"], "rejects single rows of rollouts before 'turn_rows'"),
        (["turns", "advantage"], "'advantage' overwrites the columns that 'turns' writes"),
        (["collapse", "advantage", "turns"], "'advantage' would have no effect. Remove one of them"),
        (["collapse", "length", "turn_rows"], "no later stage reads that reward"),
    ],
)
def test_silently_wrong_orders_are_refused_by_name(names, message):
    with pytest.raises(ValueError, match=message):
        order(*names)


@pytest.mark.parametrize(
    "names",
    [
        ["collapse", "exclude", "advantage", "whitening", "discount", "correction", "split", "fold"],
        ["mask", "advantage", "opsm", "correction", "split"],
        ["tokens", "advantage", "correction", "all"],
        ["advantage", "rows", "correction"],
        ["advantage", "correction", "other_policy"],
        ["drop_rollouts", "sum", "advantage"],
        ["mask", "sum", "advantage"],
        ["drop", "collapse", "advantage"],
        ["exclude", "turns", "correction"],
        ["collapse", "length"],
    ],
)
def test_meaningful_orders_are_accepted(names):
    assert order(*names).order == names


@pytest.mark.parametrize(
    ("action", "credit"), [("exclude", [0.5, -0.5]), ("mask", None), ("drop", [0.5, -0.5])]
)
def test_a_rejected_reward_stays_in_the_baseline_only_if_masked(action, credit):
    """The rejected row has the reward 100, the others 1 and 0. See the issues 6375 and 6452 of verl."""
    batch = rewarded([100.0, 1, 0], [0, 0, 0], spread=0.0)
    batch[OLD][0] += 1.0
    stages = {
        "collapse": FanOutCollapse(),
        "reject": SampleFilter(criterion=Diverged(estimator="k1", level="mean", high=1.5), action=action),
        "advantage": GroupRelativeAdvantage(scale="none"),
    }
    run = Pipeline(stages).run(batch)
    found = run.batch["advantage"].flatten()[-2:].tolist()
    assert found == pytest.approx(credit or [1 - 101 / 3, -101 / 3])
    assert run.ledger.rows("reject/diverged") == [{"row": 0, "rollout": 0, "group": 0}]


def test_ragged_columns_of_different_lengths_are_refused():
    """The padding of a short column would be read as log-probabilities of 0."""
    batch = lazy_stack(list(rewarded([1.0, 0, 2, 5], [0, 0, 0, 0]).unbind(0)))
    for name, key in (("tis", SAMPLER), ("mis", SAMPLER), ("opd", ("teacher_log_probs", "full"))):
        cut = lazy_stack([row.clone() for row in batch.unbind(0)])
        cut.tensordicts[1][key] = cut.tensordicts[1][key][:4]
        with pytest.raises(BatchError, match=rf"token in \('{key[0]}'.*row 1 has 4 for 6 tokens"):
            composed(f"pipeline={name}")(cut)
    batch.tensordicts[2]["advantage"] = torch.zeros(3, 1)
    for row, length in ((0, 6), (1, 6), (3, 6)):
        batch.tensordicts[row]["advantage"] = torch.zeros(length, 1)
    for stage in (RolloutCorrection(), TokenAdvantage(term=LogRatio())):
        with pytest.raises(BatchError, match=r"'advantage', as many as .*row 2 has 3 for 6 tokens"):
            stage(batch)


@pytest.mark.torchrl
def test_a_ragged_token_advantage_is_refused_by_a_loss_that_pads_differently(scene):
    policy, batch = scene
    loss = grpo_loss(policy)
    loss.set_keys(sample_log_prob=OLD)
    rows = list(batch.unbind(0))
    for key in (OLD, SAMPLER, MASK):
        rows[0][key] = rows[0][key][:-1]
    done = LossWeight(dtype="float64", log_prob_key=OLD)(RolloutCorrection()(lazy_stack(rows)))
    with pytest.raises(BatchError, match=r"get each other's advantages. Put DenseRows first"):
        optimise([done], loss, torch.optim.SGD(policy.parameters(), lr=0.0))


@pytest.mark.parametrize("level", ["token", "sequence", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_advantage_beyond_its_dtype_is_refused(dtype, level):
    """Rows 1 to 3 have large advantages. Row 2 has a weight of 1, and row 3 no token in the loss."""
    batch, most = rewarded([1.0, 0, 2, 5], [0, 0, 0, 0]), torch.finfo(dtype).max / 4
    batch["advantage"] = torch.tensor([1.0, -most, most, most], dtype=dtype).view(4, 1, 1)
    batch[OLD] = batch[SAMPLER] + 3 / (6 if level == "sequence" else 1)
    batch[OLD][2] = batch[SAMPLER][2]
    batch[MASK][3] = False
    by_token = batch.clone()
    by_token["advantage"] = batch["advantage"].repeat(1, 6, 1)
    by_token["advantage"][0, 2] = 4 * most  # row 0 has this token out of the loss
    by_token[MASK][0, 2] = False
    for each in (batch, by_token):
        for options in ({"bound": "none"}, {"high": 5.0}):
            with pytest.raises(
                BatchError, match=f"^an advantage must be finite in {dtype}; found others in row 1$"
            ):
                RolloutCorrection(level=level, **options)(each)
        found = RolloutCorrection(level=level, high=3.5)(each)  # 3.5 / 4 of the largest number
        assert found["advantage"].isfinite().all()
        assert found["advantage"].abs().max() == pytest.approx(3.5 * most, rel=1e-3)


def test_a_product_beyond_its_dtype_is_refused_by_a_token_advantage():
    batch = rewarded([1.0, 0], [0, 0])
    batch["advantage"] = torch.full((2, 1, 1), torch.finfo(torch.float32).max / 4)
    batch[OLD] = batch[SAMPLER] + 3
    with pytest.raises(BatchError, match=r"the advantage must be finite.*found inf at row 0"):
        TokenAdvantage(term=LogRatio(numerator_key=OLD), factor=30.0, how="multiply")(batch)


# -- recipes ---------------------------------------------------------------------------------------------


def credit_of(rewards: list[float], own: float) -> float:
    spread = statistics.stdev(rewards)
    return 0.0 if not spread else (own - statistics.fmean(rewards)) / (spread + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "ragged"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_equals_its_formula(name, kind):
    """The formula is computed row by row, in groups of four with different rewards."""
    rewards = [1.0, 0, 2, 5, 3, 3, 4, 4, 0, 1, 1, 7]
    groups = [row // 4 for row in range(12)]
    batch = rewarded(rewards, groups, spread=0.002 if name in ("mis", "opsm", "mlperf") else 0.9)
    logs = log_ratios(batch)
    means = [math.fsum(row) / len(row) for row in logs]
    stays = [0.999 <= math.exp(-m) <= 1.001 for m in means] if name == "mis" else [True] * 12
    run = composed(f"pipeline={name}").run(lazy_stack(list(batch.unbind(0))) if kind == "ragged" else batch)
    for place, row in enumerate(run.batch["headrace", "row"].tolist()):
        others = [rewards[r] for r in range(12) if groups[r] == groups[row] and stays[r]]
        credit = credit_of(others, rewards[row]) if stays[row] and len(others) > 1 else 0.0
        weights = [1.0] * len(logs[row])
        if name != "opsm":
            bound, low, high = {"icepop": ("zero", 0.5, 5.0), "mlperf": ("none", None, None)}.get(
                name, ("truncate", None, 2.0)
            )
            weights = stated_weights([logs[row]], "token", bound, low, high)[0]
        if name == "opsm" and credit < 0 and -means[row] > 1e-4:
            credit = 0.0
        if name == "mlperf" and not 0.999 <= math.exp(means[row]) <= 1.002:
            credit = 0.0
        found = run.batch["advantage"][place, :, 0][batch[MASK][row]]
        assert found.tolist() == pytest.approx([credit * w for w in weights], rel=1e-4, abs=1e-6)
    gone = [row["row"] for row in run.ledger.rows("reject/diverged")] if name == "mis" else []
    assert gone == [row for row in range(12) if not stays[row]]
    assert name != "mis" or 0 < len(gone) < 12


def presets() -> dict[str, dict[str, str]]:
    """For each preset of verl, the options of its stages in the page's table. A missing stage has "–"."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| `decoupled_")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: {"reject": reject, "correction": correction} for name, reject, correction in cells}


def recipe_of(preset: Mapping[str, str]) -> str:
    """The page's recipe with these options. Lines of missing stages are removed, as the page says."""
    page = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert page
    text = page[1]
    for stage, options in preset.items():
        heading = r"  reject:\n    criterion" if stage == "reject" else "  correction"
        if options == "–":
            text = re.sub(rf"^{heading}: .*\n", "", text, flags=re.MULTILINE)
            text = re.sub(rf"^.*stages\.{stage}\b.*\n", "", text, flags=re.MULTILINE)
            text = text.replace(f"{stage}, ", "")
        else:
            text, lines = re.subn(rf"^({heading}): .*$", rf"\1: {options}", text, flags=re.MULTILINE)
            assert lines == 1
    return text


# For each factory method of verl: the level and bounds of the weight, and the statistic and bounds of the
# rejection.
VERL = {
    "decoupled_token_is": (("token", "truncate", None, 2.0), None),
    "decoupled_seq_is": (("sequence", "truncate", None, 2.0), None),
    "decoupled_token_icepop": (("token", "zero", 0.5, 5.0), None),
    "decoupled_seq_is_rs": (("sequence", "truncate", None, 2.0), ("k1", "sum", 0.5, 2.0)),
    "decoupled_geo_rs": (None, ("k1", "mean", 0.999, 1.001)),
    "decoupled_geo_rs_seq_tis": (("sequence", "truncate", None, 2.0), ("k1", "mean", 0.999, 1.001)),
    "decoupled_geo_rs_token_tis": (("token", "truncate", None, 2.0), ("k1", "mean", 0.999, 1.001)),
    "decoupled_k3_rs": (None, ("k3", "mean", None, 0.01)),
    "decoupled_k3_rs_seq_tis": (("sequence", "truncate", None, 2.0), ("k3", "mean", None, 0.01)),
    "decoupled_k3_rs_token_tis": (("token", "truncate", None, 2.0), ("k3", "mean", None, 0.01)),
}


def test_every_preset_of_verl_is_in_the_table():
    assert set(presets()) == set(VERL)


@pytest.mark.slow
@pytest.mark.parametrize("name", VERL)
def test_a_preset_of_verl_behaves_as_documented(name, tmp_path):
    """A rejected row leaves the mask, and its reward stays in the baseline."""
    weigh, reject = VERL[name]
    rewards, groups = [1.0, 0, 2, 5, 3, 3, 4, 4], [0, 0, 0, 0, 1, 1, 1, 1]
    spread = 0.3 if reject and (reject[0] == "k3" or reject[1] == "sum") else 0.002 if reject else 0.9
    batch = rewarded(rewards, groups, spread=spread)
    if reject and reject[0] == "k3":
        batch[OLD][::2] = batch[SAMPLER][::2] + 0.001
    logs = log_ratios(batch)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "verl_preset.yaml").write_text(recipe_of(presets()[name]))
    path = f"hydra.searchpath=[file://{tmp_path}]"
    run = load_pipeline("pipeline=verl_preset", path, "pipeline.stages.split.shuffle=false").run(batch)
    rejected = []
    for row in range(8):
        d = stated_divergence([logs[row]], *reject[:2])[0] if reject else 0.0
        if reject:
            low, high = reject[2:]
            bounds = (math.log(low), math.log(high)) if reject[0] == "k1" else (-math.inf, high)
            if not bounds[0] <= d <= bounds[1]:
                rejected.append(row)
        others = [rewards[r] for r in range(8) if groups[r] == groups[row]]
        credit = credit_of(others, rewards[row])
        weights = [1.0] * len(logs[row])
        if weigh:
            weights = stated_weights([logs[row]], *weigh)[0]
        inside = run.batch[MASK][row]
        assert bool(inside.any()) == (row not in rejected)
        if row not in rejected:
            found = run.batch["advantage"][row].flatten().expand(6)[inside]
            assert found.tolist() == pytest.approx([credit * w for w in weights], rel=1e-4, abs=1e-6)
    assert not reject or 0 < len(rejected) < 8
    assert int(run.batch["num_tokens"][0]) == sum(len(logs[row]) for row in range(8) if row not in rejected)


# -- the report ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "warns"), [(0.99, True), (0.0, False), (None, False)])
def test_a_report_warns_of_a_low_effective_sample_size(least, warns):
    batch = rewarded([1.0, 0, 2, 5], [0, 0, 0, 0], spread=1.0)
    run = Pipeline(
        {"advantage": GroupRelativeAdvantage(), "correction": RolloutCorrection(least_ess=least)}
    ).run(batch)
    report, text = make_report(run), StringIO()
    Console(file=text, width=100).print(show_report(report))
    share = run.metrics["correction/ess_token"]
    line = (
        f"off-policy: correction: ess_token is {share:.3g}, below {least:g} (least_ess)"
        if warns
        else "off-policy"
    )
    assert (line in text.getvalue()) == warns
    shown = page_data([report], title="")["steps"][0]["advisories"]
    assert (f"{line}." in [f"{each['name']}: {each['text']}" for each in shown]) == warns == bool(shown)
    assert report.numbers["correction/ess_token"] == share
    assert {"correction/kl_k3_sequence", "correction/chi2_token"} <= set(report.numbers)
