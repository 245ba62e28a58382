"""DeepSeek V3's layer for multi-token prediction, which transformers drops, put together from transformers' own modules."""
# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from fixture_experts import CHOICE, Piece, Unlucky, apart, watched
from transformers.masking_utils import create_causal_mask
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

Arrays = dict[str, np.ndarray]


class Predictor(torch.nn.Module):
    """Section 2.2 of the DeepSeek-V3 report: norms on both inputs, a projection of the two, a decoder layer, a norm, the model's own head."""

    DESCRIPTION: ClassVar[str] = (
        "mtp_logits[b, i] predicts token i + 2 from the main model's hidden state i behind its final norm, as vLLM and SGLang feed it, "
        "and the embedding of token i + 1: eh_proj(concat[enorm(embedding), hnorm(hidden)]), one decoder layer at position i, "
        "shared_head.norm, shared_head.head. Embedding and head repeat the main model's."
    )

    def __init__(self, main: Any, randomize: Callable[[torch.nn.Module], None]) -> None:
        super().__init__()
        config = main.config
        D = config.hidden_size
        self.main = [main]
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(D, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * D, D, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        randomize(self)
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, T - 1, V]."""
        main = self.main[0]
        decoder = main.model
        hidden = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state[:, :-1]
        inputs = self.eh_proj(torch.cat([self.enorm(decoder.embed_tokens(ids[:, 1:])), self.hnorm(hidden)], dim=-1))
        positions = torch.arange(inputs.shape[1])[None]
        mask = create_causal_mask(
            config=main.config,
            inputs_embeds=inputs,
            attention_mask=torch.ones_like(ids[:, 1:]),
            past_key_values=None,
            position_ids=positions,
        )
        out = self.layer(
            inputs, attention_mask=mask, position_ids=positions, position_embeddings=decoder.rotary_emb(inputs, position_ids=positions)
        )
        return main.lm_head(self.norm(out))

    def answers(self, ids: np.ndarray) -> Arrays:
        """`mtp_logits`, `mtp_loss` (the mean over B (T - 2) tokens), and its gradient by each parameter of this layer."""
        tokens = torch.from_numpy(ids)
        self.zero_grad()
        with watched() as choices:
            out = self(tokens)
        loss = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 2:].flatten())
        loss.backward()
        grads = {name: parameter.grad for name, parameter in self.named_parameters()}
        norms = {name: piece.of(grads[piece.parameter]).double().norm().item() for name, piece in self._pieces().items()}
        if choices.margin < CHOICE or not all(norms.values()):
            raise Unlucky("the layer for multi-token prediction chooses near a tie, or leaves an expert idle")
        return {
            "mtp_logits": out.detach().numpy(),
            "mtp_loss": loss.detach().numpy(),
            "mtp_grad_names": np.array(list(norms)),
            "mtp_grad_norms": np.array(list(norms.values())),
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the file holds of it."""
        main, state = self.main[0], self.state_dict()
        prefix = self._prefix()
        own = {name: piece.of(state[piece.parameter]) for name, piece in self._pieces().items()}
        bias = {f"{prefix}mlp.gate.e_score_correction_bias": state["layer.mlp.gate.e_score_correction_bias"]}
        shared = {f"{prefix}embed_tokens.weight": main.model.embed_tokens.weight, f"{prefix}shared_head.head.weight": main.lm_head.weight}
        return {name: tensor.detach().clone().contiguous() for name, tensor in (own | bias | shared).items()}

    def _pieces(self) -> dict[str, Piece]:
        found = {}
        for name, parameter in self.named_parameters():
            stored = "shared_head.norm.weight" if name == "norm.weight" else name.removeprefix("layer.")
            found |= apart(name, self._prefix() + stored, parameter, "deepseek_v3")
        return found

    def _prefix(self) -> str:
        return f"model.layers.{self.main[0].config.num_hidden_layers}."
