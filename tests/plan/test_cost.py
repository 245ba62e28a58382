"""What a step should cost, against the same sums worked by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest

from telamon.config.hardware import chips
from telamon.config.load import load_run
from telamon.config.schema import TrainConfig
from telamon.errors import ConfigError
from telamon.models.weights import Model
from telamon.plan.cost import Layout, layout_of, predict, predict_work
from telamon.plan.hlo import count_program
from telamon.plan.topology import parse_topology
from telamon.plan.work import Attention, Product, Workload, workload
from telamon.train.job import make_job, model_flops

ROOT = Path(__file__).parents[2]
ONE = parse_topology("v5p:2x2x1")
CHIP = replace(
    ONE.chip,
    bf16_tflops=100,
    hbm_gbps=1000,
    link_gbps=10,
    network_gbps=1,
    host_gbps=5,
    tile=1,
    matmul_share=0.5,
    attention_share=0.25,
    hidden_share=0.5,
)
"""Round figures: 100 TFLOP/s, 1 TB/s."""
FOUR = replace(ONE, chip=CHIP)
FSDP = {"fsdp": 4}


def _work(*products: Product, attention: tuple[Attention, ...] = (), other: int = 0) -> Workload:
    return Workload(d_model=512, vocab=1000, layers=2, norms=0, products=products, attention=attention, other=other, matmul_parameters=1)


def _part(work: Workload, name: str, *, rows: int = 1, seq_len: int = 1024, topology=FOUR, **layout) -> float:
    return predict_work(work, Layout(rows=rows, **{"within": FSDP, **layout}), topology, seq_len=seq_len).parts[name]


def test_a_large_product_runs_at_its_share_of_the_peak():
    product = Product("ffn.up", 8192, 4096, count=3)
    by_hand = 3 * 3 * 2 * 4096 * 8192 * 4096 / 50e12  # 3 layers, 3 passes, half the peak
    assert _part(_work(product), "products ffn.up", rows=4) == pytest.approx(by_hand)


def test_a_product_of_few_tokens_runs_at_the_memorys_bandwidth():
    product = Product("ffn.up", 8192, 4096)
    by_hand = 3 * 2 * (8 * (8192 + 4096) + 8192 * 4096) / 1e12  # bfloat16: what comes in, what comes out, the weight
    assert _part(_work(product), "products ffn.up", seq_len=8) == pytest.approx(by_hand)


def test_twice_the_peak_halves_what_computes_and_leaves_what_moves():
    work = _work(Product("ffn.up", 8192, 4096), attention=(Attention(8, 128),))
    double = replace(FOUR, chip=replace(CHIP, bf16_tflops=200))
    for name, rows, ratio in (("products ffn.up", 4, 0.5), ("attention", 4, 0.5), ("between products", 4, 1.0), ("optimizer", 4, 1.0)):
        assert _part(work, name, rows=rows, topology=double) == pytest.approx(ratio * _part(work, name, rows=rows)), name
    assert _part(work, "products ffn.up", seq_len=8, topology=double) == _part(work, "products ffn.up", seq_len=8)


def test_sizes_are_rounded_up_to_the_matrix_unit():
    wide = replace(FOUR, chip=replace(CHIP, tile=256))
    exact, odd = Product("ffn.up", 8192, 4096), Product("ffn.up", 8192, 3841)
    assert _part(_work(odd), "products ffn.up", rows=4, topology=wide) == pytest.approx(_part(_work(exact), "products ffn.up", rows=4))
    # Heads of 128 fill half of a unit of 256.
    heads = _work(attention=(Attention(8, 128),))
    assert _part(heads, "attention", topology=wide) == pytest.approx(2 * _part(heads, "attention"))


@pytest.mark.parametrize("window", [None, 96])
def test_attention_counts_the_pairs_that_a_mask_lets_through(window):
    query, key = np.indices((256, 256))
    mask = (key <= query) & (query - key < (window or 256))
    by_hand = 2 * 3.5 * 4 * 8 * 128 * mask.sum() / 25e12  # 2 rows; forward, and 2.5 times that backward; a quarter of the peak
    assert _part(_work(attention=(Attention(8, 128, window),)), "attention", rows=2, seq_len=256) == pytest.approx(by_hand)


def test_what_stands_between_products_is_written_and_read_once():
    work = replace(_work(Product("mixer.query", 512, 700), Product("ffn.up", 512, 300)), norms=2)
    by_hand = 3 * 2 * 2 * (700 + 300 + 2 * 512) * 1024 / 1e12  # forward and twice that backward; in and out; 2 bytes
    assert _part(work, "between products") == pytest.approx(by_hand)
    assert _part(work, "between products", saved=frozenset()) == pytest.approx(by_hand * 4 / 3)


def test_the_optimizer_moves_thirty_two_bytes_of_each_of_its_parameters():
    assert _part(_work(other=4_000_000), "optimizer") == pytest.approx(32e6 / 1e12)


def test_the_loss_is_three_products_and_eighteen_bytes_a_logit():
    work = replace(_work(), d_model=8192, vocab=50_000)
    by_hand = 3 * 2 * 4096 * 8192 * 50_000 / 50e12 + 18 * 4096 * 50_000 / 1e12
    assert _part(work, "loss", rows=4) == pytest.approx(by_hand)
    assert _part(work, "loss", rows=4, within={"fsdp": 2, "tensor": 2}) == pytest.approx(by_hand / 2)


def test_only_what_is_needed_and_was_not_saved_is_made_again():
    products = Product("mixer.out", 8192, 4096), Product("ffn.up", 8192, 4096), Product("ffn.down", 8192, 4096, needed=False)
    work = _work(*products, attention=(Attention(8, 128),))
    names = [f"products {product.name}" for product in products] + ["attention"]
    whole = [_part(work, name, rows=4) for name in names]
    cases = [
        (frozenset(), [4 / 3, 4 / 3, 1, 4.5 / 3.5]),
        (frozenset({"mixer.out"}), [1, 4 / 3, 1, 4.5 / 3.5]),
        (frozenset({"mixer.out", "ffn.up", "ffn.down"}), [1, 1, 1, 4.5 / 3.5]),
        (frozenset({"attention"}), [4 / 3, 4 / 3, 1, 1]),
    ]
    for saved, ratios in cases:
        assert [_part(work, name, rows=4, saved=saved) for name in names] == pytest.approx(
            [r * w for r, w in zip(ratios, whole, strict=True)]
        )


def test_weights_are_gathered_twice_and_gradients_scattered_once_a_microbatch():
    work = _work(Product("ffn.up", 8192, 4096), other=1_000_000)
    parameters = 8192 * 4096 + 1_000_000
    for accumulate in (1, 3):
        layout = Layout(rows=4, within=FSDP, accumulate=accumulate)
        found = {(c.kind, c.axis): c for c in predict_work(work, layout, FOUR, seq_len=1024).collectives}
        assert set(found) == {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}
        assert found["all-gather", "fsdp"].bytes == 2 * accumulate * 2 * parameters
        assert found["reduce-scatter", "fsdp"].bytes == accumulate * 4 * parameters


def test_half_of_the_weights_collectives_hides_behind_products_while_there_is_room():
    work = _work(Product("ffn.up", 8192, 4096))
    prediction = predict_work(work, Layout(rows=400, within=FSDP), FOUR, seq_len=1024)
    assert [c.exposed for c in prediction.collectives] == pytest.approx([c.seconds / 2 for c in prediction.collectives])
    few = predict_work(work, Layout(rows=1, within=FSDP), FOUR, seq_len=8)
    hidden = sum(c.seconds - c.exposed for c in few.collectives)
    assert hidden == pytest.approx(few.parts["products ffn.up"] + few.parts["attention"])
    assert few.step_seconds == pytest.approx(sum(few.parts.values()) + sum(c.exposed for c in few.collectives))


def test_inputs_of_blocks_go_to_the_host_behind_products_and_moments_come_in_the_open():
    work = _work(Product("ffn.up", 8192, 4096), other=4_000_000)
    assert _part(work, "host", rows=400, saved=frozenset(), offload_inputs=True) == 0
    few = {"seq_len": 8, "saved": frozenset(), "offload_inputs": True}
    out_and_back = 2 * 2 * 8 * 512 * 2 / 5e9  # both ways, in bfloat16, 8 tokens of 512 features, 2 blocks
    assert _part(_work(), "host", **few) == pytest.approx(out_and_back)
    assert _part(work, "host", **few) == 0  # the product moves its weights for longer
    assert _part(work, "host", rows=400, offload_moments=True) == pytest.approx(8 * (8192 * 4096 + 4e6) / 4 / 5e9)


def test_a_tensor_axis_splits_products_and_adds_sums_of_the_stream():
    products = Product("ffn.up", 512, 8192, count=2, split="outputs"), Product("ffn.down", 8192, 512, count=2, split="inputs", needed=False)
    work = _work(*products)
    alone = predict_work(work, Layout(rows=4, within={"data": 4}), FOUR, seq_len=1024)
    split = predict_work(work, Layout(rows=4, within={"data": 2, "tensor": 2}), FOUR, seq_len=1024)
    for product in products:
        assert split.parts[f"products {product.name}"] == pytest.approx(alone.parts[f"products {product.name}"] / 2)
    (summed,) = [c for c in split.collectives if c.axis == "tensor"]
    # Two layers, forward and backward, and the loss's gradient, of 4096 tokens of 512 features in bfloat16.
    assert summed.bytes == (2 * 2 + 1) * 2 * 4096 * 512
    assert summed.exposed == summed.seconds
    (gradients,) = [c for c in split.collectives if c.axis == "data"]
    assert gradients.bytes == 4 * 2 * 2 * 512 * 8192 / 2


def test_experts_compute_what_tokens_use_and_hold_what_the_axis_leaves():
    used = Product("ffn.up", 512, 2048, copies=8, used=2, split="outputs"), Product("ffn.down", 2048, 512, copies=8, used=2, split="inputs")
    work = _work(*used, other=1000)
    prediction = predict_work(work, Layout(rows=64, within={"expert": 4}), FOUR, seq_len=1024)
    assert prediction.parts["products ffn.up"] == pytest.approx(3 * 2 * 2 * 65536 * 512 * 2048 / 50e12)
    assert prediction.parts["optimizer"] == pytest.approx(32 * (work.parameters - 1000) / 4 / 1e12, rel=1e-3)
    assert prediction.tokens_per_second_per_device == pytest.approx(64 * 1024 / prediction.step_seconds)
    found = {(c.kind, c.axis): c.bytes for c in prediction.collectives}
    # 2 experts a token, bfloat16; there and back; backward there again, with gradients, and those of the rows back.
    assert found["all-to-all", "expert"] == 5 * 2 * 2 * 65536 * 512
    assert found["all-reduce", "expert"] == 4 * 1000  # what is not an expert's


def test_tokens_are_written_in_the_order_of_experts_and_back():
    """3 layers, 2 experts a token: what the product gives, 512 values, and 512 each way, all of it once in and once out, thrice."""
    product = Product("ffn.down", 2048, 512, count=3, copies=8, used=2, split="inputs")
    by_hand = 3 * 2 * 2 * (3 * 2 * 512 + 2 * 3 * 2 * 512) * 1024 / 1e12
    assert _part(_work(product), "between products") == pytest.approx(by_hand)
    # Where a one-hot product does it, that product's results count instead.
    one_hot = Product("ffn.dispatch", 64, 512, copies=0)
    assert _part(_work(product, one_hot), "between products") == pytest.approx(by_hand * (6 + 1) / 18)


def test_what_experts_make_is_made_again_whatever_is_kept():
    product = Product("ffn.up", 8192, 4096, copies=8, used=2, kept=False)
    assert _part(_work(product), "products ffn.up", rows=64) == pytest.approx(
        4 / 3 * _part(_work(replace(product, kept=True)), "products ffn.up", rows=64)
    )


@pytest.mark.parametrize(
    "field", ["bf16_tflops", "hbm_gbps", "link_gbps", "network_gbps", "host_gbps", "matmul_share", "attention_share", "hidden_share"]
)
def test_a_better_chip_is_never_slower(field):
    work = _work(
        Product("ffn.up", 4096, 4096, split="outputs"), Product("ffn.down", 4096, 4096, split="inputs"), attention=(Attention(8, 128),)
    )
    for slices in (1, 2):
        layout = Layout(rows=2, within={"fsdp": 2, "tensor": 2}, across={"data": slices})
        slow = replace(FOUR, slices=slices)
        fast = replace(slow, chip=replace(CHIP, **{field: 1.5 * getattr(CHIP, field)}))
        speeds = [predict_work(work, layout, machine, seq_len=512).tokens_per_second_per_device for machine in (slow, fast)]
        assert speeds[1] >= speeds[0] * (1 - 1e-12)


def _run(*overrides: str):
    return load_run("tiny", ["data.tokenizer.vocab_size=300", *overrides]).config


def test_a_mixture_lists_its_experts_once_and_what_a_token_uses_of_them():
    """Llama 4 Maverick: 24 of 48 layers have 128 experts of 8,192, of which a token goes to one, and a shared one."""
    config = load_run("default", ["model.preset=llama4-maverick"]).config
    work, model = workload(config), Model(config.model.spec())
    products = {product.name: product for product in work.products}
    assert (work.parameters, work.matmul_parameters) == (model.parameter_count, model.matmul_parameters)
    assert work.flops_per_token(4096) == pytest.approx(model_flops(model, seq_len=4096))
    up = products["ffn.experts.up"]
    assert (up.inputs, up.outputs, up.count, up.copies, up.used, up.split) == (5120, 8192, 24, 128, 1, "outputs")
    assert products["ffn.shared.up"] == replace(up, name="ffn.shared.up", copies=1, used=1, kept=True)
    assert not products["ffn.experts.down"].needed
    dropping = workload(
        load_run("default", ["model.preset=llama4-maverick", "train.experts.path=capacity", "train.experts.capacity_factor=2"]).config
    )
    assert {product.used for product in dropping.products if product.copies > 1} == {2.0}
    assert dropping.matmul_parameters == work.matmul_parameters


@pytest.mark.parametrize("preset", ["tiny-llama", "gemma2-2b", "gpt3-52k", "llama4-maverick"])
def test_parameters_and_flops_are_those_of_the_model_that_trains(preset):
    config = load_run("default", [f"model.preset={preset}"]).config
    model, work = Model(config.model.spec()), workload(config)
    assert work.parameters == model.parameter_count
    for length in (8192, 20_000):  # more than a chunk of Llama 4
        assert work.flops_per_token(length) == pytest.approx(model_flops(model, seq_len=length))


def test_the_last_product_of_a_block_is_needed_where_a_norm_reads_it():
    found = {}
    for preset in ("llama3.1-8b", "gemma2-2b", "olmo2-1b"):
        work = workload(load_run("default", [f"model.preset={preset}"]).config)
        needed = {product.name: product.needed for product in work.products}
        assert all(value for name, value in needed.items() if name != "ffn.down")
        found[preset] = (needed["ffn.down"], work.norms)
    assert found == {"llama3.1-8b": (False, 2 * 32 + 1), "gemma2-2b": (True, 4 * 26 + 1), "olmo2-1b": (True, 2 * 16 + 1)}


@pytest.mark.parametrize(("devices", "remat", "kind"), [(4, "full", "adamw"), (1, "dots", "muon")])
def test_products_and_gradients_are_those_that_the_compiler_lays_out(devices, remat, kind):
    sizes = ["n_layers=2", "d_model=64", "d_ff=512", "n_heads=1", "n_kv_heads=1", "head_dim=2", "vocab_size=512", "tie_embeddings=false"]
    settings = "train.batch_size=16", "train.seq_len=32", f"train.remat={remat}", f"optimizer.kind={kind}"
    config = _run(*(f"model.{size}" for size in sizes), *settings)
    job = make_job(config, devices=jax.devices()[:devices])
    with jax.set_mesh(job.mesh):
        counted = count_program(job.lowered("train", 16).compile().as_text(), dict(job.mesh.shape))
    # On devices of 100 TFLOP/s, all of which products reach, without memory's limit: seconds are FLOPs.
    chip = replace(CHIP, matmul_share=1.0, hbm_gbps=1e12)
    prediction = predict(config, replace(FOUR, chip=chip, shape=(1, 1, devices)))
    seconds = sum(value for name, value in prediction.parts.items() if name.startswith(("products", "loss", "muon")))
    assert seconds * 100e12 == pytest.approx(counted.flops, rel=0.01)  # attention is a thousandth here
    summed = sum(c.bytes for c in counted.collectives if c.kind in ("reduce-scatter", "all-reduce"))
    assert summed == pytest.approx(sum(c.bytes for c in prediction.collectives if c.kind == "reduce-scatter"), rel=0.01)


def test_mfu_and_rate_follow_from_the_step():
    config = load_run("default", ["model.preset=llama3.1-8b", "train.batch_size=32", "train.seq_len=8192", "train.remat=full"]).config
    topology = parse_topology("v5p:2x2x4")
    prediction = predict(config, topology)
    assert prediction.tokens_per_second_per_device == pytest.approx(32 * 8192 / 16 / prediction.step_seconds)
    flops = model_flops(Model(config.model.spec()), seq_len=8192)
    assert prediction.mfu == pytest.approx(flops * prediction.tokens_per_second_per_device / 459e12)
    assert 0.4 < prediction.mfu < 0.7


def test_the_layout_of_a_run_is_its_mesh_its_rows_and_its_recomputation():
    overrides = "train.batch_size=32", "train.accumulate=2", "mesh.tensor=2", "mesh.cross_slice.data=2"
    config = _run(*overrides, "train.remat=dots")
    layout = layout_of(config, parse_topology("2*v5p:2x2x1"))
    assert (layout.rows, layout.accumulate, layout.total("fsdp"), layout.total("tensor"), layout.total("data")) == (4, 2, 2, 2, 2)
    assert not layout.again("ffn.gate")
    assert layout.again("attention")
    assert layout_of(_run(*overrides, "train.remat=full"), parse_topology("2*v5p:2x2x1")).again("ffn.gate")
    assert not layout_of(_run(*overrides, "train.remat=none"), parse_topology("2*v5p:2x2x1")).again("attention")


@pytest.mark.parametrize("remat", get_args(TrainConfig.model_fields["remat"].annotation))
def test_every_way_to_recompute_has_a_prediction_and_saving_all_is_fastest(remat):
    steps = [predict(_run(f"train.remat={way}"), parse_topology("v5p:2x2x1")).step_seconds for way in ("none", remat)]
    assert steps[0] <= steps[1]


def test_a_chip_that_is_not_known_has_no_prediction():
    with pytest.raises(ConfigError, match="v6x"):
        parse_topology("v6x:4x4")


def test_peaks_are_dense():
    peaks = {chip.key: chip.flops for chip in chips()}
    assert (peaks["a100"], peaks["h100"], peaks["tpu7x"]) == (312e12, 989e12, 2307e12 / 2)


def test_fitted_constants_are_those_of_the_benchmark():
    figures = json.loads((ROOT / "benchmarks/results/A3.json").read_text())["figures"]
    for chip in chips():
        unit = "gpu" if chip.platform == "gpu" else f"tpu {chip.tile}"
        held = {unit: chip.matmul_share, "attention": chip.attention_share, "hidden": chip.hidden_share}
        assert {f"share: {name}": share for name, share in held.items()}.items() <= figures.items(), chip.key
        assert all("benchmarks A3" in chip.sources[name] for name in ("matmul_share", "attention_share", "hidden_share"))
    assert math.isclose(figures["rows"], 13)
