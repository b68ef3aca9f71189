"""The recipe: one YAML file for all four frameworks, typed and strict.

`load` reports all faults of a file and its overrides together, each with its key, what was expected and what was
received, before anything is started or written.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from hvdkit.errors import RequestError
from hvdkit.recipe import yaml_files
from hvdkit.recipe.communication import AnyCompression, Parallel, Sync, Uncompressed
from hvdkit.recipe.data import (  # noqa: F401 - re-exported: the recipe's classes
    NAME,
    AnyData,
    AutoOr,
    BatchSize,
    Cifar10,
    Digits,
    ImageFolder,
    Location,
    Mnist5k,
    Native,
    OwnData,
    Rules,
    Strict,
    Synthetic,
    SyntheticText,
    Text,
    ToBeFound,
)
from hvdkit.recipe.models import AnyModel, GptModel, Model, OwnModel, kind_of_model
from hvdkit.recipe.optimizer import (  # noqa: F401 - re-exported
    AdamW,
    AnyOptimizer,
    AverageWeights,
    EarlyStopping,
    Lamb,
    Lars,
    Loss,
    Optimizer,
    Sgd,
)
from hvdkit.recipe.yaml_files import brief, named

# Keys that decide which others a section has.
_CHOICES = {"optimizer.name", "data.name", "compression.method", "schedule.decay", "schedule.scale"}


class Schedule(Strict):
    """The learning-rate schedule: linear scaling, gradual warm-up (Goyal et al. 2017), then decay.

    Formulas: `hvdkit/core/schedule.py`.
    """

    scale: Literal["linear", "none"] = Field("linear", description="linear: the rate grows with the global batch")
    base_batch_size: int = Field(256, ge=1, description="global batch, in samples, that learning_rate is for")
    warmup_epochs: float = Field(0.0, ge=0, le=100_000, description="epochs over which the rate rises to its value")
    decay: Literal["constant", "step", "cosine", "polynomial"] = Field("cosine", description="after the warm-up")
    milestones: list[float] = Field(default_factory=list, description="epochs; for decay: step")
    gamma: float = Field(0.1, gt=0, le=1, description="factor at each milestone")
    power: float = Field(2.0, gt=0, description="for decay: polynomial")

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Schedule:
        if (self.decay == "step") != bool(self.milestones):
            raise ValueError("expected milestones exactly where decay is 'step'")
        if self.milestones != sorted(self.milestones) or any(m <= 0 for m in self.milestones):
            raise ValueError(f"expected rising milestones above 0, got {self.milestones}")
        # Compares values, because a run's resolved recipe has all keys.
        readers = {"gamma": ("decay", "step"), "power": ("decay", "polynomial"), "base_batch_size": ("scale", "linear")}
        for key, (choice, reader) in readers.items():
            default, got = type(self).model_fields[key].default, getattr(self, key)
            if got != default and getattr(self, choice) != reader:
                raise ValueError(f"expected {key} other than {default} only where {choice} is {reader!r}, got {got}")
        return self


class Checkpointing(Strict):
    """When checkpoints are written, and how many are kept besides the best. The end of training is always kept."""

    every_epochs: int = Field(1, ge=0, description="epochs between two checkpoints, after the evaluation; 0: none")
    every_steps: int = Field(0, ge=0, description="updates between two checkpoints; 0: none")
    keep: int = Field(2, ge=1, description="newest ones that are kept")
    accept_changed_data: bool = Field(False, description="resume although the samples are not those of the checkpoint")

    @model_validator(mode="after")
    def _something_is_written(self) -> Checkpointing:
        if not self.every_epochs and not self.every_steps:
            raise ValueError("expected every_epochs or every_steps above 0; for no checkpoints give checkpoint: null")
        return self


class Elastic(Strict):
    """Training that continues when ranks are lost or added, with `min_np` to `max_np` ranks.

    Every `commit_every` updates all ranks copy the state into memory; after the loss of a rank training continues from
    that copy.
    """

    min_np: int = Field(1, ge=1, description="fewest ranks to continue with")
    max_np: int = Field(ge=1, description="most ranks to accept")
    commit_every: int = Field(10, ge=1, description="updates between two commits")

    @model_validator(mode="after")
    def _from_few_to_many(self) -> Elastic:
        if self.min_np > self.max_np:
            raise ValueError(f"expected min_np at most max_np, got {self.min_np} and {self.max_np}")
        return self


class Recipe(Strict):
    """Everything that determines what is computed, except the framework and the number of ranks."""

    name: str = Field(pattern=NAME, description="name of the recipe, for folders and reports")
    model: AnyModel = Field(description="what is trained")
    data: Annotated[AnyData, Field(discriminator="name")] = Field(description="what it is trained on")
    batch_size: BatchSize = Field(32, description="samples (images, windows of a text) per rank and step; or auto")
    max_batch_size: int | None = Field(None, ge=1, le=2**24, description="the most of batch_size: auto; null: 1,024")
    accumulate_rest: bool = Field(False, description="with batch_size: auto, accumulate up to max_batch_size samples")
    epochs: int = Field(1, ge=1, le=100_000, description="passes over the training samples")
    steps: int | None = Field(None, ge=1, le=2**48, description="stop after so many steps")
    seed: int = Field(1, ge=0, lt=2**32, description="seed of the initial weights and of the order of samples")
    optimizer: AnyOptimizer = Field(description="how gradients change the weights")
    schedule: Schedule = Field(Schedule(), description="the learning rate over time")
    loss: Loss = Field(Loss(), description="what is minimized")
    compression: AnyCompression = Field(Uncompressed(), description="how gradients are sent")
    sync: Sync | None = Field(None, description="updates by a rank's own gradients between two synchronizations")
    allreduce: Literal["ring", "hierarchical", "central"] = Field("ring", description="how gradients are summed")
    order: Literal["none", "priority"] = Field(
        "none", description="priority: gradients go first layer first, and the next forward begins under way"
    )
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = Field(
        "none", description="what a rank holds only its share of, and all before it: ZeRO-1, ZeRO-2, ZeRO-3"
    )
    parallel: Parallel = Field(Parallel(), description="how ranks divide the data, the layers, and the parts of layers")
    precision: Literal["fp32", "fp64", "bf16", "fp16"] = Field("fp32", description="of the arithmetic")
    accumulate: int = Field(1, ge=1, le=2**24, description="batches whose mean gradient makes one update")
    recompute: bool = Field(False, description="compute activations again in backward instead of keeping them")
    check_ranks: int = Field(0, ge=0, description="steps between two comparisons of all ranks' weights; 0: never")
    checkpoint: Checkpointing | None = Field(Checkpointing(), description="null: no weights are kept")
    average_weights: AverageWeights | None = Field(None, description="evaluated and saved beside the weights")
    early_stopping: EarlyStopping | None = Field(None, description="end when validation no longer improves")
    elastic: Elastic | None = Field(None, description="continue when ranks are lost or added; null: do not")
    tune: Literal["rule", "measure", "none"] = Field(
        "rule", description="how Horovod's settings are chosen: by rule, by short runs at the start, or not at all"
    )
    device: Literal["auto", "cpu", "gpu"] = Field("auto", description="auto: a GPU where there is one")
    threads: Annotated[Literal["auto"] | int, AutoOr(1, 4096)] = Field("auto", description="CPU threads a rank")
    log_every: int = Field(10, ge=1, description="steps between two lines of metrics.jsonl")
    tensorboard: bool = Field(False, description="write metrics for TensorBoard too")
    warmup_steps: int = Field(10, ge=0, description="first steps that throughput leaves out")

    @model_validator(mode="before")
    @classmethod
    def _classes_of_other_data(cls, document: Any) -> Any:
        """Only a folder of images has to be looked into for its number of classes."""
        model, data = (document.get(key) if isinstance(document, dict) else None for key in ("model", "data"))
        if not isinstance(model, dict) or not isinstance(data, dict) or data.get("name") == "imagefolder":
            return document
        decided = kind_of_model(model) == "gpt" or model.get("classes", "auto") != "auto"
        return document if decided else document | {"model": model | {"classes": 10}}

    @property
    def finds_batch_size(self) -> bool:
        """Whether the largest batch that fits is found when training starts."""
        return isinstance(self.batch_size, ToBeFound)

    @property
    def undecided(self) -> bool:
        """Whether the folder of images still has to decide something: the number of classes, or the size."""
        return isinstance(self.data, ImageFolder) and "auto" in (self.model.classes, self.data.size)

    def data_ranks(self, np: int) -> int:
        """How many of `np` ranks read different samples: the size of the data axis."""
        return max(1, np // self.parallel.model)

    @model_validator(mode="after")
    def _keys_go_together(self) -> Recipe:
        if lines := _faults(self):
            raise PydanticCustomError("together", "{lines}", {"lines": "\n".join(lines)})
        return self


def _faults(recipe: Recipe) -> list[str]:
    """A line for each rule about keys of different sections that the recipe breaks."""
    rules = [*_of_models(recipe)]
    found = recipe.finds_batch_size or recipe.accumulate_rest or recipe.max_batch_size is not None
    compression, others = recipe.compression.method, (recipe.allreduce, recipe.order, recipe.sharding)
    if found or compression != "none" or recipe.sync is not None or others != ("ring", "none", "none"):
        from hvdkit.recipe import together  # most runs do not need it

        rules = [*together.rules(recipe), *rules]
    if recipe.parallel.divides and not recipe.finds_batch_size:
        from hvdkit.recipe import parallel  # most runs do not need it

        rules += parallel.rules(recipe)
    return [f"{key}: expected {expected}, got {got}" for broken, key, expected, got in rules if broken]


def _of_models(recipe: Recipe) -> Rules:
    model, data, loss_weights = recipe.model, recipe.data, recipe.loss.class_weights
    if isinstance(data, OwnData):
        yield not isinstance(model, OwnModel), "data.name", "model.name own, as own needs a script", model.name
        lost = "null with data.shares, as the share of a rank that is lost is lost too"
        yield data.shares and recipe.elastic, "elastic", lost, "elastic training"
    elif isinstance(model, GptModel) != isinstance(data, Text | SyntheticText):
        kinds = "text or synthetic-text" if isinstance(model, GptModel) else "images"
        yield True, "data.name", f"{kinds} for model {model.name}", data.name
    if loss_weights is not None and not isinstance(model, OwnModel):
        key, given = "loss.class_weights", len(loss_weights)
        yield isinstance(model, GptModel), key, "none for a model of text, whose classes are tokens", given
        numbers = {"auto", given} if isinstance(model, Model) else {model.classes}
        yield model.classes not in numbers, key, f"{model.classes}, one for each of model.classes", given
    own = isinstance(model, OwnModel)
    yield recipe.recompute and own, "recompute", "false with model.name own, whose script can do it", "true"
    first = (recipe.average_weights and recipe.average_weights.from_epoch) or 0
    most = f"at most the recipe's {recipe.epochs} epochs"
    yield first > recipe.epochs, "average_weights.from_epoch", most, first


def load(
    path: Path,
    overrides: list[str] | tuple[str, ...] = (),
    notes: list[str] | None = None,
    overrides_from: str = "overrides",
) -> Recipe:
    """Read a recipe file and apply `key=value` overrides (nested keys with dots, values as YAML).

    Where an override chooses another optimizer, for example, the file's keys that only the former one has are left out;
    `notes` gets a line for that. Raises RequestError with all faults, one a line.
    """
    return revise(_read(path), named(path), overrides, notes, overrides_from)


def revise(
    document: dict[str, Any],
    where: str,
    overrides: list[str] | tuple[str, ...] = (),
    notes: list[str] | None = None,
    overrides_from: str = "overrides",
) -> Recipe:
    """Validate a document that has been read, with overrides, as `load` does.

    Each fault that the document has by itself starts with `where`, each that the overrides bring with `overrides_from`,
    such as "command line". Raises RequestError with all faults, one a line.
    """
    before = copy.deepcopy(document) if overrides else document
    faults = [fault for text in overrides if (fault := yaml_files.override(document, text, Recipe))]
    given = {text.partition("=")[0].strip() for text in overrides}
    if given & _CHOICES:
        from hvdkit.recipe.choices import leave_out  # most runs do not need it

        left_out = leave_out(document, before, given)
        if notes is not None:
            notes += left_out
    lines, recipe = _validated(document)
    own = _validated(before)[0] if lines and overrides else lines  # faults that the document has by itself
    faults += [f"{where if line in own else overrides_from}: {line}" for line in lines]
    if faults:
        from hvdkit.recipe.faults import MOST_FAULTS

        if len(faults) > MOST_FAULTS:
            faults = [*faults[:MOST_FAULTS], f"{where}: {len(faults) - MOST_FAULTS} more faults; no YAML recipe"]
        raise RequestError("\n".join(faults))
    assert recipe
    return recipe


def _validated(document: dict[str, Any]) -> tuple[list[str], Recipe | None]:
    """All faults of a document, or the recipe."""
    try:
        return [], Recipe.model_validate(document)
    except ValidationError as error:
        from hvdkit.recipe.faults import explain  # only a wrong recipe needs it

        return explain(error, Recipe, "recipe"), None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load` reads it back to an equal Recipe."""
    return yaml_files.dump(recipe.model_dump())


def _read(path: Path) -> dict[str, Any]:
    document = yaml_files.load(path, "a YAML recipe", "a YAML recipe such as recipes/resnet20-digits.yaml", Recipe)
    if not isinstance(document, dict):
        raise RequestError(f"{named(path)}: expected keys with values (a mapping), got {brief(document)}")
    return document


def flat(recipe: Recipe) -> dict[str, Any]:
    """The recipe's values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in recipe.model_dump(mode="json").items():
        inner = value.items() if isinstance(value, dict) else [(None, value)]
        values |= {key if leaf is None else f"{key}.{leaf}": value for leaf, value in inner}
    return values
