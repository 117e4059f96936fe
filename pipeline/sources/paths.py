"""Paths through a graph of messages, from a root to each leaf: what prime-rl trains on."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .record import Record
from .text import read_text


class Branch(NamedTuple):
    """One path, cut where the policy's first token is; without tokens, its texts only."""

    prompt: str
    response: str
    tokens: list[int] | None
    mask: list[int] | None
    """(R,) over the response: 1 for tokens that the policy sampled."""
    log_probs: list[float] | None
    """(R,) NaN where the policy did not sample; None where some are not there."""
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
    """The paths on which the policy sampled something, in the order of their leaves.

    Paths without tokens are left aside where others have some.

    Raises:
        SourceError: a node is not as documented, or its parent does not come before it.
    """
    nodes: list[_Node] = []
    for record in trace.records("nodes", optional=True):
        nodes.append(_node(record, len(nodes)))
    parents = {node.parent for node in nodes}
    resumed = {target for node in nodes for kind, target in node.links if kind == "compaction"}
    found = []
    for leaf in range(len(nodes)):
        if leaf in parents:
            continue
        path, at = [], leaf
        while True:
            path.append(nodes[at])
            if nodes[at].parent is None:
                break
            at = nodes[at].parent or 0
        path.reverse()
        if not any(node.sampled for node in path):
            continue
        attempt = any(kind == "compaction_attempt" for kind, _ in nodes[leaf].links)
        found.append(_branch(path, not attempt or leaf in resumed))
    with_tokens = [branch for branch in found if branch.tokens is not None]
    return with_tokens or found


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
