"""Model presets against what was published of them: the number of parameters, and the sizes that are easily got wrong."""

import gc

import jax
import numpy as np
import pytest

from telamon.config import presets
from telamon.config.load import load_run, plain
from telamon.config.schema import ModelConfig
from telamon.models.hf import config_from_hf
from telamon.models.hf_family import HfFamily
from telamon.models.mixture import MixtureSizes
from telamon.models.weights import Model

PRESETS = presets.names("models")


def preset(name: str) -> ModelConfig:
    return load_run(overrides=[f"model.preset={name}"]).config.model


def mixers(name: str) -> list:
    """The attention of each layer."""
    return [block.mixer for block in preset(name).spec().blocks]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_builds_a_model_of_exactly_the_published_number_of_parameters(name):
    """Counted as the sum of the tree's leaf sizes, without making one. Where publishers round, the preset states the whole number."""
    gc.collect()  # other tests' arrays, or they would hide an allocation as they go
    model, before = preset(name), len(jax.live_arrays())
    assert model.published_parameters is not None, f"presets/models/{name}.yml needs published_parameters"
    assert Model(model.spec()).parameter_count == model.published_parameters
    assert len(jax.live_arrays()) <= before, "nothing may be allocated"


@pytest.mark.parametrize("name", PRESETS)
def test_a_mixture_has_exactly_the_published_number_of_active_parameters(name):
    """All but the experts that a token does not go to, with both tables; in a model without experts every parameter is active."""
    model = preset(name)
    counted = Model(model.spec())
    if any(block.ffn.kind == "moe" for block in model.spec().blocks):
        assert isinstance(model, MixtureSizes)
        assert counted.active_parameters == model.published_active_parameters
        assert counted.active_parameters < counted.parameter_count
    else:
        assert counted.active_parameters == counted.parameter_count


# Totals and active parameters, summed by hand from published sizes.
MIXTURES = {
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "mixtral-8x22b": (140_630_071_296, 39_161_468_928),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-30b-a3b-2507": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "qwen3-235b-a22b-2507": (235_093_634_560, 22_190_763_520),
    "qwen3-coder-480b-a35b": (480_154_875_392, 35_474_765_312),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912),
    "llama4-scout": (107_769_861_120, 17_172_894_720),
    "llama4-maverick": (400_711_848_960, 17_184_691_200),
    "deepseek-v2-lite-16b": (15_706_484_224, 2_661_150_208),
    "deepseek-v2-236b": (235_741_434_880, 21_375_800_320),
    "deepseek-v3-671b": (671_026_419_200, 37_552_297_472),
    "kimi-k2-1t": (1_026_408_232_448, 32_861_500_928),
}


@pytest.mark.parametrize("name", sorted(MIXTURES.keys() & set(PRESETS)))
def test_mixtures_have_the_sizes_that_were_published_whatever_their_presets_say(name):
    model = Model(preset(name).spec())
    assert (model.parameter_count, model.active_parameters) == MIXTURES[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_through_a_config_json_unchanged(name):
    model = preset(name)
    assert isinstance(model, HfFamily)
    again = config_from_hf(model.to_hf())
    aside = {"preset", "published_parameters", "published_active_parameters", "vocab_multiple"}  # which a config.json has no place for
    assert _without(again, aside) == _without(model, aside)


def _without(model: ModelConfig, names: set[str]) -> dict:
    return {name: value for name, value in plain(model).items() if name not in names}


# The layers' windows, first to last, one letter a layer: S within the window, G without one.
LAYERS = {
    "gemma-7b": (None, "G" * 28),
    "gemma2-2b": (4096, "SG" * 13),
    "gemma2-27b": (4096, "SG" * 23),
    "gemma3-270m": (512, "SSSSSG" * 3),
    "gemma3-1b": (512, "SSSSSG" * 4 + "SS"),
    "gemma3-4b": (1024, "SSSSSG" * 5 + "SSSS"),
    "gemma3-12b": (1024, "SSSSSG" * 8),
    "gemma3-27b": (1024, "SSSSSG" * 10 + "SS"),
    "mistral-7b-v0.1": (4096, "S" * 32),
    "mistral-7b-v0.2": (None, "G" * 32),
    "mistral-7b-v0.3": (None, "G" * 32),
    "qwen2.5-7b": (None, "G" * 28),
    "qwen3-8b": (None, "G" * 36),
    "llama3.1-8b": (None, "G" * 32),
    "olmo2-7b": (None, "G" * 32),
    "olmo3-7b": (4096, "SSSG" * 8),
    "olmo3-32b": (4096, "SSSG" * 16),
    "gpt-oss-20b": (128, "SG" * 12),
    "gpt-oss-120b": (128, "SG" * 18),
}


@pytest.mark.parametrize(("name", "window", "letters"), [(name, *expected) for name, expected in LAYERS.items()])
def test_windows_are_on_the_layers_that_have_them(name, window, letters):
    """The last layers of Gemma 3's 1b, 4b and 27b slide: their patterns end in the middle."""
    assert [mixer.window for mixer in mixers(name)] == [window if letter == "S" else None for letter in letters]


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gemma-2b", 256**-0.5),
        ("gemma2-2b", 256**-0.5),
        ("gemma2-9b", 256**-0.5),
        ("gemma2-27b", 144**-0.5),
        ("gemma3-270m", 256**-0.5),
        ("gemma3-12b", 256**-0.5),
        ("gemma3-27b", 168**-0.5),
        ("qwen3-0.6b", 128**-0.5),
        ("gpt3-175b", 128**-0.5),
    ],
)
def test_scores_are_scaled_as_in_training(name, scale):
    """Gemma 2 27b and Gemma 3 27b divide by the root of width / heads, whatever the size of a head."""
    for mixer in mixers(name):
        assert (mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "softcap", "final"),
    [("gemma-7b", None, None), ("gemma2-9b", 50.0, 30.0), ("gemma2-27b", 50.0, 30.0), ("gemma3-4b", None, None)],
)
def test_only_gemma_2_caps_scores_and_logits(name, softcap, final):
    assert {mixer.softcap for mixer in mixers(name)} == {softcap}
    assert preset(name).spec().final_softcap == final


@pytest.mark.parametrize(
    ("name", "theta", "factor"),
    [
        ("llama2-7b", 1e4, None),
        ("llama3-8b", 5e5, None),
        ("llama3.1-8b", 5e5, 8),
        ("llama3.1-405b", 5e5, 8),
        ("llama3.2-1b", 5e5, 32),
        ("llama3.2-3b", 5e5, 32),
        ("llama3.3-70b", 5e5, 8),
        ("smollm2-135m", 1e5, None),
        ("smollm2-1.7b", 1.3e5, None),
        ("mistral-7b-v0.1", 1e4, None),
        ("mistral-7b-v0.2", 1e6, None),
        ("mistral-7b-v0.3", 1e6, None),
        ("qwen2.5-72b", 1e6, None),
        ("qwen3-4b", 1e6, None),
        ("qwen3-4b-2507", 5e6, None),
        ("olmo2-13b", 5e5, None),
        ("olmo3-7b-pt", 5e5, None),
    ],
)
def test_rotary_positions_of_models_whose_layers_are_alike(name, theta, factor):
    """By hand: the slowest pair turns theta^-(H-2)/H a position, divided by the factor where the text was made longer."""
    for rope in {mixer.rope for mixer in mixers(name)}:
        head = mixers(name)[0].head_dim
        frequencies = rope.inverse_frequencies(head)
        assert frequencies[0] == 1.0, "the fastest pair is never stretched"
        assert frequencies[-1] == pytest.approx(theta ** (-(head - 2) / head) / (factor or 1), rel=1e-6)
        assert rope.amplitude == 1.0


@pytest.mark.parametrize(
    ("name", "stretched"), [("gemma3-270m", 1), ("gemma3-1b", 1), ("gemma3-4b", 8), ("gemma3-12b", 8), ("gemma3-27b", 8)]
)
def test_gemma_3_has_two_kinds_of_rotary_positions(name, stretched):
    """Sliding layers turn with base 10,000; global ones with 1,000,000, and from 4b on eight times slower."""
    for mixer in mixers(name):
        theta, factor = (1e4, 1) if mixer.window else (1e6, stretched)
        plain = theta ** (-np.arange(0, mixer.head_dim, 2) / mixer.head_dim)
        np.testing.assert_allclose(mixer.rope.inverse_frequencies(mixer.head_dim), plain / factor, rtol=1e-6)


@pytest.mark.parametrize("name", ["olmo3-7b", "olmo3-32b"])
def test_olmo_3_stretches_its_global_layers_alone(name):
    """YaRN by 8 from 8192 tokens: pairs up to 18 are kept and those from 35 divided by 8; cosines grow by 0.1 ln 8 + 1."""
    plain = 5e5 ** (-np.arange(64) / 64)
    for mixer in mixers(name):
        frequencies = mixer.rope.inverse_frequencies(128)
        if mixer.window:
            np.testing.assert_allclose(frequencies, plain, rtol=1e-6)
            assert mixer.rope.amplitude == 1.0
        else:
            np.testing.assert_allclose(frequencies[:19], plain[:19], rtol=1e-6)
            np.testing.assert_allclose(frequencies[35:], plain[35:] / 8, rtol=1e-6)
            assert mixer.rope.amplitude == pytest.approx(1.2079441541679836, rel=1e-12)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss_stretches_all_layers_without_rounding_the_band(name):
    """YaRN by 32 from 4096 tokens: the band of pairs of a head of 64 ends at 8.09 and 17.40; cosines grow by 0.1 ln 32 + 1."""
    plain = 150_000.0 ** (-np.arange(32) / 32)
    slow = np.clip((np.arange(32) - 8.092779) / (17.398025 - 8.092779), 0, 1)
    [rope] = {mixer.rope for mixer in mixers(name)}
    np.testing.assert_allclose(rope.inverse_frequencies(64), plain * (1 - slow) + plain / 32 * slow, rtol=1e-5)
    assert rope.amplitude == pytest.approx(1.3465735902799727, rel=1e-12)
    assert all(mixer.sinks and mixer.qkv_bias and mixer.out_bias for mixer in mixers(name))


@pytest.mark.parametrize(("name", "normed", "mixtures"), [("llama4-scout", True, "M" * 48), ("llama4-maverick", False, "DM" * 24)])
def test_llama_4_sees_chunks_with_rotation_and_everything_without(name, normed, mixtures):
    """Layers 3, 7, ... see everything, are not rotated, and grow their queries; norms, where there are any, stand after the rotation."""
    for layer, mixer in enumerate(mixers(name)):
        if layer % 4 == 3:
            assert (mixer.chunk, mixer.rope, mixer.qk_norm) == (None, None, None)
            assert (mixer.temperature.scale, mixer.temperature.floor) == (0.1, 8192)
        else:
            assert (mixer.chunk, mixer.rope.pairs, mixer.temperature) == (8192, "interleaved", None)
            assert mixer.qk_norm_place == "after" and (mixer.qk_norm is not None) == normed
    blocks = preset(name).spec().blocks
    assert "".join("M" if block.ffn.kind == "moe" else "D" for block in blocks) == mixtures
    assert {block.ffn.d_ff for block in blocks} == ({8192} if normed else {16_384, 8192})


@pytest.mark.parametrize(("name", "factor"), [("llama4-scout", 16), ("llama4-maverick", 1)])
def test_scout_keeps_or_stretches_a_wavelength_whole(name, factor):
    """The file's own constants, 16 with equal ends of the band, and not Llama 3.1's."""
    plain = 500_000.0 ** (-np.arange(64) / 64)
    stretched = 2 * np.pi / plain > 8192
    rope = mixers(name)[0].rope
    np.testing.assert_allclose(rope.inverse_frequencies(128), np.where(stretched, plain / factor, plain), rtol=1e-6)


# Width of all query heads, of all key-value heads, rows of the embedding table, epsilon of the norms.
SIZES = {
    "gemma-2b": (2048, 256, 256_000, 1e-6),
    "gemma3-1b": (1024, 256, 262_144, 1e-6),
    "gemma3-4b": (2048, 1024, 262_208, 1e-6),
    "llama3.2-1b": (2048, 512, 128_256, 1e-5),
    "mistral-7b-v0.3": (4096, 1024, 32_768, 1e-5),
    "qwen2.5-3b": (2048, 256, 151_936, 1e-6),
    "qwen2.5-7b": (3584, 512, 152_064, 1e-6),
    "qwen2.5-14b": (5120, 1024, 152_064, 1e-5),
    "qwen3-0.6b": (2048, 1024, 151_936, 1e-6),
    "qwen3-32b": (8192, 1024, 151_936, 1e-6),
    "olmo2-1b": (2048, 2048, 100_352, 1e-6),
    "olmo3-7b": (4096, 4096, 100_278, 1e-6),
    "gpt3-175b": (12_288, 12_288, 50_304, 1e-5),
    "gpt-oss-20b": (4096, 512, 201_088, 1e-5),
    "llama4-scout": (5120, 1024, 202_048, 1e-5),
    "llama4-maverick": (5120, 1024, 202_048, 1e-5),
}


@pytest.mark.parametrize(("name", "sizes"), SIZES.items())
def test_sizes_that_a_count_alone_does_not_tell(name, sizes):
    spec = preset(name).spec()
    mixer = spec.blocks[0].mixer
    assert (mixer.n_heads * mixer.head_dim, mixer.n_kv_heads * mixer.head_dim, spec.vocab_size, spec.blocks[0].norm.eps) == sizes


@pytest.mark.parametrize(
    ("name", "tied"),
    [("llama3.2-3b", True), ("llama3.1-8b", False), ("qwen2.5-3b", True), ("qwen2.5-7b", False), ("qwen3-4b", True), ("gemma2-9b", True)],
)
def test_small_models_share_their_table_with_the_head(name, tied):
    assert preset(name).tie_embeddings is tied
