"""From a Hugging Face config.json to a model."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from telamon.config.registry import families, family
from telamon.errors import ConfigError
from telamon.models.hf_config import HfAttributes
from telamon.models.hf_family import HfFamily


def config_from_hf(raw: Mapping[str, Any], *, source: str = "config.json") -> HfFamily:
    """The sizes of the model that a config.json describes.

    Args:
        raw: the file's contents; multimodal files are read for the text model in their `text_config`.
        source: names the file in messages.

    Raises:
        ConfigError: no family reads this `model_type`, or an attribute is missing, out of range or not known; it is named.
    """
    cls = _family(raw, source)
    whole = HfAttributes(raw, source=source)
    _refuse_packed(whole, source)
    architectures = whole.listed("architectures")
    known = (cls.hf_architecture, *cls.hf_architectures)
    if architectures and not any(name in known for name in architectures):
        raise ConfigError(f"{source}: architectures={architectures} cannot be read; of model_type {raw['model_type']}: {', '.join(known)}")
    if isinstance(text := raw.get("text_config"), Mapping):
        raw = _text_model(raw, text, cls, source)
    hf = HfAttributes(raw, source=source, defaults=cls.hf_defaults)
    _refuse_packed(hf, source)
    hf.must_be("is_encoder_decoder", False, because="there is no encoder")
    hf.must_be("add_cross_attention", False, because="there is no encoder")
    try:
        config = cls.from_hf(hf)
    except ValidationError as error:
        first = error.errors()[0]
        field = f"model.{'.'.join(map(str, first['loc']))}={first['input']!r}: " if first["loc"] else ""
        raise ConfigError(f"{source}: {field}{first['msg'].removeprefix('Value error, ')}") from error
    hf.finish()
    return config


def _refuse_packed(values: HfAttributes, source: str) -> None:
    """An entry that is empty says nothing."""
    if packed := values.dictionary("quantization_config"):
        kind = packed.get("quant_method", "?")
        raise ConfigError(
            f"{source}: quantization_config says the weights are quantised ({kind}); convert them to bfloat16 or float32 first"
        )


def _text_model(raw: Mapping[str, Any], text: Mapping[str, Any], cls: type[HfFamily], source: str) -> dict[str, Any]:
    """The text model's attributes within those of a larger one, whose own are harmless or refused too."""
    around = HfAttributes(raw, source=source, defaults=cls.hf_defaults)
    around.harmless("text_config", "quantization_config", *cls.hf_around)
    # The head belongs to the whole: transformers writes what the text model would do by itself into its part, and does not obey it.
    tied = around.get("tie_word_embeddings")
    around.finish()
    return dict(text) | {"tie_word_embeddings": tied}


def _family(raw: Mapping[str, Any], source: str) -> type[HfFamily]:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{source} lacks model_type, which says what the model is")
    known = hf_families()
    if model_type not in known:
        # No nearest one: the file's word is seldom mistyped, and olmoe is no olmo3.
        raise ConfigError(
            f"{source}: model_type={model_type!r} belongs to no family here; those that can be read: {', '.join(sorted(known))}"
        )
    return known[model_type]


def hf_families() -> dict[str, type[HfFamily]]:
    """The registered families by the `model_type`s they read.

    A user's family takes over only those that its own class names, not what it inherits.
    """
    registered = (family(name) for name in families())
    return {model_type: cls for cls in registered if issubclass(cls, HfFamily) for model_type in vars(cls).get("hf_model_types", ())}
