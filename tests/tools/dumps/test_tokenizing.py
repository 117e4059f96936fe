"""No number of a text dump depends on a length. With a tokenizer, the dump equals a dump with tokens.

Tests in the second part plant a fault in one of several steps.
"""

from __future__ import annotations

import html
import json
import math
import random
import re

import pytest
from command import headrace_here
from composed import composed
from dumps import (
    episode,
    nemo_row,
    node,
    open_instruct_row,
    slime_dump,
    slime_sample,
    trl_dump,
    verifiers_row,
    verl_row,
    write_lines,
)
from recipes import CHAINS

from headrace.pipeline import make_report
from headrace.pipeline.tools.dumps.readers import Sample, SourceError, open_dump, to_batch
from headrace.pipeline.tools.dumps.readers.tokenizing import Counted, Tokenizer, add_tokens, load_tokenizer
from headrace.pipeline.tools.report import write_dump
from headrace.transforms import BatchError, MissingKeyError
from headrace.transforms.table.schema import NO_LENGTHS

pytestmark = pytest.mark.slow

GATE, BY_PROMPT = "pipeline.stages.gate.group_size=4", {"group_by": "prompt", "group_size": 4}
MASK = ("masks", "all_assistant_mask")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Two tokenizers: of characters and of words."""
    package = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, pattern in (("characters", r"[\s\S]"), ("words", r"\w+|\W")):
        vocabulary = {"?": 0} | {chr(code): code for code in range(32, 127) if chr(code) != "?"}
        tokenizer = package.Tokenizer(package.models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(pattern), "isolated")
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
    return {name: folder / name for name in ("characters", "words")}


@pytest.fixture(scope="module")
def rollouts():
    """The (prompt, response, score) of each rollout of four groups of four, with very different lengths."""
    draw = random.Random(0)
    return [
        (f"{group}+{group}?", "so " * draw.randint(1, 40) + str(score), float(score))
        for group in range(4)
        for score in ((0, 1, 1, 0), (1, 1, 0, 1), (0, 0, 0, 0), (0, 0, 1, 0))[group]
    ]


@pytest.fixture(scope="module")
def texts(tmp_path_factory, rollouts):
    rows = [
        {"input": prompt, "output": response, "gts": "2", "score": score, "step": 1}
        for prompt, response, score in rollouts
    ]
    return write_lines(tmp_path_factory.mktemp("texts") / "1.jsonl", rows).parent


def only(*arguments, **options):
    ((_, batch),) = list(open_dump(*arguments, **options))
    return batch


def numbers_of(recipe, batch, *words):
    report = make_report(composed(f"pipeline={recipe}", *words).run(batch), batch=batch)
    timed = ("time/", "response_characters/")  # only dumps of texts have numbers of characters
    return {name: value for name, value in report.numbers.items() if not name.startswith(timed)}


def same(found, expected):
    return {name: value for name, value in found.items() if not _equal(value, expected.get(name))}


def _equal(one, other):
    return other is not None and (one == other or (math.isnan(one) and math.isnan(other)))


def test_no_number_of_a_text_dump_depends_on_a_length(texts, tokenizers):
    """A number that depends on a length would depend on the tokenizer."""
    batch = only(texts, **BY_PROMPT)
    tokenized = [only(texts, **BY_PROMPT, tokenizer=tokenizer) for tokenizer in tokenizers.values()]
    tried = []
    for recipe in CHAINS:
        try:
            found = numbers_of(recipe, batch)
        except (MissingKeyError, BatchError):  # the recipe needs other columns, or lengths
            continue
        tried.append(recipe)
        assert not [name for name in found if re.search("length|token|truncated|^weight/", name)], recipe
        assert [same(found, numbers_of(recipe, each)) for each in tokenized] == [{}, {}], recipe
    assert {"grpo", "as/verl", "spo", "rae"} <= set(tried)


@pytest.mark.parametrize("recipe", ["dapo", "gr3", "as/areal", "tree_grpo"])
def test_with_a_tokenizer_numbers_equal_those_of_a_dump_with_tokens(
    recipe, texts, rollouts, tokenizers, tmp_path
):
    samples = [
        slime_sample(
            number // 4,
            number,
            score,
            tokens=[ord(letter) if letter != "?" else 0 for letter in prompt + response],
            response_length=len(response),
            rollout_log_probs=None,
            weight_versions=None,
        )
        for number, (prompt, response, score) in enumerate(rollouts)
    ]
    dump = slime_dump(tmp_path / "1.pt", 1, samples)
    long = ("pipeline.stages.overlong.max_length=90", "pipeline.stages.overlong.cache=30")
    words = long if recipe == "dapo" else ()
    found = numbers_of(recipe, only(texts, **BY_PROMPT, tokenizer=tokenizers["characters"]), *words)
    expected = numbers_of(recipe, only(dump, group_size=4), *words)
    assert not same(found, expected)
    assert expected.keys() - found.keys() <= {
        "rollouts/truncated",
        "rollouts/failed",
        "groups/equal_and_truncated",
    }


@pytest.mark.parametrize(
    "words",
    [
        "pipeline=dapo",
        "pipeline=gr3",
        "pipeline=opo",
        "pipeline=tree_grpo",
        "pipeline.stages.split.max_tokens=100",
        "pipeline.stages.weight.fold=sum",
        "criterion@pipeline.stages.filter.criterion=length_within",
    ],
)
def test_a_recipe_that_needs_lengths_is_refused_with_what_to_set(words, texts, tokenizers):
    pipeline = composed(*words.split())
    with pytest.raises(MissingKeyError, match=r"stage '\w+'.* Set source\.tokenizer=PATH, a tokenizer\.json"):
        pipeline.run(only(texts, **BY_PROMPT))
    pipeline.run(only(texts, **BY_PROMPT, tokenizer=tokenizers["words"]))


def test_texts_without_tokens_have_no_lengths_in_any_format(texts, tmp_path):
    text = [node(None, "user", [], []), node(0, "assistant", [], [], sampled=True)]
    for each in text:
        each["logprobs"] = []
    rows = [episode("g", "a", {"r": {"score": 1.0}}, trace={"nodes": text})]
    of = {
        "verl": only(texts, **BY_PROMPT),
        "trl": only(trl_dump(tmp_path / "c.parquet"), group_by="prompt"),
        "verifiers": only(write_lines(tmp_path / "results.jsonl", [verifiers_row(0, 1.0)])),
        "prime_rl": only(write_lines(tmp_path / "traces.jsonl", rows)),
    }
    report = make_report(composed("pipeline=grpo", GATE).run(of["verl"].exclude("expected_rollouts")))
    for kind in ("parquet", "jsonl"):
        write_dump(report, tmp_path / kind, format=kind)
        of[f"headrace {kind}"] = only(tmp_path / kind)
    for name, batch in of.items():
        assert batch[NO_LENGTHS].all(), name
        assert not [key for key in batch.keys(True) if key in (MASK, "masks", "tokens", "log_probs")], name
    assert report.unsaid == ["response_length/mean", "rollouts/truncated"]
    for name in ("verl", "headrace parquet", "headrace jsonl"):  # a replay of a replay adds no notice
        assert "status" not in of[name].keys()
    rows = [nemo_row(0, 1.0), nemo_row(1, 0.0)]
    batch = only(write_lines(tmp_path / "train_data_step3.jsonl", rows), group_by="prompt")
    assert NO_LENGTHS not in batch.keys(True)


def test_tool_output_is_masked_and_response_characters_are_counted(texts, rollouts):
    parts = [(True, "2+2"), (False, "tool: 4"), (True, "4")]
    sample = Sample("a", 0, 1.0, prompt="?", response="as text", response_parts=parts)
    add_tokens([sample], Tokenizer(lambda texts: [[ord(letter) for letter in text] for text in texts]))
    assert sample.loss_mask == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1]
    assert bytes(sample.tokens).decode() == "?2+2tool: 44"
    with pytest.raises(SourceError, match=r"found none\. Leave source\.tokenizer out"):
        add_tokens([Sample("a", 0, 1.0)], Tokenizer(lambda texts: []))
    report = make_report(composed("pipeline=grpo").run(only(texts, **BY_PROMPT)))
    lengths = [len(response) for _, response, _ in rollouts]
    assert report.numbers["response_characters/max"] == max(lengths)
    assert report.numbers["response_characters/mean"] == pytest.approx(sum(lengths) / len(lengths))


def test_a_tokenizer_is_a_local_file_or_folder(texts, tokenizers, tmp_path):
    file = tokenizers["words"] / "tokenizer.json"
    one, other = (only(texts, **BY_PROMPT, tokenizer=path) for path in (file, file.parent))
    assert one[MASK].equal(other[MASK])
    with pytest.raises(ValueError, match="Nothing is downloaded"):
        open_dump(texts, tokenizer="Qwen/Qwen3-8B")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read"):
        open_dump(texts, tokenizer=tmp_path)
    with pytest.raises(ValueError, match="the format slime does not read tokenizer"):
        open_dump(slime_dump(tmp_path / "5.pt"), tokenizer=file)


# -- one fault in one step ------------------------------------------------------------------------------


def verl_steps(folder, steps, fault=None, *, permuted=False):
    """Write a file for each step, with three groups of two. `fault` changes the rows of step 2."""
    for step in range(steps):
        rows = [verl_row(None, float(i), step, prompt) for prompt in ("a", "b", "c") for i in (0, 1)]
        if fault is not None and step == 2:
            rows = fault(rows)
        if permuted:
            random.Random(step).shuffle(rows)
        write_lines(folder / f"{step}.jsonl", rows)
    return folder


TWO = ("source.group_by=prompt", "source.group_size=2")


def drawn_twice(rows):
    return [*rows, *(row | {"output": "again"} for row in rows[:2])]


SAID = {"a": {"role": "assistant", "content": "yes"}, "u": {"role": "user", "content": "is it?"}}


@pytest.mark.parametrize(
    ("roles", "own", "marked", "trains"),
    [
        ("aua", [False, False, True], [1, 0, 0, 1, 1], [1, 1]),  # the first marked token is another row's
        ("uaa", [False, True, True], [0, 1, 1, 1], [1, 1, 1]),  # one run of marked tokens is of both messages
        ("ua", [False, True], [0, 0, 0], []),
    ],
)
def test_the_marked_tokens_of_a_rows_own_messages_train(roles, own, marked, trains):
    chat = [(of_policy, SAID[role]) for role, of_policy in zip(roles, own, strict=True)]
    template = Tokenizer(lambda texts: [], lambda messages: ([*range(len(marked))], marked))
    sample = Sample("g", 0, 1.0, response="yes", chat=chat)
    assert add_tokens([sample], template) == (1, 0)
    assert (sample.extent(), sample.loss_mask) == ((len(marked), len(trains)), trains)


@pytest.mark.parametrize(("marked", "runs"), [([0, 0, 0], 0), ([0, 1, 1], 1), ([1, 0, 1, 0, 1], 3)])
def test_a_template_marks_a_run_of_tokens_for_each_message_of_the_assistant(marked, runs):
    template = Tokenizer(lambda texts: [], lambda messages: ([*range(len(marked))], marked))
    sample = Sample("g", 0, 1.0, response="yes", where="here", chat=[(False, SAID["a"]), (True, SAID["a"])])
    said = (
        "here: the chat template must mark a run of tokens for each message of the assistant (2), because "
        f"this row did not sample all messages; found {runs} runs. To encode the texts one by one, set "
        "source.tokenizer to the file tokenizer.json"
    )
    with pytest.raises(SourceError, match=f"^{re.escape(said)}$"):
        add_tokens([sample], template)


def test_only_the_marked_tokens_of_a_rows_own_messages_train_in_any_chat():
    """A loop writes the marks: each message of the assistant is one run of marked tokens."""
    for seed in range(60):
        draw, chat, marked, trains = random.Random(seed), [], [], []
        for _ in range(draw.randint(1, 6)):
            role, own, length = draw.choice("aau"), draw.random() < 0.6, draw.randint(1, 3)
            chat.append((own and role == "a", SAID[role]))
            marked += [0, *[int(role == "a")] * length]
            trains += [0, *[int(own and role == "a")] * length]
        template = Tokenizer(
            lambda texts: [], lambda messages, marked=marked: ([*range(len(marked))], marked)
        )
        sample = Sample("g", 0, 1.0, response="yes", chat=chat)
        assert add_tokens([sample], template) == (1, 0)
        begin = trains.index(1) if 1 in trains else len(trains)
        assert (sample.tokens, sample.response_length) == ([*range(len(marked))], len(marked) - begin)
        assert sample.loss_mask == trains[begin:]


@pytest.mark.parametrize(
    ("by_template", "by_text", "said"),
    [(0, 0, []), (1, 0, ["1 row were marked"]), (2, 1200, ["2 rows were marked", "1,200 rows were encoded"])],
)
def test_a_notice_counts_the_rows_that_were_encoded_in_each_way(by_template, by_text, said):
    found = Counted(by_template, by_text).plus(Counted()).said
    assert len(found) == len(said)
    assert all(
        each.startswith(f"The tokens in the loss of {start}") for each, start in zip(found, said, strict=True)
    )
    assert Counted(1, 2).plus(Counted(30, 40)) == (31, 42)


def test_tokens_are_added_to_all_samples_or_to_none():
    letters = Tokenizer(lambda texts: [[ord(letter) for letter in text] for text in texts])
    samples = [Sample("g", 0, 1.0, response="yes", response_length=2), Sample("g", 1, 1.0, response="no")]
    assert add_tokens(samples, letters) == (0, 0)
    assert [sample.tokens for sample in samples] == [None, None]


def test_a_tokenizer_that_was_saved_with_limits_encodes_whole_texts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `llm` is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)
    words.enable_padding(length=8)
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(["a b a b", "b"]) == [[0, 1, 0, 1], [1]]


def test_draws_of_one_prompt_are_separated_by_order_or_left_out(tmp_path):
    how = {"group_by": "prompt", "group_size": 2}
    source = open_dump(verl_steps(tmp_path / "kept", 4, drawn_twice), **how)
    batches = {step: (batch, source.draws) for step, batch in source}
    (batch, _), draws = batches[2], source.draws[2]
    assert draws.split == 1
    assert draws.rows_left_out == 0
    assert batch["group_id"].unique(return_counts=True)[1].tolist() == [2] * 4
    assert set(batches[1][0]["group_label"]) < set(batch["group_label"])  # the first draws keep their labels
    source = open_dump(verl_steps(tmp_path / "permuted", 4, drawn_twice, permuted=True), **how)
    batches = {step: (batch, source.draws) for step, batch in source}
    (batch, _), draws = batches[2], source.draws[2]
    assert draws[:3] == (0, 1, 4)
    assert draws.drawn[0][1] == 4
    assert len(batch) == 4
    with pytest.raises(SourceError, match="dispatched with 1 rollout; found 2"):  # all groups are too large
        list(open_dump(tmp_path / "kept", group_by="prompt", group_size=1))


def test_a_group_whose_advantages_are_those_of_all_its_rollouts_is_left_out(tmp_path):
    """The four rollouts of the prompt a were trained as one group, so they are not two draws of two."""
    rewards, means = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0], [0.25] * 4 + [0.5] * 2
    columns = {"step": [4] * 6, "prompt": ["a"] * 4 + ["b"] * 2, "completion": ["x"] * 6, "accuracy": rewards}
    own = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    path = trl_dump(tmp_path / "completions_4.parquet", **columns, advantage=own)
    source = open_dump(path, group_by="prompt", group_size=2)
    ((_, batch),) = source
    assert source.draws[4][:3] == (0, 1, 4)
    assert batch["next", "reward"].flatten().tolist() == [1.0, 0.0]


def test_every_task_splits_the_draws_of_a_prompt_in_the_same_way_and_says_so(tmp_path):
    verl_steps(tmp_path / "dump", 4, drawn_twice)
    out = tmp_path / "out"
    for task in ("replay", "audit", "plan", "compare"):
        recipes = "pipelines=[as/verl,grpo]" if task == "compare" else "pipeline=as/verl"
        words = [f"task={task}", "hydra.run.dir=out", "source.path=dump", recipes, *TWO]
        shown = headrace_here(tmp_path, *words).stdout
        assert "1 prompt was drawn several times in one step: step 2," in " ".join(shown.split())
        if task == "audit":
            audited = json.loads((out / "audit.json").read_text())
            assert (audited["findings"], audited["rows"], len(audited["notices"])) == (0, 26, 2)
        if task == "plan":
            assert json.loads((out / "plan.json").read_text())["groups"] == 13
            assert f"written to {out}" in shown
        if task == "replay":
            assert shown.splitlines()[-2:] == [
                f"the page: {(out / 'report.html').as_uri()}",
                f"all rows of all steps: headrace view {out}",
            ]


def nan_score(rows):
    return [rows[0] | {"score": float("nan")}, *rows[1:]]


def lost_row(rows):
    return rows[1:]


@pytest.fixture
def recipes_of_mine(tmp_path):
    """Two recipes: `accepts` keeps a state and drops a group that lacks a row, and `refuses` refuses it."""
    (tmp_path / "mine" / "pipeline").mkdir(parents=True)
    drops, remembers = "gate: {on_incomplete: drop}", "running: {start: 0.0, decay: 0.5}"
    for name, recipe, stages in (("accepts", "rae", f"{drops}, {remembers}"), ("refuses", "grpo", "")):
        text = f"defaults: [{recipe}]\nstages: {{{stages}}}\n"
        (tmp_path / "mine" / "pipeline" / f"{name}.yaml").write_text(text)
    return f"hydra.searchpath=[file://{tmp_path}/mine]"


NAN = (nan_score, "2.jsonl:1: 'score' is the literal NaN, which is no JSON")
LOST = (lost_row, r"'gate'.* group 'a #\w+' has 1 of 2.*Set pipeline\.stages\.gate\.on_incomplete=drop")
FILE = {"compare": "compare.json", "plan": "plan.json", "audit": "audit.json"}


@pytest.mark.parametrize(
    ("task", "fault", "why"),
    [("replay", *NAN), ("replay", *LOST), ("compare", *LOST), ("plan", *LOST), ("audit", *NAN)],
)
def test_a_failing_step_is_named_and_left_out_of_all_numbers(task, fault, why, recipes_of_mine, tmp_path):
    """The third of six steps fails, and the numbers equal those of the dump without this step."""
    verl_steps(tmp_path / "dump", 6, fault)
    words = [f"task={task}", "source.path=dump", *TWO, "report.dump=parquet"]
    if task == "compare":
        words += [recipes_of_mine, "pipelines=[accepts,refuses]"]
    done = headrace_here(tmp_path, *words, "hydra.run.dir=out", check=False)
    shown = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 of 6 steps failed, and is in no number here: step 2." in shown
    assert re.search(f"step 2: {'refuses refuses it: ' * (task == 'compare')}.*{why}", shown)
    remedy = (
        "With source.skip_bad=true, malformed records are skipped, and steps that still fail are left out"
    )
    assert remedy in shown
    if task != "plan":  # a plan writes no page
        page = html.unescape((tmp_path / "out" / "report.html").read_text())
        assert "1 of 6 steps failed, and is in no number here: step 2." in page
        assert re.search(why, page)
        assert ("A step counts only if both recipes accept it" in page) == (task == "compare")
    if task == "replay":
        rows = tmp_path / "out" / "rollouts"
        can_be_read = 6 if fault is lost_row else 5
        assert len([*rows.glob("step_*.parquet")]) == can_be_read
        ((step, reason),) = json.loads((rows / "failed_steps.json").read_text())
    else:
        found = json.loads((tmp_path / "out" / FILE[task]).read_text())
        ((step, reason),) = (each.values() for each in found.pop("failed_steps"))
    assert step == 2
    assert re.search(why, reason)
    if fault is lost_row or task == "replay":  # in other cases the step is read without its malformed record
        done = headrace_here(tmp_path, *words, "hydra.run.dir=skipped", "source.skip_bad=true", check=False)
        assert done.returncode == 0
        assert "1 of 6 steps failed" in done.stdout
    (tmp_path / "dump" / "2.jsonl").unlink()
    done = headrace_here(tmp_path, *words, "hydra.run.dir=without")
    assert "failed" not in done.stdout
    if task != "replay":
        without = json.loads((tmp_path / "without" / FILE[task]).read_text())
        assert without.pop("failed_steps") == []
        assert {**found, "notices": []} == {**without, "notices": []}


def test_a_replay_ends_if_its_first_three_steps_fail(tmp_path):
    verl_steps(tmp_path / "dump", 9)
    words = ["task=replay", "source.path=dump", *TWO, "pipeline.stages.split.minibatches=100"]
    done = headrace_here(tmp_path, *words, "hydra.run.dir=out", check=False)
    assert done.returncode == 2
    assert "headrace: step 0: stage 'split'" in done.stderr
    assert "3 of 3 steps failed" in (tmp_path / "out" / "report.html").read_text()


def test_python_reads_all_steps_or_raises_at_the_failing_step(tmp_path):
    source = open_dump(verl_steps(tmp_path, 4, nan_score), group_by="prompt")
    outcomes = dict(source.outcomes())
    assert list(outcomes) == [0, 1, 2, 3]
    assert [step for step, found in outcomes.items() if isinstance(found, SourceError)] == [2]
    with pytest.raises(SourceError, match=r"2\.jsonl:1"):
        list(source)
    source = open_dump(tmp_path, group_by="prompt", skip_bad=True)
    assert [len(batch) for _, batch in source] == [6, 6, 5, 6]
    assert source.skipped == 1


def test_an_unreadable_line_between_two_steps_fails_both(tmp_path):
    """The damaged line is a row of one of the two steps, and the line does not say of which."""
    lines = [json.dumps(open_instruct_row(0, 0, 1.0, step=step)) for step in range(1, 15)]
    lines[2:2] = ["{"]  # between the steps 2 and 3
    lines[5:14] = [line.replace('"reward": 1.0', '"reward": "x"') for line in lines[5:14]]  # steps 5 to 13
    (tmp_path / "run_rollouts_0.jsonl").write_text("\n".join(lines))
    outcomes = list(open_dump(tmp_path, "open_instruct").outcomes())
    assert [step for step, _ in outcomes] == list(range(1, 15))
    failed = [step for step, found in outcomes if isinstance(found, SourceError)]
    assert failed == [2, 3, *range(5, 14)]
    (tmp_path / "run_rollouts_0.jsonl").write_text("\n".join(["{", *lines[8:]]))
    assert [step for step, _ in open_dump(tmp_path, "open_instruct").outcomes()] == [*range(8, 15)]


def test_an_unknown_status_gives_no_truncated_share():
    samples = [
        Sample("a", i, float(i), status=status, response_length=1) for i, status in enumerate((None, 3))
    ]
    batch = to_batch(samples)
    assert batch["status"].tolist() == [-1, 3]
    numbers = make_report(composed("pipeline=grpo", "pipeline.stages.gate=null").run(batch)).numbers
    assert "rollouts/truncated" not in numbers
    assert numbers["rollouts/failed"] == 0.5


def test_an_empty_file_fails_as_the_step_of_its_name(tmp_path):
    source = open_dump(verl_steps(tmp_path, 4, lambda rows: []), group_by="prompt")
    outcomes = dict(source.outcomes())
    assert list(outcomes) == [0, 1, 2, 3]
    assert "2.jsonl: the file is empty" in str(outcomes[2])
