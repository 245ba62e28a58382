"""What families with mixtures of experts share: how many experts, how a token chooses, and which layers have them."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from telamon.config.schema import Positive
from telamon.layers.moe import MoEConfig
from telamon.layers.parts import FfnConfig
from telamon.layers.router import RouterConfig
from telamon.models.dense import RotarySizes
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import Names
from telamon.models.spec import BlockSpec, ModelSpec

EXPERT_NAMES: Names = {
    "ffn.router.weight": "model.layers.{layer}.mlp.gate.weight",
    "ffn.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "ffn.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "ffn.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}
"""Names of Qwen's and DeepSeek's mixtures, where each expert has tensors of its own."""


class MixtureSizes(RotarySizes):
    """Layers whose ffn is a mixture of experts, each of them as wide as a dense layer's MLP would be."""

    n_experts: Positive = Field(default=8, description="Experts E of a mixture.")
    top_k: Positive = Field(default=2, description="Experts that a token goes to.")
    published_active_parameters: int | None = Field(
        default=None,
        gt=0,
        description="How many of published_parameters work on a token: all but experts that it does not go to; both tables count.",
    )

    beside_weights: ClassVar[frozenset[str]] = RotarySizes.beside_weights | {"top_k", "published_active_parameters"}

    @model_validator(mode="after")
    def _experts_to_choose(self) -> Self:
        if self.top_k > self.n_experts:
            raise ValueError(f"model.top_k={self.top_k} is more than the model.n_experts={self.n_experts} that there are")
        return self

    def shrunk(self) -> Self:
        """See `ModelConfig`; tokens still choose."""
        return super().shrunk().model_copy(update={"n_experts": 4, "top_k": min(self.top_k, 2), "published_active_parameters": None})

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly (see `ModelConfig`)."""
        return super().divided() | {"expert": {"n_experts": self.n_experts}}

    @property
    def expert_width(self) -> int:
        """Hidden width of an expert."""
        return self.d_ff

    def router(self) -> RouterConfig:
        """How tokens choose."""
        return RouterConfig(n_experts=self.n_experts, top_k=self.top_k)

    def mixture(self) -> FfnConfig:
        """The ffn of a layer with experts."""
        return MoEConfig(router=self.router(), d_ff=self.expert_width)

    def mixture_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return (True,) * self.n_layers

    def spec(self) -> ModelSpec:
        """See `RotarySizes`."""
        dense = super().spec()
        pairs = zip(dense.blocks, self.mixture_layers(), strict=True)
        return dense.model_copy(update={"blocks": tuple(self._with_experts(block) if mixes else block for block, mixes in pairs)})

    def _with_experts(self, block: BlockSpec) -> BlockSpec:
        return block.model_copy(update={"ffn": self.mixture()})

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `RotarySizes`."""
        # Transformers' own training; ours is in train.experts.
        hf.harmless("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
        return super().read_hf(hf) | {"n_experts": cls.read_experts(hf), "top_k": hf.size("num_experts_per_tok")}

    @classmethod
    def read_experts(cls, hf: HfAttributes) -> int:
        """The number of experts, which files spell in more ways than one."""
        spellings = [name for name in ("num_local_experts", "num_experts", "n_routed_experts") if name in hf]
        counts = {name: hf.size(name) for name in spellings}
        if len(set(counts.values())) > 1:
            raise hf.refuse(spellings[0], counts[spellings[0]], f"{spellings[1]}={counts[spellings[1]]} says otherwise")
        return hf.size(spellings[0] if spellings else "num_local_experts")


class MixtureBesideDense(MixtureSizes):
    """Families that have both widths: `d_ff` of dense layers, and one of experts."""

    d_expert: Positive = Field(default=256, description="Hidden width F of an expert; d_ff is that of layers without experts.")

    hf_expert_width: ClassVar[str] = "moe_intermediate_size"
    """Attribute for the hidden width of an expert."""

    @property
    def expert_width(self) -> int:
        """See `MixtureSizes`."""
        return self.d_expert

    def shrunk(self) -> Self:
        """See `ModelConfig`."""
        return super().shrunk().model_copy(update={"d_expert": 32})

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly (see `ModelConfig`)."""
        sizes = super().divided()
        return sizes | {"tensor": sizes["tensor"] | {"d_expert": self.d_expert}}

    @classmethod
    def read_hf(cls, hf: HfAttributes) -> dict[str, Any]:
        """See `RotarySizes`."""
        return super().read_hf(hf) | {"d_expert": hf.size(cls.hf_expert_width)}
