"""What a model is, as data: sizes, and a list of blocks.

The list is run-length encoded into stacks of a repeating pattern (`stacks`); each stack's weights carry a leading layer
axis and run under one scan, so that compile time and program size do not grow with depth.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from telamon.config.schema import Positive, Section
from telamon.layers.norm import NormConfig
from telamon.layers.parts import AnyFfn, AnyMixer

_LONGEST_PATTERN = 16


class BlockSpec(Section):
    """A block: `x += post(mixer(pre(x)))`, then `x += post(ffn(pre(x)))`, with norms where `norms` says."""

    mixer: AnyMixer = Field(description="Mixes positions.")
    ffn: AnyFfn = Field(description="Acts on each position.")
    norm: NormConfig = Field(default=NormConfig(), description="Which norm the block has.")
    norms: Literal["pre", "post", "sandwich"] = Field(
        default="pre", description="pre: before each part (Llama); post: behind it, nothing before (OLMo 2); sandwich: both (Gemma 2)."
    )


@dataclass(frozen=True)
class StackSpec:
    """A pattern of blocks, repeated."""

    pattern: tuple[BlockSpec, ...]
    repeats: int


class ModelSpec(Section):
    """A decoder: embedding, blocks, final norm, head."""

    vocab_size: Positive = Field(description="Tokens V.")
    vocab_multiple: Positive = Field(default=1, description="The tables' rows are rounded up to a multiple of this.")
    d_model: Positive = Field(description="Width D of the residual stream.")
    blocks: tuple[BlockSpec, ...] = Field(min_length=1, description="The L blocks, first to last.")
    norm: NormConfig = Field(default=NormConfig(), description="The final norm.")
    tie_embeddings: bool = Field(default=False, description="The embedding table is the output head.")
    embedding_scale: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Factor on looked-up embeddings, rounded to the type of activations (Gemma: the root of D)."
    )
    learned_positions: Positive | None = Field(
        default=None, description="Rows of a learned table of positions added to the embeddings (GPT); none: no table."
    )
    final_softcap: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Logits go through softcap * tanh(logit / softcap) (Gemma 2); none: as they are."
    )
    mtp: tuple[BlockSpec, ...] = Field(
        default=(), description="For each token beyond the next that training predicts too, the block that does (see `telamon.models.mtp`)."
    )

    @property
    def main(self) -> "ModelSpec":
        """The model that generates: without what only predicts further tokens."""
        return self.model_copy(update={"mtp": ()})

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table and columns of the head: V, and spare ones that stand for no token."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def stacks(self) -> tuple[StackSpec, ...]:
        """The blocks as the fewest scans: at each point the pattern that covers most blocks, the shortest where several do.

        `[dense] * 3 + [moe] * 58` is two stacks; 26 blocks of 5 local and 1 global are a pattern of six, four times, and a
        remainder of one block, twice.
        """
        stacks, start = [], 0
        while start < len(self.blocks):
            rest = self.blocks[start:]
            period, repeats = max(
                ((p, _repeats(rest, p)) for p in range(1, min(_LONGEST_PATTERN, len(rest)) + 1)),
                key=lambda found: (found[0] * found[1] if found[1] > 1 or found[0] == 1 else 0, -found[0]),
            )
            stacks.append(StackSpec(pattern=rest[:period], repeats=repeats))
            start += period * repeats
        return tuple(stacks)


def _repeats(blocks: tuple[BlockSpec, ...], period: int) -> int:
    """How often the first `period` blocks repeat from the start."""
    count = 1
    while blocks[count * period : (count + 1) * period] == blocks[:period]:
        count += 1
    return count
