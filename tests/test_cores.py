"""What stages are made of reads nothing from the device: shapes and routes do not depend on the data."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch
from torch.utils._pytree import tree_leaves

from headrace.transforms.advantage.baselines import (
    BASELINES,
    SCALES,
    EpsMode,
    Formula,
    advantage_in_groups,
)
from headrace.transforms.advantage.by_turn import TurnFormula
from headrace.transforms.advantage.group_relative import compare_in_groups
from headrace.transforms.advantage.grouping import Blocks, ById, ReshapeFormula
from headrace.transforms.advantage.layout import Facts, facts_of, gather_blocks
from headrace.transforms.checks import broken, identity_rules, reward_rules
from headrace.transforms.collapse import Reduction, reduce_rewards
from headrace.transforms.gate.incomplete import count_present
from headrace.transforms.ids import first_row, is_first, places_by_turn
from headrace.transforms.weight.loss_weight import loss_weight


def test_collapse_then_advantage_on_meta_reads_nothing():
    """On ``device="meta"`` there is nothing to read: what runs there synchronises with no device."""
    ids = torch.arange(12, device="meta")
    reward = torch.zeros(12, device="meta")
    first, groups = first_row(ids), first_row(ids // 4)
    for how in get_args(Reduction):
        assert reduce_rewards(reward, first, how).shape == (12,)
    rules = identity_rules(ids, ids // 4, first) + reward_rules(reward, ids, first, siblings_agree=True)
    assert broken(rules).shape == ()
    assert facts_of(rules, reward, first, groups).shape == (6,)
    assert count_present(ids // 4, ids, ids, ids).have.shape == (12,)
    number, blocks = gather_blocks(first, Facts(False, 4, 4, True, 12, 0.0), reward, ids)
    assert number.shape == (12,)
    block, lengths = blocks
    exact = [Blocks(block.double(), lengths), ById(reward.double(), groups, 12, is_first(first), ids)]
    layouts = [*exact, ReshapeFormula(block, lengths)]
    for baseline, scale, eps_mode in product(BASELINES, SCALES, get_args(EpsMode)):
        if scale in ("leave_one_out", "mad") and eps_mode != "skip":
            continue
        k = 3 if baseline == "best_of_k" else None
        for layout in layouts:
            formula = Formula(baseline, scale, 1, 1e-6, eps_mode, "raw", [0, None], 0.5, k=k)
            credit = advantage_in_groups(layout, formula)
            assert credit.numel() == 12


def flags(reward, ids):
    first = first_row(ids)
    return broken(identity_rules(ids, ids, first) + reward_rules(reward, ids, first, siblings_agree=True))


def advantage(reward, ids):
    credit, rules = compare_in_groups(reward, ids // 4, ids, formula=Formula())
    return credit, broken(rules)


def turns(reward, ids):
    has_turn = ids[:, None] >= torch.arange(3, device=ids.device)
    credit, rules = TurnFormula(0.9, "leave_one_out", "return")(
        reward[:, None].expand(-1, 3), has_turn, ids // 4, ids, reward
    )
    return credit, broken(rules)


CORES = {
    "first rows": lambda reward, ids: first_row(ids),
    "places": lambda reward, ids: places_by_turn(ids, ids).place,
    "collapse": lambda reward, ids: reduce_rewards(reward, first_row(ids), "mean"),
    "presence": lambda reward, ids: count_present(ids // 4, ids, ids, ids).have,
    "flags": flags,
    "advantage": advantage,
    "turns": turns,
    "weights": lambda reward, ids: loss_weight(ids, "rollout", rollout_id=ids, group_id=ids, minibatch=ids),
}


@pytest.mark.parametrize("name", CORES)
def test_a_core_is_traced_as_one_graph(name):
    """On meta tensors, whose route is that of every device but the CPU."""
    columns = torch.zeros(12, device="meta"), torch.arange(12, device="meta")
    expected, found = (
        CORES[name](*columns),
        torch.compile(CORES[name], fullgraph=True, backend="eager")(*columns),
    )
    leaves = zip(tree_leaves(expected), tree_leaves(found), strict=True)
    assert all(here.shape == there.shape and here.dtype == there.dtype for here, there in leaves)
