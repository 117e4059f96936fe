"""Made-up runs for the tests of the page: small ones that you can count by hand, and a large one."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from headrace.pipeline.tools.report.page_schema import Groups, ShownRows

RECIPE = [
    {"name": "gate", "text": "CompletenessGate(on_incomplete='drop')"},
    {"name": "collapse", "text": "FanOutCollapse(reward='shared')"},
    {"name": "filter", "text": "SampleFilter(RewardsVary(), action='mask')"},
    {"name": "advantage", "text": "GroupRelativeAdvantage(scale='group')"},
    {"name": "split", "text": "ShuffleSplit(minibatches=2)"},
]
HOSTILE = '</script><img src=x onerror="window.ran=1"><script>window.ran=1</script>\u2028"\'&amp;<!--'
UNITS = ("rows", "rollouts", "groups", "tokens")
Row = dict[str, Any]


def rollouts_of(
    group: int, rewards: Sequence[float | None], segments: Sequence[int] | None = None, **more: Any
) -> list[Row]:
    """The rows of a group, from the reward and the number of segments of each rollout."""
    rows = []
    for k, reward in enumerate(rewards):
        for j in range(segments[k] if segments else 1):
            row: Row = {"group": group, "rollout": 100 * group + k, "reward": reward, "advantage": None}
            row |= {"advantage_by_row": None, "tokens": 40 + (37 * (k + 1) * (j + 2) + 11 * group) % 160}
            row |= {"rewards": None, "response": None, "by_token": None, "beside": None}
            row |= {"share": None, "other_share": None, "compared": None}
            row |= {"weight": 1.0, "status": "completed", "reason": "", "staleness": group % 3}
            rows.append(row | {"minibatch": None, "microbatch": None, "rank": None} | more)
    return rows


def standardise(value: float, values: Sequence[float]) -> float:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return (value - statistics.mean(values)) / (spread + 1e-6)


def advantages(rows: list[Row]) -> None:
    """Set two advantages of each row: in one, each rollout counts once; in the other, each row."""
    for group in {row["group"] for row in rows}:
        mine = [row for row in rows if row["group"] == group]
        by_rollout = list({row["rollout"]: row["reward"] for row in mine}.values())
        for row in mine:
            row["compared"] = len(by_rollout)
            row["advantage"] = standardise(row["reward"], by_rollout)
            row["advantage_by_row"] = standardise(row["reward"], [other["reward"] for other in mine])


def split(rows: list[Row], minibatches: int = 2, ranks: int = 2, micro: int = 3) -> None:
    for place, row in enumerate(row for row in rows if not row["reason"]):
        row["minibatch"] = place % minibatches
        row["rank"] = place // minibatches % ranks
        row["microbatch"] = place // (minibatches * ranks) % micro


def units(rows: list[Row]) -> dict[str, int]:
    groups, rollouts = {row["group"] for row in rows}, {row["rollout"] for row in rows}
    tokens = sum(row["tokens"] for row in rows)
    return dict(zip(UNITS, (len(rows), len(rollouts), len(groups), tokens), strict=True))


def funnel_of(rows: list[Row], actions: dict[str, str]) -> list[dict[str, Any]]:
    left, stages = rows, [{"name": "collected", **units(rows), "out": []}]
    for stage in (stage["name"] for stage in RECIPE):
        reasons = dict.fromkeys(row["reason"] for row in left if row["reason"].startswith(f"{stage}/"))
        out = []
        for reason in reasons:
            gone = [row for row in left if row["reason"] == reason]
            out.append({"reason": reason.split("/", 1)[1], "action": actions[reason], **units(gone)})
            for name in ("rollout", "group"):
                first = {row[name]: row["reason"] for row in reversed(left) if row["reason"] in reasons}
                stays = {row[name] for row in left if row["reason"] not in reasons}
                some = {row[name] for row in gone}
                whole = {each for each in some - stays if first[each] == reason}
                out[-1][f"{name}s"], out[-1][f"{name}s_in_part"] = len(whole), len(some - whole)
        left = [row for row in left if row["reason"] not in reasons]
        stages.append({"name": stage, **units(left), "out": out})
    return stages


def groups_of(rows: list[Row], size: int, labels: Callable[[int], str | None]) -> dict[str, list[Any]]:
    lines = []
    for group in dict.fromkeys(row["group"] for row in rows):
        mine = [row for row in rows if row["group"] == group]
        votes = {row["rollout"]: row["reward"] for row in mine}
        rewards = [reward for reward in votes.values() if reward is not None]
        lines.append(
            {
                "id": group,
                "label": labels(group),
                "asked": None,
                "prompt": None,
                "rollouts": len(votes),
                "expected": size,
                "compared": len({row["rollout"] for row in mine if row["compared"]}),
                "baseline": statistics.mean(rewards) if rewards else None,
                "reward_mean": statistics.mean(rewards) if rewards else None,
                "reward_std": statistics.pstdev(rewards) if rewards else None,
                "zero_variance": len(rewards) > 1 and len(set(rewards)) == 1,
                "complete": len(votes) == size,
                "staleness": mine[0]["staleness"],
            }
        )
    return {name: [line[name] for line in lines] for name in Groups.__annotations__}


def step_of(
    rows: list[Row],
    *,
    step: int = 0,
    size: int = 4,
    actions: dict[str, str] | None = None,
    labels: Callable[[int], str | None] = lambda group: f"Write {group} backwards, then check the result.",
    of: int | None = None,
) -> dict[str, Any]:
    rows = [row | {"row": place} for place, row in enumerate(rows)]
    groups = groups_of(rows, size, labels)
    return {
        "step": step,
        "funnel": funnel_of(rows, actions or {}),
        "shown": {"groups": len(groups["id"]), "of": of or len(groups["id"])},
        "groups": groups,
        "rows": {name: [row[name] for row in rows] for name in ShownRows.__annotations__},
        "numbers": {"rows/in": float(len(rows)), "rows/trained": float(sum(not r["reason"] for r in rows))},
        "survivors": [],
        "verdict": "",
        "advisories": [],
        "unchecked": [],
    }


def run_of(*steps: dict[str, Any], title: str = "a run", **more: Any) -> dict[str, Any]:
    return {"title": title, "recipe": RECIPE, "steps": [*steps], "curve_steps": [], "curves": {}} | more


def fan_out_rows(seed: int = 0) -> list[Row]:
    """Seven groups. Group 3 has equal rewards and is masked; all groups except 6 fan out."""
    chance = random.Random(seed)
    rows = []
    for group in range(7):
        rewards = [0.5] * 4 if group == 3 else [0.0, 0.4, 1.0 - 0.1 * chance.randrange(4), 1.0]
        segments = None if group == 6 else [1, 1 + group % 2, 1, 2 + 3 * (group % 3)]
        rows += rollouts_of(group, rewards, segments)
    advantages(rows)
    for row in rows:
        if row["group"] == 3:
            row["reason"] = "filter/zero_variance"
    split(rows)
    return rows


def fan_out_run(steps: int = 5) -> dict[str, Any]:
    actions = {"filter/zero_variance": "masked"}
    made = [step_of(fan_out_rows(k), step=10 * k, actions=actions) for k in range(steps)]
    curve_steps = list(range(10 * steps - 9))
    curves: dict[str, list[float | None]] = {
        "reward/all/mean": [1 - 0.9 ** (k + 1) for k in curve_steps],
        "rows/trained": [30.0 + 7 * (k % 3) for k in curve_steps],
        "rollouts/trained": [24.0 for _ in curve_steps],
        "staleness/mean": [None if k % 7 == 3 else (k % 5) / 3 for k in curve_steps],
        "loss": [None for _ in curve_steps],
    }
    return run_of(*made, title="fan-out, five steps", curve_steps=curve_steps, curves=curves)


def incomplete_run() -> dict[str, Any]:
    """Five groups of four. Two lack rollouts and are dropped. One rollout failed, and one was truncated."""
    rows = rollouts_of(1, [0, 0, 1, 1]) + rollouts_of(2, [1, 0, 0]) + rollouts_of(4, [0, 1, 1, 1])
    rows += rollouts_of(5, [None, 0.25]) + rollouts_of(8, [0, 0, 0, 0.5], [1, 2, 1, 3])
    for row in rows:
        if row["group"] in (2, 5):
            row["reason"] = "gate/incomplete"
    rows[11]["status"], rows[11]["reason"] = "failed", "gate/failed"
    rows[-1]["status"], rows[-1]["reason"] = "truncated", "filter/truncated"
    rows[3]["reason"] = "split/remainder"
    advantages([row for row in rows if not row["reason"].startswith("gate/")])
    split(rows)
    actions = {"gate/incomplete": "dropped", "gate/failed": "dropped"}
    actions |= {"filter/truncated": "excluded", "split/remainder": "carried"}
    return run_of(step_of(rows, step=3, actions=actions), title="incomplete groups")


def filtered_run() -> dict[str, Any]:
    """Three groups of equal rewards, so that no row trains."""
    rows = [
        row for group, reward in ((0, 0.0), (1, 1.0), (2, 1.0)) for row in rollouts_of(group, [reward] * 4)
    ]
    for row in rows:
        row["reason"], row["staleness"] = "filter/zero_variance", None
    return run_of(step_of(rows, actions={"filter/zero_variance": "masked"}), title="all filtered")


def empty_run() -> dict[str, Any]:
    return run_of(step_of([]), title="an empty batch")


def hostile_run() -> dict[str, Any]:
    rows = rollouts_of(1, [0, 1], status=HOSTILE)
    rows[0]["reason"] = f"gate/{HOSTILE}"
    actions = {f"gate/{HOSTILE}": HOSTILE}
    made = step_of(rows, size=2, labels=lambda _: HOSTILE, actions=actions)
    curves = {"curve_steps": [0, 1], "curves": {HOSTILE: [0.0, 1.0]}}
    return run_of(made, made | {"step": 1, "numbers": {HOSTILE: 1.0}}, title=HOSTILE, **curves)


@cache
def large_run(rows: int = 5000) -> dict[str, Any]:
    chance = random.Random(0)
    made = [row for g in range(rows // 25) for row in rollouts_of(g, [chance.gauss(0, 1) for _ in range(25)])]
    advantages(made)
    split(made, minibatches=4, ranks=8, micro=6)
    return run_of(step_of(made, size=25, of=1234), title=f"{rows} rows")


def excerpt(start: str, missing: int = 0, end: str = "") -> dict[str, Any]:
    return {"start": start, "missing": missing, "end": end}


def by_token(values: list[float | None], texts: list[str] | None = None, **more: Any) -> dict[str, Any]:
    named = {"advantage": values, **more}
    return {"texts": texts, "values": named, "at": len(values), "missing": 0}


def reading_run() -> dict[str, Any]:
    """Two steps of four groups with the spreads 0, 0.5, 0.1 and 0.25, with prompts, responses and tokens.

    Group 2 has a prompt in the format of a chat, and responses of all lengths; group 3 has tokens with
    numbers, with text, with text of only some tokens, and without text; group 4 has no room for texts.
    """
    rows = rollouts_of(1, [1.0, 1.0]) + rollouts_of(2, [0.0, 1.0]) + rollouts_of(3, [0.4, 0.6])
    rows += rollouts_of(4, [0.5, 1.0])
    advantages(rows)
    responses = ["Four.", "It is 4.", "No idea.", "The answer\nis " + "long " * 400]
    for row, text in zip(rows, responses, strict=False):
        row["response"] = excerpt(text)
    rows[1]["response"] = excerpt("It begins", 1234, "and ends.")
    rows[0]["reason"] = rows[1]["reason"] = "filter/zero_variance"
    weights = [0.5, 1.0, 2.0]
    rows[4]["by_token"] = by_token([-1.0, None, 1.0], ["low", " out", " <b>high"], importance_weight=weights)
    rows[5]["by_token"] = by_token([-0.5, 0.0, 0.5]) | {"at": 2, "missing": 70}
    actions = {"filter/zero_variance": "masked"}
    made = step_of(rows, size=2, actions=actions, labels=lambda group: f"Question {group}?", step=10)
    made["groups"]["asked"][1] = excerpt("What is 2 + 2?")
    made["groups"]["prompt"][1] = excerpt("<|im_start|>system\nBe brief.<|im_end|>\nWhat is 2 + 2?")
    return run_of(made, made | {"step": 20}, title="to be read")


RUNS = {
    "reading": reading_run,
    "fan-out": fan_out_run,
    "incomplete": incomplete_run,
    "filtered": filtered_run,
    "empty": empty_run,
}


def data_of(page: Path) -> dict:
    """The data in a written page."""
    text = page.read_text(encoding="utf-8")
    return json.loads(text.split('id="page-data">')[1].split("</script>")[0])
