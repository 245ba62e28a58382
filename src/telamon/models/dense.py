"""What the families of dense decoders share: sizes, options that several of them have, and how Hugging Face spells these."""

import abc
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from telamon.config.schema import Positive
from telamon.layers.attention import AttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.norm import NormConfig
from telamon.layers.parts import MixerConfig
from telamon.layers.rope import RopeConfig, RopeScaling
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_family import HfFamily
from telamon.models.hf_rope import read_rope, write_rope
from telamon.models.hf_weights import Names
from telamon.models.spec import BlockSpec, ModelSpec

PRE_NORM_NAMES: Names = {
    "embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
    "mixer_norm.scale": "model.layers.{layer}.input_layernorm.weight",
    "mixer.query": "model.layers.{layer}.self_attn.q_proj.weight",
    "mixer.key": "model.layers.{layer}.self_attn.k_proj.weight",
    "mixer.value": "model.layers.{layer}.self_attn.v_proj.weight",
    "mixer.out": "model.layers.{layer}.self_attn.o_proj.weight",
    "mixer.query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "mixer.key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "mixer.value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "mixer.out_bias": "model.layers.{layer}.self_attn.o_proj.bias",
    "mixer.query_norm.scale": "model.layers.{layer}.self_attn.q_norm.weight",
    "mixer.key_norm.scale": "model.layers.{layer}.self_attn.k_norm.weight",
    "ffn_norm.scale": "model.layers.{layer}.post_attention_layernorm.weight",
    "ffn.gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "ffn.up": "model.layers.{layer}.mlp.up_proj.weight",
    "ffn.down": "model.layers.{layer}.mlp.down_proj.weight",
    "ffn.gate_bias": "model.layers.{layer}.mlp.gate_proj.bias",
    "ffn.up_bias": "model.layers.{layer}.mlp.up_proj.bias",
    "ffn.down_bias": "model.layers.{layer}.mlp.down_proj.bias",
}
"""Llama's names, which most families keep. Entries that a model has no weight for are not used."""


class RotarySizes(HfFamily):
    """Attention of some kind with rotary positions, and a gated MLP."""

    n_heads: Positive = Field(default=8, description="Query heads N.")
    d_ff: Positive = Field(default=768, description="Hidden width F of the gated MLP.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=10_000.0, description="Base of the rotary wavelengths.")
    rope_scaling: RopeScaling | None = Field(default=None, description="How rotary wavelengths are stretched for longer text.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="Epsilon of the norms.")

    hf_names: ClassVar[Names] = PRE_NORM_NAMES
    hf_theta: ClassVar[float] = 10_000.0
    """Base of the rotary wavelengths where a file states none."""
    hf_defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048}
    hf_activation: ClassVar[tuple[str, ...]] = ("hidden_act", "silu")
    """Attribute for the activation, and the values that stand for the family's own; the first is written."""

    def shrunk(self) -> Self:
        """See `ModelConfig`."""
        return super().shrunk().model_copy(update={"n_heads": 4, "d_ff": 64})

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly (see `ModelConfig`)."""
        return super().divided() | {"tensor": {"n_heads": self.n_heads, "d_ff": self.d_ff}}

    # The architecture

    def norm(self) -> NormConfig:
        """The norm of blocks and of the end."""
        return NormConfig(eps=self.norm_eps)

    def rope(self, *, windowed: bool) -> RopeConfig:
        """Rotary positions of a layer."""
        return RopeConfig(theta=self.rope_theta, scaling=self.rope_scaling)

    @abc.abstractmethod
    def attention(self, *, windowed: bool = False) -> MixerConfig:
        """The mixer of a layer."""

    def mlp(self) -> GatedMLPConfig:
        """The ffn of every block."""
        return GatedMLPConfig(d_ff=self.d_ff)

    def block(self, *, windowed: bool) -> BlockSpec:
        """A layer."""
        return BlockSpec(mixer=self.attention(windowed=windowed), ffn=self.mlp(), norm=self.norm())

    def windowed_layers(self) -> tuple[bool, ...]:
        """For each layer, whether its attention is within a window."""
        return (False,) * self.n_layers

    def spec(self) -> ModelSpec:
        """The architecture these sizes stand for."""
        return ModelSpec(
            vocab_size=self.vocab_size,
            vocab_multiple=self.vocab_multiple,
            d_model=self.d_model,
            blocks=tuple(self.block(windowed=windowed) for windowed in self.windowed_layers()),
            norm=self.norm(),
            tie_embeddings=self.tie_embeddings,
        )

    # Hugging Face

    @classmethod
    def from_hf(cls, hf: HfAttributes) -> Self:
        """The sizes that a config.json states; every attribute read is marked in `hf`."""
        return cls(**cls.read_hf(hf))

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """Fields of this class from a config.json; a family adds its own."""
        hf.must_be(*cls.hf_activation, because="the family has this activation alone")
        return {
            "vocab_size": hf.size("vocab_size"),
            "d_model": hf.size("hidden_size"),
            "n_layers": hf.size("num_hidden_layers"),
            "n_heads": hf.size("num_attention_heads"),
            "d_ff": hf.size("intermediate_size"),
            "norm_eps": hf.get("rms_norm_eps"),
            "tie_embeddings": hf.get("tie_word_embeddings"),
            "max_positions": hf.get("max_position_embeddings"),
            **read_rope(hf, theta=cls.hf_theta),
        }

    def to_hf(self) -> dict[str, Any]:
        """The attributes of a config.json that say what the model is."""
        attribute, value, *_ = self.hf_activation
        return {
            "architectures": [self.hf_architecture],
            "model_type": self.hf_model_types[0],
            "vocab_size": self.vocab_size,
            "hidden_size": self.d_model,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "intermediate_size": self.d_ff,
            attribute: value,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            **write_rope(self.rope_theta, self.rope_scaling),
        }


class DenseSizes(RotarySizes):
    """Rotary GQA and a gated MLP."""

    n_kv_heads: Positive = Field(default=2, description="Key-value heads K; a divisor of n_heads.")
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] = Field(default=32, description="Features of a head H.")

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
        return super().shrunk().model_copy(update={"n_heads": 2 * groups, "n_kv_heads": 2, "head_dim": 8})

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly (see `ModelConfig`)."""
        sizes = super().divided()
        return sizes | {"tensor": sizes["tensor"] | {"n_kv_heads": self.n_kv_heads}}

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """See `RotarySizes`."""
        return AttentionConfig(n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim, rope=self.rope(windowed=windowed))

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `RotarySizes`."""
        fields = super().read_hf(hf)
        heads = fields["n_heads"]
        kv_heads, head_dim = hf.get("num_key_value_heads") or heads, hf.get("head_dim") or fields["d_model"] // heads
        return fields | {"n_kv_heads": kv_heads, "head_dim": head_dim}

    def to_hf(self) -> dict[str, Any]:
        """See `RotarySizes`."""
        return super().to_hf() | {"num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim}


class OptionalBias(DenseSizes):
    """Families whose attention may have biases."""

    attention_bias: bool = Field(default=False, description="Biases on the maps to queries, keys and values, and on the output map.")

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """See `DenseSizes`."""
        biases = {"qkv_bias": self.attention_bias, "out_bias": self.attention_bias}
        return super().attention(windowed=windowed).model_copy(update=biases)

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().read_hf(hf) | {"attention_bias": hf.flag("attention_bias", False)}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        return super().to_hf() | {"attention_bias": self.attention_bias}


class OptionalWindow(DenseSizes):
    """Families in which some layers attend within a window."""

    window: Positive | None = Field(
        default=None, description="Keys that a query of a windowed layer sees, itself included, in tokens; none: all layers see all."
    )
    layer_pattern: Annotated[str, Field(pattern="^[SG]+$")] = Field(
        default="G", description="Repeated over the layers: S (sliding) attends within the window, G (global) to everything before."
    )

    beside_weights: ClassVar[frozenset[str]] = HfFamily.beside_weights | {"window", "layer_pattern"}

    @model_validator(mode="after")
    def _window_where_it_slides(self) -> Self:
        if "S" in self.layer_pattern and self.window is None:
            raise ValueError(f"model.layer_pattern={self.layer_pattern} has sliding layers (S) and model.window is none; give their window")
        return self

    def windowed_layers(self) -> tuple[bool, ...]:
        """See `DenseSizes`."""
        return tuple(self.layer_pattern[i % len(self.layer_pattern)] == "S" for i in range(self.n_layers))

    def attention(self, *, windowed: bool = False) -> AttentionConfig:
        """See `DenseSizes`."""
        return super().attention(windowed=windowed).model_copy(update={"window": self.window if windowed else None})

    def shrunk(self) -> Self:
        """See `ModelConfig`; the window bites, and both kinds of layer occur."""
        window = None if self.window is None else 8
        return super().shrunk().model_copy(update={"window": window, "n_layers": max(2, min(len(self.layer_pattern), 6))})

    @classmethod
    def read_layers(cls, hf: HfAttributes, *, window: int | None, slides: Callable[[int], bool]) -> dict[str, Any]:
        """Window and pattern from `layer_types`, or where the file lacks it from what transformers would make (`slides` of a layer)."""
        count = hf.size("num_hidden_layers")
        types = hf.listed("layer_types")
        if types is None:
            letters = "".join("S" if window is not None and slides(i) else "G" for i in range(count))
        else:
            letters = "".join(_LETTERS.get(str(kind), "?") for kind in types)
            if "?" in letters:
                raise hf.refuse("layer_types", types[letters.index("?")], f"known layers: {', '.join(_LETTERS)}")
            if len(types) != count:
                raise hf.refuse("layer_types", f"a list of {len(types)}", f"num_hidden_layers says {count}")
        return {"window": window if "S" in letters else None, "layer_pattern": shortest_period(letters)}

    def layer_types(self) -> list[str]:
        """Transformers' spelling of each layer's attention."""
        return ["sliding_attention" if windowed else "full_attention" for windowed in self.windowed_layers()]


_LETTERS = {"sliding_attention": "S", "full_attention": "G"}


def shortest_period(letters: str) -> str:
    """The shortest pattern whose repetition gives these letters."""
    return next(letters[:n] for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[: len(letters)] == letters)
