"""What every section of a config is made of; config.py puts the sections together."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced across kinds."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        """YAML's `yes` and `true` must not become the number 1."""
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(str(name))
            if isinstance(value, bool) and field is not None and field.annotation in (int, float):
                raise ValueError(f"{name} is {value}, must be a number")
        return values
