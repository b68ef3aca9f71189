"""The recipe's models: which there are, and the keys of each."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from hvdkit.recipe.data import AutoOr, Location, Strict

ModelName = Literal[
    "resnet8", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110",
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
]  # fmt: skip
GptName = Literal["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt"]
BatchNorm = Literal["local", "synchronized"]
_BATCH_NORM = "in training, by the statistics of the rank's own batch, or (synchronized) of all ranks' batches"
Classes = Annotated[Literal["auto"] | int, AutoOr(2, 1_000_000)]


class Model(Strict):
    """The model; its layers are in `hvdkit/tasks/resnet.py`."""

    TASK: ClassVar[str] = "image_classification"  # the module in `hvdkit/tasks/`
    SCRIPT: ClassVar[str] = "resnet"  # the module in `recipes/<framework>/` that builds the model

    name: ModelName = Field(description="CIFAR form: 8 to 56 and 110 layers; ImageNet form (v1.5): the others")
    classes: Classes = Field("auto", description="auto: as many as the folder of images has; 10 for other data")
    weights: Location | None = Field(None, description="safetensors file or folder to start from (docs/fine-tuning.md)")
    new_head: bool = Field(False, description="draw the last layer anew instead of taking it from `weights`")
    batch_norm: BatchNorm = Field("local", description=_BATCH_NORM)
    zero_init_residual: bool = Field(False, description="start each block's last batch norm with scale 0")

    @model_validator(mode="after")
    def _a_new_head_belongs_to_weights(self) -> Model:
        if self.new_head and self.weights is None:
            raise ValueError("expected new_head only where weights are given, got new_head true and no weights")
        return self


class GptModel(Strict):
    """GPT-2, or `gpt` of any size; its table is in `hvdkit/tasks/gpt.py`.

    A width of a multiple of `heads`. Files of weights have Hugging Face's names and layouts.
    """

    TASK: ClassVar[str] = "language_modeling"
    SCRIPT: ClassVar[str] = "gpt"
    new_head: ClassVar[bool] = False
    batch_norm: ClassVar[None] = None  # it has none

    name: GptName = Field(description="gpt2 to gpt2-xl: the published sizes; gpt: the size that the other keys give")
    layers: int | None = Field(None, ge=1, le=1000, description="blocks; for gpt")
    heads: int | None = Field(None, ge=1, le=1000, description="attention heads in a block; for gpt")
    width: int | None = Field(None, ge=1, le=100_000, description="size of a token's vector; for gpt")
    context: int | None = Field(None, ge=1, le=1_000_000, description="tokens of a sample; for gpt")
    vocabulary: int | None = Field(None, ge=2, le=1_000_000, description="different tokens; for gpt: 256 if not given")
    initializer_range: float = Field(0.02, gt=0, le=1, description="standard deviation of the initial weights")
    weights: Location | None = Field(None, description="safetensors file or folder with Hugging Face's names")

    @model_validator(mode="after")
    def _gpt_has_a_size(self) -> GptModel:
        sizes = {key: getattr(self, key) for key in ("layers", "heads", "width", "context", "vocabulary")}
        if self.name != "gpt":
            if given := [key for key, value in sizes.items() if value is not None]:
                raise ValueError(f"expected {', '.join(given)} only for name gpt, as {self.name} has its own sizes")
            return self
        if missing := [key for key, value in sizes.items() if value is None and key != "vocabulary"]:
            raise ValueError(f"expected {', '.join(missing)} for name gpt, got none")
        if self.width and self.heads and self.width % self.heads:
            raise ValueError(f"expected a width that is a multiple of heads, got {self.width} and {self.heads}")
        return self

    @property
    def classes(self) -> int:
        """The tokens among which the model chooses."""
        return 50_257 if self.name != "gpt" else self.vocabulary or 256


class OwnModel(Strict):
    """A model of the user's, with its data, loss and metrics: a script with a `hvdkit.Own`."""

    TASK: ClassVar[str] = "own"
    weights: ClassVar[None] = None
    new_head: ClassVar[bool] = False

    name: Literal["own"]
    script: Location = Field(description="Python file that trains it, beside the recipe or in the current folder")
    classes: Classes = Field("auto", description="for data sets of hvdkit; auto as for its models")
    batch_norm: BatchNorm = Field("local", description=_BATCH_NORM)
    options: dict[str, JsonValue] = Field(default_factory=dict, description="handed to the script as they are")


def kind_of_model(value: Any) -> str:
    """`own`, or else a name of hvdkit's models, so that all faults of the section are found."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return "own" if name == "own" else "gpt" if str(name).startswith("gpt") else "resnet20"


AnyModel = Annotated[
    Annotated[Model, Tag("resnet20")] | Annotated[GptModel, Tag("gpt")] | Annotated[OwnModel, Tag("own")],
    Discriminator(kind_of_model),
]
