"""DeepSeek V2, V3, V3.1 and R1 (DeepSeek-AI 2024, "DeepSeek-V2" and "DeepSeek-V3"), and Kimi K2 (Kimi team 2025), which is built as V3:
latent attention, and a mixture of experts in all layers but the first, beside an MLP that every token goes through.

V2 scores experts by a softmax and takes the best of the best groups; V3 by a sigmoid, with a bias that evens their load out, and makes
the weights of the chosen sum to one.
"""

import re
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from telamon.config.registry import register_family
from telamon.config.schema import Positive
from telamon.layers.latent_attention import LatentAttentionConfig
from telamon.layers.mlp import GatedMLPConfig
from telamon.layers.moe import MoEConfig
from telamon.layers.rope import Pairs, RopeConfig
from telamon.layers.router import RouterConfig
from telamon.models.dense import PRE_NORM_NAMES
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import Names
from telamon.models.mixture import EXPERT_NAMES, MixtureBesideDense
from telamon.models.spec import ModelSpec

_LAYER = "model.layers.{layer}"

DEEPSEEK_NAMES: Names = {
    **PRE_NORM_NAMES,
    **EXPERT_NAMES,
    "mixer.query_down": f"{_LAYER}.self_attn.q_a_proj.weight",
    "mixer.query_down_bias": f"{_LAYER}.self_attn.q_a_proj.bias",
    "mixer.query_norm.scale": f"{_LAYER}.self_attn.q_a_layernorm.weight",
    "mixer.query_up": f"{_LAYER}.self_attn.q_b_proj.weight",
    "mixer.kv_down": f"{_LAYER}.self_attn.kv_a_proj_with_mqa.weight",
    "mixer.kv_down_bias": f"{_LAYER}.self_attn.kv_a_proj_with_mqa.bias",
    "mixer.kv_norm.scale": f"{_LAYER}.self_attn.kv_a_layernorm.weight",
    "mixer.kv_up": f"{_LAYER}.self_attn.kv_b_proj.weight",
    "ffn.router.selection_bias": f"{_LAYER}.mlp.gate.e_score_correction_bias",
    "ffn.shared.gate": f"{_LAYER}.mlp.shared_experts.gate_proj.weight",
    "ffn.shared.up": f"{_LAYER}.mlp.shared_experts.up_proj.weight",
    "ffn.shared.down": f"{_LAYER}.mlp.shared_experts.down_proj.weight",
}

MTP_NAMES: Names = {
    "mtp.enorm.scale": f"{_LAYER}.enorm.weight",
    "mtp.hnorm.scale": f"{_LAYER}.hnorm.weight",
    "mtp.projection": f"{_LAYER}.eh_proj.weight",
    "mtp.norm.scale": f"{_LAYER}.shared_head.norm.weight",
    "mtp.embedding": f"{_LAYER}.embed_tokens.weight",
    "mtp.head": f"{_LAYER}.shared_head.head.weight",
}
"""What a layer for multi-token prediction, numbered behind the model's own, has beside a block; its tables repeat the model's."""


class DeepseekSizes(MixtureBesideDense):
    """What V2 and V3 share."""

    q_rank: Positive | None = Field(default=None, description="Width of the latent of queries; none: they come from the stream itself.")
    kv_rank: Positive = Field(default=64, description="Width of the latent of keys and values.")
    nope_dim: Positive = Field(default=32, description="Features of a head's queries and keys that are not rotated.")
    rope_dim: Annotated[int, Field(gt=0, multiple_of=2)] = Field(default=16, description="Features of a head's queries and keys that are.")
    value_dim: Positive = Field(default=32, description="Features of a head's values.")
    attention_bias: bool = Field(default=False, description="Biases on attention's maps from and to the stream.")
    n_shared: Annotated[int, Field(ge=0)] = Field(
        default=1, description="Experts that every token goes through, as one MLP of this many times d_expert; 0: none."
    )
    n_dense: Annotated[int, Field(ge=0)] = Field(default=1, description="First layers, which have a gated MLP instead of experts.")
    n_groups: Positive = Field(default=1, description="Groups of consecutive experts; a token goes to experts of its best groups only.")
    top_groups: Positive = Field(default=1, description="Groups whose experts a token may go to.")
    expert_scale: Annotated[float, Field(gt=0)] = Field(default=1.0, description="Factor on the weights of the chosen experts.")

    beside_weights: ClassVar[frozenset[str]] = MixtureBesideDense.beside_weights | {"n_groups", "top_groups"}
    hf_names: ClassVar[Names] = DEEPSEEK_NAMES
    hf_defaults: ClassVar[dict[str, Any]] = MixtureBesideDense.hf_defaults | {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    hf_scoring: ClassVar[Literal["softmax", "sigmoid"]]
    """How experts are scored, as files have it in `scoring_func`."""

    @model_validator(mode="after")
    def _groups_to_choose(self) -> Self:
        if self.n_experts % self.n_groups:
            allowed = [n for n in range(1, self.n_experts + 1) if self.n_experts % n == 0]
            raise ValueError(
                f"model.n_experts={self.n_experts} is not divisible by model.n_groups={self.n_groups}; allowed for n_groups: {allowed}"
            )
        if self.top_groups > self.n_groups:
            raise ValueError(f"model.top_groups={self.top_groups} is more than the model.n_groups={self.n_groups} that there are")
        reached = self.top_groups * self.n_experts // self.n_groups
        if self.top_k > reached:
            raise ValueError(f"model.top_k={self.top_k} is more than the {reached} experts of model.top_groups={self.top_groups}")
        return self

    def shrunk(self) -> Self:
        """See `ModelConfig`; a dense layer and one with experts, and groups where there were some."""
        groups = min(self.n_groups, 2)
        sizes = {"q_rank": self.q_rank and 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
        experts = {"n_experts": 4 * groups, "n_groups": groups, "top_groups": 1, "n_shared": min(self.n_shared, 1)}
        return super().shrunk().model_copy(update=sizes | experts | {"n_dense": min(self.n_dense, 1)})

    # The architecture

    def rope(self, *, windowed: bool) -> RopeConfig:
        """See `RotarySizes`."""
        return RopeConfig(theta=self.rope_theta, scaling=self.rope_scaling, pairs="interleaved")

    def attention(self, *, windowed: bool = False) -> LatentAttentionConfig:
        """See `RotarySizes`. Norms of latents have an epsilon of their own, whatever the model's."""
        return LatentAttentionConfig(
            n_heads=self.n_heads,
            q_rank=self.q_rank,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            rope=self.rope(windowed=windowed),
            bias=self.attention_bias,
        )

    def mixture(self) -> MoEConfig:
        """See `MixtureSizes`."""
        shared = GatedMLPConfig(d_ff=self.n_shared * self.d_expert) if self.n_shared else None
        return MoEConfig(router=self.router(), d_ff=self.expert_width, shared=shared)

    def mixture_layers(self) -> tuple[bool, ...]:
        """See `MixtureSizes`."""
        return tuple(layer >= self.n_dense for layer in range(self.n_layers))

    # Hugging Face

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `RotarySizes`."""
        hf.harmless("aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "pretraining_tp")  # of training and of the authors' own code
        nope, rope, heads = hf.size("qk_nope_head_dim"), hf.size("qk_rope_head_dim"), hf.size("num_attention_heads")
        hf.must_be("num_key_value_heads", heads, because="every head has keys and values of its own, made of the latent")
        hf.must_be("head_dim", rope, because="transformers calls the rotated features so")
        hf.must_be("qk_head_dim", nope + rope, because="a query has rotated features and others")
        hf.must_be("mlp_bias", False, because="the family has no biases in its MLPs")
        hf.must_be("moe_layer_freq", 1, because="behind the dense layers, all have experts")
        hf.must_be("scoring_func", cls.hf_scoring, because="the family scores experts so")
        return super().read_hf(hf) | {
            "q_rank": None if hf.get("q_lora_rank") is None else hf.size("q_lora_rank"),
            "kv_rank": hf.size("kv_lora_rank"),
            "nope_dim": nope,
            "rope_dim": rope,
            "value_dim": hf.size("v_head_dim"),
            "attention_bias": hf.flag("attention_bias", False),
            "n_shared": 0 if hf.get("n_shared_experts") is None else hf.count("n_shared_experts"),
            "n_dense": hf.count("first_k_dense_replace"),
            "expert_scale": hf.number("routed_scaling_factor"),
        }

    def to_hf(self) -> dict[str, Any]:
        """See `RotarySizes`."""
        return super().to_hf() | {
            "num_key_value_heads": self.n_heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "attention_bias": self.attention_bias,
            "n_routed_experts": self.n_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.d_expert,
            "n_shared_experts": self.n_shared or None,
            "first_k_dense_replace": self.n_dense,
            "moe_layer_freq": 1,
            "scoring_func": self.hf_scoring,
            "n_group": self.n_groups,
            "topk_group": self.top_groups,
            "routed_scaling_factor": self.expert_scale,
        }


@register_family
class DeepseekV2Config(DeepseekSizes):
    """DeepSeek V2's sizes."""

    family: str = Field(default="deepseek_v2", description="Family of the model.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    hf_architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    hf_scoring: ClassVar[Literal["softmax", "sigmoid"]] = "softmax"
    hf_defaults: ClassVar[dict[str, Any]] = DeepseekSizes.hf_defaults | {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    }

    def router(self) -> RouterConfig:
        """See `MixtureSizes`."""
        return RouterConfig(
            n_experts=self.n_experts,
            top_k=self.top_k,
            n_groups=self.n_groups,
            top_groups=self.top_groups,
            group_score="best",
            renormalize=False,
            scale=self.expert_scale,
        )

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `RotarySizes`."""
        hf.must_be("norm_topk_prob", False, because="the weights of the chosen experts are not made to sum to one")
        hf.must_be("rope_interleave", True, because="rotary pairs are neighbours")
        hf.must_be("topk_method", "greedy", "group_limited_greedy", because="experts are chosen so")
        fields = super().read_hf(hf)
        if hf.get("topk_method") != "group_limited_greedy":
            hf.harmless("n_group", "topk_group")
            return fields
        return fields | {"n_groups": hf.size("n_group"), "top_groups": hf.size("topk_group")}

    def to_hf(self) -> dict[str, Any]:
        """See `RotarySizes`."""
        return super().to_hf() | {"topk_method": "greedy" if self.n_groups == 1 else "group_limited_greedy", "norm_topk_prob": False}


@register_family
class DeepseekV3Config(DeepseekSizes):
    """Sizes of DeepSeek V3, V3.1 and R1."""

    family: str = Field(default="deepseek_v3", description="Family of the model.")
    renormalize: bool = Field(default=True, description="Divide a token's weights over its experts by their sum.")
    rope_pairs: Pairs = Field(
        default="interleaved", description="Rotated features that turn together: interleaved (2i and 2i + 1) or halves (i and i + half)."
    )
    mtp_layers: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Layers that predict tokens beyond the next one, in training alone, one token further each (published checkpoints have 1; "
        "the published number of parameters leaves it out). Fewer than the weights of train.init_from have: the others are left out.",
    )

    may_be_fewer: ClassVar[frozenset[str]] = frozenset({"mtp_layers"})
    hf_names: ClassVar[Names] = {**DEEPSEEK_NAMES, **MTP_NAMES}
    hf_model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3",)
    hf_architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    hf_scoring: ClassVar[Literal["softmax", "sigmoid"]] = "sigmoid"
    hf_defaults: ClassVar[dict[str, Any]] = DeepseekSizes.hf_defaults | {
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    }

    @model_validator(mode="after")
    def _two_in_a_group(self) -> Self:
        if 1 < self.n_groups == self.n_experts:
            raise ValueError(
                f"model.n_groups={self.n_groups} leaves one of model.n_experts={self.n_experts} in a group, and groups are ranked by their "
                "two best experts; with 1 all experts are ranked together"
            )
        return self

    def rope(self, *, windowed: bool) -> RopeConfig:
        """See `RotarySizes`."""
        return super().rope(windowed=windowed).model_copy(update={"pairs": self.rope_pairs})

    def router(self) -> RouterConfig:
        """See `MixtureSizes`."""
        return RouterConfig(
            n_experts=self.n_experts,
            top_k=self.top_k,
            score="sigmoid",
            selection_bias=True,
            n_groups=self.n_groups,
            top_groups=self.top_groups,
            group_score="best_two",
            renormalize=self.renormalize,
            scale=self.expert_scale,
        )

    def spec(self) -> ModelSpec:
        """See `RotarySizes`; a layer for multi-token prediction is as one of the model's own at its number would be."""
        numbers = range(self.n_layers, self.n_layers + self.mtp_layers)
        plain = self.block(windowed=False)
        further = tuple(plain if number < self.n_dense else self._with_experts(plain) for number in numbers)
        return super().spec().model_copy(update={"mtp": further})

    def as_stored(self, names: Collection[str]) -> Self:
        """See `HfFamily`. Transformers drops layers for multi-token prediction, and what it saves still names them in its config.json."""
        layers = {int(found[1]) for name in names if (found := re.match(r"model\.layers\.(\d+)\.", name))}
        further = {self.n_layers + depth for depth in range(self.mtp_layers)}
        return self if layers & further else self.model_copy(update={"mtp_layers": 0})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `RotarySizes`."""
        hf.must_be("topk_method", "noaux_tc", because="experts are chosen so")
        return super().read_hf(hf) | {
            "n_groups": hf.size("n_group"),
            "top_groups": hf.size("topk_group"),
            "renormalize": hf.flag("norm_topk_prob", True),
            "rope_pairs": "interleaved" if hf.flag("rope_interleave", True) else "halves",
            "mtp_layers": hf.count("num_nextn_predict_layers", 0),
        }

    def to_hf(self) -> dict[str, Any]:
        """See `RotarySizes`."""
        return super().to_hf() | {
            "topk_method": "noaux_tc",
            "norm_topk_prob": self.renormalize,
            "rope_interleave": self.rope_pairs == "interleaved",
            "num_nextn_predict_layers": self.mtp_layers,
        }


@register_family
class KimiK2Config(DeepseekV3Config):
    """Sizes of Kimi K2, and of the text model of K2.5 and K2.6. Files name V3's class, and a `model_type` that transformers 5 does not know."""

    family: str = Field(default="kimi_k2", description="Family of the model.")

    hf_model_types: ClassVar[tuple[str, ...]] = ("kimi_k2", "kimi_k25")
    hf_architectures: ClassVar[tuple[str, ...]] = ("KimiK25ForConditionalGeneration",)
    hf_prefixes: ClassVar[dict[str, str]] = {"language_model.": ""}
    hf_skipped: ClassVar[tuple[str, ...]] = (r"vision_tower\..*", r"mm_projector\..*", r"multi_modal_projector\..*")
    hf_around: ClassVar[tuple[str, ...]] = (
        *("vision_config", "media_placeholder_token_id", "ignore_index", "auto_map"),
        *("use_unified_vision_chunk", "video_placeholder"),
    )
