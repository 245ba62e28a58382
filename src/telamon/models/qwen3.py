"""Qwen3, dense (Qwen team 2025): Llama's block with RMSNorm over each head's queries and keys."""

from typing import Any, ClassVar

from pydantic import Field

from telamon.config.registry import register_family
from telamon.layers.attention import AttentionConfig
from telamon.models.dense import OptionalBias
from telamon.models.qwen2 import QwenSizes


@register_family
class Qwen3Config(QwenSizes, OptionalBias):
    """Qwen3's sizes."""

    family: str = Field(default="qwen3", description="Family of the model.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    hf_architecture: ClassVar[str] = "Qwen3ForCausalLM"
    # A file without head_dim means 128, whatever the width.
    hf_defaults: ClassVar[dict[str, Any]] = QwenSizes.hf_defaults | {"head_dim": 128}

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """Adds the norms of queries and keys."""
        return super().attention(windowed=windowed).model_copy(update={"qk_norm": self.norm()})
