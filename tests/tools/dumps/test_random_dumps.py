"""In 100 random steps of each format, a reader finds the numbers of the loop that wrote the steps."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from composed import composed
from dumps import (
    COLUMNS,
    atropos_group,
    episode,
    gym_row,
    hosted_row,
    in_order,
    nemo_row,
    node,
    open_instruct_row,
    own_row,
    slime_dump,
    slime_sample,
    tinker_row,
    trl_dump,
    verifiers_row,
    verl_row,
    write_lines,
)

from headrace.pipeline import make_report
from headrace.pipeline.tools.dumps.readers import READERS, open_dump
from headrace.pipeline.tools.report import write_dump
from headrace.transforms import Status

pytestmark = pytest.mark.slow

DUMPS = 100
MASK = ("masks", "all_assistant_mask")


@dataclass
class Truth:
    """What the loop knows of a row."""

    group: int
    reward: float
    sampled: int
    status: int | None = None
    advantage: float | None = None
    in_loss: bool = True


def word(draw):
    return "".join(draw.choice("abc {}\n") for _ in range(draw.randint(0, 6)))


def call(draw, plain):
    """A tool call in one of its forms, its name, and its arguments as JSON."""
    arguments = {draw.choice("xyz"): [draw.randint(0, 99), {"k": word(draw)}]}
    text = json.dumps(arguments)
    given = text if plain or draw.random() < 0.5 else arguments
    function = {"name": draw.choice(["add", "find"]), "arguments": given}
    made = {"id": str(draw.random()), "function": function}
    if not plain:
        made = draw.choice([made, function, json.dumps(made)])
    return made, function["name"], text


def conversation(draw, *, plain=False):
    """Messages of an assistant, tools and users, and the characters that the assistant sampled.

    `plain`: all messages have the same fields with the same types, as an Arrow column needs.
    """
    messages, sampled = [], 0
    for _ in range(draw.randint(1, 4)):
        role = draw.choice(["assistant", "assistant", "tool", "user"])
        message = {"role": role, "content": word(draw)}
        if role != "assistant":
            messages.append(message)
            continue
        thought = word(draw) + "t"
        form = draw.choice(["text", "null"] if plain else ["text", "null", "parts"])
        if form == "null":
            message["content"] = None
        elif form == "parts":
            text, inner = word(draw), {"type": "tool_use", "name": "run", "input": {"q": word(draw)}}
            parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {}}, inner]
            parts.append({"type": "tool_result", "content": "not sampled"})
            message["content"] = parts
            sampled += len(text) + len("run") + len(json.dumps(inner["input"]))
        else:
            sampled += len(message["content"])
        if draw.random() < 0.5:
            message["reasoning_content"] = thought
            sampled += len(thought)
            if draw.random() < 0.3 and not plain:
                message["reasoning"] = thought  # the same thought again
            if form == "text" and not plain and draw.random() < 0.3:  # the content has the thought, too
                message["content"] = f"{thought}</think>{message['content']}"
                sampled += len("</think>")
        if draw.random() < 0.5:
            calls = [call(draw, plain) for _ in range(draw.randint(1, 2))]
            message["tool_calls"] = [made for made, *_ in calls]
            if form == "text" and not plain and draw.random() < 0.5:  # the content has the calls, too
                how = draw.choice(
                    ['<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>', "[TOOL_CALLS]{}{}"]
                )
                raw = "".join(how.format(name, arguments) for _, name, arguments in calls)
                message["content"] += raw
                sampled += len(raw)
            else:
                sampled += sum(len(name) + len(arguments) for _, name, arguments in calls)
        messages.append(message)
    return messages, sampled


def groups_of(draw):
    """The (group, rollout, reward) triples of some groups."""
    return [
        (group, at, draw.choice([0.0, 0.5, 1.0]))
        for group in range(draw.randint(1, 3))
        for at in range(draw.randint(2, 3))
    ]


def bits_of(draw, length):
    return [draw.randint(0, 1) for _ in range(length)]


def of_verifiers(draw, path, step):
    rows, truth = [], []
    named = draw.choice(["example_id", "id"])
    for group, _, reward in groups_of(draw):
        completion, sampled = conversation(draw)
        cut = draw.random() < 0.3
        row = verifiers_row(group, reward, completion=completion, is_truncated=cut)
        row[named] = row.pop("example_id")
        rows.append(row)
        truth.append(Truth(group, reward, sampled, int(Status.TRUNCATED if cut else Status.COMPLETED)))
    write_lines(path, rows)
    return truth


def of_prime_hosted(draw, path, step):
    rows, truth = [], []
    for group, _, reward in groups_of(draw):
        completion, sampled = conversation(draw)
        row = hosted_row(group, len(rows), reward, step=step, advantage=reward / 2)
        rows.append({**row, "completion": json.dumps(completion) if draw.random() < 0.5 else completion})
        truth.append(Truth(group, reward, sampled, None, reward / 2))
    write_lines(path, rows)
    return truth


def of_table(draw, path, step):
    rows, truth = [], []
    for group, _, reward in groups_of(draw):
        output, sampled = conversation(draw)
        if draw.random() < 0.3:
            output = word(draw)
            sampled = len(output)
        else:
            output = [{"role": "assistant", "content": ""}, *output]
        rows.append(own_row(group, reward, output=output))
        truth.append(Truth(group, reward, sampled))
    write_lines(path, rows)
    return truth


def of_trl(draw, path, step):
    columns, truth = {"step": [], "prompt": [], "completion": [], "accuracy": [], "advantage": []}, []
    for group, _, reward in groups_of(draw):
        completion, sampled = conversation(draw, plain=True)
        values = (step, [{"role": "user", "content": f"{group}?"}], completion, reward, reward / 4)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        truth.append(Truth(group, reward, sampled, None, reward / 4))
    trl_dump(path, **columns)
    return truth


def of_nemo_gym(draw, path, step):
    """Half of the dumps have texts, and half have tokens."""
    rows, truth, tokens = [], [], draw.random() < 0.5
    for group, at, reward in groups_of(draw):
        row, output, sampled, context = gym_row(group, at, reward), [], 0, [1, 2]
        for _ in range(draw.randint(1, 3)):
            text, thought, arguments = word(draw), word(draw), json.dumps({"q": word(draw)})
            output += [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": thought}]},
                {"type": "function_call", "name": "run", "arguments": arguments},
                {"type": "function_call_output", "output": word(draw)},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
            ]
            if tokens:
                own = [5] * draw.randint(1, 4)
                output[-1] |= {"prompt_token_ids": context, "generation_token_ids": own}
                context = [*context, *own, *[7] * draw.randint(0, 2)]
                sampled += len(own)
            else:
                sampled += len(text) + len(thought) + len("run") + len(arguments)
        row["response"]["output"] = output
        rows.append(row)
        truth.append(Truth(group, reward, sampled, int(Status.COMPLETED)))
    write_lines(path, rows)
    return truth


def of_atropos(draw, path, step):
    rows, truth = [], []
    for group in range(draw.randint(1, 3)):
        scores = [draw.choice([0.0, 1.0]) for _ in range(draw.randint(2, 3))]
        row = atropos_group(scores, overrides=[{}] * len(scores), advantages=[])
        row["overrides"] = [{"set_advantage_to_zero": draw.random() < 0.2} for _ in scores]
        row["tokens"], row["masks"] = [], []
        for score, override in zip(scores, row["overrides"], strict=True):
            tokens = [draw.randint(2, 9) for _ in range(draw.randint(2, 8))]
            bits = bits_of(draw, len(tokens))
            labels = [token if bit else -100 for token, bit in zip(tokens, bits, strict=True)]
            row["tokens"].append(tokens)
            row["masks"].append(draw.choice([bits, labels]))
            row["advantages"].append([score - 0.5] * len(tokens))
            known = score - 0.5 if 1 in bits else math.nan
            truth.append(Truth(group, score, sum(bits), None, known, not override["set_advantage_to_zero"]))
        rows.append(row)
    write_lines(path, rows)
    return truth


def of_prime_rl(draw, path, step):
    """Trees of messages. A node trains in the first of its branches, in the order of the leaves."""
    rows, truth = [], []
    for group, at, reward in groups_of(draw):
        nodes = [node(None, "user", [1, 2], [False] * 2)]
        for place in range(1, draw.randint(2, 7)):
            role, length = draw.choice(["assistant", "tool"]), draw.randint(1, 4)
            parent = draw.randint(max(0, place - 2), place - 1)
            nodes.append(node(parent, role, [3] * length, [role == "assistant"] * length))
        nodes.append(node(0, "assistant", [9], [True]))
        claimed, parents = set(), {each["parent"] for each in nodes}
        for leaf in range(len(nodes)):
            if leaf in parents:
                continue
            path_of_leaf, here = [], leaf
            while here is not None:
                path_of_leaf.append(here)
                here = nodes[here]["parent"]
            own = {each for each in path_of_leaf if any(nodes[each]["mask"])} - claimed
            claimed |= own
            if own:
                count = sum(sum(nodes[each]["mask"]) for each in own)
                truth.append(Truth(group, reward, count, int(Status.COMPLETED)))
        assert sum(sum(each["mask"]) for each in nodes) == sum(sum(nodes[each]["mask"]) for each in claimed)
        rows.append(episode(str(group), f"{group}.{at}", {"r": {"score": reward}}, trace={"nodes": nodes}))
        rows[-1]["run"]["work"]["step"] = step
    write_lines(path, rows)
    return truth


def of_verl(draw, path, step):
    rows, truth = [], []
    for group, at, reward in groups_of(draw):
        rows.append({**verl_row(f"g{group}_{at}_0", reward, step), "output": word(draw)})
        truth.append(Truth(group, reward, len(rows[-1]["output"])))
    write_lines(path, rows)
    return truth


def of_nemo_rl(draw, path, step):
    rows, truth = [], []
    for group, _, reward in groups_of(draw):
        length = draw.randint(1, 5)
        mask = [0, *bits_of(draw, length - 1), 1]
        kept = draw.random() < 0.8
        change = {
            "token_ids": [[20 + group, *[7] * length, 0]],
            "token_loss_mask": [[*mask, 0]],
            "input_lengths": [length + 1],
            "sample_loss_mask": [float(kept)],
            "advantages": [[reward] * (length + 2)],
            "generation_logprobs": [[-1.0] * (length + 2)],
        }
        mask[:] = change["token_loss_mask"][0][: length + 1]
        first = mask.index(1)
        change["token_ids"][0][1:first] = [6] * (first - 1)
        rows.append(nemo_row(len(rows), reward, **change))
        label = (group, first)  # the prompt ends before the first token that trains
        truth.append((label, Truth(0, reward, sum(mask), None, reward, kept)))
    order = list(dict.fromkeys(label for label, _ in truth))
    for label, each in truth:
        each.group = order.index(label)
    write_lines(path, rows)
    return [each for _, each in truth]


def of_open_instruct(draw, path, step):
    rows, truth = [], []
    for group, _, reward in groups_of(draw):
        length, ends = draw.randint(1, 6), draw.choice(["stop", "length"])
        change = {"response_tokens": [7] * length, "logprobs": [-1.0] * length, "finish_reason": ends}
        rows.append(open_instruct_row(len(rows), group, reward, step=step, advantage=reward, **change))
        status = Status.COMPLETED if ends == "stop" else Status.TRUNCATED
        truth.append(Truth(group, reward, length, int(status), reward))
    write_lines(path, rows)
    return truth


def of_tinker(draw, path, step):
    rows, truth = [], []
    for group, at, reward in groups_of(draw):
        lengths = [draw.randint(0, 4) for _ in range(draw.randint(1, 3))]
        steps = [{"ac_len": length, "episode_done": True} for length in lengths]
        rows.append(tinker_row(group, at, reward, iteration=step, steps=steps))
        truth.append(Truth(group, reward, sum(lengths), int(Status.COMPLETED)))
    write_lines(path, rows)
    return truth


def of_slime(draw, path, step):
    samples, truth = [], []
    for group, _, reward in groups_of(draw):
        length, kept = draw.randint(1, 5), draw.random() < 0.8
        mask = draw.choice([None, bits_of(draw, length)])
        change = {"loss_mask": mask, "response_length": length, "rollout_log_probs": [-1.0] * length}
        change |= {"tokens": [1, 2, *[7] * length], "remove_sample": not kept}
        samples.append(slime_sample(group, len(samples), reward, **change))
        sampled = length if mask is None else sum(mask)
        truth.append(Truth(group, reward, sampled, int(Status.COMPLETED), None, kept))
    slime_dump(path, step, samples)
    return truth


PROMPT = {"group_by": "prompt"}
FORMATS = {
    "atropos": (of_atropos, "jsonl", {}),
    "nemo_gym": (of_nemo_gym, "jsonl", {"tokenizer": ...}),
    "nemo_rl": (of_nemo_rl, "jsonl", PROMPT),
    "open_instruct": (of_open_instruct, "jsonl", {}),
    "prime_hosted": (of_prime_hosted, "jsonl", {"tokenizer": ...}),
    "prime_rl": (of_prime_rl, "jsonl", {}),
    "slime": (of_slime, "pt", {}),
    "table": (of_table, "jsonl", {"columns": COLUMNS, "tokenizer": ...}),
    "tinker": (of_tinker, "jsonl", {}),
    "trl": (of_trl, "parquet", {**PROMPT, "tokenizer": ...}),
    "verifiers": (of_verifiers, "jsonl", {"tokenizer": ...}),
    "verl": (of_verl, "jsonl", {"tokenizer": ...}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_sampled_tokens_are_in_the_loss_or_left_out_under_a_reason(name, letters, tmp_path):
    """Groups, rewards, statuses and advantages equal those of the loop, too."""
    write, suffix, options = FORMATS[name]
    draw = random.Random(name)
    truths = [write(draw, tmp_path / f"step{step}.{suffix}", step) for step in range(DUMPS)]
    options = {key: letters if value is ... else value for key, value in options.items()}
    pipeline = composed("pipeline=grpo", "pipeline.stages.gate=null", "pipeline.empty=exclude")
    steps = open_dump(f"{tmp_path}/step*.{suffix}", name, **options)
    for (step, batch), (number, truth) in zip(steps, enumerate(truths), strict=True):
        assert step == number
        assert in_order(batch["group_id"]) == [each.group for each in truth]
        assert batch["next", "reward"].flatten().tolist() == [each.reward for each in truth]
        assert batch[MASK].sum(1).tolist() == [each.sampled * each.in_loss for each in truth]
        ends = batch["status"].tolist() if "status" in batch.keys() else [None] * len(truth)
        assert ends == [each.status for each in truth]
        if (advantage := batch.get("logged_advantage", None)) is not None:
            pairs = zip(advantage.tolist(), truth, strict=True)
            assert all(
                found == each.advantage or (math.isnan(found) and math.isnan(each.advantage))
                for found, each in pairs
            )
        else:
            assert all(each.advantage is None for each in truth)
        if step % 10 == 0:
            run = pipeline.run(batch)
            by_reason = Counter()
            for each, reason in zip(truth, run.ledger.reason.tolist(), strict=True):
                by_reason[run.ledger.names[reason]] += each.sampled
            assert int(run.batch[MASK].sum()) == by_reason["trained"]
            assert sum(by_reason.values()) == sum(each.sampled for each in truth)


def test_each_format_has_random_dumps():
    assert {*FORMATS, "headrace"} == READERS.keys()


def test_a_dump_of_headrace_has_the_loss_tokens_of_the_dump_that_was_replayed(letters, tmp_path):
    """The replayed dump was read without a tokenizer, or with the same one."""
    draw = random.Random(0)
    truths = [of_verifiers(draw, tmp_path / "in" / f"step{step}.jsonl", step) for step in range(DUMPS // 4)]
    pipeline = composed("pipeline=grpo", "pipeline.stages.gate=null", "pipeline.empty=exclude")
    for first in (None, letters):
        folder = tmp_path / f"out {first is None}"
        for step, batch in open_dump(f"{tmp_path}/in/*.jsonl", "verifiers", tokenizer=first):
            write_dump(make_report(pipeline.run(batch), step=step), folder)
        for (_, batch), truth in zip(open_dump(folder, tokenizer=letters), truths, strict=True):
            assert batch[MASK].sum(1).tolist() == [each.sampled for each in truth]
