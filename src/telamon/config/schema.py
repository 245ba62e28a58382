"""What a run is: every setting, its unit and its default, in one tree of frozen pydantic models.

The `model` section is open: each family in `telamon.models` declares its own sizes as a subclass of
:class:`ModelConfig` and registers it with `telamon.config.registry.register_family`; a user's module does the same.

Types are strict: a number in quotes, or `true` for an integer, is refused rather than turned into something.
Checks between sections are in `telamon.config.checks`.
"""

from itertools import pairwise
from math import prod
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_validator

from telamon.config.checks import check_run
from telamon.errors import ConfigError

AXES = ("data", "fsdp", "stage", "expert", "context", "tensor")

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the config: frozen, closed (an unknown key is an error), every default checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _none_is_none(cls, values: Any) -> Any:
        """`none` in a config means None wherever the field may be None (YAML itself only knows `null`)."""
        if not isinstance(values, dict):
            return values
        optional = {name for name, field in cls.model_fields.items() if type(None) in get_args(field.annotation)}
        return {key: None if value == "none" and key in optional else value for key, value in values.items()}


class ModelConfig(Section):
    """Sizes that every family has. A family's own sizes live beside its blocks in `telamon.models`."""

    family: str = Field(default="llama", description="Family of the model: a file of `telamon.models`, or one registered by --import.")
    preset: str | None = Field(default=None, description="Model preset whose sizes are the defaults (see `telamon models list`).")
    published_parameters: int | None = Field(
        default=None, gt=0, description="Number of parameters published for the preset, which `telamon verify` compares with the model's."
    )
    vocab_size: Positive = Field(default=4096, description="Rows of the embedding table, in tokens; at least the tokenizer's size.")
    d_model: Positive = Field(default=256, description="Width D of the residual stream, in features.")
    n_layers: Positive = Field(default=6, description="Number of blocks L.")
    vocab_multiple: Positive = Field(
        default=1,
        description="Rows of the tables are rounded up to a multiple of this, so that a mesh divides them; the spare rows stand for no token.",
    )
    tie_embeddings: bool = Field(default=True, description="Use the embedding table as the output head.")
    max_positions: Positive | None = Field(
        default=None, description="Longest text the model is made for, in tokens, as exports say it; none: train.seq_len."
    )

    beside_weights: ClassVar[frozenset[str]] = frozenset({"preset", "published_parameters", "max_positions", "vocab_multiple"})
    """Fields of whole numbers or names that weights do not depend on, or not in what they hold: spare rows come and go."""

    may_be_fewer: ClassVar[frozenset[str]] = frozenset()
    """Numbers of things that a model can do without: of weights that have more, the others are left out."""

    def spec(self) -> Any:
        """The architecture that the sizes stand for, a `telamon.models.spec.ModelSpec`; every family has its own."""
        raise NotImplementedError(f"the model family {self.family!r} does not say what it builds")

    @property
    def position_limit(self) -> int | None:
        """Positions that the model has at all, for a learned table of them; none: any number."""
        return None

    def shrunk(self) -> Self:
        """The same family at sizes that a laptop runs in seconds, for checks. A family shrinks its own sizes too."""
        return self.model_copy(update={"vocab_size": 256, "d_model": 32, "n_layers": 2, "published_parameters": None})

    def divided(self) -> dict[str, dict[str, int]]:
        """What a mesh axis splits evenly, as axis -> {field: size}. A family adds its heads under `tensor`."""
        return {"stage": {"n_layers": self.n_layers}}


class AxisSizes(Section):
    """Sizes of the six mesh axes, in devices."""

    data: int = Field(default=1, description="Replicas that split the batch and hold whole weights, in devices.")
    fsdp: int = Field(default=1, description="Devices that split the batch and the weights.")
    stage: int = Field(default=1, description="Pipeline stages, in devices.")
    expert: int = Field(default=1, description="Devices that split the batch, and the experts of a mixture.")
    context: int = Field(default=1, description="Devices that split the sequence.")
    tensor: int = Field(default=1, description="Devices that split heads and hidden features.")

    def sizes(self) -> dict[str, int]:
        """The size of each axis, by name."""
        return {axis: getattr(self, axis) for axis in AXES}

    @model_validator(mode="after")
    def _sizes_count_devices(self) -> Self:
        for axis, size in self.sizes().items():
            if size < 1:
                raise ValueError(f"axis {axis} has size {size}; the size of a mesh axis is at least 1")
        return self


class MeshConfig(AxisSizes):
    """How devices are arranged: a size per axis, -1 on one axis takes the devices that are left."""

    fsdp: int = Field(default=-1, description="Devices that split the batch and the weights; -1 takes all that are left.")
    cross_slice: AxisSizes = Field(
        default_factory=AxisSizes, description="How often each axis is repeated across slices (slow network), in slices."
    )
    replicated_limit: Fraction = Field(
        default=0.02, description="Largest share of the parameters that may stay unsharded on a mesh that shards weights."
    )

    @model_validator(mode="after")
    def _sizes_count_devices(self) -> Self:
        for axis, size in self.sizes().items():
            if size == 0 or size < -1:
                raise ValueError(f"mesh.{axis}={size}: the size of a mesh axis is at least 1, or -1 to take the devices that are left")
        free = [axis for axis, size in self.sizes().items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"only one mesh axis may be -1; got {', '.join(f'mesh.{axis}' for axis in free)}")
        return self

    def totals(self) -> dict[str, int]:
        """The size of each axis over all slices; -1 for one that takes the devices that are left."""
        across = self.cross_slice.sizes()
        return {axis: -1 if size == -1 else size * across[axis] for axis, size in self.sizes().items()}

    def filled(self, device_count: int) -> AxisSizes:
        """The in-slice sizes on `device_count` devices in all. Raises ConfigError where they don't fit."""
        sizes, across = self.sizes(), prod(self.cross_slice.sizes().values())
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = prod(size for size in sizes.values() if size != -1) * across
        if device_count % fixed or (not free and device_count != fixed):
            asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "all axes 1"
            slices = f" on {across} slices" if across > 1 else ""
            count = f"a multiple of {fixed}" if free else str(fixed)
            raise ConfigError(
                f"the mesh ({asked}{slices}) needs {count} devices, and there are {device_count}; mesh.fsdp=-1 takes what is left"
            )
        return AxisSizes(**{axis: device_count // fixed if size == -1 else size for axis, size in sizes.items()})


class SourceConfig(Section):
    """One source of documents."""

    kind: Literal["stdlib", "text", "jsonl", "parquet", "synthetic"] = Field(
        default="stdlib",
        description="stdlib: the running Python's own library; text: one document a file; jsonl, parquet: one a row; synthetic: seeded random tokens.",
    )
    path: str | None = Field(default=None, description="A file, a folder, a glob, or an fsspec URL; not for stdlib and synthetic.")
    field: str = Field(default="text", description="Name of the text field of a JSONL line or a Parquet row.")
    weight: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Share of this source in a mixture, relative to the others' weights."
    )
    documents: Positive = Field(default=1024, description="Synthetic only: number of documents.")
    length: Positive = Field(default=512, description="Synthetic only: mean length of a document, in tokens.")

    @model_validator(mode="after")
    def _path_fits_kind(self) -> Self:
        needs = self.kind in ("text", "jsonl", "parquet")
        if needs and not self.path:
            raise ValueError(f"a source of kind {self.kind} needs a path")
        if not needs and self.path:
            raise ValueError(f"a source of kind {self.kind} takes no path; got {self.path!r}")
        return self


class TokenizerConfig(Section):
    """Which tokenizer turns text into ids."""

    path: str | None = Field(
        default=None, description="A Hugging Face tokenizer.json, or a folder that holds one; none: train a byte-level BPE on the data."
    )
    chat_template: str | None = Field(
        default=None,
        description="File of a chat template (Jinja) that goes with the run and its exports; none: the one beside the tokenizer, if there is one.",
    )
    vocab_size: Annotated[int, Field(ge=260)] = Field(
        default=4096, description="Size of the byte-level BPE trained on first use, in tokens, specials included."
    )


class DataConfig(Section):
    """Where tokens come from, and how they are laid out in rows."""

    sources: tuple[SourceConfig, ...] = Field(default=(SourceConfig(),), min_length=1, description="Sources of documents, mixed by weight.")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="The tokenizer.")
    packing: Literal["split", "drop_tail", "first_fit", "best_fit"] = Field(
        default="split",
        description="split: documents are laid end to end and cut at row ends, nothing dropped; drop_tail: a document is cut at the row length and its tail dropped; "
        "first_fit, best_fit: whole documents placed in rows, those longer than a row split first.",
    )
    max_segments: int | None = Field(
        default=None, gt=0, description="Most documents in one row (some attention kernels have a limit); none: no limit. Not with split."
    )
    shuffle: bool = Field(default=True, description="Visit documents in a new order each epoch, over the whole set.")
    epochs: int | None = Field(
        default=None, gt=0, description="Passes over the data before it is exhausted (exit code 3); none: as many as the steps need."
    )
    val_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.01,
        description="Share of the files (rows, for JSONL and Parquet) held out for validation, chosen by a hash of the relative path.",
    )
    cache_dir: str = Field(default=".cache/telamon", description="Folder for trained tokenizers and token files, named by content hash.")
    prefetch: Positive = Field(default=4, description="Batches read ahead of the step.")

    @model_validator(mode="after")
    def _limits_fit_packing(self) -> Self:
        if self.packing == "split" and self.max_segments is not None:
            raise ValueError(f"data.max_segments={self.max_segments} needs data.packing first_fit, best_fit or drop_tail; got split")
        return self


class ScheduleConfig(Section):
    """Learning rate over the steps of the plan."""

    kind: Literal["cosine", "wsd", "constant"] = Field(
        default="wsd", description="cosine; wsd: warm-up, stable, decay to the end (linear); constant after warm-up."
    )
    warmup_steps: int | None = Field(default=None, ge=0, description="Steps of linear warm-up from 0; none: from warmup_fraction.")
    warmup_fraction: Fraction = Field(default=0.02, description="Warm-up as a share of train.steps, where warmup_steps is not given.")
    decay_fraction: Fraction = Field(default=0.4, description="wsd only: share of train.steps that decays at the end.")
    final_fraction: Fraction = Field(default=0.05, description="Learning rate at the last step, as a share of the peak.")


class GroupConfig(Section):
    """A set of parameters with its own learning rate."""

    match: str = Field(description="Regular expression searched in the parameter's dotted path, such as 'embed'.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(description="Peak learning rate of the group.")


class OptimizerConfig(Section):
    """How gradients become updates."""

    kind: Literal["adamw", "muon"] = Field(default="adamw", description="adamw; muon: Muon on matrices, AdamW on the rest.")
    learning_rate: Annotated[float, Field(gt=0)] = Field(
        default=1e-3, description="Peak learning rate (Muon's updates are scaled to AdamW's size, so one rate serves both)."
    )
    groups: tuple[GroupConfig, ...] = Field(
        default=(), description="Parameters with a peak learning rate of their own; the first match counts."
    )
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="Learning rate over the steps.")
    b1: Fraction = Field(default=0.9, description="AdamW: decay of the first moment.")
    b2: Fraction = Field(default=0.95, description="AdamW: decay of the second moment.")
    eps: Annotated[float, Field(gt=0)] = Field(default=1e-8, description="AdamW: added to the root of the second moment.")
    momentum: Fraction = Field(default=0.95, description="Muon: decay of the momentum.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled weight decay on matrices, multiplied by the learning rate."
    )
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global norm of the gradient; none: no clipping.")
    offload: bool = Field(
        default=False, description="Keep the moments in the host's memory between steps; the update streams them to the devices and back."
    )


class RampStage(Section):
    """A stage of a batch ramp."""

    step: Annotated[int, Field(ge=0)] = Field(description="First step (counted from 0) of the stage.")
    batch_size: Positive = Field(description="Rows a step from there on.")


class ExpertsConfig(Section):
    """How mixtures of experts are trained. What a mixture is, its model says."""

    path: Literal["auto", "ragged_dot", "tokamax", "blocked", "capacity", "dense"] = Field(
        default="auto",
        description="What computes them: ragged_dot, tokamax, blocked (all without dropping); capacity (what is beyond capacity_factor is "
        "dropped); dense (every expert, every token; for tests); auto: the first without dropping that serves.",
    )
    capacity_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.25, description="capacity only: places of an expert in a row, over what an even load would take."
    )
    balance: Literal["none", "batch", "sequence"] = Field(
        default="none",
        description="Term for an even load, experts x sum(load x mean probability), loads summing to top_k, mean over layers; batch: loads "
        "of the whole step (with train.accumulate above 1 a forward pass more); sequence: within each document of a row.",
    )
    balance_weight: Annotated[float, Field(ge=0)] = Field(default=0.01, description="Weight of the term for an even load.")
    z_weight: Annotated[float, Field(ge=0)] = Field(default=0.0, description="Weight of the squared log-normaliser of the router's logits.")
    bias_rate: Annotated[float, Field(ge=0)] = Field(
        default=1e-3,
        description="Models with a selection bias: how much it falls a step for an expert above the mean load, and rises for one below; 0: stays.",
    )
    jitter: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Routers see their input times random factors from 1 - jitter to 1 + jitter."
    )
    count: Literal["real", "trained"] = Field(
        default="real",
        description="Tokens that loads and the terms above are over: all that are no padding, or those with a trained target.",
    )


class TrainConfig(Section):
    """The loop."""

    steps: Positive = Field(default=1000, description="Optimizer steps of the plan; schedules refer to this length.")
    stop_at: int | None = Field(default=None, gt=0, description="End the run after this step of the plan without bending the schedule.")
    batch_size: Positive = Field(default=16, description="Rows a step, over all devices.")
    batch_ramp: tuple[RampStage, ...] = Field(
        default=(), description="Batch sizes that change at given steps; before the first stage, batch_size holds."
    )
    seq_len: Annotated[int, Field(gt=1)] = Field(default=256, description="Row length T, in tokens.")
    accumulate: Positive = Field(default=1, description="Microbatches a step; sums are accumulated and divided once.")
    seed: int = Field(default=0, ge=0, description="Seed of initialisation and of the data order.")
    init_from: str | None = Field(
        default=None,
        description="A run or an import whose newest weights a new run begins with; its model and tokenizer are the defaults. None: fresh weights.",
    )
    compute_dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Type of activations; weights are kept in float32."
    )
    remat: Literal["none", "full", "dots", "offload"] = Field(
        default="none",
        description="What the backward pass recomputes: nothing, whole blocks, or all but matrix products; "
        "offload: whole blocks, whose inputs wait in the host's memory.",
    )
    attention: Literal["auto", "splash", "cudnn", "tokamax", "chunked"] = Field(
        default="auto",
        description="What computes attention over training rows: splash (TPU), cudnn, tokamax (GPU), chunked (anywhere); auto: the first that serves.",
    )
    loss: Literal["auto", "tokamax", "chunked"] = Field(
        default="auto",
        description="What computes the cross-entropy: tokamax (TPU; tells no accuracy), chunked (anywhere); auto: the first that serves.",
    )
    loss_chunk: Positive = Field(default=1024, description="Tokens whose logits exist at one time in the loss, on each device.")
    z_loss: Annotated[float, Field(ge=0)] = Field(default=0.0, description="Weight of the squared log-normaliser of the logits.")
    mtp_weight: Annotated[float, Field(ge=0)] = Field(
        default=0.3,
        description="Models that predict further tokens (model.mtp_layers): weight of the mean cross-entropy of these predictions, over all "
        "of them (DeepSeek V3: 0.3, towards the end 0.1); 0: it is measured, and trains nothing.",
    )
    experts: ExpertsConfig = Field(default_factory=ExpertsConfig, description="How mixtures of experts are trained.")
    xla_flags: dict[str, bool | int | float | str] = Field(
        default={},
        description="XLA options, by name, added to those of the hardware's preset or in their place; an unknown one is refused.",
    )
    log_every: Positive = Field(default=10, description="Steps between log lines.")

    @property
    def last_step(self) -> int:
        """Steps done when the run ends, whole plan or not."""
        return self.stop_at or self.steps

    def batch_size_at(self, step: int) -> int:
        """Rows of step `step` (from 0)."""
        size = self.batch_size
        for stage in self.batch_ramp:
            if step >= stage.step:
                size = stage.batch_size
        return size

    def rows_before(self, step: int) -> int:
        """Rows consumed by steps 0 .. step-1."""
        edges = [0, *(s.step for s in self.batch_ramp if s.step < step), step]
        return sum((b - a) * self.batch_size_at(a) for a, b in pairwise(edges) if b > a)

    @model_validator(mode="after")
    def _stages_in_order(self) -> Self:
        starts = [s.step for s in self.batch_ramp]
        if starts != sorted(set(starts)):
            raise ValueError(f"train.batch_ramp steps must rise; got {starts}")
        for size in {self.batch_size, *(s.batch_size for s in self.batch_ramp)}:
            if size % self.accumulate:
                raise ValueError(f"train.batch_size={size} is not divisible by train.accumulate={self.accumulate}")
        if self.stop_at is not None and self.stop_at > self.steps:
            raise ValueError(f"train.stop_at={self.stop_at} lies beyond train.steps={self.steps}")
        return self


class EvalConfig(Section):
    """Validation during training."""

    every: int | None = Field(default=100, gt=0, description="Steps between evaluations; none: only at the end.")
    batch_size: int | None = Field(default=None, gt=0, description="Rows an evaluation batch; none: train.batch_size.")
    batches: int | None = Field(default=None, gt=0, description="Evaluation batches at most; none: the whole held-out set.")


class CheckpointConfig(Section):
    """What is saved, and how long it is kept."""

    every: int | None = Field(default=200, gt=0, description="Steps between checkpoints; none: only at the end and on SIGTERM.")
    keep: Positive = Field(default=3, description="Newest checkpoints kept.")
    keep_every: int | None = Field(default=None, gt=0, description="Checkpoints at multiples of this step are kept for ever.")
    asynchronous: bool = Field(default=True, description="Write in the background while training goes on.")


class WatchConfig(Section):
    """Where metrics go."""

    progress: bool = Field(default=True, description="Show a progress bar on a terminal.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard events beside metrics.jsonl.")
    wandb_project: str | None = Field(
        default=None, description="Weights & Biases project to log to (extra `wandb`; WANDB_MODE=offline works)."
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="Peak of one device in TFLOP/s, where it is unknown or to be overridden; none: table, or measured on a CPU.",
    )


class ProfileConfig(Section):
    """Looking inside a step."""

    steps: str | None = Field(
        default=None, pattern=r"^\d+:\d+$", description="Steps to trace, as FIRST:END, into the run's profile folder."
    )
    hlo: bool = Field(default=False, description="Write the compiled step's HLO text into the run directory.")


class SampleConfig(Section):
    """Text generated at the end of a run."""

    prompts: tuple[str, ...] = Field(default=("def main(", "import ", "class "), description="Prompts completed at the end of the run.")
    tokens: Annotated[int, Field(ge=0)] = Field(default=48, description="Tokens generated for each; 0: no samples.")
    temperature: Annotated[float, Field(ge=0)] = Field(default=0.8, description="Sampling temperature; 0 is greedy.")


class RunSection(Section):
    """Where the run lives."""

    root: str = Field(default="runs", description="Folder (or URL) that holds run directories.")
    name: str | None = Field(
        default=None,
        pattern=r"^[\w.+=@ -]*[\w+=@-]$",
        description="Name of the run's directory, without slashes; none: the preset's name and the time.",
    )
    compile_cache: str | None = Field(
        default=".cache/telamon/programs",
        description="Folder (or URL) for compiled programs, which later runs of the same sizes take over; none: no cache. "
        "JAX_COMPILATION_CACHE_DIR comes first.",
    )
    imports: tuple[str, ...] = Field(
        default=(), description="Modules with families and blocks of your own, imported first; --import adds to them."
    )


class RunConfig(Section):
    """A whole run."""

    run: RunSection = Field(default_factory=RunSection, description="Where the run lives.")
    model: SerializeAsAny[ModelConfig] = Field(default_factory=ModelConfig, description="What the model is.")
    data: DataConfig = Field(default_factory=DataConfig, description="Where tokens come from.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="The loop.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="How gradients become updates.")
    mesh: MeshConfig = Field(default_factory=MeshConfig, description="How devices are arranged.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Validation during training.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="What is saved.")
    watch: WatchConfig = Field(default_factory=WatchConfig, description="Where metrics go.")
    profile: ProfileConfig = Field(default_factory=ProfileConfig, description="Looking inside a step.")
    sample: SampleConfig = Field(default_factory=SampleConfig, description="Text generated at the end.")

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        check_run(self)
        return self

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up of this run."""
        schedule = self.optimizer.schedule
        if schedule.warmup_steps is not None:
            return schedule.warmup_steps
        return round(schedule.warmup_fraction * self.train.steps)
