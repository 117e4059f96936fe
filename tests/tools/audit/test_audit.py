"""An audit finds the planted faults of a dump, and has no other findings."""

from __future__ import annotations

import html
import json
import random
import re
import statistics
from pathlib import Path

import dumps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from command import headrace_here, told
from composed import composed, configure

from headrace.pipeline import ConfigError, make_report, write_dump
from headrace.pipeline.tools.audit import AuditFailed, audit_dump, logged
from headrace.pipeline.tools.audit.audit_checks import CHECKS, NO_ADVANTAGES, AuditFinding, CheckOutcome
from headrace.pipeline.tools.audit.audit_task import CheckResult, said_of_checks, verdict_of
from headrace.pipeline.tools.dumps.readers import SourceError, open_dump
from headrace.pipeline.tools.replay import replay_dump

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def composed_once(monkeypatch):
    """Use recipes that are composed once for all tests."""
    monkeypatch.setattr(logged, "load_pipeline", composed)


def grpo(rewards, voters=None, eps=1e-6):
    """(R − mean) / (std + ε), with the mean and std of the voters' rewards."""
    voters = rewards if voters is None else voters
    scale = statistics.stdev(voters) + eps
    return [(reward - statistics.mean(voters)) / scale if len(set(voters)) > 1 else 0.0 for reward in rewards]


def audited(path, folder, *words):
    """Run an audit. Return its text, and the checks of its JSON file by name."""
    named = [word for word in words if word.startswith("pipeline=")]
    config = configure("config", "task=audit", f"source.path={path}", *words)
    number, text = told(audit_dump, config, folder, named)
    report = json.loads((folder / "audit.json").read_text())
    checks = {check["check"]: check for check in report["checks"]}
    assert number == report["findings"] == sum(len(check["findings"]) for check in checks.values())
    return text, checks


def found(checks):
    """For each check with findings, the groups in its findings."""
    return {
        name: [each["group"] for each in check["findings"]]
        for name, check in checks.items()
        if check["findings"]
    }


# -- dumps with planted faults -----------------------------------------------------------------------------


class Rows:
    """Rows of a slime dump and their advantages, collected group by group."""

    def __init__(self):
        self.samples, self.advantages = [], []

    def add(self, group, rewards, advantages, *, rows=None, **changes):
        """Add a group. `rows` has the number of rows of a rollout index, `changes` its changed fields."""
        for at, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
            for _ in range((rows or {}).get(at, 1)):
                sample = dumps.slime_sample(group, len(self.samples), reward, rollout_id=100 * group + at)
                self.samples.append(sample | changes.get(f"rollout_{at}", {}))
                self.advantages.append(advantage)

    def columns(self):
        return self.samples, self.advantages


R = [1.0, 0.0, 0.5, 0.25]
AS_SLIME = ("pipeline=as/slime", "pipeline.empty=exclude", "source.group_size=4")
REMOVED = {"rollout_1": {"remove_sample": True}}


def sound_rows():
    """Three groups without a fault: a plain one, one with fan-out, and one with a rollout out of the loss."""
    rows = Rows()
    rows.add(0, R, grpo(R))
    rows.add(6, R, grpo(R), rows={0: 2})
    rows.add(7, R, grpo(R, [1.0, 0.5, 0.25]), **REMOVED)
    return rows


def finding(step, group, rows, rollouts, expected, found, text, share):
    names = ("step", "group", "rollouts", "rows", "expected", "found", "text", "share")
    return dict(zip(names, (step, group, rollouts, rows, expected, found, text, share), strict=True))


def test_five_faults_of_a_slime_dump_are_found(tmp_path):
    """All of the file, the text and the page are compared.

    Each row has two tokens, and each rollout counts once. So a row's share of the gradient is |advantage|
    over the rows of its rollout, divided by the sum for all rows.
    """
    rows = sound_rows()
    rows.add(1, R[:3], grpo(R[:3]))
    rows.add(2, R, grpo(R), rollout_2={"prompt": 50 * "a" + " prompt"})
    rows.add(3, R, grpo(R, [1.0, *R]), rows={0: 2})
    rows.add(4, R, grpo(R), **REMOVED)
    rows.add(5, [*R, 0.75], grpo([*R, 0.75]))
    path = dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages)
    text, checks = audited(path, tmp_path, *AS_SLIME)
    size = [
        0.0
        if sample["remove_sample"]
        else abs(advantage) / sum(each["rollout_id"] == sample["rollout_id"] for each in rows.samples)
        for sample, advantage in zip(rows.samples, rows.advantages, strict=True)
    ]
    share = {
        group: sum(
            part for part, sample in zip(size, rows.samples, strict=True) if sample["group_index"] == group
        )
        / sum(size)
        for group in range(1, 6)
    }
    fair, twice, masked = grpo(R), grpo(R, [1.0, *R]), grpo(R, [1.0, 0.5, 0.25])
    both = [[each[at] for at in (0, 0, 1, 2, 3)] for each in (fair, twice)]
    of_masked = [[each[0], None, *each[2:]] for each in (masked, fair)]
    a_mixed = f"group 2 has 2 prompts: 'prompt 2', '{33 * 'a'} prompt'"  # questions are at the end
    a_twice = (
        "group 3: rollouts that count once for each of their rows: 300; row 20 (rollout 300) 1.006, by the "
        "recipe 1.317, row 21 (rollout 300) 1.006, by the recipe 1.317, row 22 (rollout 301) -1.23, by the "
        "recipe -1.025 and 2 more; wrong signs among these: 1"
    )
    a_masked = (
        "group 4: rollouts that are out of the loss but count in the baseline: 401; row 25 (rollout 400) "
        "1.317, by the recipe 1.091, row 27 (rollout 402) 0.1464, by the recipe -0.2182, row 28 (rollout "
        "403) -0.4392, by the recipe -0.8729; wrong signs among these: 1"
    )
    short, large = "group 1 has 3 of 4 rollouts", "group 5 has 5 rollouts, but was dispatched with 4"
    names = {group: [f"{group}0{at}" for at in range(size)] for group, size in ((1, 3), (2, 4), (5, 5))}
    found_by = {
        "mixed": finding(5, "2", [16, 17, 18, 19], names[2], [1], [2], a_mixed, share[2]),
        "incomplete": finding(5, "1", [13, 14, 15], names[1], [4], [3], short, share[1]),
        "oversized": finding(5, "5", [29, 30, 31, 32, 33], names[5], [4], [5], large, share[5]),
        "counted_twice": finding(5, "3", [20, 21, 22, 23, 24], ["300"], *both, a_twice, share[3]),
        "masked": finding(5, "4", [25, 26, 27, 28], ["401"], *of_masked, a_masked, share[4]),
    }
    table = []
    for name, (title, _) in CHECKS.items():
        state = "found" if name in found_by else "not checked" if name == "weights" else "passed"
        own = [found_by[name]] if name in found_by else []
        of_check = sum(each["share"] for each in own)
        lacking = {"the dump has no loss weights": 1} if name == "weights" else {}
        result = {"check": name, "title": title, "state": state, "gradient_share": of_check, "hint": ""}
        assert checks[name] == near(result | {"findings": own, "not_checked": lacking})
        table.append(f"{title} {state} {len(own)} {'–' if lacking else f'{of_check:.1%}'}")
    said = "8 checks: 5 found, 2 passed, 1 not checked."
    of = f"{path} (slime), 34 rows, steps: 1, against as/slime"
    below = [
        "not checked: other weights than the recipe's: the dump has no loss weights",
        "A row's share of a step's gradient is |weight × advantage × tokens| over the sum of all rows. The "
        "share of a check is the mean over all steps. A check that was not made has not passed.",
    ]
    tables = [
        f"{of} check verdict findings share of the gradient {' '.join(table)}",
        *(
            f"{CHECKS[name][0]} step share 5 {each['text']} {each['share']:.1%}"
            for name, each in found_by.items()
        ),
    ]
    for line, (title, _) in zip(table, CHECKS.values(), strict=True):
        state, count, part = line.removeprefix(f"{title} ").rsplit(" ", 2)
        assert f"\n{title:34}  {state:11}  {count:>8}  {part:>8}\n" in text
    for group, said_of in ((1, short), (5, large)):
        assert f"\n{5:4}  {said_of}  {f'{share[group]:.1%}':>5}\n" in text
    page = (tmp_path / "report.html").read_text()
    where = [
        f"written to {tmp_path}",
        f"the page: {(tmp_path / 'report.html').as_uri()}",
        "34 rows in 1 step",
    ]
    assert words_of(text) == sorted(" ".join([said, *tables, *below, *where]).split())
    body = html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<body>")[2]))
    assert " ".join(body.split()) == " ".join(["Audit", said, *tables, *below])


def near(value):
    """A JSON value whose numbers equal others up to rounding."""
    if isinstance(value, dict):
        return {key: near(each) for key, each in value.items()}
    if isinstance(value, list):
        return [near(each) for each in value]
    return pytest.approx(value, abs=1e-5) if isinstance(value, float | int) else value


def words_of(text):
    """The sorted words of a text without the lines of tables, because a cell may take several lines."""
    return sorted(re.sub("─+", " ", text).split())


def test_three_faults_of_a_verl_dump_are_found(tmp_path):
    rows = [dumps.verl_row(f"fine_{i}_0", float(i)) for i in range(4)]
    rows += [dumps.verl_row(f"short_{i}_0", float(i)) for i in range(3)]
    rows += [dumps.verl_row(f"mixed_{i}_0", float(i), prompt=f"{i // 2}+1?") for i in range(4)]
    rows += [dumps.verl_row(f"large_{i}_0", float(i)) for i in range(5)]
    path = dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    text, checks = audited(path, tmp_path, "pipeline=as/verl", "source.group_size=4", "source.format=verl")
    assert found(checks) == {"incomplete": ["short"], "mixed": ["mixed"], "oversized": ["large"]}
    assert checks["mixed"]["findings"][0]["rollouts"] == [f"mixed_{i}" for i in range(4)]
    for name in ("signs", "counted_twice", "advantages"):
        assert checks[name]["state"] == "not checked"
        assert list(checks[name]["not_checked"]) == ["the dump has no advantages"]
    assert "not checked: rollouts in the baseline only: the dump has no loss masks" in text
    assert re.search(r"advantages of the wrong sign +not checked +0 +–", text)
    assert re.search(r"groups of several prompts +found +1 +–", text)  # the dump has no lengths
    assert text.count("the dump has no loss masks") == 1
    assert not text.startswith("\n")


def test_an_audit_first_says_that_it_cannot_check_missing_advantages(tmp_path):
    rows = [dumps.verl_row(f"<b>_{i}_0", float(i), prompt=f"<script>{i // 2}") for i in range(4)]
    path = dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    text, _ = audited(path, tmp_path, "pipeline=as/verl", "source.group_size=4", "source.format=verl")
    said = "This dump cannot show whether the advantages were right, because it has none. verl saves none."
    assert " ".join(text.split()).startswith(said)
    page = (tmp_path / "report.html").read_text()
    assert page.index("<h1>Audit</h1>") < page.index(said) < page.index("<table")
    assert "--paper" in page  # the style of the page of a run
    assert "&lt;script&gt;" in page  # texts from a dump are escaped
    assert not [word for word in ("<script", "<b>", "\\n") if word in page]


def test_the_label_of_a_group_made_from_a_prompt_begins_with_the_question(tmp_path):
    asked = ["2+2?"] * 4 + ["3+3?"] * 4 + ["4+4?"] * 3
    rows = [
        dumps.verl_row(None, float(i), prompt=f"user\n{each}\nassistant\n") for i, each in enumerate(asked)
    ]
    path = dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    words = ("source.group_by=prompt", "source.group_size=4", "source.format=verl")
    text, _ = audited(path, tmp_path, "pipeline=as/verl", *words)
    assert re.search(r"group 4\+4\? #\w+ has 3 of 4 rollouts", text)


def trl_columns(advantages):
    return {
        "step": [4] * 8,
        "prompt": [f"prompt {i // 4}" for i in range(8)],
        "completion": [str(i) for i in range(8)],
        "accuracy": R + R[::-1],
        "advantage": advantages,
    }


AS_TRL = ("pipeline=as/trl", "source.group_by=prompt", "source.group_size=4")


def test_wrong_signs_in_a_trl_table_are_found(tmp_path):
    advantages = grpo(R, eps=1e-4) + grpo(R[::-1], eps=1e-4)
    wrong = [-value if i in (1, 4, 6) else value for i, value in enumerate(advantages)]
    path = dumps.trl_dump(tmp_path / "completions" / "completions_4.parquet", **trl_columns(wrong))
    text, checks = audited(path, tmp_path, "pipeline=rloo", *AS_TRL)  # the last recipe counts
    assert json.loads((tmp_path / "audit.json").read_text())["pipeline"] == "as/trl"
    assert set(found(checks)) == {"signs"}
    assert [each["rows"] for each in checks["signs"]["findings"]] == [[1], [4, 6]]
    assert checks["signs"]["gradient_share"] is None  # the share depends on lengths, and the dump has none
    assert "wrong sign" in text
    assert checks["counted_twice"]["state"] == "not checked"


def test_a_rollout_without_one_of_two_rewards_is_compared_by_the_other(tmp_path):
    first, second = R + R[::-1], [1.0, None, 0.5, 0.0] * 2
    sums = [one + (other or 0.0) for one, other in zip(first, second, strict=True)]
    columns = trl_columns(grpo(sums[:4], eps=1e-4) + grpo(sums[4:], eps=1e-4)) | {"format": second}
    path = dumps.trl_dump(tmp_path / "completions" / "completions_4.parquet", **columns)
    _, checks = audited(path, tmp_path, *AS_TRL, "pipeline.stages.collapse.columns=2")
    assert (found(checks), checks["advantages"]["state"]) == ({}, "passed")


def test_a_strict_audit_fails_if_the_recipe_refuses_a_step(tmp_path):
    """The audit has no findings, but it could not check the advantages of the step."""
    columns = trl_columns(grpo(R, eps=1e-4) + grpo(R[::-1], eps=1e-4))
    columns["accuracy"] = [value - 5 for value in columns["accuracy"]]
    path = dumps.trl_dump(tmp_path / "completions" / "completions_4.parquet", **columns)
    words = (*AS_TRL, "pipeline.stages.advantage.scale=mean")  # this scale needs rewards of at least 0
    assert not found(audited(path, tmp_path, *words)[1])
    with pytest.raises(AuditFailed, match="0 findings, and the recipe refused 1 of 1 steps"):
        audited(path, tmp_path, *words, "audit.strict=true")


# -- sound dumps ---------------------------------------------------------------------------------------------


def sound_lines(name, record):
    """Return a function that writes a file of this name with the records of a group of four rollouts."""
    return lambda folder: dumps.write_lines(folder / name, [record(i) for i in range(4)])


def two_groups_of_trl(folder):
    advantages = grpo(R, eps=1e-4) + grpo(R[::-1], eps=1e-4)
    dumps.trl_dump(folder / "completions_4.parquet", **trl_columns(advantages))


def by_population_std(i):
    return (R[i] - statistics.mean(R)) / (statistics.pstdev(R) + 1e-8)


# A correct dump of each format: the function that writes it into a folder, and the options to read it.
SOUND = {
    "atropos": (
        lambda folder: dumps.write_lines(
            folder / "groups.jsonl", [dumps.atropos_group(R, advantages=[[a] * 4 for a in grpo(R)])]
        ),
        ["pipeline=as/slime", "source.group_size=4", "source.format=atropos"],
    ),
    "nemo_gym": (
        sound_lines("rollouts.jsonl", lambda i: dumps.gym_row(0, i, R[i])),
        ["source.group_size=4", "source.format=nemo_gym"],
    ),
    "prime_hosted": (
        sound_lines(
            "samples.jsonl",
            lambda i: dumps.hosted_row(0, i, R[i], advantage=R[i] - statistics.mean(R)),
        ),
        ["pipeline=as/prime_rl", "source.group_size=4", "source.format=prime_hosted"],
    ),
    "table": (
        sound_lines("mine.jsonl", lambda i: dumps.own_row(0, R[i])),
        [
            "source.columns={group: problem_id, reward: metrics.score, response: output}",
            "source.group_size=4",
            "source.format=table",
        ],
    ),
    "headrace": (lambda folder: headrace_dump(folder), ["pipeline=grpo"]),
    "slime": (lambda folder: dumps.slime_details(folder, *sound_rows().columns()), AS_SLIME),
    "trl": (two_groups_of_trl, AS_TRL),
    "verl": (
        sound_lines("7.jsonl", lambda i: dumps.verl_row(f"a_{i}_0", R[i])),
        ["pipeline=as/verl", "source.group_size=4", "source.format=verl"],
    ),
    "verifiers": (
        sound_lines("results.jsonl", lambda i: dumps.verifiers_row(0, R[i], timing=i)),
        ["source.group_size=4"],
    ),
    "prime_rl": (
        sound_lines(
            "traces.jsonl", lambda i: dumps.episode("g", f"e{i}", {"a": {"score": R[i], "weight": 1.0}})
        ),
        ["pipeline=as/prime_rl", "source.group_size=4"],
    ),
    "nemo_rl": (
        sound_lines(
            "train_data_step3.jsonl", lambda i: dumps.nemo_row(i, R[i], advantages=[[grpo(R)[i]] * 5])
        ),
        ["pipeline=as/slime", "source.group_by=prompt", "source.group_size=4"],
    ),
    "open_instruct": (
        sound_lines(
            "run_rollouts_000000.jsonl",
            lambda i: dumps.open_instruct_row(i, 0, R[i], advantage=by_population_std(i)),
        ),
        ["pipeline=as/open_instruct", "source.group_size=4"],
    ),
    "tinker": (
        sound_lines("train_rollout_summaries.jsonl", lambda i: dumps.tinker_row(0, i, R[i])),
        ["pipeline=as/tinker", "source.group_size=4"],
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_dump_has_no_findings(name, tmp_path):
    write, words = SOUND[name]
    write(tmp_path / "dump")
    text, checks = audited(tmp_path / "dump", tmp_path, *words, "audit.strict=true")
    assert found(checks) == {}
    compared = {"atropos", "headrace", "slime", "trl", "nemo_rl", "open_instruct", "prime_hosted"}
    assert (checks["advantages"]["state"] == "passed") == (name in compared)
    assert (checks["weights"]["state"] == "passed") == (name == "headrace")
    for check in checks.values():  # a check that was not made has its reason in the file and on the screen
        assert (check["state"] == "not checked") == bool(check["not_checked"])
        for why in check["not_checked"]:
            assert re.search(rf"not checked: [^:]*{check['title']}[^:]*: {re.escape(why)}", text)


# -- how a group was counted ---------------------------------------------------------------------------------


def test_each_group_that_counts_rows_or_masked_rollouts_is_found(tmp_path):
    """Each of 60 random groups is counted in one of four ways. The findings equal those of a loop."""
    draw = random.Random(0)
    rows, truth = Rows(), {"counted_twice": [], "masked": []}
    for group in range(60):
        rewards = [draw.random() for _ in range(4)]
        several = {0: draw.randint(1, 3)}
        removed = draw.random() < 0.5
        fair = [reward for at, reward in enumerate(rewards) if not (removed and at == 1)]
        counts_rows, counts_masked = draw.choice([(False, False), (True, False), (False, True), (True, True)])
        voters = [rewards[0]] * (several[0] - 1) * counts_rows + (rewards if counts_masked else fair)
        if counts_rows and several[0] > 1:
            truth["counted_twice"].append(str(group))
        if counts_masked and removed:
            truth["masked"].append(str(group))
        rows.add(group, rewards, grpo(rewards, voters), rows=several, **(REMOVED if removed else {}))
    path = dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages)
    _, checks = audited(path, tmp_path, *AS_SLIME)
    assert found(checks) == {name: groups for name, groups in truth.items() if groups}


def test_two_ways_to_count_with_equal_advantages_are_no_finding(tmp_path):
    """One rollout has three rows, and one is masked. The mean reward is ½ in each way to count."""
    rows = Rows()
    rewards = [0.5, 0.5, 1.0, 0.0]
    rows.add(0, rewards, [0.0, 0.0, 0.5, -0.5], rows={0: 3}, **REMOVED)
    path = dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages)
    words = ("pipeline=as/prime_rl", "pipeline.empty=exclude", "source.group_size=4")
    _, checks = audited(path, tmp_path, *words)
    assert found(checks) == {}
    assert checks["counted_twice"]["state"] == checks["masked"]["state"] == "passed"


def test_a_step_that_is_one_group_of_all_its_rows_is_named(tmp_path):
    """The first rollout has two rows, and each row of the step counts."""
    rows, rewards = Rows(), [[1.0, 0.0, 0.0, 1.0], [0.25, 0.75, 0.5, 1.0]]
    voters = [1.0, *rewards[0], *rewards[1]]
    for group, own in enumerate(rewards):
        rows.add(group, own, grpo(own, voters), rows={0: 2 - group})
    text, _ = audited(
        dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages), tmp_path, *AS_SLIME
    )
    assert "compared with other groups, as if the whole step is one group" in text


def test_groups_cut_by_position_are_named(tmp_path):
    """The groups have 3 and 5 rollouts, and their advantages are those of groups of four."""
    rewards = [1.0, 0.0, 0.25, 0.75, 0.5, 0.0, 0.125, 1.0]
    columns = trl_columns(grpo(rewards[:4], eps=1e-4) + grpo(rewards[4:], eps=1e-4))
    columns |= {"accuracy": rewards, "prompt": ["a"] * 3 + ["b"] * 5}
    path = dumps.trl_dump(tmp_path / "completions_4.parquet", **columns)
    text, checks = audited(path, tmp_path, *AS_TRL)
    assert set(found(checks)) == {"mixed", "incomplete", "oversized"}
    assert len(checks["mixed"]["findings"]) == 2
    assert "compared with other groups, as if groups are cut by position, 4 rows each" in text
    assert checks["advantages"]["findings"] == checks["signs"]["findings"] == []


def test_one_group_cut_by_position_is_no_step_cut_by_position(tmp_path):
    """The groups have 3 and 5 rows. Only the first has the advantages of a group of four rows."""
    rewards = [1.0, 0.0, 0.25, 0.75, 0.5, 0.0, 0.125, 1.0]
    columns = trl_columns(grpo(rewards[:3], rewards[:4], eps=1e-4) + grpo(rewards[3:], eps=1e-4))
    columns |= {"accuracy": rewards, "prompt": ["a"] * 3 + ["b"] * 5}
    path = dumps.trl_dump(tmp_path / "completions_4.parquet", **columns)
    _, checks = audited(path, tmp_path, *AS_TRL)
    assert set(found(checks)) == {"advantages", "incomplete", "oversized"}
    assert all(row < 3 for row in checks["advantages"]["findings"][0]["rows"])


def test_a_wrong_sign_is_found_if_rows_and_rollouts_give_one_baseline(tmp_path):
    rows, centred = Rows(), [reward - statistics.mean(R) for reward in R]
    rows.add(0, R, [-centred[0], *centred[1:]], rows=dict.fromkeys(range(4), 2))
    path = dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages)
    _, checks = audited(path, tmp_path, "pipeline=as/prime_rl", "source.group_size=4")
    assert found(checks) == {"signs": ["0"]}
    assert checks["counted_twice"]["state"] == "passed"


def test_the_recipe_that_gives_the_logged_advantages_is_named(tmp_path):
    columns = trl_columns([reward - statistics.mean(R) for reward in R + R[::-1]])
    path = dumps.trl_dump(tmp_path / "completions_4.parquet", **columns)
    text, checks = audited(path, tmp_path, *AS_TRL)
    assert set(found(checks)) == {"advantages"}
    assert "8 of 8 advantages are not those of the recipe: row 0 (rollout 1) 0.5625, by the recipe 1." in text
    assert "they are those of " in checks["advantages"]["hint"]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ((), True),
        (("pipeline.stages.gate.empty=exclude",), False),  # the gate decides before the pipeline
        (("pipeline.stages.gate=null",), True),
        (("pipeline.stages.gate=null", "pipeline.empty=exclude"), False),
    ],
)
def test_masked_rollouts_are_not_checked_if_the_recipe_counts_them(words, counts, tmp_path):
    rows = Rows()
    rows.add(4, R, grpo(R), **REMOVED)
    path = dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages)
    _, checks = audited(path, tmp_path, "pipeline=as/slime", "source.group_size=4", *words)
    assert found(checks) == ({} if counts else {"masked": ["4"]})
    why = "the recipe counts masked rollouts; to find them, set pipeline.empty=exclude"
    assert checks["masked"]["not_checked"] == ({why: 1} if counts else {})


def test_a_failed_rollout_makes_its_group_incomplete(tmp_path):
    rows = Rows()
    aborted = {"rollout_1": {"status": "aborted", "prompt": None}}
    rows.add(0, R, grpo(R, [1.0, 0.5, 0.25]), **aborted)
    rows.add(1, R, grpo(R), **aborted)
    path = dumps.slime_details(tmp_path / "dump", rows.samples, rows.advantages)
    text, checks = audited(path, tmp_path, *AS_SLIME)
    assert found(checks) == {"incomplete": ["0", "1"], "masked": ["1"]}
    assert "group 0 has 3 of 4 rollouts; failed or aborted: 1" in text
    text, checks = audited(path, tmp_path / "again", *AS_SLIME[:2])
    assert found(checks) == {"incomplete": ["0", "1"], "masked": ["1"]}
    assert re.search(
        r"not checked: [^:]*groups with too many rollouts: the size of groups is not known", text
    )
    _, checks = audited(path, tmp_path / "counts", "pipeline=as/slime", "source.group_size=4")
    assert found(checks) == {
        "incomplete": ["0", "1"],
        "masked": ["1"],
    }  # the recipe counts masked rollouts, but no failed ones


def test_a_rollout_without_a_reward_is_not_reported_as_masked(tmp_path):
    rows = Rows()
    rows.add(0, [*R, None], [*grpo(R), 0.0], **REMOVED, rollout_4={"status": "aborted"})
    path = dumps.slime_details(tmp_path / "dump", *rows.columns())
    _, checks = audited(path, tmp_path, *AS_SLIME[:2], "source.group_size=5")
    assert found(checks) == {"incomplete": ["0"], "masked": ["0"]}
    assert checks["masked"]["findings"][0]["rollouts"] == ["1"]


def headrace_dump(folder: Path, *words: str, rows: int = 8) -> Path:
    """The first `rows` rows of two groups of four, with one to four tokens each, in two minibatches."""
    columns = {"group_id": torch.arange(8) // 4, "rollout_id": torch.arange(8)}
    columns |= {("next", "reward"): torch.tensor(R + R), "expected_rollouts": torch.full((8,), 4)}
    columns["masks", "all_assistant_mask"] = torch.arange(4) >= torch.arange(8).unsqueeze(1) % 4
    pipeline = composed("pipeline=grpo", "pipeline.stages.split.minibatches=2", *words)
    return write_dump(make_report(pipeline.run(dumps.batch_of(columns)[:rows])), folder)


def test_an_untrained_incomplete_group_is_no_finding(tmp_path):
    path = headrace_dump(tmp_path / "dump", "pipeline.stages.gate.on_incomplete=drop", rows=7)
    _, checks = audited(path, tmp_path)
    assert found(checks) == {}
    assert checks["incomplete"]["state"] == "passed"


def test_an_oversized_group_is_a_finding_only_if_it_trains(tmp_path):
    """A group was dispatched with four rollouts and has five. All five are out of the loss, or none is."""
    five = [*R, 0.75]
    for removed in (True, False):
        rows = Rows()
        rows.add(0, R, grpo(R))
        out = {f"rollout_{at}": {"remove_sample": removed} for at in range(5)}
        rows.add(1, five, grpo(five), **out)
        path = dumps.slime_details(tmp_path / f"dump {removed}", *rows.columns())
        _, checks = audited(path, tmp_path / f"out {removed}", *AS_SLIME)
        assert found(checks).get("oversized", []) == ([] if removed else ["1"])


def test_a_check_with_a_finding_is_found_even_if_a_step_was_not_checked():
    finding = AuditFinding(3, "a", ["0"], [0], [1.0], [2.0], "a has 2", None)
    result = CheckResult("mixed", "groups of several prompts")
    states = [result.state]
    result.add(CheckOutcome([], "step 2 has no prompts"))
    states.append(result.state)
    result.add(CheckOutcome([finding]))
    assert [*states, result.state] == ["passed", "not checked", "found"]


def test_the_share_of_a_check_is_the_mean_over_all_steps():
    """Two findings have the shares 1/2 and 1/4, and two of four steps have none."""
    result = CheckResult("mixed", "groups of several prompts")
    finding = AuditFinding(3, "a", ["0"], [0], [1.0], [2.0], "a has 2", 0.5)
    result.add(CheckOutcome([finding, finding._replace(share=0.25)]))
    assert (result.share(4), result.plain(4)["gradient_share"]) == (0.1875, 0.1875)
    result.add(CheckOutcome([finding._replace(share=None)]))
    assert result.share(4) is None


FOUND = [AuditFinding(3, "a", ["0"], [0], [1.0], [2.0], "a has 2", None)]
NONE = {NO_ADVANTAGES: 2, "another reason": 1}


@pytest.mark.parametrize(
    ("results", "counts", "why"),
    [
        ({"advantages": {}}, "1 check: 1 passed", ""),
        ({"advantages": {}, "sizes": {}}, "2 checks: 2 passed", ""),
        ({"advantages": {"lacking": NONE}}, "1 check: 1 not checked", f": advantages ({NO_ADVANTAGES})"),
        (
            {"a": {}, "advantages": {"findings": FOUND, "lacking": NONE}, "b": {"lacking": {"no b": 1}}},
            "3 checks: 1 found, 1 passed, 1 not checked",
            ": b (no b)",
        ),
        (
            {"a": {"lacking": NONE}, "b": {"lacking": {"no b": 1}}, "advantages": {"lacking": NONE}},
            "3 checks: 3 not checked",
            f": a, advantages ({NO_ADVANTAGES}); b (no b)",
        ),
    ],
)
def test_a_verdict_counts_checks_by_state_and_a_summary_names_those_not_made(results, counts, why):
    checks = {name: CheckResult(name, f"wrong {name}", **each) for name, each in results.items()}
    assert said_of_checks(checks) == counts + why
    assert said_of_checks(checks, why=False) == counts
    blind = "This dump cannot show whether the advantages were right, because it has none. "
    blind *= bool(checks["advantages"].lacking)
    assert verdict_of(checks, "trl") == f"{blind}{counts}."
    saves = "Train with --dump-details, which saves them. " * bool(blind)
    assert verdict_of(checks, "slime") == f"{blind}{saves}{counts}."


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("pipeline=spo",), "it has a state from steps before the dump, in running"),
        (("pipeline=grpo", "pipeline.stages.advantage=null"), "none of its stages writes an advantage"),
    ],
)
def test_a_recipe_whose_advantages_cannot_be_computed_is_refused_for_each_step(words, why, tmp_path):
    path = dumps.trl_dump(tmp_path / "completions_4.parquet", **trl_columns([0.0] * 8))
    text, checks = audited(path, tmp_path / "out", *words, *AS_TRL[1:])
    assert found(checks) == {}
    refused = {f"the recipe refuses step 4: {why}": 1}
    assert checks["signs"]["not_checked"] == checks["advantages"]["not_checked"] == refused
    assert text.startswith("8 checks: 2 passed, 6 not checked. The recipe refuses 1 of 1 steps.\n")


def test_eight_findings_and_two_reasons_of_a_check_are_printed_and_the_others_counted(tmp_path):
    """In each of nine steps a row has the wrong sign. A scale that needs rewards ≥ 0 refuses each step."""
    wrong = grpo(R, eps=1e-4)
    wrong[0] *= -1
    for step in range(9):
        columns = {name: values[:4] for name, values in trl_columns(wrong * 2).items()}
        columns |= {"step": [step] * 4, "accuracy": [value - 5 for value in R]}
        dumps.trl_dump(tmp_path / "completions" / f"completions_{step}.parquet", **columns)
    printed, checks = audited(tmp_path / "completions", tmp_path, *AS_TRL)
    text = " ".join(printed.split())
    assert len(checks["signs"]["findings"]) == 9
    assert text.count("wrong signs: row 0") == 8
    assert "and 1 more, see audit.json" in text
    assert "(source.group_by=prompt) (9 steps)" in text
    words = (*AS_TRL, "pipeline.stages.advantage.scale=mean")
    for steps, others in ((3, "1 more reason"), (4, "2 more reasons")):
        path = f"'{tmp_path}/completions/completions_[0-{steps - 1}].parquet'"
        text, checks = audited(path, tmp_path / f"refused {steps}", *words)
        title, reasons = checks["signs"]["title"], checks["signs"]["not_checked"]
        line = rf"not checked: [^:\n]*{title}[^:\n]*: "
        shown = [bool(re.search(f"{line}{re.escape(why)}\n", text)) for why in reasons]
        assert shown == [True, True] + [False] * (steps - 2)
        assert f"not checked: {title}: {others}, see audit.json\n" in text


def test_a_page_has_500_findings_of_a_check_and_the_number_of_the_others(tmp_path):
    rows = [dumps.verl_row(f"g{group}_0_0", 0.0) for group in range(501)]
    path = dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    audited(path, tmp_path, "pipeline=as/verl", "source.group_size=2", "source.format=verl")
    page = (tmp_path / "report.html").read_text()
    assert page.count(" has 1 of 2 rollouts") == 500
    assert "and 1 more, see audit.json" in page


OF_TURNS = ("pipeline.stages.weight.unit=turn", "pipeline.stages.weight.turn_index_key=turn_index")


def test_weights_are_compared_with_the_declared_mean(tmp_path):
    words = ("pipeline.stages.weight.unit=rollout",)
    path = headrace_dump(tmp_path / "dump", *words)
    _, checks = audited(path, tmp_path, *words)
    assert checks["weights"]["state"] == "passed"
    _, checks = audited(path, tmp_path / "turn", *OF_TURNS)
    assert checks["weights"]["state"] == "not checked"  # a dump does not have the turns of a row
    _, checks = audited(path, tmp_path / "token")
    finding = checks["weights"]["findings"][0]
    assert set(found(checks)) == {"weights"}
    table = pq.read_table(path).to_pylist()
    trained = [row for row in table if row["minibatch"] == table[finding["rows"][0]]["minibatch"]]
    tokens = sum(row["tokens"] for row in trained)
    assert finding["expected"] == pytest.approx([1 / tokens] * len(finding["rows"]))
    assert finding["found"] == pytest.approx(
        [1 / (len(trained) * table[row]["tokens"]) for row in finding["rows"]]
    )
    table = pq.read_table(path)
    place = table.column_names.index("loss_weight")
    weights = pa.array([None if w is None else 2 * w for w in table["loss_weight"].to_pylist()])
    pq.write_table(table.set_column(place, "loss_weight", weights), path)
    text, checks = audited(tmp_path / "dump", tmp_path / "twice", *words)
    assert "4 of 4 rows have 2 to 2 times the weight of the declared mean; Σ weight × tokens is 2" in text
    assert len(checks["weights"]["findings"]) == 2
    assert checks["weights"]["gradient_share"] == pytest.approx(1)


def test_the_sign_of_a_row_with_the_loss_weight_0_is_no_finding(tmp_path):
    path = headrace_dump(tmp_path / "dump")
    table = pq.read_table(path)
    for weight, groups in ((0.0, []), (0.5, ["0"])):
        first, *others = table.to_pylist()
        first |= {"loss_weight": weight, "advantage": -first["advantage"]}
        pq.write_table(pa.Table.from_pylist([first, *others], table.schema), path)
        assert found(audited(path, tmp_path)[1]).get("signs", []) == groups


def test_a_row_that_did_not_train_has_no_share_of_the_gradient(tmp_path):
    """The share of row 0 is |weight × advantage × tokens|, divided by the sum over the trained rows."""
    path = headrace_dump(tmp_path / "dump")
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[0]["advantage"] *= -1
    rows[1]["loss_weight"] = None
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    sizes = [abs((row["loss_weight"] or 0.0) * row["advantage"] * row["tokens"]) for row in rows]
    finding = audited(path, tmp_path)[1]["signs"]["findings"][0]
    assert finding["rows"] == [0]
    assert finding["share"] == pytest.approx(sizes[0] / sum(sizes))


def test_loss_weights_for_averaged_gradients_are_multiplied_by_the_number_of_ranks(tmp_path):
    words = ("pipeline.stages.split.ranks=2", "pipeline.stages.weight.gradients=mean")
    path = headrace_dump(tmp_path / "dump", *words)
    assert audited(path, tmp_path / "one", words[0])[1]["weights"]["state"] == "found"
    assert audited(path, tmp_path / "two", *words)[1]["weights"]["state"] == "passed"


# -- the command ---------------------------------------------------------------------------------------------


def test_a_strict_command_exits_with_1_on_findings(tmp_path):
    wrong = [-1.0, *grpo(R, eps=1e-4)[1:], *grpo(R[::-1], eps=1e-4)]
    dumps.trl_dump(tmp_path / "bad" / "completions_4.parquet", **trl_columns(wrong))
    words = ["task=audit", *AS_TRL, "source.path=bad", "hydra.run.dir=out"]
    assert headrace_here(tmp_path, *words).returncode == 0
    done = headrace_here(tmp_path, *words, "audit.strict=true", check=False)
    assert done.returncode == 1
    assert "advantages of the wrong sign" in done.stdout
    out = tmp_path / "out"
    written = {each.name for each in out.glob("[!.]*") if each.is_file() and each.suffix != ".log"}
    assert written == {"audit.json", "config.yaml", "report.html"}
    page = (out / "report.html").read_text()
    assert "wrong signs: row 0 (rollout 1) -1, by the recipe 1.3" in page
    assert "<script" not in page
    with pytest.raises(AuditFailed, match=r"the audit has 1 finding$"):
        audited(tmp_path / "bad", tmp_path, *AS_TRL, "audit.strict=true")
    with pytest.raises(ConfigError, match="a dump to read is required"):
        audit_dump(configure("config", "task=audit"), out)


# -- the trained rows of slime -------------------------------------------------------------------------


def trained(folder: Path, change) -> Path:
    """Write a sound dump, and change its file of trained rows."""
    rows = sound_rows()
    dumps.slime_details(folder, rows.samples, rows.advantages)
    path = folder / "train_data" / "5.pt"
    payload = torch.load(path, weights_only=True)
    change(payload)
    torch.save(payload, path)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda payload: payload.update(format_version=3), "must have format_version 2"),
        (lambda payload: payload["samples"][0].update(rollout_position=1), "and occur once"),
        (
            lambda payload: payload["samples"][0].update(rollout_position=99),
            "must be below 13 and occur once",
        ),
        (lambda payload: payload["samples"][0].update(advantages=torch.ones(3)), "must have equal lengths"),
        (lambda payload: payload["samples"][0].pop("advantages"), "the key 'advantages' is required"),
        (
            lambda payload: payload["samples"][0].update(advantages=torch.tensor([0.0, float("nan")])),
            "finite",
        ),
    ],
)
def test_invalid_files_of_trained_slime_rows_are_refused(change, said, tmp_path):
    with pytest.raises(SourceError, match=said):
        list(open_dump(trained(tmp_path, change)))


def test_slime_advantages_belong_to_samples_by_index(tmp_path):
    rows = sound_rows()
    path = trained(tmp_path, lambda payload: payload["samples"].reverse())
    ((step, batch),) = open_dump(path)
    out = torch.tensor([sample["remove_sample"] for sample in rows.samples])
    assert step == 5
    assert batch["logged_advantage"][out].isnan().all()  # no token of these rows is trained
    assert batch["logged_advantage"][~out].tolist() == pytest.approx(
        [value for value, removed in zip(rows.advantages, out, strict=True) if not removed]
    )
    ((_, batch),) = open_dump(path / "rollout_data" / "5.pt")
    assert "logged_advantage" in batch.keys()
    (path / "train_data" / "5.pt").unlink()
    ((_, batch),) = open_dump(path)
    assert "logged_advantage" not in batch.keys()


# -- a prompt that was drawn twice ---------------------------------------------------------------------------

DRAWS = [[1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
ORDERED = ("source.group_size=8", "audit.strict=true")


def trl_draws(folder, draws=DRAWS, advantages=None):
    """Write a step of TRL with several draws of one prompt. The default advantages are exact."""
    rewards = [reward for draw in draws for reward in draw]
    own = [value for draw in draws for value in grpo(draw, eps=1e-4)]
    columns = {"step": [4] * len(rewards), "prompt": ["1+1?"] * len(rewards), "accuracy": rewards}
    columns |= {"completion": [str(i) for i in range(len(rewards))], "advantage": advantages or own}
    dumps.trl_dump(folder / "completions_4.parquet", **columns)
    return folder, ("pipeline=as/trl", "source.group_by=prompt")


def slime_draws(folder, draws=DRAWS, voters=None, advantages=None, **how):
    """Write a step of slime with two draws of one problem under one id. `how` applies to both draws."""
    rows = Rows()
    for draw, own in zip(draws, voters or draws, strict=True):
        start = len(rows.samples)
        rows.add(3, draw, grpo(draw, own), **how)
        for sample in rows.samples[start:]:
            sample["rollout_id"] += 50 * bool(start)
    if advantages:
        rows.advantages = advantages
    dumps.slime_details(folder, *rows.columns())
    return folder, ("pipeline=as/slime", "pipeline.empty=exclude")


@pytest.mark.parametrize("write", [trl_draws, slime_draws])
def test_two_draws_of_a_problem_with_exact_advantages_are_no_finding(write, tmp_path):
    """Each of the two draws has eight rollouts, and a replay trains all 16 rows."""
    path, words = write(tmp_path / "dump")
    text, checks = audited(path, tmp_path, *words, *ORDERED)
    assert found(checks) == {}
    assert checks["advantages"]["state"] == checks["oversized"]["state"] == "passed"
    assert "1 of these groups was split into the draws, and the logged advantages are those" in text
    trained, text = told(
        replay_dump,
        configure("config", f"source.path={path}", "task=replay", *words, ORDERED[0]),
        tmp_path / "r",
    )
    assert trained == 16
    assert "16 rows have one, 100% agree with yours" in " ".join(text.split())


def test_equal_rewards_of_both_draws_are_no_finding(tmp_path):
    path, words = trl_draws(tmp_path / "dump", [[1.0] * 8] * 2)
    _, checks = audited(path, tmp_path, *words, *ORDERED)
    assert found(checks) == {}


def wrong_sign():
    exact = [value for draw in DRAWS for value in grpo(draw, eps=1e-4)]
    return [-value if at == 9 else value for at, value in enumerate(exact)]


BOTH_DRAWS = [reward for draw in DRAWS for reward in draw]
TWO_ROWS = {"rows": {0: 2}}
NOT_MASKED = [draw[:1] + draw[2:] for draw in DRAWS]  # the second rollout of each draw is out of the loss
THREE = [DRAWS[0], [1.0, 0.0] * 4, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]  # the last mean is that of all
# Faults of a repeated prompt: the function that writes the dump, and the check of each finding.
FAULTS = {
    "a wrong sign": (lambda at: trl_draws(at, advantages=wrong_sign()), ["signs"]),
    "the mean of both draws": (
        lambda at: trl_draws(at, advantages=grpo(BOTH_DRAWS, eps=1e-4)),
        ["oversized"],
    ),
    "a rollout is missing": (lambda at: trl_draws(at, [DRAWS[0], DRAWS[1][:7]]), ["incomplete"]),
    "one draw is not divided by its std": (
        lambda at: trl_draws(
            at, advantages=grpo(DRAWS[0], eps=1e-4) + [r - statistics.mean(DRAWS[1]) for r in DRAWS[1]]
        ),
        ["advantages"],
    ),
    "a rollout of two rows counts twice": (
        lambda at: slime_draws(at, voters=[[DRAWS[0][0], *DRAWS[0]], DRAWS[1]], **TWO_ROWS),
        ["counted_twice"],
    ),
    "a rollout out of the loss counts": (lambda at: slime_draws(at, **REMOVED), ["masked"] * 2),
    "the mean of three draws": (
        lambda at: trl_draws(at, THREE, grpo([reward for draw in THREE for reward in draw], eps=1e-4)),
        ["oversized"],
    ),
    "the mean of both draws, with ids": (
        lambda at: slime_draws(at, advantages=grpo(BOTH_DRAWS)),
        ["oversized"],
    ),
    "a rollout is missing, with ids": (lambda at: slime_draws(at, [DRAWS[0][:7], DRAWS[1]]), ["incomplete"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_planted_fault_of_a_repeated_prompt_is_found(fault, tmp_path):
    write, names = FAULTS[fault]
    path, words = write(tmp_path / "dump")
    with pytest.raises(AuditFailed, match=f"{len(names)} finding"):
        audited(path, tmp_path, *words, *ORDERED)
    checks = {check["check"]: check for check in json.loads((tmp_path / "audit.json").read_text())["checks"]}
    assert [name for name, groups in found(checks).items() for _ in groups] == names


def test_a_sound_draw_with_a_rollout_out_of_the_loss_is_no_finding(tmp_path):
    path, words = slime_draws(tmp_path / "dump", voters=NOT_MASKED, **REMOVED)
    assert found(audited(path, tmp_path, *words, *ORDERED)[1]) == {}


def test_without_a_group_size_each_half_of_a_group_is_off_by_a_constant(tmp_path):
    """The means of the draws are 2/8 and 5/8. The mean of all 16 is 7/16, which differs from each by 3/16."""
    centred = [reward - statistics.mean(draw) for draw in DRAWS for reward in draw]
    path, words = trl_draws(tmp_path / "dump", advantages=centred)
    text, checks = audited(path, tmp_path, "pipeline=as/prime_rl", *words[1:])
    said = "each half of its 16 rollouts is off by a constant (+0.1875, -0.1875), as if its prompt was drawn"
    assert said in checks["advantages"]["findings"][0]["text"]
    assert "set source.group_size=8" in " ".join(text.split())


def test_a_strict_audit_fails_if_a_demanded_check_was_not_made(tmp_path):
    samples = [dumps.slime_sample(0, i, R[i]) for i in range(4)]  # a dump without advantages
    (tmp_path / "dump").mkdir()
    dumps.slime_dump(tmp_path / "dump" / "5.pt", samples=samples)
    words = ("pipeline=as/slime", "source.group_size=4")
    text, checks = audited(tmp_path / "dump", tmp_path, *words, "audit.strict=true")
    assert found(checks) == {}
    lacking = "signs, counted_twice, masked, advantages, weights"
    assert f"checks that were not made: {lacking}. To demand some: audit.strict=[signs,counted_twice" in text
    with pytest.raises(AuditFailed, match=r"0 findings, and these checks were not made: signs, advantages$"):
        audited(tmp_path / "dump", tmp_path, *words, "audit.strict=[signs,advantages,oversized]")
    audited(tmp_path / "dump", tmp_path, *words, "audit.strict=[incomplete,oversized]")
    with pytest.raises(
        ConfigError, match=r"list of checks: signs, .*; got 'sign' \(did you mean 'signs'\?\)"
    ):
        audited(tmp_path / "dump", tmp_path, *words, "audit.strict=[sign]")


def test_a_strict_audit_fails_if_no_check_was_made(tmp_path):
    rows = [dumps.verl_row(None, float(i)) for i in range(4)]
    path = dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    words = ("pipeline=as/verl", "source.format=verl", "source.group_by=prompt")
    with pytest.raises(AuditFailed, match="0 findings, and these checks were not made: signs, mixed, "):
        audited(path, tmp_path, *words, "audit.strict=true")


def test_groups_by_row_order_leave_three_checks_unmade(tmp_path):
    """Groups that are cut by row order have one prompt and 8 rollouts by construction."""
    path, words = trl_draws(tmp_path / "dump")
    words = [words[0], "source.group_by=order"]
    _, checks = audited(path, tmp_path, *words, "pipeline.stages.gate.group_size=8", "audit.strict=true")
    assert found(checks) == {}
    unmade = [name for name, check in checks.items() if "source.group_by=order" in str(check["not_checked"])]
    assert unmade == ["mixed", "incomplete", "oversized"]
    assert {checks[name]["state"] for name in unmade} == {"not checked"}
    assert checks["advantages"]["state"] == checks["signs"]["state"] == "passed"
    path, _ = trl_draws(tmp_path / "sign", advantages=wrong_sign())
    _, checks = audited(path, tmp_path, *words, "source.group_size=8")
    assert list(found(checks)) == ["signs"]
    assert checks["signs"]["findings"][0]["rows"] == [9]


def test_an_audit_of_a_run_of_headrace_names_the_recorded_recipe_if_it_audits_another(tmp_path):
    headrace_here(tmp_path, "pipeline=rloo", "train.steps=1", "hydra.run.dir=run", "report.html=false")
    hint = "the run has recorded the recipe pipeline=rloo. The run that wrote it set pipeline.stages."
    text, checks = audited(tmp_path / "run", tmp_path / "other")
    assert "The recipe refuses 1 of 1 steps. The run that wrote it set pipeline.stages." in text
    assert hint in checks["advantages"]["hint"]
    options = (
        checks["advantages"]["hint"].partition("the recipe ")[2].replace(". The run that wrote it set", "")
    )
    _, checks = audited(tmp_path / "run", tmp_path / "own", *options.split())
    assert found(checks) == {}
    assert checks["advantages"]["hint"] == ""
