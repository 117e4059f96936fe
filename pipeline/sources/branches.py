"""Branches of a graph of messages, from a root to each leaf: what prime-rl trains on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .record import Record
from .text import read_text


class Branch(NamedTuple):
    """One branch, split at the policy's first token; without tokens, its texts only."""

    prompt: str
    response: str
    tokens: list[int] | None
    mask: list[int] | None
    """(R,) over the response: 1 for tokens that the policy sampled."""
    log_probs: list[float] | None
    """(R,) NaN where the policy did not sample; None where the log-probabilities are incomplete."""
    trainable: bool


class _Node(NamedTuple):
    parent: int | None
    sampled: bool
    text: str
    tokens: list[int]
    mask: list[int]
    log_probs: list[float]
    links: list[tuple[str, int]]


def branches(trace: Record) -> list[Branch]:
    """The branches on which the policy sampled something, in the order of their leaves.

    Where some branches have tokens, those without are omitted.

    Raises:
        SourceError: a node is not as documented, or its parent does not come before it.
    """
    nodes: list[_Node] = []
    for record in trace.records("nodes", optional=True):
        nodes.append(_node(record, len(nodes)))
    parents = {node.parent for node in nodes}
    resumed = {target for node in nodes for kind, target in node.links if kind == "compaction"}
    result = []
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = _path_to(nodes, leaf)
        if any(node.sampled for node in path):
            attempt = any(kind == "compaction_attempt" for kind, _ in nodes[leaf].links)
            result.append(_branch(path, not attempt or leaf in resumed))
    return [branch for branch in result if branch.tokens is not None] or result


def _path_to(nodes: list[_Node], leaf: int) -> list[_Node]:
    """The nodes from the root to a leaf."""
    path = [nodes[leaf]]
    while (parent := path[-1].parent) is not None:
        path.append(nodes[parent])
    return path[::-1]


def _node(record: Record, index: int) -> _Node:
    parent = record.whole("parent", optional=True)
    if parent is not None and parent >= index:
        raise record.fail(f"'parent' must be a node before this one ({index})", parent)
    tokens = record.wholes("token_ids", optional=True) or []
    mask = record.bits("mask", optional=True) or []
    log_probs = record.numbers("logprobs", optional=True) or []
    if len(mask) != len(tokens):
        raise record.fail(f"'mask' must be as long as token_ids ({len(tokens)})", mask)
    if log_probs and len(log_probs) != sum(mask):
        raise record.fail(f"'logprobs' has one for each sampled token ({sum(mask)})", log_probs)
    links = [
        (link.text("type"), link.whole("node")) for link in record.records("semantic_parents", optional=True)
    ]
    text = read_text(Record({"m": [record.record("message").data]}, record.where, record.line), "m") or ""
    return _Node(parent, record.flag("sampled", default=False), text, tokens, mask, log_probs, links)


def _branch(path: list[_Node], trainable: bool) -> Branch:
    first = next(i for i, node in enumerate(path) if node.sampled)
    prompt = "\n".join(node.text for node in path[:first])
    response = "\n".join(node.text for node in path[first:])
    tokens: list[int] = [token for node in path for token in node.tokens]
    mask: list[int] = [bit for node in path for bit in node.mask]
    if 1 not in mask:
        return Branch(prompt, response, None, None, None, trainable)
    begin = mask.index(1)
    complete = all(len(node.log_probs) == sum(node.mask) for node in path)
    spread = [value for node in path for value in _spread(node)] if complete else None
    return Branch(
        prompt, response, tokens, mask[begin:], None if spread is None else spread[begin:], trainable
    )


def _spread(node: _Node) -> list[float]:
    values: Any = iter(node.log_probs)
    return [next(values) if bit else math.nan for bit in node.mask]
