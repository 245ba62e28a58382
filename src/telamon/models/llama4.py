"""Llama 4, text (Meta 2025): rotary layers within chunks, every few layers one that sees everything and is not rotated, and mixtures of
which each token takes one expert and a shared one.

Transformers counts chunks and temperatures by place in the row; here both go by position within the document, so that documents
packed in a row, and left padding, are as if alone. On rows of one document the two are the same.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.layers.attention import AttentionConfig, TemperatureConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.moe import MoEConfig
from telamon.layers.norm import NormConfig
from telamon.layers.rope import RopeConfig
from telamon.layers.router import RouterConfig
from telamon.models.dense import PRE_NORM_NAMES, OptionalBias, shortest_period
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import HfName, Names
from telamon.models.mixture import MixtureBesideDense
from telamon.models.spec import ModelSpec

_FFN = "model.layers.{layer}.feed_forward."


@register_family
class Llama4Config(MixtureBesideDense, OptionalBias):
    """Llama 4's sizes; `d_ff` is the width of layers without experts, `d_expert` that of experts and of the shared one."""

    family: str = Field(default="llama4", description="Family of the model.")
    chunk: Positive | None = Field(
        default=8192, description="Layers of kind C: a document is cut into chunks of this many tokens, and queries see their own chunk."
    )
    layer_pattern: Annotated[str, Field(pattern="^[CRN]+$")] = Field(
        default="CCCN",
        description="Repeated over the layers: C rotary within chunks, R rotary over everything before, N everything before without rotation.",
    )
    ffn_pattern: Annotated[str, Field(pattern="^[DM]+$")] = Field(
        default="M", description="Repeated over the layers: M has a mixture of experts, D a gated MLP."
    )
    qk_norm: bool = Field(default=True, description="Rotary layers norm queries and keys after the rotation, without a scale.")
    temperature: TemperatureConfig | None = Field(
        default=TemperatureConfig(), description="How queries of layers without rotation grow with their position; none: they do not."
    )
    top_k: Positive = Field(default=1, description="Experts that a token goes to.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(default=500_000.0, description="Base of the rotary wavelengths.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-5, description="Epsilon of the norms.")

    beside_weights: ClassVar[frozenset[str]] = MixtureBesideDense.beside_weights | {"chunk", "layer_pattern"}
    hf_model_types: ClassVar[tuple[str, ...]] = ("llama4_text", "llama4")
    hf_architecture: ClassVar[str] = "Llama4ForCausalLM"
    hf_architectures: ClassVar[tuple[str, ...]] = ("Llama4ForConditionalGeneration",)
    hf_theta: ClassVar[float] = 500_000.0
    hf_expert_width: ClassVar[str] = "intermediate_size"
    hf_defaults: ClassVar[dict[str, Any]] = MixtureBesideDense.hf_defaults | {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    }
    hf_prefixes: ClassVar[dict[str, str]] = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
    hf_around: ClassVar[tuple[str, ...]] = (
        *("vision_config", "image_token_index", "boi_token_index", "eoi_token_index"),
        *("image_token_id", "boi_token_id", "eoi_token_id"),
    )
    hf_skipped: ClassVar[tuple[str, ...]] = (r"vision_model\..*", r"multi_modal_projector\..*")
    hf_names: ClassVar[Names] = {
        **PRE_NORM_NAMES,
        **{f"ffn.{name}": f"{_FFN}{name}_proj.weight" for name in ("gate", "up", "down")},
        **{f"ffn.shared.{name}": f"{_FFN}shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
        "ffn.router.weight": _FFN + "router.weight",
        ("ffn.experts.gate", "ffn.experts.up"): HfName(_FFN + "experts.gate_up_proj", input_first=True),
        "ffn.experts.down": HfName(_FFN + "experts.down_proj", input_first=True),
    }

    @model_validator(mode="after")
    def _chunk_where_layers_have_one(self) -> Self:
        if "C" in self.layer_pattern and self.chunk is None:
            raise ValueError(
                f"model.layer_pattern={self.layer_pattern} has layers within chunks (C) and model.chunk is none; give their length"
            )
        return self

    def shrunk(self) -> Self:
        """See `ModelConfig`; chunks and temperatures bite, and each kind of layer occurs."""
        layers = max(2, min(max(len(self.layer_pattern), len(self.ffn_pattern)), 6))
        temperature = self.temperature and self.temperature.model_copy(update={"floor": 4})
        changes = {"n_layers": layers, "chunk": None if self.chunk is None else 8, "temperature": temperature}
        return super().shrunk().model_copy(update=changes)

    # The architecture

    def rope(self, *, windowed: bool) -> RopeConfig:
        """See `DenseSizes`."""
        return super().rope(windowed=windowed).model_copy(update={"pairs": "interleaved"})

    def mixer(self, letter: str) -> AttentionConfig:
        """The attention of a layer of this kind (see `layer_pattern`)."""
        attention = self.attention()
        if letter == "N":
            return attention.model_copy(update={"rope": None, "temperature": self.temperature})
        norm = NormConfig(kind="rms0", eps=self.norm_eps) if self.qk_norm else None
        chunk = self.chunk if letter == "C" else None
        return attention.model_copy(update={"chunk": chunk, "qk_norm": norm, "qk_norm_place": "after"})

    def layer_letters(self) -> str:
        """The kind of each layer's attention."""
        return "".join(self.layer_pattern[layer % len(self.layer_pattern)] for layer in range(self.n_layers))

    def router(self) -> RouterConfig:
        """The weight multiplies what an expert is given."""
        changes = {"score": "sigmoid", "renormalize": False, "weight_on": "input"}
        return super().router().model_copy(update=changes)

    def mixture(self) -> MoEConfig:
        """See `MixtureSizes`."""
        return MoEConfig(router=self.router(), d_ff=self.expert_width, shared=GatedMLPConfig(d_ff=self.expert_width))

    def mixture_layers(self) -> tuple[bool, ...]:
        """See `MixtureSizes`."""
        return tuple(self.ffn_pattern[layer % len(self.ffn_pattern)] == "M" for layer in range(self.n_layers))

    def spec(self) -> ModelSpec:
        """See `DenseSizes`."""
        spec = super().spec()
        pairs = zip(spec.blocks, self.layer_letters(), strict=True)
        return spec.model_copy(update={"blocks": tuple(block.model_copy(update={"mixer": self.mixer(letter)}) for block, letter in pairs)})

    # Hugging Face

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `DenseSizes`."""
        hf.harmless("for_llm_compressor")  # how transformers once laid experts out in memory
        tuned = {"scale": hf.number("attn_scale", 0.1), "floor": hf.size("floor_scale", 8192)}
        fields = super().read_hf(hf) | {
            "d_ff": hf.size("intermediate_size_mlp", 16_384),
            "qk_norm": hf.flag("use_qk_norm", True),
            # Some files say it with a whole number.
            "temperature": TemperatureConfig(**tuned) if hf.flag("attn_temperature_tuning", True) else None,
            "ffn_pattern": shortest_period(_ffn_letters(hf)),
        }
        letters, chunk = _layer_letters(hf), hf.get("attention_chunk_size", 8192)
        return fields | {"layer_pattern": shortest_period(letters), "chunk": chunk if "C" in letters else None}

    def to_hf(self) -> dict[str, Any]:
        """See `DenseSizes`."""
        letters, mixtures = self.layer_letters(), self.mixture_layers()
        every = len(self.ffn_pattern) if self.ffn_pattern == "D" * (len(self.ffn_pattern) - 1) + "M" else 1
        tuned = {} if self.temperature is None else {"attn_scale": self.temperature.scale, "floor_scale": self.temperature.floor}
        return super().to_hf() | {
            "intermediate_size": self.d_expert,
            "intermediate_size_mlp": self.d_ff,
            "num_local_experts": self.n_experts,
            "num_experts_per_tok": self.top_k,
            "interleave_moe_layer_step": every,
            "moe_layers": [layer for layer, mixes in enumerate(mixtures) if mixes],
            "no_rope_layers": [int(letter != "N") for letter in letters],
            "layer_types": ["chunked_attention" if letter == "C" else "full_attention" for letter in letters],
            "attention_chunk_size": self.chunk or 8192,  # transformers asks for one that no layer has, too
            "use_qk_norm": self.qk_norm,
            "attn_temperature_tuning": self.temperature is not None,
            **tuned,
        }


def _ffn_letters(hf: HfAttributes) -> str:
    """Which layers have experts: those listed, or without a list every so many."""
    count, step = hf.size("num_hidden_layers"), hf.size("interleave_moe_layer_step", 1)
    listed = hf.listed("moe_layers")
    mixtures = range(step - 1, count, step) if listed is None else listed
    if any(not isinstance(layer, int) or not 0 <= layer < count for layer in mixtures):
        raise hf.refuse("moe_layers", listed, f"layers are counted from 0 to {count - 1}")
    return "".join("M" if layer in mixtures else "D" for layer in range(count))


def _layer_letters(hf: HfAttributes) -> str:
    """The kinds of attention. `no_rope_layers` has a 1 for each layer that is rotated, its name notwithstanding; an empty list is none."""
    count, interval = hf.size("num_hidden_layers"), hf.size("no_rope_layer_interval", 4)
    rotated = hf.listed("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(rotated) < count or any(each not in (0, 1) for each in rotated):
        raise hf.refuse("no_rope_layers", rotated, f"a 0 or a 1 for each of {count} layers is needed")
    types = hf.listed("layer_types") or ["chunked_attention" if each else "full_attention" for each in rotated[:count]]
    letters = "".join(_LETTERS.get((str(kind), int(each)), "?") for kind, each in zip(types, rotated, strict=False))
    if "?" in letters or len(types) != count:
        known = "chunked_attention and full_attention for layers that are rotated, full_attention for others"
        raise hf.refuse("layer_types", types, f"one for each of {count} layers is needed: {known}")
    return letters


_LETTERS = {("chunked_attention", 1): "C", ("full_attention", 1): "R", ("full_attention", 0): "N"}
