"""Each component of a loss is a mean over its own tokens, for any cut of the optimiser step."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from any_rank import results_of, spread
from tensordict import TensorDict, lazy_stack

from headrace.pipeline import Pipeline, load_pipeline, optimise
from headrace.transforms import (
    BatchError,
    FanOutCollapse,
    LossWeight,
    MissingKeyError,
    RewardsVary,
    SampleFilter,
    ShuffleSplit,
    pack,
    split_microbatches,
    split_minibatches,
    take_rows,
    weighted_loss,
)
from headrace.transforms.table.schema import PADDING, ROW

LOSS, REAL, SEEN = ("masks", "all_assistant_mask"), ("masks", "all_attention_mask"), ("masks", "seen")
TOKENS, LOG_PROB = ("tokens", "full"), ("log_probs", "full")
UNITS = ("token", "sample", "rollout", "group", "constant", "inverse_length")
MORE = {"constant": {"length": 7}, "inverse_length": {"power": 0.75}}


def drawn(seed: int) -> TensorDict:
    """Groups of rollouts. Each rollout has one to three rows of five tokens.

    The filter masks groups with equal rewards. Rollouts without a token in the loss are excluded.
    """
    generator = torch.Generator().manual_seed(seed)

    def below(top: int) -> int:
        return int(torch.randint(0, top, (), generator=generator))

    rows = [
        (group, 10 * group + number, float(below(2)))
        for group in range(2 + below(4))
        for number in range(2)
        for _ in [below(2)]
    ]
    rows = [row for row in rows for _ in range(1 + below(3))]
    rewards = {rollout: reward for _, rollout, reward in rows}
    size, shape = len(rows), (len(rows), 5)
    loss_mask = torch.rand(shape, generator=generator) < 0.4
    # Tokens that the environment wrote, and a few of the policy: a component may have any tokens.
    seen = (torch.rand(shape, generator=generator) < 0.5) & (
        ~loss_mask | (torch.rand(shape, generator=generator) < 0.2)
    )
    return TensorDict(
        {
            "group_id": torch.tensor([group for group, _, _ in rows]),
            "rollout_id": torch.tensor([rollout for _, rollout, _ in rows]),
            ("next", "reward"): torch.tensor([rewards[rollout] for _, rollout, _ in rows]),
            LOSS: loss_mask,
            SEEN: seen,
            LOG_PROB: -torch.rand(shape, generator=generator),
            TOKENS: torch.randint(0, 9, shape, generator=generator),
            "terms": torch.randn(*shape, 3, generator=generator, dtype=torch.float64),
        },
        batch_size=[size],
    )


def components_of(seed: int) -> dict[str, dict]:
    """Two components over tokens in the loss, and one over seen tokens. The seed decides their units."""
    units = [UNITS[(seed + shift) % 6] for shift in (0, 1, 3)]
    own = [{"unit": unit, **MORE.get(unit, {})} for unit in units]
    return {
        "objective": own[0],
        "kl": own[1] | {"factor": 0.25},
        "seen": own[2] | {"factor": 0.5, "loss_mask_key": SEEN},
    }


def pipeline_of(components: dict, *, minibatches: int = 1, microbatches: int = 1, **options) -> Pipeline:
    split = {"remainder": "pad", "seed": minibatches + microbatches, "unit": "sample"}
    ranks = {name: options.pop(name) for name in ("process_group", "shared_ids") if name in options}
    stages = {
        "collapse": FanOutCollapse(),
        "filter": SampleFilter(criterion=RewardsVary()),
        "split": ShuffleSplit(minibatches=minibatches, microbatches=microbatches, **split),
        "weight": LossWeight(components=components, dtype="float64", **options),
    }
    return Pipeline(stages, **ranks)


def terms_of(part: TensorDict, names: Sequence[str]) -> TensorDict:
    return TensorDict({f"loss_{name}": part["terms"][..., k] for k, name in enumerate(names)})


def by_loops(batch: TensorDict, rows: Sequence[int], in_loss: set[int], options: dict, number: int) -> float:
    """The mean of a component over its own tokens in a step of these rows, times its factor."""
    own = "loss_mask_key" in options
    tokens = [
        (row, place)
        for row in rows
        for place in range(5)
        if (bool(batch[SEEN][row, place]) if own else row in in_loss and bool(batch[LOSS][row, place]))
    ]
    value = {each: float(batch["terms"][each[0], each[1], number]) for each in tokens}
    unit, factor = options["unit"], options.get("factor", 1.0)
    if not tokens:
        return 0.0
    label = {"token": lambda token: token, "sample": lambda token: token[0]}
    label["group"] = lambda token: int(batch["group_id"][token[0]])
    of = label.get(unit, lambda token: int(batch["rollout_id"][token[0]]))
    units: dict = {}
    for token in tokens:
        units.setdefault(of(token), []).append(value[token])
    if unit == "constant":
        return factor * math.fsum(value.values()) / (len(units) * options["length"])
    if unit == "inverse_length":
        power = options["power"]
        above = math.fsum(len(each) ** -power * math.fsum(each) for each in units.values())
        return factor * above / math.fsum(len(each) ** -power for each in units.values())
    return factor * math.fsum(math.fsum(each) / len(each) for each in units.values()) / len(units)


def rows_in_loss(batch: TensorDict) -> set[int]:
    """Rows whose rollout has a token in the loss, and whose group has different rewards."""
    count, rollout = batch[LOSS].sum(1), batch["rollout_id"]
    full = {int(each) for each in rollout if int(count[rollout == each].sum())}
    rewards: dict = {}
    for row, each in enumerate(rollout.tolist()):
        if each in full:
            rewards.setdefault(int(batch["group_id"][row]), set()).add(float(batch["next", "reward"][row]))
    varied = {group for group, each in rewards.items() if len(each) > 1}
    return {
        row
        for row, each in enumerate(rollout.tolist())
        if each in full and int(batch["group_id"][row]) in varied
    }


def test_each_component_is_the_mean_over_its_tokens_for_any_cut():
    """Loops over tokens compute the three components of each batch."""
    masked, excluded, padded = 0, 0, 0
    for seed in range(60):  # each combination of a unit, a cut and a form
        batch, components = drawn(seed), components_of(seed)
        in_loss = rows_in_loss(batch)
        cut = {"minibatches": 1 + seed % 2, "microbatches": 1 + seed % 4}
        seen = 0
        given = lazy_stack(list(batch.unbind(0))) if seed % 5 == 0 else batch
        for minibatch in pipeline_of(components, **cut).minibatches(given):
            rows = [row for row in minibatch[ROW].tolist() if row >= 0]
            seen += len(rows)
            if PADDING in minibatch.keys(True):
                padded += int(minibatch[SEEN][minibatch[PADDING]].sum())
            found = dict.fromkeys(components, 0.0)
            for part in split_microbatches(minibatch):
                for number, name in enumerate(components):
                    alone = torch.zeros_like(part["terms"])
                    alone[..., number] = part["terms"][..., number]
                    part_alone = TensorDict({"terms": alone}, batch_size=alone.shape[:1])
                    found[name] += float(weighted_loss(terms_of(part_alone, list(components)), part))
            for number, (name, options) in enumerate(components.items()):
                expected = by_loops(batch, rows, in_loss, options, number)
                assert found[name] == pytest.approx(expected, rel=1e-12, abs=1e-12), (seed, name)
        assert seen == len(batch)
        empty = {
            each
            for each in batch["rollout_id"].tolist()
            if not batch[LOSS][batch["rollout_id"] == each].any()
        }
        excluded += sum(each in empty for each in batch["rollout_id"].tolist())
        masked += len(batch) - len(in_loss)
    assert min(masked, excluded, padded) > 10, "the batches must have all of these"


def of_ranks(rank: int, world: int, seeds: Sequence[int], gradients: str) -> list[list[float]]:
    """For each batch and component, the sum of weight × term over the rows of this rank."""
    found = []
    for seed in seeds:
        batch, components = drawn(seed), components_of(seed)
        how = ("in turn", "at random", "one without")[seed % 3]
        mine = spread(batch, how, world)[rank]
        rows = take_rows(batch, mine) if len(mine) else TensorDict({}, batch_size=[0])
        options = {"process_group": "world", "shared_ids": "same", "gradients": gradients}
        pipeline = pipeline_of(components, microbatches=1 + seed % 3, **options)
        sums = [0.0] * 3
        for minibatch in pipeline.minibatches(rows):
            for part in split_microbatches(minibatch):
                for number, name in enumerate(components):
                    sums[number] += float((part["loss_weights", name] * part["terms"][..., number]).sum())
        found.append(sums)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world", "gradients"), [(2, "sum"), (3, "mean")])
def test_each_component_has_one_denominator_over_all_ranks(world: int, gradients: str, tmp_path: Path):
    seeds = range(9)
    every = results_of(of_ranks, world, tmp_path, seeds, gradients)
    for number, seed in enumerate(seeds):
        batch, components = drawn(seed), components_of(seed)
        in_loss = rows_in_loss(batch)
        for k, options in enumerate(components.values()):
            expected = by_loops(batch, range(len(batch)), in_loss, options, k)
            sums = math.fsum(of_rank[number][k] for of_rank in every)
            found = sums / (world if gradients == "mean" else 1)
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12), (seed, k)


# -- which rows a component has ---------------------------------------------------------------------------


def pair() -> TensorDict:
    """Three rows of 3 tokens: a group with rewards 1 and 0, and a demonstration outside of the loss mask."""
    return TensorDict(
        {
            "group_id": torch.tensor([0, 0, 1]),
            "rollout_id": torch.tensor([0, 1, 2]),
            ("next", "reward"): torch.tensor([1.0, 0.0, 0.0]),
            LOSS: torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0]]).bool(),
            SEEN: torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1]]).bool(),
            LOG_PROB: torch.zeros(3, 3),
        },
        batch_size=[3],
    )


CHORD = {"objective": {"factor": 0.9}, "imitation": {"unit": "sample", "loss_mask_key": SEEN, "factor": 0.1}}


def test_a_demonstration_trains_in_its_component_and_is_in_no_statistic():
    """The demonstration has no token in the loss mask, so it is excluded: only the pair has advantages.

    Imitation is 0.1 × the mean over two rows, of 1 and of 2 tokens: a token weighs 0.1/2 or 0.1/4.
    The objective is 0.9 × the mean over 3 tokens.
    """
    batch = pair()
    batch["expected_rollouts"] = torch.tensor([2, 2, 1])
    run = load_pipeline("grpo", stages={"weight": {"components": CHORD}}, shuffle=False).run(batch)
    out = run.batch
    assert out["loss_weights", "imitation"].tolist() == [
        pytest.approx(row) for row in ([0, 0, 0], [0, 0, 0.05], [0, 0.025, 0.025])
    ]
    assert out["loss_weights", "objective"].tolist() == [
        pytest.approx(row) for row in ([0, 0.3, 0.3], [0, 0.3, 0], [0, 0, 0])
    ]
    alone = load_pipeline("grpo", shuffle=False).run(batch[:2]).batch
    assert torch.equal(out["advantage"][:2], alone["advantage"])
    assert run.metrics["weight/tokens_imitation"] == 3
    assert run.metrics["weight/tokens_objective"] == run.metrics["weight/tokens"] == 3


def test_a_masked_group_trains_only_in_components_with_another_mask():
    batch = pair()
    batch["next", "reward"] = torch.zeros(3)
    stages = {"filter": SampleFilter(criterion=RewardsVary()), "weight": LossWeight(components=CHORD)}
    out = Pipeline(stages)(batch)
    assert not out[LOSS].any()
    assert not out["loss_weights", "objective"].any()
    assert (out["loss_weights", "imitation"] > 0).tolist() == batch[SEEN].tolist()


def test_dropped_rows_are_in_no_component():
    batch = pair()
    batch[LOSS][2, 1] = True  # otherwise the row is excluded, and no filter drops it
    drop = SampleFilter(criterion=RewardsVary(), action="drop")
    out = Pipeline({"filter": drop, "weight": LossWeight(components=CHORD)})(batch)
    assert out["rollout_id"].tolist() == [0, 1]
    assert out["loss_weights", "imitation"].sum() == pytest.approx(0.1)


def test_padding_rows_are_in_no_component_without_a_pipeline():
    split = ShuffleSplit(minibatches=2, microbatches=2, remainder="pad", unit="sample", shuffle=False)
    batch = take_rows(pair(), torch.tensor([1, 2, 2]))
    out = LossWeight(components={"imitation": {"loss_mask_key": SEEN}})(split(batch))
    assert out[PADDING].sum() == 1
    for minibatch in split_minibatches(out):
        assert float(minibatch["loss_weights", "imitation"].sum()) == pytest.approx(1)
        assert not minibatch["loss_weights", "imitation"][minibatch[PADDING]].any()


def test_a_component_by_rollout_needs_rollout_ids():
    batch = pair()
    batch["rollout_id"][2] = -1
    component = {"imitation": {"unit": "rollout", "loss_mask_key": SEEN}}
    with pytest.raises(BatchError, match="every row in the component 'imitation' needs a rollout_id ≥ 0"):
        LossWeight(components=component)(batch)


# -- the loss ---------------------------------------------------------------------------------------------


def test_a_component_without_options_has_the_loss_weight():
    dense = drawn(3)
    ragged = lazy_stack(list(dense.exclude(LOG_PROB).unbind(0)))  # all log-probabilities are finite
    for unit, batch in itertools.product(UNITS, (dense, ragged)):
        more = MORE.get(unit, {})
        out = LossWeight(unit=unit, **more, components={"objective": {}, "kl": {"factor": 0.5}})(batch)
        expected = out["loss_weight"][:, None] * out[LOSS]
        assert torch.equal(out["loss_weights", "objective"], expected)
        assert torch.allclose(out["loss_weights", "kl"], expected / 2, rtol=1e-6)


def test_nan_outside_of_a_component_reaches_no_loss_and_no_gradient():
    batch = pair()
    out = LossWeight(components=CHORD)(batch)
    log_prob = torch.full((3, 3), math.nan)
    log_prob[batch[SEEN]] = torch.tensor([1.0, 2.0, 4.0])
    log_prob.requires_grad_()
    terms = TensorDict({"loss_imitation": -log_prob, "loss_objective": torch.full((3, 3, 1), 2.0)})
    loss = weighted_loss(terms, out)
    assert float(loss.detach()) == pytest.approx(1.8 - 0.05 * 1 - 0.025 * (2 + 4))
    loss.backward()
    assert torch.equal(log_prob.grad, -out["loss_weights", "imitation"])


def test_terms_and_components_must_have_the_same_names():
    out = LossWeight(components=CHORD)(pair())
    term = torch.zeros(3, 3)
    for names in (["objective"], ["objective", "imitation", "entropy"], ["objective", "imitatoin"]):
        told = f"the terms are {sorted(f'loss_{name}' for name in names)}, and the components are of "
        told += "['loss_imitation', 'loss_objective']. Name them alike"
        with pytest.raises(BatchError, match=re.escape(told)):
            weighted_loss(TensorDict({f"loss_{name}": term for name in names}), out)
    with pytest.raises(BatchError, match=r"'loss_objective' is \(\)"):
        weighted_loss(TensorDict({"loss_objective": term.sum(), "loss_imitation": term}), out)
    with pytest.raises(BatchError, match=r"'loss_imitation' is \(3,\)"):
        weighted_loss(TensorDict({"loss_objective": term, "loss_imitation": term[0]}), out)


def test_rows_with_weights_of_components_are_refused():
    """A stage without components would leave the old weights, and weighted_loss would apply them."""
    first, second = LossWeight(components=CHORD), LossWeight()
    with pytest.raises(BatchError, match="already have the weights of components"):
        second(first(pair()))
    with pytest.raises(BatchError, match="already have the weights of components"):
        Pipeline({"first": first, "second": second})(pair())


def test_components_change_no_other_column():
    batch = drawn(1)
    plain, with_them = LossWeight()(batch), LossWeight(components=components_of(1))(batch)
    keys = {("headrace", "step_weight"), ("headrace", "counted"), "loss_weight", "num_tokens", "num_samples"}
    keys |= {"num_rollouts", "num_groups"}
    assert set(plain.keys(True, True)) - set(batch.keys(True, True)) == keys
    for key in plain.keys(True, True):
        assert torch.equal(plain[key], with_them[key]), key


# -- packed and ragged rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [False, True])
def test_packed_rows_have_the_weights_of_their_tokens(tree: bool):
    batch = pair()
    batch[TOKENS], batch[REAL] = torch.tensor([[1, 2, 0], [1, 3, 4], [1, 5, 6]]), torch.ones(3, 3).bool()
    batch[REAL][0, 2] = batch[LOSS][0, 2] = False
    out = LossWeight(components=CHORD)(batch)
    ragged = lazy_stack([row.clone() for row in batch.unbind(0)])
    for row, size in zip(ragged.tensordicts, (2, 3, 3), strict=True):
        for key in (TOKENS, REAL, LOSS, SEEN, LOG_PROB):
            row[key] = row[key][:size]
    cut = LossWeight(components=CHORD)(ragged)
    terms = torch.arange(9.0).view(3, 3)
    expected = weighted_loss(TensorDict({"loss_objective": terms, "loss_imitation": terms}), out)
    for rows in (out, cut):
        packed = pack(rows, tree=tree)
        assert packed["loss_weights", "imitation"].shape == (1, 8)
        of_tokens = terms[batch[REAL]][None]
        both = TensorDict({"loss_objective": of_tokens, "loss_imitation": of_tokens[..., None]})
        assert float(weighted_loss(both, packed)) == pytest.approx(float(expected))
    with pytest.raises(BatchError, match="need dense rows"):
        weighted_loss(TensorDict({"loss_objective": terms, "loss_imitation": terms}), cut)


def test_packing_refuses_to_drop_tokens_of_a_component():
    batch = pair()
    batch[TOKENS], batch[REAL] = torch.ones(3, 3).long(), torch.ones(3, 3).bool()
    for row, place, words in ((2, 2, "must be real"), (2, 0, "no context")):
        wrong = batch.clone()
        wrong[REAL][row, place] = wrong[LOSS][row, place] = place == 0 and wrong[REAL][row, place]
        wrong[LOSS][row] = False
        wrong[SEEN][row, place] = True
        with pytest.raises(BatchError, match=words):
            pack(LossWeight(components=CHORD)(wrong))


# -- optimiser steps --------------------------------------------------------------------------------------


def steps_taken(minibatches, seen: list | None = None) -> int:
    parameter = torch.nn.Parameter(torch.ones(()))

    def loss(batch: TensorDict) -> TensorDict:
        terms = parameter * torch.ones(len(batch), 3)
        return TensorDict({"loss_objective": terms, "loss_imitation": terms})

    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps = optimise(minibatches, loss, optimizer)
    if seen is not None:
        seen.append(float(parameter.detach()))
    return steps


def test_a_step_is_taken_if_only_one_component_has_tokens():
    """The parameter is 1, and its gradient is 0.1 × a mean of ones. Without tokens no step is taken."""
    batch, seen = pair(), []
    batch[LOSS] &= False
    out = LossWeight(components=CHORD)(batch)
    assert steps_taken([out], seen) == 1
    assert seen == [pytest.approx(0.9)]
    batch[SEEN] &= False
    out = LossWeight(components=CHORD)(batch)
    assert steps_taken([out]) == steps_taken([out.exclude("headrace")]) == 0


def test_rows_of_different_optimiser_steps_are_refused():
    batch = pair()
    batch[LOSS][2] = torch.tensor([0, 1, 0]).bool()
    out = LossWeight(components=CHORD)(batch)
    assert steps_taken([out]) == 1
    other = batch.clone()
    other[SEEN][2] = False
    mixed = out.clone()
    for key in (("loss_weights", "imitation"), ("headrace", "step_weights", "imitation")):
        mixed[key][2] = LossWeight(components=CHORD)(other)[key][2]
    with pytest.raises(
        BatchError, match=r"all tokens of 2 components of the loss; found the weights of 1\.5"
    ):  # one of the two rows of imitation is missing
        steps_taken([mixed])
    assert steps_taken([out.exclude("headrace")]) == 1  # such rows have no sums to check


def test_ragged_rows_of_an_optimiser_step_are_checked_too():
    rows = [row.clone() for row in pair().unbind(0)]
    for key in (LOSS, SEEN, LOG_PROB):
        rows[0][key] = rows[0][key][1:]
    ragged = LossWeight(components=CHORD)(lazy_stack(rows))
    with pytest.raises(BatchError, match="need dense rows"):
        steps_taken([ragged])
    ragged.tensordicts[1]["loss_weights", "imitation"] *= 2  # the row has half of the weight of imitation
    with pytest.raises(BatchError, match=r"components of the loss; found the weights of 2\.5"):
        steps_taken([ragged])


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"components": {"loss_kl": {}}}, "named after its term: 'kl' for loss_kl; got 'loss_kl'"),
        ({"components": {"": {}}}, "named after its term: 'kl' for loss_kl; got ''"),
        (
            {"components": {"kl": {"weight": 1.0, "unit": "token", "alpha": 2.0}}},
            r"options of unit, length, power, factor, loss_mask_key; got \['alpha', 'weight'\]",
        ),
        ({"components": {"kl": 0.1}}, "must be a mapping with options .*; got 0.1"),
        ({"components": {"kl": {"unit": "turn"}}}, "unit of components.* must be one of 'token', 'sample'"),
        ({"components": {"kl": {"factor": -1.0}}}, "factor of components.* must be finite and ≥ 0"),
        ({"components": {"kl": {"factor": True}}}, "must be a finite number; got True"),
        ({"components": {"kl": {"unit": "constant"}}}, "unit='constant' needs length"),
        ({"components": {"kl": {"power": 1.0}}}, "unit='inverse_length' needs power"),
        ({"components": {"kl": {"loss_mask_key": list(LOSS)}}}, "leave out loss_mask_key"),
        ({"components": {"kl": {}}, "fold": "sum"}, "with components each term has its own weight"),
        ({"components": {"kl": {}}, "unit": "turn", "turn_key": "turn"}, "needs unit, .*is 'turn'"),
    ],
)
def test_wrong_options_are_refused(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        LossWeight(**options)


def test_a_mask_of_a_component_needs_one_bool_per_token():
    """Only a missing loss mask has a default, the tokens of the response."""
    batch = pair()
    batch["tokens"] = {"prompt": torch.zeros(3, 1), "response": torch.zeros(3, 2)}
    batch[REAL] = torch.ones(3, 3).bool()
    stage = LossWeight(components=CHORD)
    with pytest.raises(MissingKeyError, match=r"needs .*\('masks', 'seen'\)"):
        stage(batch.exclude(SEEN))
    with pytest.raises(BatchError, match="is bool"):
        stage(batch.clone().update({"masks": {"seen": torch.ones(3, 3)}}))
    for wrong, width in ((torch.ones(3), 1), (torch.ones(3, 1), 1), (torch.ones(3, 4), 4)):
        wrong = wrong.bool()
        told = rf"as many as the loss mask: \[3\]; \('masks', 'seen'\) has \[{width}\]\. For the tokens of"
        with pytest.raises(BatchError, match=told):
            stage(batch.clone().update({"masks": {"seen": wrong}}))


def test_an_override_sets_components():
    """In an override, a list of names is the key of a column."""
    word = "{objective:{},seen:{unit:sample,loss_mask_key:[masks,seen],factor:0.05}}"
    pipeline = load_pipeline("grpo", f"pipeline.stages.weight.components={word}", "pipeline.stages.gate=null")
    batch = pair()
    out = pipeline(batch)
    assert float(out["loss_weights", "seen"].sum()) == pytest.approx(0.05)
    assert torch.equal(out["loss_weights", "seen"] > 0, batch[SEEN][out[ROW]])
