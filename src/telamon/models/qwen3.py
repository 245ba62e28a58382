"""Qwen3, dense (Qwen team 2025): Llama's block with RMSNorm over each head's queries and keys."""

from typing import Annotated

from pydantic import Field

from telamon.config.registry import register_family
from telamon.layers.attention import AttentionConfig
from telamon.models.llama import DenseSizes


@register_family
class Qwen3Config(DenseSizes):
    """Qwen3's sizes."""

    family: str = Field(default="qwen3", description="Family of the model.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=1_000_000.0, description="Base of the rotary wavelengths.")

    def attention(self) -> AttentionConfig:
        """Adds the norms of queries and keys."""
        return super().attention().model_copy(update={"qk_norm": True})
