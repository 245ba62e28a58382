"""GPT-OSS (OpenAI 2025): sinks in attention, a window on every other layer, and a mixture of clamped, biased experts in all."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.layers.attention import AttentionConfig
from telamon.layers.moe import MoEConfig
from telamon.layers.norm import NormConfig
from telamon.layers.rope import RopeScaling, YarnScaling
from telamon.layers.router import RouterConfig
from telamon.models.dense import PRE_NORM_NAMES, OptionalBias, OptionalWindow
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import HfName, Names
from telamon.models.mixture import MixtureSizes

_MLP = "model.layers.{layer}.mlp."
_PUBLISHED_ROPE = YarnScaling(factor=32.0, original_length=4096, truncate=False)
"""Of both sizes, and of files that say nothing of rotary positions."""


@register_family
class GptOssConfig(MixtureSizes, OptionalWindow, OptionalBias):
    """GPT-OSS's sizes. An expert's width is `d_ff`; there are no layers without experts."""

    family: str = Field(default="gpt_oss", description="Family of the model.")
    window: Positive | None = Field(default=128, description="Keys that a query of a windowed layer sees, itself included, in tokens.")
    layer_pattern: Annotated[str, Field(pattern="^[SG]+$")] = Field(
        default="SG", description="Repeated over the layers: S sliding, G global."
    )
    attention_bias: bool = Field(default=True, description="Biases on the maps to queries, keys and values, and on the output map.")
    top_k: Positive = Field(default=4, description="Experts that a token goes to.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=150_000.0, description="Base of the rotary wavelengths.")
    rope_scaling: RopeScaling | None = Field(default=_PUBLISHED_ROPE, description="How rotary wavelengths are stretched for longer text.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="Epsilon of the norms.")
    swiglu_limit: Annotated[float, Field(gt=0)] | None = Field(
        default=7.0, description="An expert's gate is cut off above this, and up outside of plus and minus this; none: neither."
    )

    beside_weights: ClassVar[frozenset[str]] = MixtureSizes.beside_weights | OptionalWindow.beside_weights
    hf_model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    hf_architecture: ClassVar[str] = "GptOssForCausalLM"
    hf_theta: ClassVar[float] = 150_000.0
    hf_defaults: ClassVar[dict[str, Any]] = MixtureSizes.hf_defaults | {
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    }
    hf_names: ClassVar[Names] = {
        **PRE_NORM_NAMES,
        "mixer.sinks": "model.layers.{layer}.self_attn.sinks",
        "ffn.router.weight": _MLP + "router.weight",
        "ffn.router.bias": _MLP + "router.bias",
        ("ffn.experts.gate", "ffn.experts.up"): HfName(_MLP + "experts.gate_up_proj", input_first=True, interleaved=True),
        ("ffn.experts.gate_bias", "ffn.experts.up_bias"): HfName(_MLP + "experts.gate_up_proj_bias", interleaved=True),
        "ffn.experts.down": HfName(_MLP + "experts.down_proj", input_first=True),
        "ffn.experts.down_bias": _MLP + "experts.down_proj_bias",
    }

    def norm(self) -> NormConfig:
        """See `DenseSizes`."""
        return NormConfig(kind="rms32", eps=self.norm_eps)

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """Adds the sinks."""
        return super().attention(windowed=windowed).model_copy(update={"sinks": True})

    def router(self) -> RouterConfig:
        """The softmax over the chosen experts alone: that over all, divided by the sum of the chosen ones."""
        return super().router().model_copy(update={"bias": True})

    def mixture(self) -> MoEConfig:
        """See `MixtureSizes`."""
        return MoEConfig(router=self.router(), d_ff=self.expert_width, activation="swiglu_oss", limit=self.swiglu_limit, bias=True)

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`. Transformers 5.12.1 has the limit as a constant of 7; here a file's own counts."""
        layers = cls.read_layers(hf, window=hf.get("sliding_window", 128), slides=lambda layer: layer % 2 == 0)
        fields = super().read_hf(hf) | layers
        hf.must_be("experts_per_token", fields["top_k"], because="the file says it a second time, as num_experts_per_tok")
        if not hf.dictionary("rope_parameters") and not hf.dictionary("rope_scaling"):
            fields["rope_scaling"] = _PUBLISHED_ROPE
        if isinstance(scaling := fields["rope_scaling"], YarnScaling):
            original = scaling.original_length
            hf.must_be("initial_context_length", original, because="it is the length that rotary positions are stretched from")
        else:
            hf.harmless("initial_context_length")
        return fields | {
            "attention_bias": hf.flag("attention_bias", True),
            "swiglu_limit": hf.number("swiglu_limit", 7.0),
        }

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`. A file that says nothing of a stretch would mean the published one; transformers asks for a window that no layer has."""
        plain = {"rope_scaling": {"rope_type": "default"}} if self.rope_scaling is None else {}
        return super().to_hf() | {
            "num_local_experts": self.n_experts,
            "num_experts_per_tok": self.top_k,
            "sliding_window": self.window or 128,
            "layer_types": self.layer_types(),
            "swiglu_limit": self.swiglu_limit,
            **plain,
        }
