"""The form of measurements, by kind: a file of another form is refused here, so nothing else has to check.

Only the fields that a report reads are described; other fields may be anything.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bd3lm.reports.animation import Film

LARGEST = 1e30
"""The largest number that plots and tables have room for."""

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=1 / LARGEST, le=LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Figure(_Part):
    meaning: Literal["exact", "bound", "neither"]
    perplexity: Positive | None
    perplexity_error: NotNegative | None
    bits_per_byte: NotNegative | None


class _Likelihood(_Part):
    class Settings(_Part):
        data: str
        text: str
        split: str
        estimator: str
        replicates: Count
        seed: Seed
        context: Count
        batch_size: Count
        limit: Count | None
        eos_between_documents: bool
        bos_eos: bool = False
        law: str | None = None
        lean: Number | None = None
        tokenizer: str | None = None
        field: str | None = None

    class Result(_Part):
        sequences: Count
        tokens: Count
        figures: Annotated[list[_Figure], Field(min_length=1)]

    settings: Settings
    result: Result


class _Variance(_Part):
    class Settings(_Part):
        batches: Count
        gradients: Count
        seed: Seed

    class Result(_Part):
        class Row(_Part):
            masks: str
            unbiased: bool
            loss: NotNegative | None
            loss_error: NotNegative | None
            gradient: NotNegative | None
            gradient_error: NotNegative | None

        rows: list[Row]

    settings: Settings
    result: Result


class _Statistics(_Part):
    median: NotNegative
    mean: NotNegative
    p90: NotNegative
    max: NotNegative
    lengths: Annotated[list[Count], Field(min_length=1)]


class _Unmasking(_Part):
    kind: str


class _Writing(_Part):
    """How texts were drawn."""

    top_p: NotNegative | None
    steps: Count | None
    seed: Seed
    law: str | None = None
    lean: Number | None = None
    top_p_rule: str = ""
    unmasking: str | _Unmasking | None = None


class _Lengths(_Part):
    class Settings(_Part):
        length: Count | None
        data: str | None
        law: str | None = None
        lean: Number | None = None
        count: Count
        seed: Seed
        top_p: NotNegative | None
        top_p_rule: str = ""
        entropy_floor: Number | None
        entropy_window: Count

    class Result(_Part):
        class Samples(_Statistics):
            number: Count
            stopped_by: dict[str, Count]

        class Training(_Statistics):
            documents: Count

        samples: Samples
        training: Training | None

    settings: Settings
    result: Result


class _Judgement(_Part):
    class Settings(_Writing):
        judge: str
        judge_dtype: str
        window: Count
        stride: Count
        count: Count
        length: Count
        dtype: str
        entropy_floor: Number | None
        redraws: Count | None
        mauve_reference: str | None = None

    class Result(_Part):
        samples: Count
        perplexity: Positive | None
        perplexity_error: NotNegative | None
        entropy: Number | None
        entropy_error: NotNegative | None
        evaluations_per_token: NotNegative | None
        redraws: Count
        degenerate: Count
        mauve: Number | None

    settings: Settings
    result: Result


class _Texts(_Part):
    class Result(_Part):
        class Text(_Part):
            given: str
            written: str
            tokens: Count
            evaluations: Count
            stopped_by: Literal["eos", "string", "entropy", "length"]

        texts: list[Text]

    settings: _Writing
    result: Result


class _LongText(_Texts):
    class Settings(_Writing):
        length: Count

    settings: Settings


class _FilmOf(_Part):
    settings: _Writing
    result: dict[str, Any]

    @model_validator(mode="after")
    def _has_a_film(self) -> "_FilmOf":
        Film.from_json(self.result)
        return self


class _BoxFilm(_Part):
    class Result(_Part):
        title: str
        parameters: Count
        film: dict[str, Any]

        @model_validator(mode="after")
        def _has_a_film(self) -> "_BoxFilm.Result":
            Film.from_json(self.film)
            return self

    settings: _Writing
    result: Result


class _Unigram(_Part):
    class Settings(_Part):
        text: str
        split: str

    class Result(_Part):
        perplexity: Positive
        tokens: Count

    settings: Settings
    result: Result


_OF_KIND: Mapping[str, type[_Part]] = {
    "perplexity": _Likelihood,
    "variance": _Variance,
    "lengths": _Lengths,
    "judgement": _Judgement,
    "samples": _Texts,
    "denoising": _FilmOf,
    "unigram": _Unigram,
    "long_text": _LongText,
    "box_film": _BoxFilm,
}


class _Common(_Part):
    """Fields of records of all kinds."""

    kind: str
    measured: str
    dtype: str


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record that does not have the form of its kind, naming the first problem."""
    for form in (_Common, _OF_KIND.get(record["kind"], _Part)):
        try:
            form.model_validate(record)
        except ValidationError as error:
            raise ValueError(
                f"{where} must be a measurement as bd3lm stores it, and is not at {_first(error)}"
            ) from None


def _first(error: ValidationError) -> str:
    """The place of the first problem, the problem and, unless it says so itself, the value."""
    found = error.errors(include_url=False)[0]
    said = str(found["ctx"]["error"]) if found["type"] == "value_error" else found["msg"]
    got = "" if found["type"] in ("value_error", "missing") else f", got {found['input']!r:.60}"
    return f"{'.'.join(map(str, found['loc']))}: {said}{got}"
