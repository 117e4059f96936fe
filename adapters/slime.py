"""Run a recipe in slime. slime imports three functions of this module by their paths.

THUDM/slime at 624b824a89 (2026-08-21): slime/ray/rollout.py, ``_post_process_rewards`` and
``_convert_samples_to_train_data``; slime/backends/megatron_utils/loss.py, ``compute_advantages_and_returns``.
miles also has ``_post_process_rewards``: radixark/miles at 31f1ca961a (2026-08-21).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from headrace.transforms import BatchError

from .environment import recipe_of_environment, token_stages
from .samples import Rewards, decide_samples, weigh_samples

recipe_of_environment("as/slime")  # an unknown recipe raises here
BY_TOKEN = "headrace.adapters.slime.compute_advantages"


def post_process_rewards(args: Any, samples: list[Any]) -> Rewards:
    """Return the rewards, and the advantages that the trainer uses instead of rewards.

    Name this function in ``--custom-reward-post-process-path``. Samples that leave the loss get
    `remove_sample=True`. If you also set :func:`compute_advantages`, that function runs the token stages.
    """
    by_token = getattr(args, "custom_advantage_function_path", None) == BY_TOKEN
    rewards, decision = decide_samples(args, samples, part="rows" if by_token else "advantages")
    return rewards, decision.advantage.tolist()


def convert_samples_to_train_data(args: Any, samples: list[Any]) -> dict[str, Any]:
    """Return slime's own data with the advantages and the weights of the recipe.

    Name this function in ``--custom-convert-samples-to-train-data-path``.
    """
    from slime.ray.rollout import RolloutManager

    convert = RolloutManager.__ray_metadata__.modified_class._convert_samples_to_train_data

    def own(samples: list[Any], rewards: Rewards) -> Any:
        manager = SimpleNamespace(args=args, custom_convert_samples_to_train_data_func=None)
        manager._post_process_rewards = lambda _: rewards
        return convert(manager, samples)

    return weigh_samples(args, samples, own, whole=False)


def compute_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Write the advantage and the return of each token in this rank's rows.

    Name this function in ``--custom-advantage-function-path``, and also use one of the two functions above.
    The recipe's token stages compute the advantages from `rewards`. A rank has only some rows of a group, and
    no group ids, so a term that compares rows is refused.
    """
    lengths, masks = rollout_data["response_lengths"], rollout_data["loss_masks"]
    name = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    known = {"log_probs": rollout_data.get(name)}
    known |= {each: rollout_data.get(each) for each in ("ref_log_probs", "teacher_log_probs")}
    columns = {key: rows for key, rows in known.items() if rows is not None}
    for key, rows in (columns | {"kl": rollout_data["kl"]}).items():
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                raise BatchError(
                    f"{key} must have one number for each token of a response; found {len(row)} for the "
                    f"{length} tokens of row {index}: set --context-parallel-size 1"
                )
    device = rollout_data["kl"][0].device
    batch = TensorDict({"rollout_id": torch.as_tensor(rollout_data["rollout_ids"])}, [len(lengths)]).to(
        device
    )
    batch["masks", "all_assistant_mask"] = pad_sequence(list(masks), batch_first=True).bool().to(device)
    batch["advantage"] = torch.as_tensor(rollout_data["rewards"], device=device).float().view(-1, 1, 1)
    for key, rows in columns.items():
        batch[key, "full"] = pad_sequence(list(rows), batch_first=True)
    for stage in token_stages(recipe_of_environment("as/slime")).values():
        batch = stage(batch)
    found = batch["advantage"].squeeze(-1).expand(-1, max(lengths))
    rollout_data["advantages"] = [row[:length] for row, length in zip(found, lengths, strict=True)]
    rollout_data["returns"] = list(rollout_data["advantages"])
