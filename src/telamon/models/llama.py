"""Llama 2 and its kin (Touvron et al. 2023): pre-norm blocks, rotary GQA, gated MLP with SiLU."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from telamon.config.registry import register_family
from telamon.config.schema import ModelConfig, Positive
from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.rope import RopeConfig
from telamon.models.spec import BlockSpec, ModelSpec


class DenseSizes(ModelConfig):
    """Sizes shared by the families of dense pre-norm blocks."""

    n_heads: Positive = Field(default=8, description="Query heads N.")
    n_kv_heads: Positive = Field(default=2, description="Key-value heads K; a divisor of n_heads.")
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] = Field(default=32, description="Features of a head H.")
    d_ff: Positive = Field(default=768, description="Hidden width F of the gated MLP.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=10_000.0, description="Base of the rotary wavelengths.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="Epsilon of the RMSNorms.")
    attention_bias: bool = Field(default=False, description="Biases on queries, keys, values.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            allowed = [k for k in range(1, self.n_heads + 1) if self.n_heads % k == 0]
            raise ValueError(
                f"model.n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.n_kv_heads}; allowed for n_kv_heads: {allowed}"
            )
        return self

    def shrunk(self) -> Self:
        """See `ModelConfig`; query heads still share key-value heads where they did."""
        groups = min(self.n_heads // self.n_kv_heads, 2)
        sizes = {"n_heads": 2 * groups, "n_kv_heads": 2, "head_dim": 8, "d_ff": 64}
        return super().shrunk().model_copy(update=sizes)

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly (see `ModelConfig`)."""
        return super().divided() | {"tensor": {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "d_ff": self.d_ff}}

    def attention(self) -> AttentionConfig:
        """The mixer of every block."""
        return AttentionConfig(
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            rope=RopeConfig(theta=self.rope_theta),
            qkv_bias=self.attention_bias,
            norm_eps=self.norm_eps,
        )

    def mlp(self) -> GatedMLPConfig:
        """The ffn of every block."""
        return GatedMLPConfig(d_ff=self.d_ff)

    def spec(self) -> ModelSpec:
        """The architecture these sizes stand for."""
        block = BlockSpec(mixer=self.attention(), ffn=self.mlp(), norm_eps=self.norm_eps)
        return ModelSpec(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            blocks=(block,) * self.n_layers,
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
        )


@register_family
class LlamaConfig(DenseSizes):
    """Llama's block, with the biases that Hugging Face's Llama allows."""

    family: str = Field(default="llama", description="Family of the model.")
    mlp_bias: bool = Field(default=False, description="Biases in the MLP.")

    def attention(self) -> AttentionConfig:
        """Hugging Face's `attention_bias` puts a bias on the output map too."""
        return super().attention().model_copy(update={"out_bias": self.attention_bias})

    def mlp(self) -> GatedMLPConfig:
        """See `DenseSizes`."""
        return GatedMLPConfig(d_ff=self.d_ff, bias=self.mlp_bias)
