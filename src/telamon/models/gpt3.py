"""GPT-3 (Brown et al. 2020), whose block is GPT-2's (Radford et al. 2019): learned positions, LayerNorm, biases, GELU without a gate.

Hugging Face has no GPT-3; GPT-2's class is the same model where heads times head size is the width, so exports use it and GPT-2's
own checkpoints can be imported.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.errors import ConfigError
from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import MLPConfig
from telamon.layers.norm import NormConfig
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_family import HfFamily
from telamon.models.hf_weights import HfName, Names
from telamon.models.spec import BlockSpec, ModelSpec

_QKV = ("mixer.query", "mixer.key", "mixer.value")


@register_family
class Gpt3Config(HfFamily):
    """GPT-3's sizes."""

    family: str = Field(default="gpt3", description="Family of the model.")
    n_heads: Positive = Field(default=8, description="Heads N.")
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] = Field(default=32, description="Features of a head H.")
    d_ff: Positive = Field(default=1024, description="Hidden width F of the MLP.")
    n_positions: Positive = Field(default=2048, description="Rows of the table of positions: the longest text, in tokens.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="Epsilon of the norms.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("gpt2",)
    hf_architecture: ClassVar[str] = "GPT2LMHeadModel"
    hf_defaults: ClassVar[dict[str, Any]] = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_inner": None}
    hf_prefixes: ClassVar[dict[str, str]] = {
        "wte.": "transformer.wte.",
        "wpe.": "transformer.wpe.",
        "h.": "transformer.h.",
        "ln_f.": "transformer.ln_f.",
    }
    hf_skipped: ClassVar[tuple[str, ...]] = (r".*\.attn\.(masked_)?bias",)  # the causal mask, which old files store
    hf_names: ClassVar[Names] = {
        "embedding": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "norm.scale": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head": "lm_head.weight",
        "mixer_norm.scale": "transformer.h.{layer}.ln_1.weight",
        "mixer_norm.bias": "transformer.h.{layer}.ln_1.bias",
        _QKV: HfName("transformer.h.{layer}.attn.c_attn.weight", input_first=True),
        tuple(f"{name}_bias" for name in _QKV): "transformer.h.{layer}.attn.c_attn.bias",
        "mixer.out": HfName("transformer.h.{layer}.attn.c_proj.weight", input_first=True),
        "mixer.out_bias": "transformer.h.{layer}.attn.c_proj.bias",
        "ffn_norm.scale": "transformer.h.{layer}.ln_2.weight",
        "ffn_norm.bias": "transformer.h.{layer}.ln_2.bias",
        "ffn.up": HfName("transformer.h.{layer}.mlp.c_fc.weight", input_first=True),
        "ffn.up_bias": "transformer.h.{layer}.mlp.c_fc.bias",
        "ffn.down": HfName("transformer.h.{layer}.mlp.c_proj.weight", input_first=True),
        "ffn.down_bias": "transformer.h.{layer}.mlp.c_proj.bias",
    }

    @property
    def position_limit(self) -> int | None:
        """See `ModelConfig`."""
        return self.n_positions

    def shrunk(self) -> Self:
        """See `ModelConfig`."""
        return super().shrunk().model_copy(update={"n_heads": 4, "head_dim": 8, "d_ff": 64, "n_positions": 64})

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly (see `ModelConfig`)."""
        return super().divided() | {"tensor": {"n_heads": self.n_heads, "d_ff": self.d_ff}}

    def spec(self) -> ModelSpec:
        """The architecture these sizes stand for."""
        norm = NormConfig(kind="layer", eps=self.norm_eps)
        mixer = AttentionConfig(
            n_heads=self.n_heads, n_kv_heads=self.n_heads, head_dim=self.head_dim, rope=None, qkv_bias=True, out_bias=True
        )
        return ModelSpec(
            vocab_size=self.vocab_size,
            vocab_multiple=self.vocab_multiple,
            d_model=self.d_model,
            blocks=(BlockSpec(mixer=mixer, ffn=MLPConfig(d_ff=self.d_ff), norm=norm),) * self.n_layers,
            norm=norm,
            tie_embeddings=self.tie_embeddings,
            learned_positions=self.n_positions,
        )

    @classmethod
    def from_hf(cls, hf: HfAttributes) -> Self:
        """The sizes that GPT-2's config.json states."""
        hf.harmless("resid_pdrop", "embd_pdrop", "attn_pdrop", "n_ctx", "task_specific_params", "reorder_and_upcast_attn")
        hf.harmless("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")
        hf.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh", because="the family has this activation alone")
        hf.must_be("scale_attn_weights", True, because="scores are divided by the root of the head's size")
        hf.must_be("scale_attn_by_inverse_layer_idx", False, because="scores are scaled alike in all layers")
        hf.must_be("add_cross_attention", False, because="a decoder has no other text to attend to")
        width, heads, positions = hf.size("n_embd"), hf.size("n_head"), hf.size("n_positions")
        return cls(
            vocab_size=hf.size("vocab_size"),
            d_model=width,
            n_layers=hf.size("n_layer"),
            n_heads=heads,
            head_dim=width // heads,
            d_ff=hf.get("n_inner") or 4 * width,
            n_positions=positions,
            norm_eps=hf.get("layer_norm_epsilon"),
            tie_embeddings=hf.get("tie_word_embeddings"),
            max_positions=positions,
        )

    def to_hf(self) -> dict[str, Any]:
        """The attributes of GPT-2's config.json.

        Raises:
            ConfigError: the heads together are not as wide as the stream, which GPT-2's class cannot express.
        """
        if self.n_heads * self.head_dim != self.d_model:
            raise ConfigError(
                f"model.n_heads={self.n_heads} times model.head_dim={self.head_dim} is not model.d_model={self.d_model}: "
                "Hugging Face's GPT-2 class, which exports of this family use, has no other heads"
            )
        return {
            "architectures": [self.hf_architecture],
            "model_type": self.hf_model_types[0],
            "vocab_size": self.vocab_size,
            "n_embd": self.d_model,
            "n_layer": self.n_layers,
            "n_head": self.n_heads,
            "n_inner": self.d_ff,
            "n_positions": self.n_positions,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
