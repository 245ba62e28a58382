"""Bytes by arithmetic, against figures counted by hand and the compiler's own analysis."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import tiny

from telamon.config.load import load_run
from telamon.config.schema import MeshConfig, OptimizerConfig, RunConfig
from telamon.errors import ConfigError
from telamon.plan.memory import Memory, estimate_decode_memory, estimate_memory, split_compiled
from telamon.plan.topology import parse_topology
from telamon.records.record import read_records
from telamon.train.job import make_job

MIXTURE = {"n_layers": 2, "d_model": 200, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 64, "n_experts": 4, "vocab_size": 3259}
MILLION = {"vocab_size": 4035, "d_model": 200, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 128}

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def _run(
    model: dict[str, Any] | None = None, *, mesh: dict[str, Any] | None = None, optimizer: Any = None, family: str = "llama", **train: Any
) -> RunConfig:
    config = tiny.run(family=family, model=model, optimizer=optimizer, **train)
    return RunConfig.model_validate({**dict(config), "mesh": mesh or {}})


def test_a_million_parameters_and_adam_are_sixteen_million_bytes():
    memory = estimate_memory(_run(MILLION), 1)
    assert memory.weights + memory.optimizer + memory.gradients == 16_000_000


def test_muon_keeps_one_moment_of_a_matrix():
    memory = estimate_memory(_run(MILLION, optimizer=OptimizerConfig(kind="muon")), 1)
    in_blocks = 2 * (200 * 32 * 2 + 200 * 16 * 2 + 3 * 200 * 128)
    assert memory.optimizer == 8_000_000 - 4 * in_blocks


@pytest.mark.parametrize("axis, stays", [("fsdp", 5 * 200), ("tensor", 5 * 200 + 4035 * 200)])
def test_an_axis_halves_only_what_it_splits(axis: str, stays: int):
    """Norms are on no axis, and `tensor` cannot split a table with an odd number of rows."""
    memory = estimate_memory(_run(MILLION, mesh={"fsdp": 1, axis: 2, "replicated_limit": 1.0}), 2)
    assert memory.weights == 4 * (stays + (1_000_000 - stays) // 2)
    assert memory.optimizer == 2 * memory.weights


def test_the_expert_axis_halves_experts_alone():
    """A million parameters, of which 2 layers x 4 experts x 3 maps of 200 x 64 are experts'."""
    one = estimate_memory(_run(MIXTURE, family="mixtral"), 1)
    assert one.weights + one.optimizer + one.gradients == 16_000_000
    two = estimate_memory(_run(MIXTURE, family="mixtral", mesh={"fsdp": 1, "expert": 2}), 2)
    experts = 2 * 4 * 3 * 200 * 64
    assert (two.weights, two.gradients) == (4 * (1_000_000 - experts // 2),) * 2
    assert two.optimizer == 2 * two.weights


def test_an_uneven_dimension_stays_whole():
    memory = estimate_memory(_run(tiny.INDIVISIBLE, mesh={"replicated_limit": 1.0}), 8)
    assert memory.weights == estimate_memory(_run(tiny.INDIVISIBLE), 1).weights


def test_an_axis_for_experts_halves_experts_alone():
    sizes = {"n_experts": 8, "top_k": 2, "d_ff": 24}
    run = RunConfig.model_validate({**dict(tiny.run(family="mixtral", model=sizes)), "mesh": {"fsdp": 1, "expert": 2}})
    one, two = estimate_memory(run.model_copy(update={"mesh": MeshConfig()}), 1), estimate_memory(run, 2)
    assert one.weights - two.weights == 4 * 2 * 8 * 3 * 32 * 24 // 2


def test_replicas_halve_nothing_but_the_batch():
    one, two = (estimate_memory(_run(mesh={"data": n, "fsdp": 1}), n) for n in (1, 2))
    assert (two.weights, two.optimizer, two.gradients) == (one.weights, one.optimizer, one.gradients)
    assert 2 * two.activations == one.activations


def test_whole_logits_count_and_chunked_ones_count_their_chunk():
    """Float32 logits, and their gradient in the type of activations; nothing else of the loss grows with the chunk as they do."""
    model = {"vocab_size": 4096, "n_layers": 1}
    B, T, V = 8, 16, 4096
    whole, chunked = (estimate_memory(_run(model, loss_chunk=chunk, compute_dtype="bfloat16"), 1).total for chunk in (B * T, B * T // 4))
    logits = 4 * B * T * V + 2 * B * T * V
    assert whole - chunked == pytest.approx(logits * 3 // 4, rel=0.01)


@pytest.mark.parametrize(
    "model, train, mesh",
    [
        ({"d_model": 64, "d_ff": 192, "n_layers": 12}, {"seq_len": 64, "batch_size": 4, "compute_dtype": "bfloat16"}, {}),
        (
            {"d_model": 64, "d_ff": 192, "n_layers": 12, "vocab_size": 512},
            {"seq_len": 64, "batch_size": 16, "accumulate": 2},
            {"fsdp": 2, "tensor": 2},
        ),
        (
            {"d_model": 96, "d_ff": 256, "n_layers": 16, "vocab_size": 4096, "tie_embeddings": False},
            {"seq_len": 32, "batch_size": 8, "compute_dtype": "bfloat16", "remat": "full", "loss_chunk": 64},
            {},
        ),
    ],
    ids=["saves everything", "microbatches on a mesh", "recomputes, large vocabulary"],
)
def test_within_a_tenth_of_the_compilers_own_analysis(model: dict[str, Any], train: dict[str, Any], mesh: dict[str, int]):
    """Arguments exactly, and with temporaries within 10 %. The layers are many, as in real models: the allocator of XLA on CPU packs
    what a single block works with badly (up to half of it is lost), while what all layers save lies densely."""
    config = _run(model, mesh=mesh, **train)
    devices = jax.devices()[: 4 if mesh else 1]
    found = make_job(config, devices=devices).train_step(config.train.batch_size).memory_analysis()
    memory = estimate_memory(config, len(devices))
    assert memory.arguments == found.argument_size_in_bytes
    assert memory.total == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.1)


def test_a_mixture_on_a_mesh_is_within_a_tenth_of_the_compilers_own_analysis():
    """What experts take at work is traced by itself, and what layers keep beside it."""
    sizes = {"d_model": 64, "d_ff": 64, "n_layers": 12, "n_experts": 8, "vocab_size": 512}
    config = _run(sizes, family="mixtral", mesh={"fsdp": 2, "expert": 2}, seq_len=64, batch_size=16)
    found = make_job(config, devices=jax.devices()[:4]).train_step(16).memory_analysis()
    memory = estimate_memory(config, 4)
    assert memory.arguments == found.argument_size_in_bytes
    assert memory.total == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.1)
    assert estimate_memory(config, 4, at_least=True).total < memory.total


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize(
    "preset", ["llama2-7b", "llama2-13b", "llama3.1-8b", "gemma-7b", "gemma2-9b", "gpt3-22b", "qwen3-30b-a3b", "deepseek-v2-lite-16b"]
)
def test_near_the_peaks_that_compilers_for_accelerators_gave(preset: str, platform: str):
    """Within 8 % of what the presets' records hold (`telamon verify --checks fits-on-tpu,fits-on-gpu`)."""
    record = next(record for record in read_records(RECORDS) if record.file_name == f"{preset}.fits-on-{platform}.json")
    machine, _, settings = record.hardware.partition(": ")
    topology = parse_topology(machine)
    config = load_run("default", [f"model.preset={preset}", *settings.partition("; ")[2].split()]).config
    compiled = record.figure * topology.chip.hbm_bytes
    assert estimate_memory(config, topology).total == pytest.approx(compiled, rel=0.08)


def test_what_waits_in_the_hosts_memory_is_no_part_of_the_devices():
    plain = estimate_memory(_run(remat="full"), 1)
    moments = estimate_memory(_run(remat="full", optimizer=OptimizerConfig(offload=True)), 1)
    assert (moments.optimizer, moments.host) == (0, plain.optimizer)
    inputs = estimate_memory(_run(remat="offload"), 1)
    assert inputs.host == 2 * 8 * 16 * 32 * 4  # the float32 stream [8, 16, 32] before each of two layers
    assert plain.activations - inputs.activations == pytest.approx(inputs.host, rel=0.01)


def test_each_part_says_which_option_would_lower_it():
    memory = estimate_memory(_run(), 1)
    assert memory.advice["activations"] == "train.remat=full"
    assert estimate_memory(_run(remat="full"), 1).advice["activations"] == "train.accumulate=2"
    assert "muon" not in estimate_memory(_run(optimizer=OptimizerConfig(kind="muon")), 1).advice["optimizer"]
    assert memory.advice["weights"] == "a larger mesh.fsdp (now 1) or mesh.tensor (now 1)"
    mixture = estimate_memory(_run(MIXTURE, family="mixtral", mesh={"fsdp": 1, "expert": 2}), 2)
    assert mixture.advice["weights"] == "a larger mesh.fsdp (now 1), mesh.expert (now 2) or mesh.tensor (now 1)"
    assert set(memory.advice) == {"weights", "optimizer", "gradients", "activations", "temporaries", "inputs", "code"}


def test_a_large_model_takes_no_time_and_no_memory():
    config = _run({"d_model": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "head_dim": 128, "d_ff": 28672, "vocab_size": 128256,
                   "tie_embeddings": False}, batch_size=512, seq_len=4096, remat="full", compute_dtype="bfloat16")  # fmt: skip
    memory = estimate_memory(config, parse_topology("v6e:16x16"))
    assert memory.weights == pytest.approx(4 * 70.55e9 / 256, rel=0.01)
    assert memory.activations == pytest.approx(
        82 * 2 * 4096 * 8192 * 2, rel=0.01
    )  # a block's input for each layer, and the last norm's two


def test_the_compilers_figures_are_split_without_remainder():
    estimate = Memory(weights=100, optimizer=200, gradients=100, activations=50, temporaries=10, inputs=8)
    compiled = SimpleNamespace(argument_bytes=320, temp_bytes=400, output_bytes=305, alias_bytes=300, code_bytes=7)
    memory = split_compiled(compiled, estimate)
    assert (memory.weights, memory.optimizer, memory.inputs) == (100, 200, 20)
    assert (memory.gradients, memory.activations, memory.temporaries, memory.code) == (100, 50, 255, 7)
    assert memory.total == 320 + 400 + 5 + 7


def test_the_cache_of_a_decoding_step_is_a_part_of_its_arguments():
    estimate = Memory(weights=100, activations=50, temporaries=10, inputs=8)
    compiled = SimpleNamespace(argument_bytes=165, temp_bytes=60, output_bytes=55, alias_bytes=50, code_bytes=7)
    memory = split_compiled(compiled, estimate, decoding=True)
    assert (memory.weights, memory.activations, memory.inputs, memory.temporaries) == (100, 50, 15, 65)
    assert memory.total == 165 + 60 + 5 + 7


def test_a_compiler_that_needs_less_leaves_no_negative_part():
    compiled = SimpleNamespace(argument_bytes=310, temp_bytes=120, output_bytes=300, alias_bytes=300, code_bytes=0)
    memory = split_compiled(compiled, Memory(weights=100, optimizer=200, gradients=100, activations=50, inputs=10))
    assert (memory.gradients, memory.activations, memory.temporaries) == (100, 20, 0)


def test_decoding_holds_weights_in_the_type_of_activations_and_keys_and_values():
    config = _run(MILLION, compute_dtype="bfloat16")
    memory = estimate_decode_memory(config, 1, batch=4, length=100)
    vectors = 5 * 200
    assert memory.weights == 2 * (1_000_000 - vectors) + 4 * vectors
    assert memory.activations == 2 * 2 * (4 * 2 * 100 * 8) * 2  # two layers, keys and values, [B, K, S, H] in bfloat16
    assert memory.gradients == memory.optimizer == 0


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="needs a multiple of 2 devices"):
        estimate_memory(_run(mesh={"data": 2}), 3)
