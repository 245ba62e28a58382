"""What predicts further tokens in the plan: counted in work and memory of training, and in nothing of generation."""

from dataclasses import replace
from typing import Any

import jax
import pytest
import tiny

from telamon.config.schema import RunConfig
from telamon.models.deepseek import DeepseekV3Config
from telamon.models.llama import LlamaConfig
from telamon.models.spec import ModelSpec
from telamon.models.weights import Model
from telamon.plan.memory import estimate_decode_memory, estimate_memory
from telamon.plan.work import Product, workload
from telamon.records.checks import Subject, parameter_count
from telamon.train.job import make_job, model_flops

SIZES: dict[str, Any] = {"vocab_size": 512, "d_model": 64, "n_layers": 2, "n_heads": 2, "d_ff": 160, "n_experts": 4, "d_expert": 48}
LATENT = {"q_rank": None, "kv_rank": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 16}


def _run(*, mtp_layers: int, n_dense: int = 1, **train: Any) -> RunConfig:
    model = DeepseekV3Config(**SIZES, **LATENT, n_dense=n_dense, mtp_layers=mtp_layers, tie_embeddings=False)
    return RunConfig(model=model, train=tiny.run(**{"seq_len": 64, **train}).train)


def test_work_by_hand():
    """V 11, D 8, F 16, 4 query and 2 KV heads of 2: a depth has a block of 592, a projection of 128, three norms, and the head's 88 again."""
    spec = tiny.model(vocab_size=11, d_model=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=2, d_ff=16).spec
    model = Model(spec.model_copy(update={"mtp": (spec.blocks[0],)}))
    assert model.parameter_count == 1280 + 592 + 128 + 24
    assert model.matmul_parameters == model.parameter_count + 88
    assert model_flops(model, seq_len=16) == 6 * model.matmul_parameters + 6 * 3 * 16 * 8


def test_the_plans_work_is_that_of_the_model_that_trains():
    config = _run(mtp_layers=2)
    model, work = Model(config.model.spec()), workload(config)
    assert work.parameters == model.parameter_count
    assert work.flops_per_token(64) == pytest.approx(model_flops(model, seq_len=64))
    assert (work.layers, work.heads, work.norms) == (4, 3, 1 + 2 * 2 + 2 * 5)
    products = {product.name: product for product in work.products}
    assert products["projection"] == Product("projection", inputs=128, outputs=64, count=2, split="inputs")
    assert products["ffn.experts.up"].count == 3
    assert replace(workload(_run(mtp_layers=0)), heads=3) != work


class DenseWithFurther(LlamaConfig):
    """A dense model with a depth."""

    def spec(self) -> ModelSpec:
        spec = super().spec()
        return spec.model_copy(update={"mtp": spec.blocks[:1]})


def test_within_a_tenth_of_the_compilers_own_analysis():
    """With many layers, as in tests of models without it: the allocator of XLA on CPU packs what single blocks work with badly."""
    sizes = tiny.sizes(d_model=64, d_ff=192, n_layers=12, vocab_size=512, tie_embeddings=False)
    config = RunConfig(model=DenseWithFurther(**sizes.model_dump()), train=tiny.run(seq_len=64, batch_size=8).train)
    found = make_job(config, devices=jax.devices()[:1]).train_step(8).memory_analysis()
    memory = estimate_memory(config, 1)
    assert memory.arguments == found.argument_size_in_bytes
    assert memory.total == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.1)


def test_training_holds_it_and_generating_does_not():
    more, less = _run(mtp_layers=1), _run(mtp_layers=0)
    added = Model(more.model.spec()).parameter_count - Model(less.model.spec()).parameter_count
    training = [estimate_memory(config, 1) for config in (more, less)]
    assert training[0].weights - training[1].weights == 4 * added
    assert training[0].activations > training[1].activations
    generating = [estimate_decode_memory(config, 1, batch=8, length=64) for config in (more, less)]
    assert generating[0] == generating[1]


def test_the_published_number_of_parameters_is_of_the_model_without_it():
    for layers in (0, 1):
        config = _run(mtp_layers=layers)
        without = Model(_run(mtp_layers=0).model.spec())
        published = {"published_parameters": without.parameter_count, "published_active_parameters": without.active_parameters}
        config = config.model_copy(update={"model": config.model.model_copy(update=published)})
        assert parameter_count.measure(Subject("of a test", config, tiny=False)) == 0
