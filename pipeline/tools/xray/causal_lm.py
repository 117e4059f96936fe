"""Wrap the table of logits as a causal language model of transformers, for trainers that need one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headrace.installed import import_extra

from .token_table import TokenTable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def table_as_causal_lm(table: TokenTable) -> PreTrainedModel:
    """Return a model of transformers whose logits are those of a table, for trainers such as TRL's.

    Its hidden states are the logits, and its head is the identity, without a gradient. So trainers that
    compute log-probabilities from ``base_model`` and the weight of the head get the same values. The model
    has no other parameters, no dropout and no positions, and ignores attention masks.

    Args:
        table: the table, which gets the gradient. Pass the model or the table to :func:`token_weights`.

    Returns:
        A ``PreTrainedModel`` in the table's dtype, with ``vocab_size`` V.

    Raises:
        ImportError: the extra ``llm`` is not installed.

    Example:
        >>> model = table_as_causal_lm(TokenTable(5, torch.float32))
        >>> model(input_ids=torch.tensor([[0, 3]])).logits.shape
        torch.Size([1, 2, 5])
    """
    transformers: Any = import_extra("transformers", "table_as_causal_lm")
    outputs: Any = import_extra("transformers.modeling_outputs", "table_as_causal_lm")

    class TableBackbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return outputs.BaseModelOutput(last_hidden_state=self.table(input_ids))

    class TableConfig(transformers.PretrainedConfig):
        model_type = "token_table"

    class TableForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class, base_model_prefix, main_input_name = TableConfig, "model", "input_ids"

        def __init__(self, config: Any):
            super().__init__(config)
            self.model = TableBackbone()
            self.lm_head = nn.Linear(table.vocabulary, table.vocabulary, bias=False, dtype=table.table.dtype)
            self.lm_head.weight.requires_grad_(False).copy_(torch.eye(table.vocabulary))

        def get_input_embeddings(self) -> None:
            return None

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **_: Any) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            return outputs.CausalLMOutput(logits=self.lm_head(hidden[:, -logits_to_keep:]))

    config = TableConfig(vocab_size=table.vocabulary, hidden_size=table.vocabulary)
    # A batch of `xray_batch` does not use the last two tokens of the vocabulary as next tokens.
    config.pad_token_id, config.eos_token_id = table.vocabulary - 2, table.vocabulary - 1
    config.tie_word_embeddings = False
    config.architectures = ["TableForCausalLM"]
    return TableForCausalLM(config)
