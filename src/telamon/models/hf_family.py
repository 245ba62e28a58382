"""What a family says so that Hugging Face's checkpoints can be read and written."""

import abc
import re
from collections.abc import Collection
from typing import Any, ClassVar, Self

from telamon.config.schema import ModelConfig
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_weights import HfTensor, Names, further_tables, hf_tensors, tied_head
from telamon.models.weights import Model

_BUFFERS = r".*rotary_emb\.inv_freq"
"""Old files store what follows from the config."""


class HfFamily(ModelConfig, abc.ABC):
    """A family with a Hugging Face form: its config, both ways, and one table of tensor names that serves both."""

    hf_model_types: ClassVar[tuple[str, ...]]
    """Values of `model_type` that the family reads; the first is what it writes."""
    hf_architecture: ClassVar[str]
    """Transformers' class, as exports name it."""
    hf_architectures: ClassVar[tuple[str, ...]] = ()
    """Other classes whose files can be read."""
    hf_defaults: ClassVar[dict[str, Any]] = {}
    """What transformers takes for attributes that a config.json leaves out."""
    hf_around: ClassVar[tuple[str, ...]] = ()
    """Attributes of a larger model that has the text model within it, which change nothing of the latter."""
    hf_names: ClassVar[Names]
    """Which tensor holds which weight; entries that a model has no weight for are not used."""
    hf_prefixes: ClassVar[dict[str, str]] = {}
    """Beginnings of names in other files of the family -> those of `hf_names`."""
    hf_skipped: ClassVar[tuple[str, ...]] = ()
    """Patterns of tensors that the family's files hold and the text model does not need."""

    @classmethod
    @abc.abstractmethod
    def from_hf(cls, hf: HfAttributes) -> Self:
        """The sizes that a config.json states; every attribute that is read is ticked off in `hf`."""

    @abc.abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """The attributes of a config.json that say what the model is."""

    def canonical(self, name: str) -> str | None:
        """A tensor's name as `hf_names` spells it; None for one that is not needed."""
        if any(re.fullmatch(pattern, name) for pattern in (*self.hf_skipped, _BUFFERS)):
            return None
        for beginning, ours in self.hf_prefixes.items():
            if name.startswith(beginning):
                return ours + name.removeprefix(beginning)
        return name

    def as_stored(self, names: Collection[str]) -> Self:
        """The sizes of a file that holds these tensors, by their canonical names, where it may lack a part that its config.json speaks of."""
        return self

    def tensors(self, model: Model) -> list[HfTensor]:
        """The tensors of the family's checkpoint, layer by layer, and the weights of `model` that each holds."""
        return hf_tensors(self.hf_names, model)

    def copies(self, model: Model) -> dict[str, str]:
        """Tensors that the family's files hold though they only repeat others -> those, by name."""
        return further_tables(self.hf_names, model)

    def tied(self, model: Model) -> dict[str, str]:
        """The same of a tied head, which some files hold."""
        return tied_head(self.hf_names, model)
