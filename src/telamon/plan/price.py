"""What a run costs, from a price of the user's and a predicted time."""

from dataclasses import dataclass

from telamon.config.schema import RunConfig
from telamon.plan.cost import Prediction
from telamon.plan.topology import Topology


@dataclass(frozen=True)
class Price:
    """What a run costs."""

    chip_hour: float
    """Dollars for a chip and hour, as given."""
    dollars: float
    """Of all steps of the run."""
    tokens_per_dollar: float

    def __str__(self) -> str:
        return f"${self.dollars:,.2f} at ${self.chip_hour:,.2f} for a chip and hour: {self.tokens_per_dollar:,.0f} tokens a dollar"


def price_of(config: RunConfig, topology: Topology, prediction: Prediction, *, chip_hour: float) -> Price:
    """Chips x hours x price of all of a run's steps; what starting, evaluating and saving take is not counted.

    Args:
        config: the run; a batch ramp's steps count at the size that `prediction` is for.
        topology: the machine.
        prediction: time of a step.
        chip_hour: dollars for a chip and hour.
    """
    hours = prediction.step_seconds * config.train.steps / 3600
    dollars = hours * topology.chip_count * chip_hour
    tokens = prediction.tokens_per_second_per_device * topology.device_count * hours * 3600
    return Price(chip_hour, dollars, tokens / dollars)
