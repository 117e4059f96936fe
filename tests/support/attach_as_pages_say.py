"""Attach every adapter by the exact lines of its page, in an environment of its own.

    python attach_as_pages_say.py FOLDER      the folder is docs/coming-from

TRL is the real package, and makes a training step. The other trainers are stand-ins, which call a hook as the
trainer does; tests/support/foreign.py and the adapters name the commits of their signatures. The program
prints a line per adapter.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import foreign
import numpy as np
import pytest
import torch

PATCH = pytest.MonkeyPatch()
BLOCK = re.compile(
    r"^<!-- attaches: (?P<name>[^>]*) -->\n```\w*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
REWARDS = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]  # the rewards of a group of eight, as on the pages
OF_EIGHT = (torch.tensor(REWARDS) - 0.25).tolist()


def lines_of(text: str) -> list[str]:
    """The lines that a user writes: no empty lines and no comments."""
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def set_environment(text: str) -> list[str]:
    """Set the environment variables of the `export` lines. Return the words of the other lines."""
    words = []
    for line in lines_of(text.replace("\\\n", " ")):
        said = shlex.split(line, comments=True)
        if said[0] == "export":
            name, _, value = said[1].partition("=")
            PATCH.setenv(name, value)
        else:
            words += said
    return words


def imported(path: str) -> Any:
    """The object at an import path, as trainers load it."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def import_anew(module: str) -> None:
    """Import a module as a new process would. Adapters keep references to the trainer's modules."""
    sys.modules.pop(module, None)
    importlib.import_module(module)


def is_centred(found: Any, *, scaled: bool = False) -> None:
    """Check that these are the advantages of REWARDS, divided by the group's std if `scaled`."""
    expected = torch.tensor(OF_EIGHT) / (torch.tensor(REWARDS).std() if scaled else 1.0)
    torch.testing.assert_close(torch.as_tensor(found).flatten().float(), expected, rtol=1e-3, atol=1e-4)


# -- trainers that are objects --------------------------------------------------------------------------


def trl(blocks: list[str]) -> None:
    """A training step of GRPOTrainer with a model of one layer."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokens = Tokenizer(models.WordLevel({token: i for i, token in enumerate("_$0123456789")}))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="_", eos_token="$", padding_side="left"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    given: list[list[float]] = []

    def ones(completions, **others):
        given.append([completion.count("1") + 0.1 * len(completion) for completion in completions])
        return given[-1]

    trainer = trl.GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids)),
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=4,
            max_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        ),
        reward_funcs=ones,
        train_dataset=Dataset.from_dict({"prompt": ["12", "34"]}),
        processing_class=tokenizer,
    )
    exec(blocks[0], {"trainer": trainer})
    trainer.train()
    groups = torch.tensor(given[0]).view(-1, 4)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(
        torch.tensor(trainer._logs["advantages"]), expected.flatten(), rtol=1e-3, atol=1e-4
    )


def swift(blocks: list[str]) -> None:
    """ms-swift 4.6.0: `SwiftRLHF.main` calls `train(trainer)`, which calls `_compute_advantages`."""

    class GRPOTrainer:
        __module__ = "swift.rlhf_trainers.grpo_trainer"
        kl_in_reward, beta, num_generations, num_generations_eval = False, 0.0, 8, 8
        model, reward_weights = SimpleNamespace(training=True), torch.ones(1)

        def _compute_advantages(self, samples, rewards_per_func, batch_encoded_inputs):
            return rewards_per_func.squeeze(1) * 0

    class SwiftRLHF:
        def __init__(self, args):
            self.args = args

        def train(self, trainer):
            rows = [
                SimpleNamespace(prompt_id="p", request_id=f"r{at}", finish_reason="stop") for at in range(8)
            ]
            found.append(trainer._compute_advantages(rows, torch.tensor(REWARDS).unsqueeze(1), []))

        def main(self):
            trainer = GRPOTrainer()
            trainer._metrics = {"train": defaultdict(list)}
            trainer.state = SimpleNamespace(global_step=0)
            self.train(trainer)

    from accelerate import PartialState

    PartialState(cpu=True)
    found: list[torch.Tensor] = []
    foreign.module_of(PATCH, "swift.pipelines.train.rlhf", {"SwiftRLHF": SwiftRLHF})
    exec(blocks[0], {})
    is_centred(found[0], scaled=True)


# -- registries of estimators ---------------------------------------------------------------------------


def verl_registry() -> dict[str, Any]:
    """A new registry. Two pages register an estimator with the same name."""
    registry: dict[str, Any] = {}
    core_algos = foreign.module_of(PATCH, "verl.trainer.ppo.core_algos", {})
    core_algos.register_adv_est = lambda name: lambda each: registry.setdefault(name, each)
    return registry


def verl(blocks: list[str]) -> None:
    """verl 0.9.1: the registry, whose groups are uids, and the v1 trainer's function."""
    registry = verl_registry()

    def theirs(data, batch_keys, adv_estimator, gamma=1.0, lam=1.0, num_repeat=1, **others):
        raise AssertionError("verl's own function")

    v1 = foreign.module_of(PATCH, "verl.trainer.ppo.v1", {})
    base = {"compute_advantage_for_multi_trajectories": theirs}
    v1.trainer_base = foreign.module_of(PATCH, "verl.trainer.ppo.v1.trainer_base", base)
    words = set_environment("\n".join(blocks))
    import_anew(os.environ["VERL_USE_EXTERNAL_MODULES"])
    estimator = next(word.partition("=")[2] for word in words if word.startswith("algorithm.adv_estimator="))
    rewards, mask = torch.tensor(REWARDS).unsqueeze(1), torch.ones(8, 1)
    data = SimpleNamespace(batch={"response_mask": mask, "token_level_rewards": rewards})
    keys = [f"prompt_0_{session}_0" for session in range(8)]
    of_sessions = v1.trainer_base.compute_advantage_for_multi_trajectories
    is_centred(of_sessions(data, keys, estimator, num_repeat=8).batch["advantages"], scaled=True)
    PATCH.setenv("HEADRACE_OVERRIDES", "pipeline.stages.gate.group_size=8")  # as in the page's table
    found, _ = registry[estimator](rewards, mask, index=np.array(["u"] * 8), config=None)
    is_centred(found, scaled=True)


def agent_lightning(blocks: list[str]) -> None:
    """Agent Lightning 1.0.2 calls the verl estimator that its configuration names, with a row per rollout."""
    from yaml import safe_load

    registry = verl_registry()
    foreign.module_of(PATCH, "verl.trainer.ppo.v1", {})
    set_environment(blocks[0])
    import_anew(os.environ["VERL_USE_EXTERNAL_MODULES"])
    algorithm = safe_load(blocks[1])
    assert algorithm["enable_rollout_level_advantage"] is True
    rewards, mask = torch.tensor(REWARDS).unsqueeze(1), torch.ones(8, 1)
    is_centred(registry[algorithm["adv_estimator"]](rewards, mask, index=["u"] * 8)[0], scaled=True)


def skyrl(blocks: list[str]) -> None:
    registry = foreign.skyrl_ppo_utils(PATCH)
    words = set_environment(blocks[1])
    exec(blocks[0], {})
    name = next(each.partition("=")[2] for each in words if "advantage_estimator=" in each)
    given = {"token_level_rewards": torch.tensor(REWARDS).unsqueeze(1), "response_mask": torch.ones(8, 1)}
    is_centred(registry[name](**given, index=["u"] * 8, values=None, config=None)[0], scaled=True)


def rllm(blocks: list[str]) -> None:
    """rLLM's `AgentTrainer` takes the name of an estimator for each role."""
    registry = foreign.rllm_advantage(PATCH)
    given: dict[str, Any] = {}
    set_environment(blocks[1])
    exec(blocks[0], {"AgentTrainer": lambda *_, **options: given.update(options)})
    ((role, name),) = given["traj_group_adv_estimator_map"].items()
    steps = [SimpleNamespace(response_ids=[1, 2])]
    rows = [SimpleNamespace(uid=str(at), name=role, reward=r, steps=steps) for at, r in enumerate(REWARDS)]
    group = SimpleNamespace(group_id=f"task:{role}", trajectories=rows)
    found, _ = registry[name](rewards=[np.array(REWARDS)], algorithm_config=None, traj_groups=[group])
    assert found[0] == pytest.approx(np.array(OF_EIGHT) / np.std(REWARDS), abs=1e-4)


# -- classes that a configuration or a module names -----------------------------------------------------


def prime_rl(blocks: list[str]) -> None:
    """The end of prime-rl's `algo/__init__.py`, whose registry is a dict of classes."""
    foreign.prime_rl_algo(PATCH)
    classes: dict[str, Any] = {"grpo": None}
    set_environment(blocks[1])
    exec(blocks[0], {"ALGORITHM_CLASSES": classes})
    episodes = [
        foreign.Episode([foreign.Trace(reward, [foreign.Node([True])])], id=str(at))
        for at, reward in enumerate(REWARDS)
    ]
    asyncio.run(classes["grpo"](SimpleNamespace(), None).score_group(episodes))
    is_centred([each.traces[0].nodes[0].advantages[0] for each in episodes])


def torchtitan(blocks: list[str]) -> None:
    status = foreign.torchtitan_config(PATCH)
    given: dict[str, Any] = {}
    rollouter = SimpleNamespace(Config=lambda *_, **options: given.update(options))
    set_environment(blocks[1])
    exec(blocks[0], {"Rollouter": rollouter})
    group = foreign.torchtitan_group(REWARDS, [status.COMPLETED] * 8)
    is_centred(given["advantage"].build()(group))


def trinity(blocks: list[str]) -> None:
    """Trinity-RFT 0.6.0: the class that `algorithm.advantage_fn` names is an `ExperienceOperatorV1`."""
    from yaml import safe_load

    base = foreign.trinity_operator(PATCH)
    set_environment(blocks[1])
    operator = imported(safe_load(blocks[0])["algorithm"]["advantage_fn"])
    assert issubclass(operator, base)
    mask = torch.ones(2, dtype=torch.bool)
    experiences = [
        foreign.trinity_experience("0/0", f"0/0/{at}", 0, reward, mask) for at, reward in enumerate(REWARDS)
    ]
    found, metrics = asyncio.run(operator(**operator.default_args()).process(experiences))
    is_centred([each.advantages[0] for each in found], scaled=True)
    assert metrics["headrace/rows/trained"] == 8


def openrlhf(blocks: list[str]) -> None:
    """OpenRLHF 0.11.2: Ray calls the hook in each process that it starts, with these variables."""
    maker = foreign.openrlhf_maker(PATCH, group_size=8)
    words = shlex.split("\n".join(blocks))
    environment = json.loads(words[words.index("--runtime-env-json") + 1])
    for name, value in environment["env_vars"].items():
        PATCH.setenv(name, value)
    imported(environment["worker_process_setup_hook"])()
    rows = foreign.openrlhf_experience(range(8), ["p"] * 8, torch.tensor(REWARDS), torch.ones(8, 2).bool())
    (found,) = maker.compute_advantages_and_returns([rows])
    is_centred(found.advantages[:, -1])


def nemo_rl(blocks: list[str]) -> None:
    """NeMo RL 7ea279abfb: `create_sampler` takes ``module:ClassName``, and the class gets the other keys."""
    from prompt_groups import Run, World
    from yaml import safe_load

    config = safe_load(blocks[0])["async_rl"]
    options = config["sampler"]
    assert options.pop("name") == "custom"
    module, _, name = options.pop("target").partition(":")
    kind = getattr(importlib.import_module(module), name)
    world = World(groups=32, slots=config["max_inflight_prompts"], seconds=60)
    run = Run(world, lambda buffer: kind(buffer, **options))
    assert run.sampler.required_buffer_capacity(32) == config["max_buffered_rollouts"]
    assert config["max_inflight_prompts"] == config["max_buffered_rollouts"]
    assert run.go().most == 3 * 32


# -- slime and miles: a path of a function for each hook -------------------------------------------------


def hook_of(blocks: list[str]) -> tuple[str, Any]:
    flag, path = shlex.split(blocks[0])
    return flag, imported(path)


def samples() -> tuple[SimpleNamespace, list[foreign.SlimeSample]]:
    rows = [foreign.SlimeSample(group_index=0, index=at, reward=reward) for at, reward in enumerate(REWARDS)]
    return foreign.slime_args(8, 1), rows


def slime_rewards(blocks: list[str]) -> None:
    flag, hook = hook_of(blocks)
    assert flag == "--custom-reward-post-process-path"
    is_centred(hook(*samples())[1], scaled=True)


def slime_data(blocks: list[str]) -> None:
    foreign.slime_ray(PATCH)
    flag, hook = hook_of(blocks)
    assert flag == "--custom-convert-samples-to-train-data-path"
    is_centred(hook(*samples())["rewards"], scaled=True)


def miles_data(blocks: list[str]) -> None:
    foreign.miles_ray(PATCH)
    flag, hook = hook_of(blocks)
    assert flag == "--custom-convert-samples-to-train-data-path"
    found = hook(*samples())
    is_centred(found["rewards"], scaled=True)
    assert found["rollout_mask_sums"] == [3] * 8


def slime_tokens(blocks: list[str]) -> None:
    flag, hook = hook_of(blocks)
    assert flag == "--custom-advantage-function-path"
    data: dict[str, Any] = {"response_lengths": [1] * 8, "rewards": OF_EIGHT, "rollout_ids": list(range(8))}
    data |= {"loss_masks": [torch.ones(1)] * 8, "kl": [torch.zeros(1)] * 8}
    hook(SimpleNamespace(use_rollout_logprobs=False), data)
    is_centred(torch.cat(data["advantages"]))


ADAPTERS: dict[str, Callable[[list[str]], None]] = {
    each.__name__: each
    for each in (
        *(trl, swift, verl, agent_lightning, slime_rewards, slime_data, miles_data, slime_tokens),
        *(prime_rl, skyrl, rllm, torchtitan, trinity, openrlhf, nemo_rl),
    )
}


def main(folder: Path) -> None:
    """Try every page that attaches something. Each adapter is tried once.

    Raises:
        AssertionError: a page is wrong about its number of lines, or its lines give wrong numbers.
    """
    left = dict(ADAPTERS)
    for page in sorted(folder.glob("*.md")):
        text = page.read_text()
        blocks: dict[str, list[str]] = {}
        for block in BLOCK.finditer(text):
            blocks.setdefault(block["name"], []).append(textwrap.dedent(block["text"]))
        said = re.findall(r"Lines to add.*?: \*\*(\d+)\*\*", text, re.DOTALL)
        assert len(said) == bool(blocks), (page, said)
        for name, found in blocks.items():
            lines = sum(len(lines_of(each)) for each in found)
            assert lines == int(said[0]), (page.name, name, lines, said)
            for variable in ("HEADRACE_RECIPE", "HEADRACE_OVERRIDES"):
                PATCH.delenv(variable, raising=False)
            left.pop(re.sub(r"\W", "_", name))(found)
            print(f"{page.stem}: {name}: {lines}")
    assert not left, left


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
