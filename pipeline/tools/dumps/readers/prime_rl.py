"""Read episodes of prime-rl and verifiers: ``traces.jsonl`` with one episode per line.

Schema: verifiers 0.4.0, ``verifiers/v1/episode.py`` (``Episode``), ``trace.py`` (``Trace``, ``Branch``),
``graph.py`` (``MessageNode``), as written by ``utils/trace_store.py``. prime-rl saves the same episodes (its
pull requests 3329 and 3444). The reader uses ``group.id``, ``run.work`` (``step``, ``policy.start``) and
``ok``, and of the trace ``id``, ``agent.trainable``, ``rewards``, ``ok``, ``stop_condition``, ``calls`` and
``nodes``. Traces outside of an episode, and rollouts of releases before episodes, are not read.

- An episode is a rollout of one trainable agent. Two episodes of a step with the same ``id`` are an error.
  An episode with several trainable agents is refused, because it is not settled how their rewards compare.
- The samples of an episode are the branches of its graph of messages, from a root to a leaf. A sample has the
  tokens that the policy sampled on the branch. If several branches share tokens, these are in the loss of the
  first branch, and are context in the others. A branch without tokens of its own is not a sample (prime-rl
  at 559b44772, ``iter_trainable_branches``). A compaction from which the harness did not continue is out of
  the loss, and shares no tokens.
- The reward is the sum of score × weight, or that of `reward_key` alone. A null reward is missing.
- The step is that of a folder ``step_<N>`` above the file. Without such a folder it is the step at which the
  episode was dispatched, or else the number of the file. Annotations in other files are not read.
- Episodes of evaluations have no group. For them ``group_by="prompt"`` groups by the ``key`` of the task.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headrace.transforms import Status

from .batch import Sample
from .file_kinds import Format, Reading, read_jsonl
from .record import Record, as_number, read_messages, sampled_texts, text_of

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")


def read_prime_rl(path: Path, reading: Reading) -> Iterator[Sample]:
    """Read the samples of one file of episodes.

    Raises:
        SourceError: a record is not as documented.
    """
    steps = [match[1] for folder in path.parts[:-1] if (match := re.fullmatch(r"step_(\d{1,18})", folder))]
    return read_jsonl(path, reading, partial(parse_row, step=int(steps[-1]) if steps else None))


def parse_row(record: Record, reading: Reading, *, step: int | None) -> list[Sample]:
    """Read the samples of one episode: a segment for each branch of its messages, at least one.

    Raises:
        SourceError: the episode is not as documented, or has several trainable agents.
    """
    if "nodes" in record.data and "traces" not in record.data:
        raise record.fail("an episode with its traces is required", "a loose trace, as older releases saved")
    traces = [t for t in record.records("traces") if t.record("agent").flag("trainable", default=True)]
    if len(traces) > 1:
        raise record.fail("an episode has one trainable agent", f"{len(traces)} trainable traces")
    run = record.record("run", optional=True)
    work = run.record("work", optional=True) if run else None
    policy = work.record("policy", optional=True) if work else None
    version = policy.whole("start") if policy else None
    dispatched = work.whole("step") if work else None
    group = record.record("group", optional=True)
    prompt = None if group is not None else record.record("task").text("key")
    row = Sample(
        group=group.text("id") if group is not None else reading.group_of_prompt(prompt, record.where),
        rollout=record.text("id"),
        status=Status.FAILED,
        policy_version=version,
        step=next((s for s in (step, dispatched) if s is not None), reading.file),
        record=record.text("id"),
    )
    if not traces:  # the episode failed before an agent began
        return [row]
    trace = traces[0]
    row.status = _status(record, trace)
    row.reward = _reward(trace, reading.reward_key)
    return _segments(trace, row) or [row]


def _status(episode: Record, trace: Record) -> Status:
    if not episode.flag("ok", default=False) or not trace.flag("ok", default=False):
        return Status.FAILED
    if trace.text("stop_condition", optional=True) in LIMITS:
        return Status.TRUNCATED
    answered = [c for c in trace.records("calls", optional=True) if c.get("error", optional=True) is None]
    cut = bool(answered) and answered[-1].text("finish_reason", optional=True) == "length"
    return Status.TRUNCATED if cut else Status.COMPLETED


def _reward(trace: Record, key: str | None) -> float | None:
    rewards = trace.record("rewards", optional=True)
    given = []
    for name in rewards.data if rewards is not None else ():
        reward = rewards.record(name, optional=True) if key in (None, name) else None
        if reward is not None:
            weight = reward.number("weight", optional=True)
            given.append(reward.number("score") * (1.0 if weight is None else weight))
    total = as_number(sum(given))
    if total is None:
        raise trace.fail("'rewards' must add up to a finite number", given)
    return total if given else None


# -- branches of the graph of messages, from a root to each leaf ------------------------------------------


class _Node(NamedTuple):
    parent: int | None
    sampled: bool
    message: Mapping[str, Any]
    tokens: list[int]
    mask: list[int]
    log_probs: list[float]
    links: list[tuple[str, int]]


def _segments(trace: Record, row: Sample) -> list[Sample]:
    """The segments that prime-rl trains: branches with sampled messages, in the order of their leaves.

    If some branches have tokens, branches without tokens are omitted.

    Raises:
        SourceError: a node is not as documented, or its parent does not come before it.
    """
    nodes = [_node(record, index) for index, record in enumerate(trace.records("nodes", optional=True))]
    parents = {node.parent for node in nodes}
    resumed = {target for node in nodes for kind, target in node.links if kind == "compaction"}
    result, trained = [], set[int]()  # nodes whose tokens are in the loss of an earlier branch
    for leaf in (index for index in range(len(nodes)) if index not in parents):
        path = [leaf]
        while (parent := nodes[path[-1]].parent) is not None:
            path.append(parent)
        path.reverse()
        sampled = {at for at in path if nodes[at].sampled or 1 in nodes[at].mask}
        attempt = any(kind == "compaction_attempt" for kind, _ in nodes[leaf].links)
        in_loss = not attempt or leaf in resumed
        own = sampled - trained if in_loss else sampled
        if own:
            result.append(_segment(row, [(nodes[at], at in own) for at in path], in_loss=in_loss))
        if in_loss:
            trained |= sampled
    return [segment for segment in result if segment.tokens is not None] or result


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
    message = Record({"m": [record.record("message").data]}, record.where, record.line)
    [read] = read_messages(message, "m") or [{}]
    return _Node(parent, record.flag("sampled", default=False), read, tokens, mask, log_probs, links)


def _segment(row: Sample, path: list[tuple[_Node, bool]], *, in_loss: bool) -> Sample:
    """The row of one branch, split at the policy's first token. Without tokens, it has only texts.

    Args:
        row: a sample with the fields that all branches of the episode share.
        path: the nodes of the branch, each with a boolean: whether this branch trains its sampled tokens.
        in_loss: whether the branch is in the loss.
    """
    first = next(at for at, (node, _) in enumerate(path) if node.sampled or 1 in node.mask)
    messages = [node.message for node, _ in path]
    segment = replace(
        row,
        prompt=text_of(messages[:first]),
        response=text_of(messages[first:]),
        response_parts=[
            text
            for node, own in path[first:]
            for text in sampled_texts(node.message, sampled=own and node.sampled)
        ],
        chat=[(own and node.sampled, node.message) for node, own in path],
        in_loss=in_loss,
    )
    sampled = [bit for node, _ in path for bit in node.mask]  # 1: the policy sampled the token
    if 1 not in sampled:
        return segment
    begin = sampled.index(1)
    segment.tokens = [token for node, _ in path for token in node.tokens]
    segment.loss_mask = [bit * own for node, own in path for bit in node.mask][begin:]
    segment.response_length = len(sampled) - begin
    if all(len(node.log_probs) == sum(node.mask) for node, _ in path):  # else some are missing
        values = iter([value for node, _ in path for value in node.log_probs])
        segment.log_probs = [next(values) if bit else math.nan for bit in sampled][begin:]
    return segment


FORMAT = Format(
    read_prime_rl,
    files=("traces.jsonl", "step_*/train/effective/traces.jsonl", "traces/stream.jsonl", "stream.jsonl"),
    keys=frozenset({"id", "task", "traces"}),
    options=("group_by", "group_size", "reward_key", "tokenizer"),
)
