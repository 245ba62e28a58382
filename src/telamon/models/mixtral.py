"""Mixtral (Jiang et al. 2024): Mistral's block with a mixture of experts in every layer."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.models.dense import PRE_NORM_NAMES
from telamon.models.hf_weights import Names
from telamon.models.mistral import MistralConfig
from telamon.models.mixture import MixtureSizes


@register_family
class MixtralConfig(MixtureSizes, MistralConfig):
    """Mixtral's sizes."""

    family: str = Field(default="mixtral", description="Family of the model.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=1_000_000.0, description="Base of the rotary wavelengths.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    hf_architecture: ClassVar[str] = "MixtralForCausalLM"
    hf_defaults: ClassVar[dict[str, Any]] = MistralConfig.hf_defaults | {
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    hf_theta: ClassVar[float] = 1_000_000.0
    hf_names: ClassVar[Names] = {
        **PRE_NORM_NAMES,
        "ffn.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
        "ffn.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "ffn.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        "ffn.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
    }

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().to_hf() | {"num_local_experts": self.n_experts, "num_experts_per_tok": self.top_k}
