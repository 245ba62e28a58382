"""What a run says of itself before it begins."""

import pytest

from telamon.config.load import load_run
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
