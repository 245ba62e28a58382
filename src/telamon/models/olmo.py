"""OLMo 2 and 3 (OLMo team 2024, 2025): norms behind each part and none before, queries and keys normed over all heads together."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.layers.attention import AttentionConfig
from telamon.layers.norm import NormConfig
from telamon.layers.rope import RopeConfig
from telamon.models.dense import PRE_NORM_NAMES, OptionalBias, OptionalWindow
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import Names
from telamon.models.spec import BlockSpec

POST_NORM_NAMES: Names = {
    **PRE_NORM_NAMES,
    "mixer_post_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "ffn_post_norm.scale": "model.layers.{layer}.post_feedforward_layernorm.weight",
}


@register_family
class Olmo2Config(OptionalBias):
    """OLMo 2's sizes."""

    family: str = Field(default="olmo2", description="Family of the model.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=500_000.0, description="Base of the rotary wavelengths.")

    hf_names: ClassVar[Names] = {
        name: tensor for name, tensor in POST_NORM_NAMES.items() if name not in ("mixer_norm.scale", "ffn_norm.scale")
    }
    hf_model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    hf_architecture: ClassVar[str] = "Olmo2ForCausalLM"
    hf_defaults: ClassVar[dict[str, Any]] = OptionalBias.hf_defaults | {"rms_norm_eps": 1e-5}

    def norm(self) -> NormConfig:
        """See `DenseSizes`."""
        return NormConfig(kind="rms32", eps=self.norm_eps)

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """Adds the norms of queries and keys."""
        norms = {"qk_norm": self.norm(), "qk_norm_over": "projection"}
        return super().attention(windowed=windowed).model_copy(update=norms)

    def block(self, *, windowed: bool) -> BlockSpec:
        """See `DenseSizes`."""
        return super().block(windowed=windowed).model_copy(update={"norms": "post"})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.must_be("clip_qkv", because="only OLMo 1 clips queries, keys and values")
        return super().read_hf(hf)


@register_family
class Olmo3Config(OptionalWindow, Olmo2Config):
    """OLMo 3's sizes.

    The model was trained with YaRN on global layers only. Transformers 5.12.1 applies it to all layers, which costs quality;
    `scale_sliding_rope` does so too, for comparisons.
    """

    family: str = Field(default="olmo3", description="Family of the model.")
    window: Positive | None = Field(default=4096, description="Keys that a query of a windowed layer sees, itself included, in tokens.")
    layer_pattern: Annotated[str, Field(pattern="^[SG]+$")] = Field(
        default="SSSG", description="Repeated over the layers: S sliding, G global."
    )
    scale_sliding_rope: bool = Field(
        default=False, description="Stretch the wavelengths of sliding layers too, as transformers 5.12.1 does and training did not."
    )

    beside_weights: ClassVar[frozenset[str]] = OptionalWindow.beside_weights | {"scale_sliding_rope"}
    hf_model_types: ClassVar[tuple[str, ...]] = ("olmo3",)
    hf_architecture: ClassVar[str] = "Olmo3ForCausalLM"

    def rope(self, *, windowed: bool) -> RopeConfig:
        """See `DenseSizes`."""
        plain = windowed and not self.scale_sliding_rope
        return RopeConfig(theta=self.rope_theta, scaling=None if plain else self.rope_scaling)

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        layers = cls.read_layers(hf, window=hf.get("sliding_window", 4096), slides=lambda layer: (layer + 1) % 4 != 0)
        return super().read_hf(hf) | layers | {"scale_sliding_rope": hf.flag("scale_sliding_rope", False)}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`. What transformers has no word for is written where it is not our default, so that an export comes back as it was."""
        own = {"scale_sliding_rope": True} if self.scale_sliding_rope else {}
        return super().to_hf() | {"sliding_window": self.window, "layer_types": self.layer_types()} | own
