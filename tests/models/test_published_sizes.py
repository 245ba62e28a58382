"""Model presets against the numbers of parameters that were published for them."""

import pytest

from telamon.config import presets
from telamon.config.load import load_run
from telamon.models.weights import Model


@pytest.mark.parametrize("name", presets.names("models"))
def test_a_preset_builds_a_model_of_the_published_number_of_parameters(name):
    model = load_run(overrides=[f"model.preset={name}"]).config.model
    assert model.published_parameters is not None, f"presets/models/{name}.yml needs published_parameters"
    # Tied heads are counted once by some publishers and twice by others, and some round; none is off by half a percent.
    assert Model(model.spec()).parameter_count == pytest.approx(model.published_parameters, rel=0.005)
