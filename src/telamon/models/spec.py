"""What a model is, as data: sizes, and a list of blocks.

The list is run-length encoded into stacks of a repeating pattern (`stacks`); each stack's weights carry a leading layer
axis and run under one scan, so that compile time and program size do not grow with depth.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from telamon.config.schema import Positive, Section
from telamon.layers.parts import AnyFfn, AnyMixer

_LONGEST_PATTERN = 16


class BlockSpec(Section):
    """A pre-norm block: `x += mixer(norm(x))`, then `x += ffn(norm(x))`."""

    mixer: AnyMixer = Field(description="Mixes positions.")
    ffn: AnyFfn = Field(description="Acts on each position.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="Epsilon of the block's RMSNorms.")


@dataclass(frozen=True)
class StackSpec:
    """A pattern of blocks, repeated."""

    pattern: tuple[BlockSpec, ...]
    repeats: int


class ModelSpec(Section):
    """A decoder: embedding, blocks, final norm, head."""

    vocab_size: Positive = Field(description="Rows of the embedding table V.")
    d_model: Positive = Field(description="Width D of the residual stream.")
    blocks: tuple[BlockSpec, ...] = Field(min_length=1, description="The L blocks, first to last.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(default=1e-6, description="Epsilon of the final RMSNorm.")
    tie_embeddings: bool = Field(default=False, description="The embedding table is the output head.")

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
