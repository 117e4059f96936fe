"""Make a step for `xray` from ms-swift's real GRPOTrainer, up to its optimiser step."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from headrace.transforms import group_relative_advantage

from .causal_lm import table_as_causal_lm
from .measure import Step
from .of_trl import gradient_before_the_optimiser, word_tokenizer
from .setting import LONGEST, ROWS_OF_STEP, SUM_OF_STEP, TOKENS_OF_PART, TOKENS_OF_STEP, Setting
from .token_table import LOSS, REAL, TOKENS


def ms_swift_settings() -> list[Setting]:
    """Return a setting for each ``loss_type`` of ms-swift's GRPOTrainer that is a mean over tokens."""

    def of(name: str, documented: str, constant: float = 1.0, curve: bool = False, **config: Any) -> Setting:
        note = config.pop("note", "")
        step = ms_swift_step(loss_type=name.partition(",")[0], **config)
        how: Any = {"note": note, "curve": curve, "dtype": torch.float32}
        return Setting(f"GRPOTrainer(loss_type={name})", step, documented, constant, **how)

    bound = "epsilon_high bounds the ratio; its page sets 5.0, the default is 0.2"
    twice = "the tokens of the generation batch are the denominator, which is of two optimiser steps"
    return [
        of("grpo", ROWS_OF_STEP, curve=True),
        of("bnpo", TOKENS_OF_PART, note="normalised by the tokens of the micro-batch"),
        of("dr_grpo", SUM_OF_STEP, 1 / LONGEST, note="the constant is max_completion_length"),
        of("dapo", TOKENS_OF_STEP),
        of("dapo, steps_per_generation=2 * gradient_accumulation_steps", TOKENS_OF_STEP, steps=2, note=twice),
        of("cispo", TOKENS_OF_STEP, note=bound),
        of("cispo, epsilon_high=5.0", TOKENS_OF_STEP, epsilon_high=5.0, curve=True),
        of("sapo", ROWS_OF_STEP, curve=True),
    ]


def ms_swift_step(change: Callable[[Any], object] = lambda _: None, *, steps: int = 1, **config: Any) -> Step:
    """Make a step for :func:`xray` from ms-swift's GRPOTrainer, up to its optimiser step.

    The trainer's model is the table, and its template is that of a model without a chat format. The rows of
    the batch replace the completions that it would generate, and a reward function returns their rewards.
    Encoding, advantages, masks, losses and accumulation are the trainer's own. The gradient is read before
    the optimiser step. The step writes the advantages to the batch.

    Args:
        change: a function that changes the trainer before it trains, for example attaches a recipe.
        steps: number of optimiser steps for each generation batch. The first step is measured. The others get
            the same rows.
        config: options of the trainer's configuration, such as ``loss_type``.
    """
    from datasets import Dataset
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PrinterCallback

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from swift.model import ModelMeta
        from swift.model.model_meta import ModelInfo
        from swift.rlhf_trainers import GRPOConfig
        from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
        from swift.template import get_template

    def train(model: Any, batch: TensorDictBase, cut: int, folder: str) -> None:
        rows, size, reward = len(batch), int(batch["expected_rollouts"][0]), batch["next", "reward"].sum(-1)
        groups, scaled = batch["group_id"].flatten(), dict[str, Any](baseline="mean", scale="group", eps=1e-4)
        batch["advantage"] = group_relative_advantage(reward, groups, **scaled)[:, None, None]
        prompts, completions = [], []
        for row in batch.unbind(0):
            tokens, start = row[TOKENS][row[REAL]].tolist(), int(row[LOSS][row[REAL]].int().argmax())
            prompts.append(tokens[:start])
            completions.append(tokens[start:])
        old = float(batch["log_probs", "full"][batch[LOSS]][0])

        class Replays(GRPOTrainer):
            def _generate_completions(self, samples: Any) -> Any:
                for at, sample in enumerate(self._preprocess_inputs(samples)):
                    prompt, ids = prompts[at % rows], completions[at % rows]
                    sample.messages = [
                        {"role": "user", "content": " ".join(map(str, prompt))},
                        {"role": "assistant", "content": ids},
                    ]
                    sample.response_token_ids, sample.finish_reason = [ids], "stop"
                return samples

            def _prepare_batch_inputs(self, samples: Any) -> Any:
                made = super()._prepare_batch_inputs(samples)
                if abs(old + math.log(model.vocabulary)) > 1e-9:  # sampled by a policy other than the table
                    for each in made:
                        each["grpo_batch"].old_per_token_logps.fill_(old)
                return made

        lm, words = table_as_causal_lm(model), word_tokenizer(model.vocabulary)
        words.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
        words.backend_tokenizer.model.unk_token = "0"  # for the special words of the templates
        info = {"max_model_len": 2 * LONGEST, "quant_method": None, "quant_bits": 0, "task_type": "causal_lm"}
        for each in (lm, words):
            each.model_meta = ModelMeta("xray", [], template="dummy")
            each.model_info = ModelInfo("xray", "xray", torch.float32, config=lm.config, **info)
        template = get_template(words, template_type="dummy", truncation_strategy="left")
        template.set_mode("train")
        settings: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": rows // cut,
            "gradient_accumulation_steps": cut,
            "steps_per_generation": steps * cut,
            "num_generations": size,
            "max_completion_length": LONGEST,
            "scale_rewards": "group",
            "beta": 0.0,
            "max_steps": 1,
            "learning_rate": 0.0,
            "max_grad_norm": 0.0,
            "dataset_shuffle": False,
            "dataloader_num_workers": 0,
            "remove_unused_columns": False,
            "check_model": False,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "disable_tqdm": True,
            "eval_strategy": "no",
            "logging_strategy": "no",
            "save_strategy": "no",
        }
        asked = [[{"role": "user", "content": f"{number}"}] for number in range(steps * rows // size)]
        made: Any = Replays(
            model=lm,
            args=GRPOConfig(**settings | config),
            template=template,
            reward_funcs=[lambda completions, **_: reward.tolist() * steps],
            train_dataset=Dataset.from_dict({"messages": asked}),
        )
        made.remove_callback(PrinterCallback)
        change(made)
        found = gradient_before_the_optimiser(made, model)
        made.train()
        model.table.grad = found.pop() if found else None

    def step(model: Any, batch: TensorDictBase, cut: int) -> None:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(model, batch, cut, folder)

    return step
