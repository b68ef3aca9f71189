"""What the schemas of JSON files have in common, and how such a file is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from hvdkit.errors import LARGEST, RequestError, first_fault
from hvdkit.files import read_bounded, write_atomic

if TYPE_CHECKING:
    from pandas import DataFrame

_LARGEST_FLOAT = 1e300  # beyond it, sums and ratios overflow
Count = Annotated[int, Field(ge=0, le=LARGEST)]
R = TypeVar("R", bound=BaseModel)


class Record(BaseModel):
    """A part of a file. A key that the schema does not have is an error."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class StrictRecord(Record):
    """A record that takes no value of another type, such as a text for a number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Figures(Record):
    """A record whose numbers are finite, and small enough to compute with."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name, value in self.__dict__.items():
            if value is None or type(value) in (str, bool) or (type(value) is float and abs(value) <= LARGEST):
                continue  # most are, and a metrics.jsonl may have millions of lines
            for number in value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,):
                most = LARGEST if isinstance(number, int) else _LARGEST_FLOAT
                if isinstance(number, int | float) and abs(number) > most:
                    raise ValueError(f"{name}: expected a number of at most {most:g}")
        return self


class OfCheckpoint(Figures):
    """What a rank under `framework` says of a checkpoint that is `trained_by` one, after its update `step`.

    `averaged` says whether its weights are averaged ones.
    """

    framework: str
    framework_version: str
    hvdkit_version: str
    model: str
    trained_by: str
    step: int
    averaged: bool = False


class Result(BaseModel):
    """A whole file that a command has written, named `FILE`; `OF` is what messages call one."""

    FILE: ClassVar[str]
    OF: ClassVar[str]
    _folder: Path | None = PrivateAttr(None)

    def __init_subclass__(cls, file: str, of: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.FILE, cls.OF = file, of or f"the {file} of hvdkit"

    @property
    def folder(self) -> Path:
        """The folder of the file, absolute. Raises RequestError for a result that no file is known of."""
        if self._folder is None:
            raise RequestError(
                f"{type(self).__name__}: expected a result that was read or written, got one without a file"
            )
        return self._folder

    def at(self, folder: Path) -> Self:
        """This result, with its `folder`."""
        self._folder = folder.absolute()
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file. Raises RequestError if it is missing or damaged."""
        return read(cls, path, cls.OF).at(path.parent)

    def written(self, folder: Path) -> Self:
        """Write it into the folder; returns this result, with its `folder`. Raises RunError."""
        write_atomic(folder / self.FILE, self.model_dump_json(indent=2) + "\n")
        return self.at(folder)

    def records(self) -> list[dict[str, Any]]:
        """The result as a table, with a dictionary for each row."""
        raise NotImplementedError

    def to_pandas(self) -> DataFrame:
        """`records` as a pandas DataFrame. Raises RequestError without pandas."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise RequestError("to_pandas: expected pandas; install it with `pip install pandas`") from None
        return DataFrame(self.records())

    def __eq__(self, other: object) -> bool:
        """Whether the files have the same content, wherever they are."""
        return type(self) is type(other) and self.__dict__ == other.__dict__


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values in nested mappings by their keys, with dots between them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def read(kind: type[R], path: Path, expected: str) -> R:
    """Read a JSON file. Raises RequestError, one line with the file and what was `expected`, if it is damaged."""
    try:
        return kind.model_validate_json(read_bounded(path))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); expected {expected}") from None
    except ValidationError as error:
        raise RequestError(f"{path}: not {expected}: {first_fault(error)}") from None
