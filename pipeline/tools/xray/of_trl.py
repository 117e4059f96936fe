"""Make steps for `xray` from TRL's real trainers, from the generation batch to the optimiser."""

from __future__ import annotations

import math
import tempfile
import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from headrace.transforms import group_relative_advantage
from headrace.transforms.table.schema import MICROBATCH

from .causal_lm import table_as_causal_lm
from .measure import Step
from .setting import LONGEST, ROWS_OF_STEP, SUM_OF_STEP, TOKENS_OF_PART, TOKENS_OF_STEP, Setting
from .token_table import LOSS, REAL, TOKENS, TokenTable


def trl_settings() -> list[Setting]:
    """Return settings of GRPOTrainer by `loss_type` and of RLOOTrainer, with truncation masked or not."""
    return [*_settings(masked=False), *_settings(masked=True)]


def _settings(*, masked: bool) -> list[Setting]:
    more = ", mask_truncated_completions" if masked else ""

    def of(
        name: str, documented: str, constant: float = 1.0, note: str = "", curve: bool = False, **config: Any
    ) -> Setting:
        config |= {"loss_type": name.partition(",")[0], "mask_truncated_completions": masked}
        how: Any = {"note": note, "curve": curve and not masked, "dtype": torch.float32}
        step = trl_step("GRPOTrainer", **config)
        return Setting(f"GRPOTrainer(loss_type={name}{more})", step, documented, constant, **how)

    bound = "the recommended value is 5.0, and where it is not set it is epsilon, 0.2"
    sequence: Any = {"importance_sampling_level": "sequence"}
    # RLOOTrainer's loss is over sequences, whose log-probability is the sum over their tokens. With its
    # default KL term, the trainer would load a second model from the hub.
    rloo = trl_step("RLOOTrainer", beta=0.0, mask_truncated_completions=masked)
    return [
        of("dapo", TOKENS_OF_STEP, curve=True),
        of("grpo", ROWS_OF_STEP, curve=True),
        of("dr_grpo", SUM_OF_STEP, 1 / LONGEST, "the constant is max_completion_length"),
        of("bnpo", TOKENS_OF_PART, note="results may slightly vary depending on the local batch size"),
        of("cispo", TOKENS_OF_STEP, note=f"epsilon_high bounds the ratio; {bound}"),
        of("cispo, epsilon_high=5.0", TOKENS_OF_STEP, curve=True, epsilon_high=5.0),
        of("sapo", ROWS_OF_STEP, curve=True),
        of("vespo", TOKENS_OF_STEP),
        of("luspo", SUM_OF_STEP, note="each sequence's loss times its length", curve=True, **sequence),
        of("grpo, importance_sampling_level=sequence", ROWS_OF_STEP, curve=True, **sequence),
        Setting(f"RLOOTrainer(beta=0.0{more})", rloo, SUM_OF_STEP, dtype=torch.float32),
    ]


def trl_step(trainer: str | type, more: dict[str, Any] | None = None, **config: Any) -> Step:
    """Make a step for :func:`xray` from a trainer of TRL, up to its optimiser step.

    The trainer's model is the table. Its completions are the rows of the batch, and a reward function returns
    their rewards. Advantages, masks, shuffling, losses and accumulation are the trainer's own. The gradient
    is read before the optimiser step. The step writes three columns to the batch: the documented advantages,
    the loss mask without the rows that the trainer masks, and the micro-batch of each row.

    Args:
        trainer: ``GRPOTrainer``, ``RLOOTrainer``, or a class derived from one of them.
        more: further arguments of the trainer.
        config: options of the trainer's configuration, such as ``loss_type``.

    Raises:
        ImportError: TRL is not installed.
        ValueError: micro-batches would have different numbers of rows.

    Example:
        >>> step = trl_step("GRPOTrainer", loss_type="bnpo")  # doctest: +SKIP
        >>> xray(step, dtype=torch.float32).verdict  # doctest: +SKIP
        'mean over the tokens of each micro-batch: with 4 micro-batches, tokens get 0.971 to 1.03 times ...'
    """
    try:
        import trl
        from transformers import PrinterCallback
    except ImportError as err:
        raise ImportError("trl_step needs TRL: pip install trl") from err
    kind: Any = getattr(trl, trainer) if isinstance(trainer, str) else trainer
    rloo = issubclass(kind, trl.RLOOTrainer)
    scale = config.get("scale_rewards", "none" if rloo else "group")

    def step(model: TokenTable, batch: TensorDictBase, cut: int) -> None:
        if len(batch) % cut:
            raise ValueError(f"TRL's micro-batches must have equal sizes; got {len(batch)} rows for {cut}")
        rows, size, reward = len(batch), int(batch["expected_rollouts"][0]), batch["next", "reward"].sum(-1)
        batch["advantage"] = group_relative_advantage(
            reward,
            batch["group_id"].flatten(),
            baseline="leave_one_out" if rloo else "mean",
            scale={True: "group", False: "none"}.get(scale, scale),
            eps=1e-4,
        )[:, None, None]
        prompts, completions, masks = [], [], []
        for row in batch.unbind(0):
            tokens, real, inside = row[TOKENS], row[REAL], row[LOSS]
            start = int(inside[real].int().argmax())
            prompts.append(tokens[real][:start].tolist())
            completions.append(tokens[real][start:].tolist())
            masks.append(inside[real][start:].int().tolist())
        # Two thirds of the completions end with an end token; the others count as truncated.
        ends = {completions[row][-1] for row in range(rows) if row % 3}
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # transformers 5 warns of names that its own Trainer uses.
            warnings.simplefilter("ignore", FutureWarning)
            settings: dict[str, Any] = {
                "output_dir": folder,
                "per_device_train_batch_size": rows // cut,
                "gradient_accumulation_steps": cut,
                "num_generations": size,
                "max_completion_length": max(map(len, completions)),
                "max_steps": 1,
                "learning_rate": 0.0,
                "max_grad_norm": 0.0,
                "gradient_checkpointing": False,
                "use_cpu": True,
                "bf16": False,
                "report_to": [],
                "disable_tqdm": True,
                "logging_strategy": "no",
                "save_strategy": "no",
            }
            made: Any = kind(
                model=table_as_causal_lm(model),
                args=(trl.RLOOConfig if rloo else trl.GRPOConfig)(**settings | config),
                reward_funcs=lambda completions, **_: reward.tolist(),
                train_dataset=_prompts(rows // size),
                processing_class=word_tokenizer(model.vocabulary),
                **more or {},
            )
            made.remove_callback(PrinterCallback)
            made.eos_token_ids = sorted(ends)
            if rloo:
                made._tokenize_prompts = lambda _: (prompts, None, {})
                made._generate_single_turn = lambda *_: completions
            else:
                rollouts = {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}
                rollouts |= {} if all(map(all, masks)) else {"env_mask": masks}
                made.rollout_func = lambda *_: dict(rollouts)
            order = _row_order(
                made, {(*p, *c): row for row, (p, c) in enumerate(zip(prompts, completions, strict=True))}
            )
            _act_with(made, float(batch["log_probs", "full"][batch[LOSS]][0]))
            found = gradient_before_the_optimiser(made, model)
            made.train()
        model.table.grad = found.pop() if found else None
        batch[MICROBATCH] = torch.tensor([order[row] for row in range(rows)])
        if made.mask_truncated_completions:
            batch[LOSS] = batch[LOSS] & torch.tensor([ids[-1] in ends for ids in completions])[:, None]

    return step


def _row_order(trainer: Any, row_of: dict[tuple[int, ...], int]) -> dict[int, int]:
    """Return a dictionary of each row's micro-batch. The trainer fills it when it computes its losses."""
    order: dict[int, int] = {}
    loss, pad = trainer._compute_loss, trainer._tokenizer.pad_token_id

    def compute_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        number = max(order.values(), default=-1) + 1
        for ids in torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1):
            order[row_of[tuple(ids[ids != pad].tolist())]] = number
        result: Tensor = loss(model, inputs)
        return result

    trainer._compute_loss = compute_loss
    return order


def _act_with(trainer: Any, log_prob: float) -> None:
    """Make the trainer use this log-probability for each token of the sampling policy."""
    score, own = trainer._generate_and_score_completions, -math.log(trainer.model.config.vocab_size)

    def generate_and_score(inputs: Any) -> dict[str, Tensor]:
        output: dict[str, Tensor] = score(inputs)
        old = log_prob * output["completion_mask"]
        if abs(log_prob - own) > 1e-9:
            output |= {"old_logps": old.sum(1)} if "old_logps" in output else {"old_per_token_logps": old}
        return output

    trainer._generate_and_score_completions = generate_and_score


def gradient_before_the_optimiser(trainer: Any, model: TokenTable) -> list[Tensor]:
    """Return a list to which the trainer's gradient is appended before the optimiser step."""
    from transformers import TrainerCallback

    found: list[Tensor] = []

    class Reader(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if model.table.grad is not None:
                found.append(model.table.grad.clone())

    trainer.add_callback(Reader())
    return found


def _prompts(count: int) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{number}" for number in range(count)]})


def word_tokenizer(vocabulary: int) -> Any:
    """A tokenizer with one word for each token; V − 2 is the padding, V − 1 an unused end token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"{number}": number for number in range(vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)),
        pad_token=f"{vocabulary - 2}",
        eos_token=f"{vocabulary - 1}",
        padding_side="left",
    )
