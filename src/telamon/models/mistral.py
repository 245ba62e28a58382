"""Mistral 7B (Jiang et al. 2023): Llama's block without biases; all layers may attend within one window."""

from typing import Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.layers.attention import AttentionConfig
from telamon.models.dense import DenseSizes
from telamon.models.hf_config import HfAttributes


@register_family
class MistralConfig(DenseSizes):
    """Mistral's sizes."""

    family: str = Field(default="mistral", description="Family of the model.")
    window: Positive | None = Field(default=None, description="Keys each query sees, itself included, in tokens; none: all before it.")

    beside_weights: ClassVar[frozenset[str]] = DenseSizes.beside_weights | {"window"}
    hf_defaults: ClassVar[dict[str, Any]] = DenseSizes.hf_defaults | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }
    hf_model_types: ClassVar[tuple[str, ...]] = ("mistral",)
    hf_architecture: ClassVar[str] = "MistralForCausalLM"

    def windowed_layers(self) -> tuple[bool, ...]:
        """See `DenseSizes`."""
        return (self.window is not None,) * self.n_layers

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """See `DenseSizes`."""
        return super().attention(windowed=windowed).model_copy(update={"window": self.window})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`. Transformers takes 4096 where a file leaves the window out; none has to be written as null."""
        return super().read_hf(hf) | {"window": hf.get("sliding_window")}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().to_hf() | {"sliding_window": self.window}
