"""A transformer of about 100,000 parameters that samples responses and computes log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules.distributions import LLMMaskedCategorical

from headrace.transforms import logits_of_tokens, tree_mask
from headrace.transforms.table.options import at_least

from .digits import END, PAD, PROMPT_LENGTH, RESPONSE_LENGTH, VOCABULARY, token_texts


class Block(nn.Module):
    """Pre-norm self-attention and a two-layer perceptron."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Map (B, T, width) to (B, T, width); `visible` (B, 1, T, T) bool is the attention mask."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_perceptron(x))))


class DigitPolicy(TensorDictModuleBase):
    """Sample responses token by token. GRPOLoss computes log-probabilities through :meth:`get_dist`.

    Reads ``("tokens", "prompt")`` (…, P) int64, left-padded. Writes ``("tokens", "response")`` (…, R) and
    ``("tokens", "full")`` (…, P + R) int64, ``("log_probs", "full")`` (…, P + R) float, and the masks
    ``all_attention_mask`` and ``all_assistant_mask`` (…, P + R) bool.

    Args:
        width: width of the model, a multiple of `heads`.
        heads: attention heads.
        layers: number of blocks.
        device: device of the model.

    Raises:
        ValueError: an option is below 1, or `width` is not a multiple of `heads`.
    """

    def __init__(self, *, width: int = 64, heads: int = 4, layers: int = 2, device: str | None = None):
        super().__init__()
        for option, count in (("width", width), ("heads", heads), ("layers", layers)):
            at_least(option, count, 1)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads; got {width} and {heads}")
        self.in_keys = [("tokens", "prompt")]
        self.out_keys = [
            ("tokens", "response"),
            ("tokens", "full"),
            ("log_probs", "full"),
            ("masks", "all_attention_mask"),
            ("masks", "all_assistant_mask"),
        ]
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(PROMPT_LENGTH + RESPONSE_LENGTH, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.to(device)

    token_texts = staticmethod(token_texts)

    def logits(self, tokens: Tensor, there: Tensor, packed: TensorDictBase | None = None) -> Tensor:
        """Return (B, T, V) logits of the next token, −1e9 for PAD. `there` (B, T) bool is False at padding.

        In `packed` rows a token attends to its own row only. For a prefix tree the result is (1, M, V).
        """
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
        if packed is None:
            place = (there.long().cumsum(-1) - 1).clamp_min(0)
            # Padding attends to itself, because a softmax over no tokens would be NaN.
            visible = (causal & there[:, None, None, :]) | itself
        elif "tree_start" in packed.keys():
            tokens, place, visible = packed["input_ids"], packed["position_ids"], tree_mask(packed)
        else:
            place, row = packed["position_ids"], packed["segment_ids"]
            visible = causal & (row[:, None, :, None] == row[:, None, None, :])
        x = self.token(tokens) + self.position(place)
        for block in self.blocks:
            x = block(x, visible)
        never = torch.arange(VOCABULARY, device=tokens.device) == PAD
        return self.head(self.norm(x)).masked_fill(never, -1e9)

    @torch.no_grad()
    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Sample a response to each prompt."""
        prompt = batch["tokens", "prompt"]
        tokens = prompt.reshape(-1, prompt.shape[-1])
        there = tokens != PAD
        log_probs = torch.zeros(tokens.shape, device=tokens.device)
        open_ = torch.ones_like(there[:, 0])
        responded = torch.zeros_like(there)
        for _ in range(RESPONSE_LENGTH):
            scores = self.logits(tokens, there)[:, -1].log_softmax(-1)
            sampled = torch.multinomial(scores.exp(), 1)
            new = torch.where(open_[:, None], sampled, PAD)
            log_prob = scores.gather(-1, sampled) * open_[:, None]
            tokens, there = torch.cat([tokens, new], 1), torch.cat([there, open_[:, None]], 1)
            responded = torch.cat([responded, open_[:, None]], 1)
            log_probs = torch.cat([log_probs, log_prob], 1)
            open_ = open_ & (new[:, 0] != END)
        written = (tokens[:, -RESPONSE_LENGTH:], tokens, log_probs, there, responded)
        for key, value in zip(self.out_keys, written, strict=True):
            batch.set(key, value.reshape(*prompt.shape[:-1], -1))
        return batch

    def get_dist(self, batch: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        """Return the distribution of each token given the tokens before it, masked by the loss mask."""
        packed = batch if "segment_ids" in batch.keys() else None
        logits = self.logits(batch["tokens", "full"], batch["masks", "all_attention_mask"], packed)
        if packed is not None and "packed_node" in packed.keys():
            shifted = logits_of_tokens(logits, packed)
        else:
            shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return LLMMaskedCategorical(logits=shifted, mask=batch["masks", "all_assistant_mask"])
