"""Llama 2 and 3, and SmolLM2 (Touvron et al. 2023; Llama team 2024): pre-norm blocks, rotary GQA, gated MLP with SiLU."""

from typing import Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.layers.mlp import GatedMLPConfig
from telamon.models.dense import OptionalBias
from telamon.models.hf_config import HfAttributes


@register_family
class LlamaConfig(OptionalBias):
    """Llama's block, with the biases that Hugging Face's Llama allows."""

    family: str = Field(default="llama", description="Family of the model.")
    mlp_bias: bool = Field(default=False, description="Biases in the MLP.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("llama",)
    hf_architecture: ClassVar[str] = "LlamaForCausalLM"

    def mlp(self) -> GatedMLPConfig:
        """See `DenseSizes`."""
        return GatedMLPConfig(d_ff=self.d_ff, bias=self.mlp_bias)

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.harmless("pretraining_tp", "is_llama_config")  # slicing of products, and a mark of SmolLM2's files
        hf.must_be("rope_interleaved", False, because="queries and keys are paired by halves")
        return super().read_hf(hf) | {"mlp_bias": hf.flag("mlp_bias", False)}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().to_hf() | {"mlp_bias": self.mlp_bias}
