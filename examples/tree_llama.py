"""Train a Llama that computes each shared token of a group once: python examples/tree_llama.py --turns 6

Rollouts of four groups have a row for each turn, with all earlier turns in the prompt. One model trains on
these rows, and another on trees of the same rows. Both models take the same steps to the same weights.
"""

import argparse

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch.nn.utils.rnn import pad_sequence
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.pipeline import load_pipeline, optimise
from headrace.transforms import ScoreRows, logits_of_tokens, tree_mask

VOCABULARY, PROMPT, TURN = 64, 24, 8


class Actor(TensorDictModuleBase):  # GRPOLoss asks the actor for the distribution of each token
    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, 0
        self.in_keys, self.out_keys = [("tokens", "full")], [("log_probs", "full")]

    def get_dist(self, batch, **_):
        if "packed_node" in batch.keys():  # the model gets (1, M) nodes, the loss (1, L) tokens
            mask = tree_mask(batch, self.model.dtype)
            logits = logits_of_tokens(self.logits(batch["input_ids"], batch["position_ids"], mask), batch)
        else:
            there = batch["masks", "all_attention_mask"]
            place = (there.long().cumsum(1) - 1).clamp_min(0)
            logits = self.logits(batch["tokens", "full"], place, there)
            logits = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return LLMMaskedCategorical(logits=logits, mask=batch["masks", "all_assistant_mask"])

    def logits(self, tokens, place, mask):
        self.seen += tokens.numel()
        return self.model(input_ids=tokens, position_ids=place, attention_mask=mask, use_cache=False).logits


def make_actor():
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Actor(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attn_implementation="sdpa", **size)))


def collected(turns, groups=4, group_size=4):  # random rows in place of sampled ones
    rows, ids = [], {"group_id": [], "rollout_id": []}
    for group in range(groups):
        prompt = torch.randint(1, VOCABULARY, (PROMPT,))
        for rollout in range(group * group_size, (group + 1) * group_size):
            whole = torch.cat([prompt, torch.randint(1, VOCABULARY, (turns * TURN,))])
            rows += [whole[: PROMPT + TURN * (turn + 1)] for turn in range(turns)]
            ids["group_id"] += [group] * turns
            ids["rollout_id"] += [rollout] * turns
    tokens = pad_sequence(rows, batch_first=True, padding_side="left")
    place = torch.arange(tokens.shape[1], 0, -1)
    masks = {
        "all_attention_mask": tokens > 0,
        "all_assistant_mask": (place <= TURN // 2).expand(tokens.shape),
    }
    batch = TensorDict({"tokens": {"full": tokens}, "masks": masks, **ids}, batch_size=[len(rows)])
    batch["next", "reward"] = torch.rand(groups * group_size)[batch["rollout_id"]]  # one per rollout
    return batch


def train(actor, batch, *, transform=None, tree="none"):
    split = {"minibatches": 1, "unit": "group", "max_tokens": 1200, "tree": tree}
    words = [f"pipeline.stages.split.{option}={value}" for option, value in split.items()]
    pipeline = load_pipeline("pipeline=grpo", "pipeline.stages.gate.group_size=4", *words)
    run, actor.seen = pipeline.run(ScoreRows(actor=actor, max_rows=8)(batch), epochs=2), 0
    loss = GRPOLoss(actor, masking_strategy="generic", entropy_bonus=False, aggregation="none")
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    optimise(run.minibatches(), loss, optimizer, transform=transform)
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=6)
    batch = collected(parser.parse_args().turns)
    rows, trees = make_actor(), make_actor()
    train(rows, batch)
    train(trees, batch, transform="tree", tree="group").report(batch=batch)
    pairs = zip(rows.state_dict().values(), trees.state_dict().values(), strict=True)
    apart = [float((a - b).abs().max()) for a, b in pairs]
    print(f"{rows.seen:,} tokens row by row, {trees.seen:,} as trees; weights differ by {max(apart):.0e}")
