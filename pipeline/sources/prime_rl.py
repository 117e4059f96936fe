"""Episodes of prime-rl and verifiers: ``traces.jsonl``, an episode a line.

Schema: verifiers 0.4.0, ``verifiers/v1/episode.py`` (``Episode``), ``trace.py`` (``Trace``, ``Branch``),
``graph.py`` (``MessageNode``), as written by ``utils/trace_store.py``; prime-rl saves the same episodes
(its pull requests 3329 and 3444). Read are ``group.id``, ``run.work`` (``step``, ``policy.start``), ``ok``,
and of the trace ``id``, ``agent.trainable``, ``rewards``, ``ok``, ``stop_condition``, ``calls`` and
``nodes``. Traces outside of an episode, and the rollouts of releases before episodes, are other formats and
are not read.

An episode is a rollout of one trainable agent, and its ``id`` is there once in a step; one with several is
refused, since how their rewards would be compared is not settled. Its samples are the branches of the graph
of messages, from a root to a leaf, with the tokens that the policy sampled on each. A compaction from which
the harness did not continue is out of the loss. The reward is the sum of score × weight, or that of
`reward_key` alone; a reward that is null is missing. The step is that of a folder ``step_<N>`` above the
file, else the one at which the episode was dispatched; annotations in other files are not read. Where an
episode has no group, as in evaluations, ``group_by="prompt"`` groups by the task's ``key``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.transforms import Status

from .branches import Branch, branches
from .jsonl import read_jsonl
from .reading import Reading
from .record import Record, as_number
from .sample import Label, Sample

LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")


def read_prime_rl(path: Path, reading: Reading) -> Iterator[Sample]:
    """Samples of one file of episodes.

    Raises:
        SourceError: a record is not as documented.
    """
    steps = [match[1] for folder in path.parts[:-1] if (match := re.fullmatch(r"step_(\d{1,18})", folder))]
    return read_jsonl(path, reading, partial(parse_row, step=int(steps[-1]) if steps else None))


def parse_row(record: Record, reading: Reading, *, step: int | None) -> list[Sample]:
    """The samples of one episode: a segment for each branch of its messages, at least one.

    Raises:
        SourceError: it is not as documented, or has several trainable agents.
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
    row = Sample(
        group=_group(record, reading),
        rollout=record.text("id"),
        status=Status.FAILED,
        policy_version=version,
        step=next((s for s in (step, dispatched) if s is not None), reading.file),
        expected_rollouts=reading.group_size,
        record=record.text("id"),
        where=record.where,
    )
    if not traces:  # the episode failed before an agent began
        return [row]
    trace = traces[0]
    row.status = _status(record, trace)
    row.reward = _reward(trace, reading.reward_key)
    return [_segment(row, branch) for branch in branches(trace)] or [row]


def _segment(row: Sample, branch: Branch) -> Sample:
    return replace(
        row,
        prompt=branch.prompt,
        response=branch.response,
        tokens=branch.tokens,
        loss_mask=branch.mask,
        response_length=None if branch.mask is None else len(branch.mask),
        log_probs=branch.log_probs,
        in_loss=branch.trainable,
    )


def _group(record: Record, reading: Reading) -> Label:
    group = record.record("group", optional=True)
    if group is not None:
        return group.text("id")
    task = record.record("task")
    return reading.group_of_prompt(task.text("key"), record.where)


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
    names = list(rewards.data) if rewards is not None else []
    values = [_value(rewards.record(name, optional=True)) for name in names if key in (None, name)]
    given = [value for value in values if value is not None]
    total = as_number(sum(given))
    if total is None:
        raise trace.fail("'rewards' must add up to a finite number", given)
    return total if given else None


def _value(reward: Record | None) -> float | None:
    if reward is None:
        return None
    weight = reward.number("weight", optional=True)
    return reward.number("score") * (1.0 if weight is None else weight)
