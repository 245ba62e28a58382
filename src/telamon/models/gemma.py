"""Gemma 1, 2 and 3, text (Gemma team 2024a, 2024b, 2025): scaled embeddings, norms that hold their distance from 1, GeGLU.

Gemma 2 adds norms behind each part, a window on every other layer, and caps on scores and logits; Gemma 3 has norms of queries
and keys instead of caps, and other rotary positions in windowed layers.
"""

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.norm import NormConfig
from telamon.layers.rope import RopeConfig
from telamon.models.dense import PRE_NORM_NAMES, OptionalBias, OptionalWindow
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_rope import read_parameters, write_scaling
from telamon.models.hf_weights import Names
from telamon.models.spec import BlockSpec, ModelSpec

SANDWICH_NAMES: Names = {
    **PRE_NORM_NAMES,
    "mixer_post_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "ffn_norm.scale": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "ffn_post_norm.scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
"""`post_attention_layernorm` is what it says here, and the MLP's first norm in Llama."""

Capped = Annotated[float, Field(gt=0)] | None


@register_family
class GemmaConfig(OptionalBias):
    """Gemma 1's sizes."""

    family: str = Field(default="gemma", description="Family of the model.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("gemma",)
    hf_architecture: ClassVar[str] = "GemmaForCausalLM"
    hf_defaults: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
    }
    # Early files say gelu; the model was trained with the tanh form.
    hf_activation: ClassVar[tuple[str, ...]] = ("hidden_act", "gelu_pytorch_tanh", "gelu")

    def norm(self) -> NormConfig:
        """See `DenseSizes`."""
        return NormConfig(kind="rms1p", eps=self.norm_eps)

    def mlp(self) -> GatedMLPConfig:
        """See `DenseSizes`."""
        return GatedMLPConfig(d_ff=self.d_ff, activation="gelu_tanh")

    def spec(self) -> ModelSpec:
        """See `DenseSizes`."""
        return super().spec().model_copy(update={"embedding_scale": math.sqrt(self.d_model)})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.must_be("use_bidirectional_attention", False, because="a decoder attends to what came before")
        hf.must_be("hidden_activation", "gelu_pytorch_tanh", because="the family has this activation alone")
        return super().read_hf(hf)


class SandwichSizes(OptionalWindow, GemmaConfig):
    """What Gemma 2 and 3 share."""

    query_pre_attn_scalar: Annotated[float, Field(gt=0)] = Field(default=256.0, description="Scores are divided by the root of this.")

    hf_names: ClassVar[Names] = SANDWICH_NAMES
    hf_activation: ClassVar[tuple[str, ...]] = ("hidden_activation", "gelu_pytorch_tanh")
    hf_period: ClassVar[int]
    """Every so many layers, one is global."""

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """See `DenseSizes`."""
        return super().attention(windowed=windowed).model_copy(update={"scale": self.query_pre_attn_scalar**-0.5})

    def block(self, *, windowed: bool) -> BlockSpec:
        """See `DenseSizes`."""
        return super().block(windowed=windowed).model_copy(update={"norms": "sandwich"})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.must_be("hidden_act", "gelu_pytorch_tanh", because="the family has this activation alone")
        period = hf.size("sliding_window_pattern", hf.size("_sliding_window_pattern", cls.hf_period))
        layers = cls.read_layers(hf, window=hf.get("sliding_window", 4096), slides=lambda layer: (layer + 1) % period != 0)
        return super().read_hf(hf) | layers | {"query_pre_attn_scalar": hf.number("query_pre_attn_scalar", 256.0)}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        scalar = self.query_pre_attn_scalar
        return super().to_hf() | {
            "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
            "sliding_window": self.window,
            "layer_types": self.layer_types(),
        }


@register_family
class Gemma2Config(SandwichSizes):
    """Gemma 2's sizes."""

    family: str = Field(default="gemma2", description="Family of the model.")
    window: Positive | None = Field(default=4096, description="Keys that a query of a windowed layer sees, itself included, in tokens.")
    layer_pattern: Annotated[str, Field(pattern="^[SG]+$")] = Field(
        default="SG", description="Repeated over the layers: S sliding, G global."
    )
    attention_softcap: Capped = Field(default=50.0, description="Scores go through cap * tanh(score / cap); none: as they are.")
    final_softcap: Capped = Field(default=30.0, description="Logits go through cap * tanh(logit / cap); none: as they are.")

    hf_defaults: ClassVar[dict[str, Any]] = GemmaConfig.hf_defaults | {"num_key_value_heads": 4}
    hf_model_types: ClassVar[tuple[str, ...]] = ("gemma2",)
    hf_architecture: ClassVar[str] = "Gemma2ForCausalLM"
    hf_period: ClassVar[int] = 2

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """See `DenseSizes`."""
        return super().attention(windowed=windowed).model_copy(update={"softcap": self.attention_softcap})

    def spec(self) -> ModelSpec:
        """See `DenseSizes`."""
        return super().spec().model_copy(update={"final_softcap": self.final_softcap})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.must_be("sliding_window_size", hf.get("sliding_window", 4096), because="files of 9b and 27b say sliding_window twice")
        caps = {"attention_softcap": hf.get("attn_logit_softcapping", 50.0), "final_softcap": hf.get("final_logit_softcapping", 30.0)}
        return super().read_hf(hf) | caps

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().to_hf() | {"attn_logit_softcapping": self.attention_softcap, "final_logit_softcapping": self.final_softcap}


@register_family
class Gemma3Config(SandwichSizes):
    """Gemma 3's sizes, of the text model alone."""

    family: str = Field(default="gemma3", description="Family of the model.")
    window: Positive | None = Field(default=1024, description="Keys that a query of a windowed layer sees, itself included, in tokens.")
    layer_pattern: Annotated[str, Field(pattern="^[SG]+$")] = Field(
        default="SSSSSG", description="Repeated over the layers: S sliding, G global."
    )
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=1_000_000.0, description="Base of the rotary wavelengths of global layers.")
    rope_local_theta: Annotated[float, Field(gt=0)] = Field(
        default=10_000.0, description="Base of the rotary wavelengths of sliding layers, which are never stretched."
    )
    final_softcap: Capped = Field(default=None, description="Logits go through cap * tanh(logit / cap); none: as they are.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("gemma3_text", "gemma3")
    hf_architecture: ClassVar[str] = "Gemma3ForCausalLM"
    hf_architectures: ClassVar[tuple[str, ...]] = ("Gemma3ForConditionalGeneration",)
    hf_period: ClassVar[int] = 6
    hf_prefixes: ClassVar[dict[str, str]] = {
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
    hf_around: ClassVar[tuple[str, ...]] = (
        *("vision_config", "mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"),
        *("image_token_id", "boi_token_id", "eoi_token_id"),
    )
    hf_skipped: ClassVar[tuple[str, ...]] = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")
    # The text part of 4b to 27b says only what differs from transformers' defaults.
    hf_defaults: ClassVar[dict[str, Any]] = GemmaConfig.hf_defaults | {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    }

    def rope(self, *, windowed: bool) -> RopeConfig:
        """See `DenseSizes`."""
        return RopeConfig(theta=self.rope_local_theta) if windowed else super().rope(windowed=windowed)

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """Adds the norms of queries and keys."""
        return super().attention(windowed=windowed).model_copy(update={"qk_norm": self.norm()})

    def spec(self) -> ModelSpec:
        """See `DenseSizes`."""
        return super().spec().model_copy(update={"final_softcap": self.final_softcap})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`. Transformers' attention of Gemma 3 ignores a cap on scores."""
        hf.harmless("attn_logit_softcapping", "rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq")
        fields = super().read_hf(hf.without("rope_scaling", "rope_parameters", "rope_theta"))
        return fields | _read_two_ropes(hf) | {"final_softcap": hf.get("final_logit_softcapping", None)}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().to_hf() | {
            "rope_scaling": None if self.rope_scaling is None else write_scaling(self.rope_scaling),
            "rope_local_base_freq": self.rope_local_theta,
            "final_logit_softcapping": self.final_softcap,
        }


def _read_two_ropes(hf: HfAttributes) -> dict[str, Any]:
    """Global and local rotary positions, in the old spelling or the new one (a dictionary by type of layer)."""
    by_type = hf.dictionary("rope_parameters")
    if by_type.get("rope_theta") is None and by_type.get("rope_type", "default") == "default":
        # Transformers writes these beside the two where a model's layers are all of one type, and reads them nowhere.
        by_type = {kind: values for kind, values in by_type.items() if kind not in ("rope_theta", "rope_type")}
    for kind in by_type:
        if kind not in ("full_attention", "sliding_attention"):
            raise hf.refuse("rope_parameters", by_type, "a dictionary for full_attention and one for sliding_attention is needed")
    kinds = hf.inner("rope_parameters", by_type)
    wide = {**kinds.dictionary("full_attention"), **hf.dictionary("rope_scaling")}
    fields = read_parameters(hf, hf.inner("rope_parameters", wide), theta=hf.number("rope_theta", 1_000_000.0))
    narrow = kinds.dictionary("sliding_attention")
    local = read_parameters(hf, hf.inner("rope_parameters", narrow), theta=hf.number("rope_local_base_freq", 10_000.0))
    if local["rope_scaling"] is not None:
        raise hf.refuse("rope_parameters", narrow, "sliding layers are not stretched")
    return fields | {"rope_local_theta": local["rope_theta"]}
