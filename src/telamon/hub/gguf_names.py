"""How GGUF spells the weights of the architectures that can be read, and what its converters did to their numbers."""

import re
from dataclasses import dataclass

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, written for Llama 3's scaling: part of the config, not a weight."""

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """Names of one architecture, and how its numbers differ from Hugging Face's."""

    block: dict[str, str]
    """Hugging Face's name of each module of a layer, by GGUF's."""
    interleaved: bool = False
    """Rows of queries and keys are in the order of rotary pairs (2i, 2i+1), where Hugging Face pairs i with i + H/2."""
    norms_plus_one: bool = False
    """Norms are stored as the factor 1 + w, where Hugging Face stores w."""

    def hf_name(self, name: str) -> str | None:
        """Hugging Face's name of a tensor, None where it has none."""
        module, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        if layer is None:
            return f"{_OUTSIDE[module]}.{kind}" if module in _OUTSIDE else None
        inner = self.block.get(layer[2])
        return None if inner is None else f"model.layers.{int(layer[1])}.{inner}.{kind}"


ARCHITECTURES = {
    "llama": Architecture(_BLOCK, interleaved=True),
    "qwen2": Architecture(_BLOCK),
    "qwen3": Architecture(_BLOCK | _HEAD_NORMS),
    "gemma": Architecture(_BLOCK, norms_plus_one=True),
    "gemma2": Architecture(_BLOCK | _SANDWICH, norms_plus_one=True),
    "gemma3": Architecture(_BLOCK | _SANDWICH | _HEAD_NORMS, norms_plus_one=True),
}
