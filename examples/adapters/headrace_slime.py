"""slime's and miles' hook: --custom-reward-post-process-path headrace_slime.post_process_rewards"""

import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from headrace.pipeline import advantages_of, load_pipeline
from headrace.transforms import Status

PIPELINE = load_pipeline("pipeline=as/slime")


def post_process_rewards(args, samples):
    rewards = [sample.get_reward_value(args) for sample in samples]
    masks = [
        torch.tensor(s.loss_mask or [1] * s.response_length).bool() & (not s.remove_sample) for s in samples
    ]
    columns = {
        "group_id": [-1 if s.group_index is None else s.group_index for s in samples],
        "rollout_id": [s.index if s.rollout_id is None else s.rollout_id for s in samples],
        "expected_rollouts": [args.n_samples_per_prompt] * len(samples),
        "status": [Status[s.status.name] for s in samples],
        ("next", "reward"): torch.tensor(rewards),
        ("masks", "all_assistant_mask"): pad_sequence(masks, batch_first=True),
    }
    credit = advantages_of(PIPELINE, TensorDict(columns, [len(samples)]))
    for sample, trains in zip(samples, credit.in_loss.any(1).tolist(), strict=True):
        sample.remove_sample = not trains
    return rewards, credit.advantage.squeeze(1).tolist()
