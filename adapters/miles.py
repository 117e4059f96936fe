"""Run a recipe in miles. miles imports two functions of this module by their paths.

radixark/miles at 31f1ca961a (2026-08-21), miles/ray/rollout/train_data_conversion.py:
``_post_process_rewards`` and ``convert_samples_to_train_data``.
"""

from __future__ import annotations

from typing import Any

from headrace.transforms import BatchError

from .samples import Rewards, weigh_samples
from .slime import post_process_rewards

__all__ = ["convert_samples_to_train_data", "post_process_rewards"]


def convert_samples_to_train_data(args: Any, samples: list[Any]) -> dict[str, Any]:
    """Return miles' own data with the advantages and the weights of the recipe.

    Name this function in ``--custom-convert-samples-to-train-data-path``. miles stores denominators as whole
    numbers. The hook does not get the metadata, which dynamic batch sizes and several LoRA adapters need.
    """
    from miles.ray.rollout import train_data_conversion

    if args.use_dynamic_global_batch_size or any(sample.adapter is not None for sample in samples):
        raise BatchError(
            "miles gives this hook no metadata, which dynamic batch sizes and several LoRA adapters need: "
            "leave these out, or use --custom-reward-post-process-path"
        )

    def own(samples: list[Any], rewards: Rewards) -> Any:
        convert = train_data_conversion.convert_samples_to_train_data
        return convert(args, samples, {}, None, lambda *_: rewards)

    return weigh_samples(args, samples, own, whole=True)
