import re
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny_gguf as tiny

from telamon.errors import ConfigError, DataError
from telamon.hub import gguf_file
from telamon.hub.gguf_file import GgufFile
from telamon.hub.gguf_names import ARCHITECTURES

# Blocks as ggml-common.h declares them, decoded number by number: the format's definition, not the package's code.


def q8_0(block: bytes) -> list[np.float32]:
    (d,), qs = np.frombuffer(block[:2], np.float16).astype(np.float32), np.frombuffer(block[2:], np.int8)
    return [d * np.float32(q) for q in qs]


def nibbles(qs: bytes) -> list[int]:
    return [q & 15 for q in qs] + [q >> 4 for q in qs]


def q4_0(block: bytes) -> list[np.float32]:
    (d,) = np.frombuffer(block[:2], np.float16).astype(np.float32)
    return [d * np.float32(q - 8) for q in nibbles(block[2:])]


def q4_1(block: bytes) -> list[np.float32]:
    d, m = np.frombuffer(block[:4], np.float16).astype(np.float32)
    return [d * np.float32(q) + m for q in nibbles(block[4:])]


def q4_k(block: bytes) -> list[np.float32]:
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    packed, qs = block[4:16], block[16:]
    numbers = []
    for j in range(8):  # eight groups of 32, each with a scale and a minimum of 6 bits
        if j < 4:
            scale, minimum = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            minimum = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        for q in qs[j // 2 * 32 : j // 2 * 32 + 32]:
            numbers.append(d * np.float32(scale) * np.float32(q >> 4 if j % 2 else q & 15) - dmin * np.float32(minimum))
    return numbers


def q6_k(block: bytes) -> list[np.float32]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    (d,) = np.frombuffer(block[208:], np.float16).astype(np.float32)
    numbers = []
    for i in range(256):
        half, quarter, place = i // 128, i // 32 % 4, i % 32
        byte = low[half * 64 + quarter % 2 * 32 + place]
        q = (byte >> 4 if quarter >= 2 else byte & 15) | (high[half * 32 + place] >> 2 * quarter & 3) << 4
        numbers.append(d * np.float32(scales[i // 16]) * np.float32(q - 32))
    return numbers


BLOCKS = {"Q8_0": (q8_0, (0,)), "Q4_0": (q4_0, (0,)), "Q4_1": (q4_1, (0, 2)), "Q4_K": (q4_k, (0, 2)), "Q6_K": (q6_k, (208,))}


def random_blocks(kind: str, rows: int) -> np.ndarray:
    """u8[rows, bytes] with 512 numbers in a row: random codes, and scales that are finite."""
    rng = np.random.default_rng(5)
    per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, 512 // per_block, size), np.uint8)
    for at in BLOCKS[kind][1]:
        blocks[:, :, at : at + 2] = rng.normal(size=(*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_quantised_numbers_are_those_of_the_format(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    decode, blocks = BLOCKS[kind][0], random_blocks(kind, rows=5)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    expected = [[number for i in range(0, len(row), size) for number in decode(row[i : i + size])] for row in (bytes(r) for r in blocks)]
    path = tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"), {"blk.0.ffn_up.weight": (blocks, kind)})
    with GgufFile(path) as source:
        name = "model.layers.0.mlp.up_proj.weight"
        assert (source.tensors[name].shape, source.tensors[name].dtype) == ((5, 512), "float32")
        with monkeypatch.context() as pieces:
            pieces.setattr(gguf_file, "_NUMBERS_AT_A_TIME", 1024)  # two rows, two, one
            np.testing.assert_array_equal(source.read(name), np.array(expected, np.float32))
        np.testing.assert_array_equal(source.read(name), np.array(expected, np.float32))


def test_a_large_tensor_needs_little_room_beside_the_result(tmp_path: Path):
    blocks = np.zeros((4096, 4096 // 32 * 34), np.uint8)
    with GgufFile(tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"), {"blk.0.attn_q.weight": (blocks, "Q8_0")})) as source:
        tracemalloc.start()
        result = source.read("model.layers.0.self_attn.q_proj.weight")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak - result.nbytes < 20e6 < result.nbytes / 3


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_what_was_quantised_comes_back_within_its_step(tmp_path: Path, kind: str):
    weight = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    quantised = gguf.quantize(weight, gguf.GGMLQuantizationType[kind])
    path = tiny.write(tmp_path / "a.gguf", "qwen3", tiny.sizes("qwen3"), {"blk.0.ffn_up.weight": (quantised, kind)})
    with GgufFile(path) as source:
        step = 2 * np.abs(weight).max() / (255 if kind == "Q8_0" else 15)
        np.testing.assert_allclose(source.read("model.layers.0.mlp.up_proj.weight"), weight, atol=step, rtol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_stay_what_they_are(tmp_path: Path, dtype: type):
    weight = np.random.default_rng(0).normal(size=(6, 20)).astype(dtype)
    path = tiny.write(tmp_path / "a.gguf", "qwen3", tiny.sizes("qwen3"), {"blk.1.ffn_up.weight": weight})
    with GgufFile(path) as source:
        read = source.read("model.layers.1.mlp.up_proj.weight")
        assert read.dtype == dtype and source.tensors["model.layers.1.mlp.up_proj.weight"].dtype == np.dtype(dtype).name
        np.testing.assert_array_equal(read, weight)
        read[:] = 0  # the caller's own, not the file's


def scores(q: np.ndarray, k: np.ndarray, rotate) -> np.ndarray:
    """[N, T, T] products of rotated queries and keys, from heads' outputs [T, N or K, H]."""
    q, k = rotate(q), rotate(k)
    return np.einsum("tnh,snh->nts", q, np.repeat(k, q.shape[1] // k.shape[1], axis=1))


def angles(tokens: int) -> np.ndarray:
    return np.arange(tokens)[:, None, None] * 10_000.0 ** (-np.arange(0, tiny.H, 2) / tiny.H)


def rotate_pairs(x: np.ndarray) -> np.ndarray:
    """Features 2i and 2i+1 are a complex number that turns: how llama.cpp rotates Llama's heads."""
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * angles(len(x)))
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def rotate_halves(x: np.ndarray) -> np.ndarray:
    """Features i and i + H/2 are a complex number that turns: how Hugging Face rotates them."""
    half = tiny.H // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles(len(x)))
    return np.concatenate([turned.real, turned.imag], -1)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_queries_and_keys_give_the_scores_that_the_file_means(tmp_path: Path, arch: str):
    weights = tiny.layer(arch, 0, np.random.default_rng(1))
    for name, rows in (("attn_q", tiny.N * tiny.H), ("attn_k", tiny.K * tiny.H)):
        weights[f"blk.0.{name}.bias"] = np.random.default_rng(rows).normal(size=rows).astype(np.float32)
    x = np.random.default_rng(2).normal(size=(7, tiny.D))
    path = tiny.write(tmp_path / "a.gguf", arch, tiny.sizes(arch), weights)

    def heads(weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return (x @ weight.T + bias).reshape(len(x), -1, tiny.H)

    with GgufFile(path) as source:
        read = {n: heads(*(source.read(f"model.layers.0.self_attn.{n}_proj.{kind}") for kind in ("weight", "bias"))) for n in "qk"}
    stored = {n: heads(weights[f"blk.0.attn_{n}.weight"], weights[f"blk.0.attn_{n}.bias"]) for n in "qk"}
    expected = scores(stored["q"], stored["k"], rotate_pairs if arch == "llama" else rotate_halves)
    np.testing.assert_allclose(scores(read["q"], read["k"], rotate_halves), expected, atol=1e-9)


def test_quantised_rows_are_put_in_order_as_well(tmp_path: Path):
    blocks = random_blocks("Q4_K", rows=16)
    tensors = {"blk.0.attn_k.weight": (blocks, "Q4_K"), "blk.0.attn_v.weight": (blocks, "Q4_K")}
    with GgufFile(tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"), tensors)) as source:
        k, v = (source.read(f"model.layers.0.self_attn.{name}_proj.weight") for name in "kv")
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of the eight rows of a head: first members of the pairs, then second ones
    np.testing.assert_array_equal(k, v[order + [8 + i for i in order]])


@pytest.mark.parametrize("arch", ["gemma", "gemma2", "gemma3"])
def test_gemmas_norms_are_given_without_the_one(tmp_path: Path, arch: str):
    more = {"attention__sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    weights = tiny.model(arch)
    known = tiny.sizes(arch, **{"gemma": {}, "gemma2": more, "gemma3": {"attention__sliding_window": 8}}[arch])
    shifted = {name: w + 1 if name.endswith("norm.weight") else w for name, w in weights.items()}
    with GgufFile(tiny.write(tmp_path / "a.gguf", arch, known, shifted)) as source:
        for name, weight in weights.items():
            hf_name = ARCHITECTURES[arch].hf_name(name)
            assert hf_name is not None
            np.testing.assert_allclose(source.read(hf_name), weight, rtol=0, atol=2**-22 if name.endswith("norm.weight") else 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_are_those_of_the_gguf_package(arch: str):
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], tiny.LAYERS)
    for name in [*tiny.model(arch, tied=arch.startswith("gemma")), "blk.1.attn_q.bias"]:
        hf_name = ARCHITECTURES[arch].hf_name(name)
        assert hf_name is not None and theirs.get_name(hf_name, try_suffixes=(".weight", ".bias")) == name


def test_a_model_is_there_under_hugging_faces_names(tmp_path: Path):
    weights = tiny.model("llama", tied=False)
    with GgufFile(tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"), weights)) as source:
        assert len(source.tensors) == len(weights) == 2 * 9 + 3
        assert source.tensors["lm_head.weight"].shape == (tiny.V, tiny.D)
        assert source.origin == str(tmp_path / "a.gguf") and source.assets == {}
        for name, info in source.tensors.items():
            assert source.read(name).shape == info.shape and source.read(name).dtype == info.dtype


def refused(path: Path, error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as caught:
        GgufFile(path)
    assert all(word in str(caught.value) for word in (str(path), *words)), caught.value


def test_a_file_that_is_not_there_or_not_gguf_is_refused(tmp_path: Path):
    refused(tmp_path / "none.gguf", DataError, "No such file")
    refused(tmp_path, DataError, "Is a directory")
    for i, content in enumerate([b"", b"GG", b"PK\x03\x04 and more", b"{}"]):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(content)
        refused(path, DataError, "is not a GGUF file")


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path):
    whole = tiny.write(tmp_path / "whole.gguf", "llama", tiny.sizes("llama"), tiny.model("llama")).read_bytes()
    end = len(whole) - 1  # the last tensor needs every byte
    for size in [*range(4, 1200, 7), *range(1200, end, 997), end]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        refused(cut, DataError, "cut short or damaged", f"({size:,} bytes)")


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "a.gguf"
    refused(tiny.write(path, "mamba", {}), ConfigError, "general.architecture", "'mamba'", "llama, qwen2, qwen3, gemma, gemma2, gemma3")
    odd = {"blk.0.ffn_up.weight": (np.zeros((2, 292), np.uint8), "Q8_K")}
    refused(
        tiny.write(path, "llama", tiny.sizes("llama"), odd), ConfigError, "blk.0.ffn_up.weight", "Q8_K", "F32, F16, Q4_0", "Q6_K", "BF16"
    )
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((2, 2), np.float32), "rope_factors_long.weight": np.zeros(2, np.float32)}
    refused(tiny.write(path, "llama", tiny.sizes("llama"), extra), ConfigError, "ffn_gate_inp.weight", "rope_factors_long.weight")
    refused(tiny.write(path, "llama", tiny.sizes("llama") | {"split.count": 3}), ConfigError, "one of several parts", "llama-gguf-split")
    refused(tiny.write(path, "llama", tiny.sizes("llama"), {"token_embd.weight": None}), DataError, "token_embd.weight is missing")
    refused(tiny.write(path, "llama", {}, endianess=gguf.GGUFEndian.BIG), ConfigError, "big-endian", "gguf_convert_endian.py")


def test_a_text_that_is_damaged_is_refused_by_its_key(tmp_path: Path):
    path = tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama") | {"llama.rope.scaling.type": "linear"})
    path.write_bytes(path.read_bytes().replace(b"linear", b"lin\xffar"))
    refused(path, DataError, "is damaged: the metadata llama.rope.scaling.type is no UTF-8 text")


def test_a_quantisation_of_the_future_is_refused(tmp_path: Path):
    path = tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"))
    name = b"token_embd.weight"
    content = bytearray(path.read_bytes())
    at = re.search(re.escape(name), content).end() + 4 + 2 * 8  # type: ignore[union-attr]  # past the number of dimensions and two of them
    assert content[at : at + 4] == bytes(4)
    content[at] = 99
    path.write_bytes(content)
    refused(path, DataError, "99", "of a newer kind than the gguf package knows")


def test_heads_that_do_not_fit_the_rows_are_refused(tmp_path: Path):
    tensors = {"blk.0.attn_q.weight": np.zeros((10, 32), np.float32)}
    path = tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"), tensors)
    with (
        GgufFile(path) as source,
        pytest.raises(DataError, match=r"q_proj.weight has 10 rows, which cannot be 4 heads; num_attention_heads"),
    ):
        source.read("model.layers.0.self_attn.q_proj.weight")


def test_a_closed_source_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with GgufFile(tiny.write(tmp_path / "a.gguf", "llama", tiny.sizes("llama"))):
        assert len(list((tmp_path / "temporary").iterdir())) == 1
    path = tiny.write(tmp_path / "b.gguf", "llama", tiny.sizes("llama") | {"tokenizer.ggml.model": "bert"})
    refused(path, ConfigError, "tokenizer.ggml.model", "'bert'")
    assert not list((tmp_path / "temporary").iterdir())
