"""Each mistake on the command line is refused in one paragraph that says what to type instead."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
from command import headrace_here

from headrace.pipeline.error_overrides import text_with_overrides
from headrace.transforms import BatchError

pytestmark = pytest.mark.slow  # most cases compose a configuration

REPLAY = "task=replay source.path=dump"
OF_PROMPT = "source.group_by=prompt source.group_size=2"
MISTAKES = {
    # -- the recipe
    "grpo": "did you mean pipeline=grpo?",
    "-p grpo": "unknown option '-p' (did you mean pipeline=grpo?)",
    "pipeline": "did you mean pipeline=VALUE?",
    "pipeline= grpo": "pipeline=: a name is required",
    "pipeline:grpo": "did you mean pipeline=grpo?",
    "--pipeline=grpo": "unknown option '--pipeline' (did you mean pipeline=grpo?)",
    "pipeline=gprpo": "unknown recipe 'gprpo' (did you mean 'grpo' or 'ppo'?); headrace recipes lists",
    "pipeline=GRPO": "did you mean 'grpo'",
    "recipes DAPO": "unknown recipe 'DAPO' (did you mean 'dapo'?)",
    "recipes dr-grpo": "unknown recipe 'dr-grpo' (did you mean 'dr_grpo'?)",
    "GRPO": "did you mean pipeline=grpo?",
    "recipes reinforce++": "unknown recipe 'reinforce++' (did you mean 'reinforce_pp'?)",
    "pipeline=REINFORCE++-baseline": "did you mean 'reinforce_pp_baseline'?",
    "recipes NAME": "NAME stands for the name of a recipe; headrace recipes lists all",
    "recipes grop": "unknown recipe 'grop' (did you mean 'grpo'",
    # -- the task
    "replay": "did you mean task=replay?",
    "replay file.txt": "did you mean headrace task=replay source.path=file.txt?",
    "audit new.jsonl pipeline=rloo": "did you mean headrace task=audit source.path=new.jsonl pipeline=rloo?",
    "compare dump": "did you mean headrace task=compare source.path=dump 'pipelines=[as/verl,grpo]'?",
    "compare dump new.jsonl": (
        "did you mean headrace view dump new.jsonl, for two runs, or headrace task=compare source.path=dump "
    ),
    "replay dump file.txt": "got 'replay' (did you mean task=replay?)\n",
    "compare dump pipelines=[rloo,grpo]": (
        "(did you mean headrace task=compare source.path=dump 'pipelines=[rloo,grpo]'?)\n"
    ),
    "doctr": "did you mean headrace doctor?)",
    "demo rloo": "did you mean headrace pipeline=rloo, or for the demo headrace alone?",
    "plot": "did you mean headrace view FOLDER?",
    "repaly": "did you mean task=replay",
    "recipe": "got 'recipe' (did you mean headrace recipes?)\n",
    "seed= replay": "got 'replay' (did you mean seed=replay?)\n",
    "--help task=repaly": "unknown task 'repaly' (did you mean 'replay'?); choose from train, replay",
    "task=repaly lr 3": "an option is NAME=VALUE; got 'lr'\n",
    # -- flags of other commands
    "--cfg nothing": "'nothing' (choose from 'job', 'hydra', 'all'); headrace --help lists the options\n",
    "-m": "-m runs a job for each value of an option, and no option has several values: headrace -m seed=1,2",
    "--resume": "A loop of your own can, with headrace.Checkpoint (docs/resume.md)\n",
    "--list": "did you mean headrace recipes?",
    "--verison": "unknown option '--verison' (did you mean '--version'",
    "-- seed=1": "unknown option '--'; headrace --help lists the options\n",
    "-x seed=1": "unknown option '-x'; headrace --help lists the options\n",
    "-seed=1": "did you mean seed=1?",
    "--lr 0.1": "did you mean optimizer.lr=0.1?",
    "--lr": "unknown option '--lr' (did you mean optimizer.lr=VALUE?); headrace --help",
    "--lr seed=1": "unknown option '--lr' (did you mean optimizer.lr=VALUE?); headrace --help",
    "--lr=2 3": "unknown option '--lr' (did you mean optimizer.lr=2?); headrace --help",
    f"{REPLAY} --skip-bad": "did you mean source.skip_bad=true?",
    "-m --cfg job seed=1,2": "use one of the two",
    # -- names of options
    "seed 1": "did you mean seed=1?",
    "lr = 3": "did you mean optimizer.lr=3?",
    "lr =": "did you mean optimizer.lr=VALUE?",
    "train.steps=${device}": "train.steps must be an integer; got 'auto'",
    "output=x": "did you mean hydra.run.dir=x?",
    "rows=llm": "choose from pipeline, report, group_size, sampler, ",
    f"{REPLAY} group_by=prompt": "did you mean source.group_by=prompt?",
    f"{REPLAY} sorce.group_by=prompt": "'sorce.group_by' (did you mean source.group_by=prompt?)",
    "seed=1 doctor": "headrace doctor is a command of its own, without options\n",
    "doctor seed=1": "headrace doctor is a command of its own, without options\n",
    "stages gate advantage": "headrace stages [NAME] is a command of its own, without options\n",
    f"{REPLAY} pipeline=as/verl pipeline.stages.filter.action=drop": (
        "'pipeline.stages.filter.action': pipeline=as/verl has no stage 'filter'; it has gate, collapse"
    ),
    "train=3": "train is a group of settings; set one of them, as train.NAME=VALUE; got 3",
    # -- stages
    "pipeline.stages.kl=token_advantage": "pipeline.stages.kl.term=entropy_share. A term is directed_",
    "stages NAME": "NAME stands for the name of a stage; headrace stages lists all",
    "stages RewardShaping": "CONTRIBUTING.md says how, under 'A new reward shaping'",
    "stages FanOut": "unknown stage 'FanOut' (did you mean 'FanOutCollapse'?)",
    "stages Shaping": "unknown stage 'Shaping' (did you mean 'RewardShaping'?)",
    "stages gaet": "unknown stage 'gaet' (did you mean 'gate' or 'gae'?)",
    "pipeline.stages.second=not_truncated": "pipeline.stages.second=filter pipeline.stages.second.criterion=",
    "pipeline.stages.advantage.scael=none": "(did you mean pipeline.stages.advantage.scale=none?",
    "+pipeline.stages.advantage.scael=none": "no option 'scael' (did you mean 'scale'",
    "+pipeline.stages.advantge.scale=none": "the recipe has no stage 'advantge' (did you mean 'advantage'",
    "+pipeline.stages.filter.criterion.reward_kye=1": "no option 'reward_kye' (did",
    "pipeline.order=[gate]": "order must name each stage once",
    "loss_unit=token": "did you mean pipeline.stages.weight.unit=token",
    "pipeline.stages.gate._target_=headrace.transforms.Gate": "'headrace.transforms.Gate' cannot be",
    "~pipeline.stages.advantage": (
        "no stage writes the column 'advantage', which the loss reads; the stages are gate, "
    ),
    "policy=3": "policy must be a node with a _target_; got 3\n",
    "~pipeline.stages.weight": "Set aggregation='token_mean' on GRPOLoss",
    "+stage@pipeline.stages.signs=signs": "it lacks 'signs'. Place it, as in pipeline.after.signs=advantage",
    # -- values
    "group_size=0": "sampler.group_size must be an integer ≥ 1; got 0",
    f"{REPLAY} source.columns={{group: id, reward: r}} seed=1": (
        "a value with spaces goes in quotes (did you mean 'source.columns={group: id, reward: r}'?)"
    ),
    "train.steps=-1": "train.steps must be an integer ≥ 1; got -1",
    "pipeline.stages.advantage.scale=stdev": "must be one of 'group', 'leave_one_out'",
    "pipeline.stages.advantage.scale=false": "(did you mean 'none'?); got false",
    "pipeline.stages.advantage.clip=5": "(did you mean [-5, 5]?); got 5",
    "report.html=flase": "report.html must be true or false; got 'flase'",
    f"{REPLAY} source.group_by=prompts": "did you mean 'prompt'?",
    f"{REPLAY} source.format=velr": "format must be auto or one of atropos, headrace, nemo_gym",
    f"{REPLAY} source.tokenizer=Qwen/Qwen3-8B": "tokenizer must be a tokenizer.json, or a folder",
    "task=compare source.path=dump pipelines=[as/verl, grpo]": "did you mean 'pipelines=[as/verl, grpo]'?",
    "task=compare source.path=dump pipelines=[grpo,grpo]": "such as 'pipelines=[as/verl,grpo]'; got",
    "task=compare source.path=dump pipelines=[rloo,grpo] pipeline.stages.overlong.cache=3": (
        "'pipeline.stages.overlong.cache': pipeline=rloo has no stage 'overlong'; it has gate, collapse"
    ),
    "task=compare source.path=dump pipelines=[rloo,grpo] 'pipeline.stages.mine={_target_: no.where}'": (
        "pipeline.stages.mine: _target_ 'no.where' cannot be imported"  # it is added to each recipe
    ),
    "task=compare source.path=dump pipelines=[rloo,grpo] pipeline.stages.mine=signs "
    "pipeline.stages.mine.negatve=0.5": "(headrace.transforms.SignFactors) has no option 'negatve'",
    "pipeline.stages.gate.group_size=${nope}": "group_size: it refers to ${nope}, which is unknown",
    "task=compare source.path=dump pipelines=abc": "pipelines must be a list (each a word); got 'abc'",
    "pipeline=3": "pipeline=3 must be the name of a file, as in pipeline=grpo",
    "policy.width=30": "policy.width must be a multiple of heads; got 30 and 4",
    "optimizer.lr=fast": "optimizer.lr must be a finite number or a node with a _target_; got 'fast'",
    "optimizer.lr=-1": "optimizer.lr=-1: Invalid learning rate: -1",
    "'train.transform={_target_: no.where}'": "_target_ 'no.where' cannot be imported: No module named 'no'",
    "train.transform=trees": "train.transform must be one of 'pack', 'tree'",
    "device=gpu": "device=gpu is not available; choose from auto, cpu\n",
    "device=foo": "device=foo is not available; choose from auto, cpu\n",
    "pipeline.stages.gate.on_incomplete=raise env.failing=0.5 policy.width=16": "stage 'gate'",
    # -- other tasks
    "task=certify certify.group_sizes=[9] certify.only=[stop_or_continue]": (
        "a group of 9 of task 'stop_or_continue' has 262,144 outcomes, and certify.most is 20,000"
    ),
    "task=certify certify.group_sizes=[3] certify.only=[forks]": "must be a multiple of 2; got 3",
    "task=certify certify.only=[forsk]": "unknown task 'forsk' (did you mean 'forks'?)",
    "task=certify certify.tasks.forks.theta=[1] certify.only=[forks]": "certify.tasks.forks.theta",
    "task=certify '+certify.tasks.mine={a: 1}'": "certify.tasks.mine must be a node with a _target_",
    "task=xray xray=mine source=json:nothing": "source=json:nothing cannot be imported",
    "task=xray xray.only=nothing": "xray.only=nothing matches no setting; the settings are GRPOLoss",
    "task=xray xray.cuts=2": "xray.cuts must be",
    # -- files
    "hydra.run.dir=/dev/null/x": "/dev/null/x: not a directory. hydra.run.dir=FOLDER",
    "task=replay": "source.path=FILE, FOLDER or a glob in quotes",
    "task=replay dump": "did you mean 'source.path=dump'?",
    "task=replay source.path=dump/1.jsonl dump/2.jsonl": "quote it: 'source.path=dump/*.jsonl'",
    "task=replay source.path=dmup": "dmup: there is no such file or folder (did you mean 'dump'?)",
    "task=replay 'source.path=nothing/*.jsonl'": "nothing/*.jsonl: no file matches",
    "task=replay 'source.path=dmup/*.jsonl'": "no file matches this pattern (did you mean 'dump'?)",
    "task=replay 'source.path=dump/*.json'": "no file matches this pattern; dump has *.jsonl\n",
    "task=replay dump/*.json": "did you mean 'source.path=dump/*.json'?). But dump/*.json: no file matches",
    "--path dump": "did you mean task=replay source.path=dump?",
    "task=replay --file dump": "did you mean source.path=dump?",
    REPLAY: "task=replay source.path=dump source.group_by=prompt source.group_size=",
    f"{REPLAY} source.group_by=prompt": "source.group_by=prompt source.group_size=",
    f"{REPLAY} {OF_PROMPT} hydra.run.dir=file.txt": "file.txt: this is a file",
    "hydra.run.dir=": "hydra.run.dir=: an output folder is required",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "file.txt").write_text("a file\n")
    (folder / "dump").mkdir()
    for step in (1, 2):
        rows = [{"input": "1+1?", "output": "2", "gts": "2", "score": float(i), "step": step} for i in (0, 1)]
        (folder / "dump" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_refused_with_what_to_type_instead(folder, typed):
    shutil.rmtree(folder / "outputs", ignore_errors=True)  # the default folder is the same for a second
    done = headrace_here(folder, *shlex.split(typed), check=False)
    assert done.returncode == 2
    assert MISTAKES[typed] in done.stderr
    assert done.stderr.startswith("headrace: ")
    python = ("Traceback", "Error", "None", "Errno", "__init__", "<class")
    assert not [word for word in python if word in done.stderr]


def test_an_option_in_an_error_is_the_override_that_sets_it():
    error = BatchError("set {on_incomplete=drop} or {group_size=} or {split/seed=3}{infinite}", group=7)
    assert text_with_overrides(error).startswith(
        "set on_incomplete='drop' or group_size or pipeline.stages.spl"
    )
    error.stage, error.made_by = "gate", "Gate()"
    assert text_with_overrides(error) == (
        "stage 'gate', Gate(): set pipeline.stages.gate.on_incomplete=drop or "
        "pipeline.stages.gate.group_size or pipeline.stages.split.seed=3"
    )
    assert text_with_overrides(ValueError("set {on_incomplete=drop}")) == "set {on_incomplete=drop}"
