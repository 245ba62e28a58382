"""Qwen2 and Qwen2.5, dense (Qwen team 2024): Llama's block with biases on queries, keys and values."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.layers.attention import AttentionConfig
from telamon.models.dense import OptionalWindow
from telamon.models.hf_config import HfAttributes


class QwenSizes(OptionalWindow):
    """How Qwen's files spell a window: for the layers from `max_window_layers` on, where `use_sliding_window` says so."""

    rope_theta: Annotated[float, Field(gt=0)] = Field(default=1_000_000.0, description="Base of the rotary wavelengths.")

    hf_defaults: ClassVar[dict[str, Any]] = OptionalWindow.hf_defaults | {"num_key_value_heads": 32, "max_position_embeddings": 32_768}

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.must_be("use_mrope", False, because="positions are those of text")
        window, first = hf.get("sliding_window", 4096), hf.number("max_window_layers", 28)
        window = window if hf.flag("use_sliding_window", False) else None
        return super().read_hf(hf) | cls.read_layers(hf, window=window, slides=lambda layer: layer >= first)

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        windowed = self.windowed_layers()
        return super().to_hf() | {
            "use_sliding_window": any(windowed),
            "sliding_window": self.window if any(windowed) else None,
            "layer_types": self.layer_types(),
            "max_window_layers": windowed.index(True) if any(windowed) else self.n_layers,
        }


@register_family
class Qwen2Config(QwenSizes):
    """Qwen2's sizes."""

    family: str = Field(default="qwen2", description="Family of the model.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    hf_architecture: ClassVar[str] = "Qwen2ForCausalLM"

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """Adds the biases, which every Qwen2 has."""
        return super().attention(windowed=windowed).model_copy(update={"qkv_bias": True})
