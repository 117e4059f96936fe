"""Rows share nodes exactly where all inputs are equal, and values return to their rows."""

from __future__ import annotations

import re
from itertools import pairwise, product

import pytest
import torch
from fake_device import waits_of
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from tries import ATTENTION, FULL, LOG_PROBS, LOSS, Trie, dense, ragged, scenes

from headrace.transforms import (
    BatchError,
    MissingKeyError,
    logits_of_tokens,
    pack,
    tree_log_probs,
    tree_mask,
    tree_mask_mod,
    unpack,
    unpack_tokens,
)

# Few token ids, so that rows share tokens. 0 is also padding, and −200 is an image in some models.
ROWS = st.lists(st.lists(st.sampled_from([0, 1, 2, -200]), min_size=1, max_size=9), min_size=1, max_size=9)
LAYOUTS = st.sampled_from(["left", "right", "ragged"])


def batch_of(rows, layout) -> TensorDict:
    return ragged(rows) if layout == "ragged" else dense(rows, max(map(len, rows)) + 2, layout)


def paths_of(packed) -> list[tuple]:
    """The path of each node, by its parents."""
    paths: list[tuple] = []
    tokens, parents = packed["input_ids"][0].tolist(), packed["tree_parent"][0].tolist()
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@given(ROWS, LAYOUTS)
def test_nodes_equal_the_paths_of_a_trie(rows, layout):
    packed = pack(batch_of(rows, layout), tree=True)
    paths, trie = paths_of(packed), Trie(rows)
    assert len(paths) == len(set(paths))  # nothing is computed twice
    assert set(paths) == trie.paths
    assert packed["position_ids"][0].tolist() == [len(path) - 1 for path in paths]
    of_tokens = [tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)]
    assert [paths[node] for node in packed["packed_node"][0].tolist()] == of_tokens
    roots = [path[0] for path in paths]
    assert [a == b for a, b in pairwise(roots)] == [
        a == b for a, b in pairwise(packed["segment_ids"][0].tolist())
    ]
    assert packed["segment_ids"][0].unique().tolist() == list(range(len(set(roots))))


@given(ROWS)
def test_a_token_attends_to_its_path(rows):
    packed = pack(dense(rows), tree=True)
    paths, mask = paths_of(packed), tree_mask(packed)
    assert mask.shape == (1, 1, len(paths), len(paths))
    assert mask.dtype is torch.bool
    assert mask[0, 0].tolist() == [[Trie.sees(query, key) for key in paths] for query in paths]
    added = tree_mask(packed, torch.float32)
    assert torch.equal(added == 0, mask)
    assert torch.equal(added == torch.finfo(torch.float32).min, ~mask)
    sees, (q, k) = tree_mask_mod(packed), torch.meshgrid(*[torch.arange(len(paths))] * 2, indexing="ij")
    assert torch.equal(sees(torch.zeros_like(q), torch.zeros_like(q), q, k), mask[0, 0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_equals_attention_with_the_mask():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    packed = pack(dense(scenes()["forks anywhere"]), tree=True)
    size = packed["input_ids"].shape[1]
    blocks = create_block_mask(tree_mask_mod(packed), 1, None, size, size, device="cpu")
    each = torch.randn(3, 1, 2, size, 16).unbind(0)
    expected = torch.nn.functional.scaled_dot_product_attention(*each, attn_mask=tree_mask(packed))
    torch.testing.assert_close(flex_attention(*each, block_mask=blocks), expected, rtol=1e-4, atol=1e-5)


@given(ROWS, LAYOUTS)
def test_values_of_rows_and_nodes_return_to_their_rows(rows, layout):
    batch = batch_of(rows, layout)
    packed, plain = pack(batch, tree=True), pack(batch)
    back, expected = unpack(packed), unpack(plain)
    for key in (FULL, ATTENTION, LOSS, LOG_PROBS, "advantage", "loss_weight"):
        assert torch.equal(packed[key], plain[key]), key  # the loss gets values of rows
        assert torch.equal(back[key], expected[key]), key
    values = torch.stack([packed["input_ids"][0], packed["position_ids"][0] + 1], -1)[None]
    found = unpack_tokens(values, packed)
    assert torch.equal(found[..., 0], back[FULL])
    assert torch.equal(found[..., 1], back[ATTENTION].long().cumsum(1) * back[ATTENTION])


@given(ROWS, st.randoms(use_true_random=False))
def test_the_tree_does_not_depend_on_the_order_of_the_rows(rows, random):
    shuffled = random.sample(rows, len(rows))
    packed, other = (pack(dense(each), tree=True) for each in (rows, shuffled))
    for key in ("input_ids", "position_ids", "segment_ids", "tree_start", "tree_end", "tree_parent"):
        assert torch.equal(packed[key], other[key]), key


@given(ROWS, st.integers(0, 2**31))
def test_rows_with_different_inputs_share_no_token(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = dense(rows)
    kind = torch.randint(2, (*batch[FULL].shape, 2), generator=generator).bfloat16()
    image = torch.randint(2, (len(rows), 2, 1), generator=generator).double()
    batch["kind"], batch["image"] = kind, image
    packed = pack(batch, tree=True, input_keys=["kind"], row_input_keys=["image"])
    there = [
        [(token, *kind[number, place].tolist()) for place, token in enumerate(row)]
        for number, row in enumerate(rows)
    ]
    trie = Trie([[tuple(image[number].flatten().tolist()), *row] for number, row in enumerate(there)])
    assert packed["input_ids"].shape[1] == len(trie.paths) - len({path[0] for path in trie.paths})
    assert torch.equal(packed["kind"][:, packed["packed_node"][0]], pack(batch, input_keys=["kind"])["kind"])
    assert torch.equal(packed["input_ids"][:, packed["packed_node"][0]], pack(batch)["input_ids"])
    assert torch.equal(unpack(packed)["kind"], batch["kind"])


def test_rows_with_different_images_share_no_node():
    rows = ragged([[1, 2], [1, 2], [1, 2], [1, 2]])
    images = [torch.zeros(1, 4), torch.zeros(2, 2), torch.zeros(0, 4), torch.zeros(1, 4)]
    for row, image in zip(rows.tensordicts, images, strict=True):
        row["image"] = image
    assert pack(rows, tree=True)["input_ids"].shape[1] == 2
    assert pack(rows, tree=True, row_input_keys=["image"])["input_ids"].shape[1] == 6


@pytest.mark.parametrize("name", list(scenes()))
def test_log_probs_of_nodes_equal_those_of_the_rows(name):
    """Rows may continue differently after a node."""
    rows = scenes(tokens=8)[name]
    packed = pack(dense(rows), tree=True)
    logits = torch.randn(1, packed["input_ids"].shape[1], 8, dtype=torch.float64)
    logits[..., 0] = -30.0  # a logit may be far from 0
    before = torch.cat([torch.zeros(len(rows), 1, 8), unpack_tokens(logits, packed)[:, :-1]], 1)
    batch = dense(rows)
    expected = before.log_softmax(-1).gather(-1, batch[FULL][..., None]).squeeze(-1)
    expected = torch.where(batch[ATTENTION] & (batch[ATTENTION].cumsum(1) > 1), expected, 0.0)
    nodes = tree_log_probs(logits, packed)
    torch.testing.assert_close(unpack_tokens(nodes, packed), expected, rtol=1e-12, atol=1e-12)
    wide = logits_of_tokens(logits, packed).log_softmax(-1).gather(-1, packed[FULL][..., None]).squeeze(-1)
    behind = pack(batch)["position_ids"] > 0
    torch.testing.assert_close(nodes[:, packed["packed_node"][0]][behind], wide[behind], rtol=1e-12, atol=0)


@pytest.mark.parametrize("token", [-1, -200, 9])
def test_an_id_that_the_model_does_not_have_is_refused(token):
    with pytest.raises(IndexError, match="out of"):
        tree_log_probs(torch.zeros(1, 2, 9), pack(dense([[1, token]]), tree=True))


@pytest.mark.parametrize("layout", ["right", "ragged"])
def test_device_reads_do_not_grow_with_the_rows(layout):
    for count in (1, 4, 64):
        batch = batch_of([[5, 6, number % 7, number][: 1 + number % 4] for number in range(count)], layout)
        copies = 2 if layout == "ragged" and count > 1 else 1  # the nodes, and the lengths of ragged rows
        assert waits_of(lambda rows: pack(rows, tree=True), batch) == (3, copies)
        packed = pack(batch, tree=True)
        assert waits_of(unpack, packed) == (0, 0)
        assert waits_of(tree_mask, packed) == (0, 0)


def test_rows_that_make_no_tree_are_refused_with_the_reason():
    batch = dense([[1, 2], [1, 3]])
    packed = pack(batch, tree=True)
    with pytest.raises(BatchError, match=r"\(1, 3, ...\), for the 3 nodes of a tree .* got \(1, 4\)"):
        unpack_tokens(packed[FULL], packed)
    with pytest.raises(BatchError, match=r"\(1, 4, ...\), for the 4 tokens .* got \(1, 3\)"):
        unpack_tokens(torch.zeros(1, 3), pack(batch))
    for function in (tree_mask, tree_mask_mod, lambda rows: tree_log_probs(torch.zeros(1, 4, 9), rows)):
        with pytest.raises(MissingKeyError, match=r"written by pack\(..., tree=True\)"):
            function(pack(batch))
    for function, shape in product(
        (tree_log_probs, logits_of_tokens), ((1, 4, 9), (2, 3, 9), (1, 3), (3, 9))
    ):
        said = f"logits must be (1, 3, V), for the 3 nodes of packed['input_ids']; got {shape}"
        with pytest.raises(BatchError, match=f"^{re.escape(said)}$"):
            function(torch.zeros(shape), packed)
    with pytest.raises(MissingKeyError, match="row_input_keys"):
        pack(batch, tree=True, row_input_keys=["image"])
    with pytest.raises(MissingKeyError, match="input_keys"):
        pack(batch, tree=True, input_keys=["kind"])
    batch["image"] = ["a", "b"]
    with pytest.raises(BatchError, match="'image' is no tensor, so it cannot be compared"):
        pack(batch, tree=True, row_input_keys=["image"])
    with pytest.raises(BatchError, match="'image' is no tensor"):
        pack(lazy_stack(list(batch.unbind(0))), tree=True, row_input_keys=["image"])
    batch["wave"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(BatchError, match=r"integers, floats or bools; found torch.complex64"):
        pack(batch, tree=True, row_input_keys=["wave"])
