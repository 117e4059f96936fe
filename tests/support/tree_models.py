"""Models for rows, packed rows and prefix trees, and gradients of a loss through these models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from gradients import distance
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical
from tries import ATTENTION, FULL, LOG_PROBS, LOSS, dense, scenes

from headrace.pipeline import Pipeline, TokenGRPOLoss, optimise
from headrace.transforms import LossWeight, ShuffleSplit, logits_of_tokens, take_rows, tree_mask

VOCABULARY = 50
as_tree = "tree"


class Transformer(nn.Module):
    """Two layers of attention with learned positions."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head, self.heads = nn.Linear(width, VOCABULARY), heads

    def forward(self, tokens: Tensor, place: Tensor, sees: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(place)
        for qkv, mix in zip(self.qkv, self.mix, strict=True):
            each = qkv(F.layer_norm(x, x.shape[-1:])).view(*x.shape[:2], 3, self.heads, -1)
            seen = F.scaled_dot_product_attention(*each.permute(2, 0, 3, 1, 4), attn_mask=sees)
            x = x + torch.tanh(mix(seen.transpose(1, 2).reshape(x.shape)))
        return self.head(x)


class Llama(nn.Module):
    """A Llama of transformers, made in memory."""

    def __init__(self, attention: str):
        super().__init__()
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
        config = transformers.LlamaConfig(**sizes, attn_implementation=attention)
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: Tensor, place: Tensor, sees: Tensor) -> Tensor:
        dtype = self.model.dtype
        added = torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, torch.finfo(dtype).min)
        return self.model(input_ids=tokens, position_ids=place, attention_mask=added, use_cache=False).logits


class Actor(TensorDictModuleBase):
    """The actor of a loss. It gives the distribution of each token in rows, packed rows or trees."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.in_keys, self.out_keys = model, [FULL], [LOG_PROBS]
        self.seen = 0  # number of tokens that the model has computed

    def get_dist(self, batch: TensorDict, **_) -> LLMMaskedCategorical:
        if "packed_node" in batch.keys():
            logits = self._logits(batch["input_ids"], batch["position_ids"], tree_mask(batch))
            shifted = logits_of_tokens(logits, batch)
        else:
            there = batch[ATTENTION]
            place = (there.long().cumsum(1) - 1).clamp_min(0)
            own = torch.zeros_like(place)
            if "segment_ids" in batch.keys():
                place, own = batch["position_ids"], batch["segment_ids"]
            causal = torch.ones(place.shape[1], place.shape[1], dtype=torch.bool).tril()
            sees = causal & there[:, None] & (own[:, :, None] == own[:, None])
            sees = sees | torch.eye(place.shape[1], dtype=torch.bool)
            logits = self._logits(batch[FULL], place, sees[:, None])
            shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return LLMMaskedCategorical(logits=shifted, mask=batch[LOSS])

    def _logits(self, tokens: Tensor, place: Tensor, sees: Tensor) -> Tensor:
        self.seen += tokens.numel()
        return self.model(tokens, place, sees)


def make_actor(kind: str, dtype: torch.dtype = torch.float64) -> Actor:
    """A ``tiny`` transformer, or a Llama whose attention is ``eager`` or ``sdpa``."""
    torch.manual_seed(1)
    actor = Actor(Transformer() if kind == "tiny" else Llama(kind)).to(dtype)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else None  # so that attention is not uniform
    return actor


def make_batch(actor: Actor, rows: list[list[int]], side: str = "left") -> TensorDict:
    """Rows with ids, and the log-probabilities of a policy near the actor's."""
    batch = dense(rows, max(map(len, rows)) + 3, side)
    dtype = next(actor.parameters()).dtype
    batch["group_id"] = torch.tensor([row[0] for row in rows])
    batch["rollout_id"] = torch.arange(len(rows))
    batch = batch.exclude("loss_weight")
    with torch.no_grad():
        own = actor.get_dist(batch, logits_key="logits").log_prob(batch[FULL])
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    batch[LOG_PROBS] = torch.where(batch[LOSS], own + 0.1 * noise, 0.0).to(dtype)
    batch["next", "ref_log_probs", "full"] = batch[LOG_PROBS] - 0.1
    batch["advantage"] = batch["advantage"].to(dtype)
    return batch


def gradient_of(
    actor: Actor, batch: TensorDict, transform=None, group: str | None = None, mean: str = "sample", **cut
) -> Tensor:
    """The gradient of one optimiser step through TokenGRPOLoss with weights."""
    loss = TokenGRPOLoss(actor, masking_strategy="generic", entropy_coeff=0.01, kl_to_ref_coeff=0.1)
    world = "world" if group == "own rows" else None
    split = ShuffleSplit(**{"minibatches": 1, "remainder": "uneven", "process_group": world} | cut)
    ranks = cut.get("ranks", 1)
    length = 9 if mean == "constant" else None
    weight = LossWeight(unit=mean, length=length, ranks=ranks, process_group=world, shared_ids="same")
    pipeline = Pipeline({"split": split, "weight": weight})
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.0)
    actor.zero_grad()
    together = None if group is None else "world"
    optimise(pipeline.minibatches(batch), loss, optimizer, transform=transform, process_group=together)
    parameters = [p for p in actor.parameters() if p.grad is not None]
    return torch.cat([p.grad.flatten() for p in parameters])


def run_rank(rank: int, world: int) -> dict:
    """For each scene, the distance of the gradient over ranks from that of one process."""
    found = {}
    for name, rows in scenes().items():
        actor = make_actor("tiny")
        batch = make_batch(actor, rows)
        whole = gradient_of(actor, batch)
        mine = take_rows(batch, torch.arange(rank, len(batch), world))
        pad = {"transform": as_tree, "remainder": "pad"}
        shared = {"group": "shared rows", "ranks": world, "rank": rank}
        ways = {
            "shared rows": gradient_of(actor, batch, **pad, **shared, microbatches=2),
            "own rows": gradient_of(actor, mine, **pad, group="own rows", microbatches=2),
            "shared trees": gradient_of(actor, batch, **pad, **shared, max_tokens=30, tree="group"),
            "own trees": gradient_of(actor, mine, **pad, group="own rows", max_tokens=30, tree="group"),
        }
        found |= {(name, way): distance(each, whole) for way, each in ways.items()}
    return found
