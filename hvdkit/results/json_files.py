"""What the schemas of JSON files have in common, and how such a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from hvdkit.errors import LARGEST, RequestError, first_fault
from hvdkit.files import read_bounded

_LARGEST_FLOAT = 1e300  # beyond it, sums and ratios overflow
Count = Annotated[int, Field(ge=0, le=LARGEST)]
R = TypeVar("R", bound=BaseModel)


class Record(BaseModel):
    """A part of a file. A key that the schema does not have is an error."""

    model_config = ConfigDict(extra="forbid")


class Figures(Record):
    """A record whose numbers are finite, and small enough to compute with."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name, value in self:
            for each in value if isinstance(value, list) else value.values() if isinstance(value, dict) else (value,):
                most = LARGEST if isinstance(each, int) else _LARGEST_FLOAT
                if isinstance(each, int | float) and abs(each) > most:
                    raise ValueError(f"{name}: expected a number of at most {most:g}")
        return self


def version(expected: int, remedy: str) -> BeforeValidator:
    """Refuses the file of another version of the schema, and says what to do."""

    def check(value: Any) -> Any:
        if type(value) is int and value != expected:
            raise ValueError(f"expected {expected}, got {value}; {remedy}")
        return value

    return BeforeValidator(check)


def read(kind: type[R], path: Path, expected: str) -> R:
    """Read a JSON file. Raises RequestError, one line with the file and what was `expected`, if it is damaged."""
    try:
        return kind.model_validate_json(read_bounded(path))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); expected {expected}") from None
    except ValidationError as error:
        raise RequestError(f"{path}: not {expected}: {first_fault(error)}") from None
