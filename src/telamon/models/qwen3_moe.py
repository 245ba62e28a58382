"""Qwen3's mixtures of experts (Qwen team 2025): Qwen3's attention, and a mixture in the layers that the config names, mostly all."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.layers.attention import AttentionConfig
from telamon.layers.router import RouterConfig
from telamon.models.dense import PRE_NORM_NAMES, OptionalBias, OptionalWindow, shortest_period
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import Names
from telamon.models.mixture import EXPERT_NAMES, MixtureBesideDense


@register_family
class Qwen3MoeConfig(MixtureBesideDense, OptionalWindow, OptionalBias):
    """Sizes of Qwen3's mixtures."""

    family: str = Field(default="qwen3_moe", description="Family of the model.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=1_000_000.0, description="Base of the rotary wavelengths.")
    renormalize: bool = Field(default=True, description="Divide a token's weights over its experts by their sum.")
    ffn_pattern: Annotated[str, Field(pattern="^[DM]+$")] = Field(
        default="M", description="Repeated over the layers: M has a mixture of experts, D a gated MLP."
    )

    beside_weights: ClassVar[frozenset[str]] = MixtureBesideDense.beside_weights | OptionalWindow.beside_weights
    hf_model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    hf_architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    hf_defaults: ClassVar[dict[str, Any]] = MixtureBesideDense.hf_defaults | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
    }
    hf_names: ClassVar[Names] = {**PRE_NORM_NAMES, **EXPERT_NAMES}

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """Adds the norms of queries and keys."""
        return super().attention(windowed=windowed).model_copy(update={"qk_norm": self.norm()})

    def router(self) -> RouterConfig:
        """See `MixtureSizes`."""
        return super().router().model_copy(update={"renormalize": self.renormalize})

    def mixture_layers(self) -> tuple[bool, ...]:
        """See `MixtureSizes`."""
        return tuple(self.ffn_pattern[layer % len(self.ffn_pattern)] == "M" for layer in range(self.n_layers))

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`. A window, where there is one, is on all layers."""
        hf.must_be("qkv_bias", False, because="attention has one word for its biases, attention_bias")
        hf.must_be("use_qk_norm", True, because="the family has norms of queries and keys")
        hf.must_be("shared_expert_intermediate_size", 0, because="the family has no shared expert")
        hf.harmless("max_window_layers")
        window = hf.get("sliding_window", 4096)
        window = window if hf.flag("use_sliding_window", False) else None
        layers, step = range(hf.size("num_hidden_layers")), hf.size("decoder_sparse_step", 1)
        only_dense = hf.listed("mlp_only_layers") or []
        if any(not isinstance(layer, int) or layer not in layers for layer in only_dense):
            raise hf.refuse("mlp_only_layers", only_dense, f"layers are counted from 0 to {len(layers) - 1}")
        letters = "".join("D" if layer in only_dense or (layer + 1) % step else "M" for layer in layers)
        return super().read_hf(hf) | {
            **cls.read_layers(hf, window=window, slides=lambda layer: True),
            "renormalize": hf.flag("norm_topk_prob", False),
            "ffn_pattern": shortest_period(letters),
        }

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        slides = any(self.windowed_layers())
        return super().to_hf() | {
            "num_experts": self.n_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.d_expert,
            "norm_topk_prob": self.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer, mixes in enumerate(self.mixture_layers()) if not mixes],
            "use_sliding_window": slides,
            "sliding_window": self.window if slides else None,
        }
