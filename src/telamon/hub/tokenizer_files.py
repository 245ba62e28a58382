"""The tokenizer of a run as files that transformers' AutoTokenizer and vLLM load."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from telamon.data.chat_template import find_template
from telamon.data.tokenizer import PAD, load_tokenizer
from telamon.hub.safetensors_folder import read_json

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class Specials:
    """Ids of a trained tokenizer's special tokens."""

    bos: int | None
    eos: int | None
    pad: int | None

    def attributes(self) -> dict[str, int]:
        """As config.json and generation_config.json spell them."""
        ids = {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}
        return {name: number for name, number in ids.items() if number is not None}


def copy_tokenizer(source: Path, destination: Path) -> None:
    """The files of an imported model's tokenizer, as they came."""
    shutil.copytree(source, destination, dirs_exist_ok=True)


def write_tokenizer(source: Path, destination: Path, *, longest: int) -> Specials:
    """A trained run's tokenizer, with what transformers needs to know beside tokenizer.json.

    Training begins every document with BOS, and so does `telamon generate`; the file says so too where it said nothing, or a prompt given
    to transformers would lack it.

    Args:
        source: a folder with a tokenizer.json, or such a file.
        destination: the export's folder.
        longest: tokens the model was trained on at a time.
    """
    import tokenizers as hf

    tokenizer = load_tokenizer(str(source))
    given = source if source.is_dir() else source.parent
    inner = hf.Tokenizer.from_file(str(source / _TOKENIZER if source.is_dir() else source))
    specials = Specials(tokenizer.bos_id, tokenizer.eos_id, inner.token_to_id(PAD))
    if specials.bos is not None and inner.post_processor is None:
        bos = inner.id_to_token(specials.bos)
        inner.post_processor = hf.processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, specials.bos)]
        )
    inner.save(str(destination / _TOKENIZER))
    ids = {"bos_token": specials.bos, "eos_token": specials.eos, "pad_token": specials.pad}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        **{name: None if number is None else inner.id_to_token(number) for name, number in ids.items()},
        **(read_json(given / _CONFIG) if (given / _CONFIG).is_file() else {}),
    }
    (destination / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    template = find_template(source)
    if template is not None:
        template.export(destination)
    return specials
