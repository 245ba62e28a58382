"""Rotary positions as Hugging Face's config.json spells them, in both spellings.

Old: `rope_theta` beside `rope_scaling`. New (transformers 5): `rope_parameters`, which holds both. Where both are there, the
old scaling counts, as in transformers.
"""

from typing import Any

from telamon.layers.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from telamon.models.hf_config import HfAttributes, Values

_ORIGINAL = "original_max_position_embeddings"


def read_rope(hf: HfAttributes, *, theta: float = 10_000.0) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as fields of `RotarySizes`, of a model whose layers all have the same rotary positions; `theta` where no base is stated."""
    parameters, scaling = hf.dictionary("rope_parameters"), hf.dictionary("rope_scaling")
    values = hf.inner("rope_scaling" if scaling else "rope_parameters", scaling or parameters)
    return read_parameters(hf, values, theta=hf.number("rope_theta", theta))


def read_parameters(hf: HfAttributes, values: Values, *, theta: float) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from one dictionary of rotary parameters; `theta` where it states none.

    Every key is used or refused.
    """
    values.must_be("partial_rotary_factor", 1.0, because="this family turns whole heads")
    kind = values.get("rope_type", None) or values.get("type", None) or "default"
    values.get("type", None)  # some files say it twice
    stated = values.number("rope_theta", theta)
    scaling = _read_scaling(hf, values, kind)
    values.finish()
    return {"rope_theta": stated, "rope_scaling": scaling}


def _read_scaling(hf: HfAttributes, values: Values, kind: str) -> RopeScaling | None:
    if kind == "default":
        # Left over from an edit of the file; transformers ignores them as well.
        for name in ("factor", _ORIGINAL):
            values.get(name, None)
        return None
    if kind == "linear":
        values.get(_ORIGINAL, None)  # transformers writes it and does not use it
        return LinearScaling(factor=values.number("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=values.number("factor"),
            low_freq_factor=values.number("low_freq_factor"),
            high_freq_factor=values.number("high_freq_factor"),
            original_length=_original_length(hf, values),
        )
    if kind == "yarn":
        original, factor = _original_length(hf, values), values.number("factor", None)
        return YarnScaling(
            factor=hf.size("max_position_embeddings") / original if factor is None else factor,
            original_length=original,
            beta_fast=values.number("beta_fast", None) or 32.0,
            beta_slow=values.number("beta_slow", None) or 1.0,
            truncate=values.get("truncate", True),
            attention_factor=values.get("attention_factor", None),
            mscale=values.get("mscale", None),
            mscale_all_dim=values.get("mscale_all_dim", None),
        )
    raise values.refuse("rope_type", kind, "rotary types that are built: default, linear, llama3, yarn")


def _original_length(hf: HfAttributes, values: Values) -> int:
    """What is stated, or the model's length."""
    stated = values.size(_ORIGINAL, None)
    return hf.size("max_position_embeddings") if stated is None else stated


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The old spelling, which every version of transformers and vLLM reads."""
    return {"rope_theta": theta, "rope_scaling": None if scaling is None else write_scaling(scaling)}


def write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """A scaling in Hugging Face's terms."""
    values = scaling.model_dump(exclude_none=True)
    spelling = {"kind": "rope_type", "original_length": _ORIGINAL}
    return {spelling.get(name, name): value for name, value in values.items()}
