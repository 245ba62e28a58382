"""What a run says of itself before it begins."""

import pytest
from pydantic import Field

from telamon.config.load import load_run
from telamon.config.registry import register_family
from telamon.errors import ConfigError
from telamon.layers.router import RouterConfig
from telamon.models.dense import DenseSizes
from telamon.models.mixture import MixtureSizes
from telamon.train.job import make_job
from telamon.train.start import describe_job


@pytest.mark.parametrize(
    ("preset", "model"),
    [
        ("tiny-llama", "tiny-llama, 34,976 parameters, 2 layers"),
        (
            "tiny-mixture",
            "tiny-mixture, 141,160 parameters (104,296 active), 2 layers",
        ),  # 6 of 8 experts of 3 x 64 x 32 do not work on a token
    ],
)
def test_the_size_of_a_model_is_said_with_what_works_on_a_token(preset, model):
    job = make_job(load_run("tiny", [f"model.preset={preset}", "mesh.data=-1", "mesh.fsdp=1"]).config)
    assert describe_job(job)["model"] == model


def test_a_part_that_refuses_the_sizes_of_a_family_of_ones_own_is_named():
    @register_family
    class Grouped(MixtureSizes, DenseSizes):
        family: str = Field(default="test_grouped", description="Family of the model.")
        n_groups: int = Field(default=3, description="Groups of experts.")

        def router(self) -> RouterConfig:
            return RouterConfig(n_experts=self.n_experts, top_k=self.top_k, n_groups=self.n_groups)

    run = load_run("tiny", ["model.preset=none", "model.family=test_grouped"]).config
    with pytest.raises(
        ConfigError,
        match=r"model\.family=test_grouped is built of a RouterConfig that cannot be: n_experts=8 is not divisible by n_groups=3",
    ):
        make_job(run)
