"""What a run says while it trains: metrics read one step late, checked, logged and shown."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from telamon.errors import NumericsError
from telamon.train.evaluation import Validation, acceptance_metrics, bits_per_byte
from telamon.watch.progress import RunDisplay
from telamon.watch.throughput import Throughput
from telamon.watch.trackers import Trackers


@dataclass
class History:
    """What a resumed run must remember of itself; part of each checkpoint's meta."""

    seconds: float = 0.0
    """Wall time of the processes before this one, up to their checkpoints, s."""
    seconds_to_beat_gzip: float | None = None
    """Wall time at the first validation below gzip's figure, s."""


@dataclass
class Recorder:
    """Takes each step's metrics as device arrays and reads them when the next step is under way."""

    steps: int
    """Steps of the plan."""
    first: int
    """Steps done before this process."""
    log_every: int
    places: Any
    """Rows x row length of a step, as a function of the step (from 0)."""
    learning_rate: optax.Schedule
    display: RunDisplay
    trackers: Trackers
    meter: Throughput
    gzip_bits_per_byte: float | None
    history: History
    began: float
    """Unix time at which this process started."""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step that was read."""
    validation: Validation | None = None
    """The last evaluation."""
    untrained_steps: int = 0
    """Steps that held no trained token."""
    _pending: tuple[int, Mapping[str, jax.Array]] | None = None

    def after_step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Note the metrics of a step just dispatched (`step` steps are done with it), and read those of the one before.

        A step that is logged is waited for: its figures belong to the stretch that ends with it, and one wait in
        `log_every` steps costs nothing.
        """
        self.settle()
        self._pending = (step, metrics)
        if self._logged(step):
            self.settle()

    def settle(self) -> None:
        """Read what is pending.

        Raises:
            NumericsError: the loss or the gradient of a step is not finite.
        """
        if self._pending is None:
            return
        step, pending = self._pending
        self._pending = None
        values = {name: float(np.asarray(value)) for name, value in pending.items()}
        self.meter.step(real_tokens=values["tokens"], places=self.places(step - 1))
        for name in ("loss", "grad_norm"):
            if not np.isfinite(values[name]):
                raise NumericsError(
                    f"{name} is {values[name]} at step {step}; nothing was saved since the last checkpoint. "
                    "Lower optimizer.learning_rate, or look at the batch with `telamon data preview`"
                )
        self.untrained_steps += values["tokens"] == 0
        self.latest = values
        if self._logged(step):
            self._log(step, values)
        else:
            self.display.advance(step)

    def validated(self, step: int, validation: Validation | None) -> None:
        """Log an evaluation."""
        self.validation = validation
        if validation is None:
            return
        metrics = {"val_loss": validation.loss} | acceptance_metrics(validation)
        if validation.bits_per_byte is not None:
            metrics["val_bits_per_byte"] = validation.bits_per_byte
            gzip = self.gzip_bits_per_byte
            if self.history.seconds_to_beat_gzip is None and gzip is not None and validation.bits_per_byte < gzip:
                self.history.seconds_to_beat_gzip = self.elapsed
        self.trackers.log(step, metrics | {"seconds": self.elapsed})
        if validation.bits_per_byte is not None:
            self.display.validation(step, validation.bits_per_byte)
        else:
            self.display.print(f"step {step}/{self.steps}  validation loss {validation.loss:.4f}")
        if validation.acceptance:
            shares = ", ".join(f"{share:.1%}" for share in validation.acceptance.values())
            self.display.print(f"step {step}/{self.steps}  drafts of multi-token prediction accepted {shares}")

    @property
    def elapsed(self) -> float:
        """Wall time of the run, earlier processes included, s."""
        return self.history.seconds + time.time() - self.began

    def _logged(self, step: int) -> bool:
        return step % self.log_every == 0 or step in (self.first + 1, self.steps)

    def _log(self, step: int, values: dict[str, float]) -> None:
        metrics = {"loss": values["loss"]}
        per_byte = bits_per_byte(values["nll"], values["bytes"])
        if per_byte is not None:
            metrics["bits_per_byte"] = per_byte
        metrics["grad_norm"] = values["grad_norm"]
        metrics["learning_rate"] = float(np.asarray(self.learning_rate(step - 1)))
        reading = self.meter.read()
        metrics |= reading.metrics() if reading else {}
        auxiliary = {n: v for n, v in values.items() if n not in (*metrics, "nll", "bytes")}
        if auxiliary.get("cross_entropy") == values["loss"]:  # it has no other terms
            del auxiliary["cross_entropy"]
        metrics |= {"expert_load_max": values["expert_load_max"]} if "expert_load_max" in values else {}
        self.trackers.log(step, metrics | auxiliary | {"seconds": self.elapsed})
        self.display.log(step, metrics)
