"""Requests: the fields of OpenAI's API that have an effect here, and our own fields.

A field without effect is refused by name, so that nobody relies on it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StringConstraints,
    model_validator,
)

from bd3lm.limits import MOST_ALTERNATIVES

_MOST_PROMPTS, _MOST_IDS = 1024, 200_000

NOT_HERE: Mapping[str, str] = MappingProxyType(
    {
        "best_of": "texts are not ranked; n returns several",
        "presence_penalty": "there are no penalties",
        "frequency_penalty": "there are no penalties",
        "repetition_penalty": "there are no penalties",
        "top_logprobs": "it is for chats; in completions logprobs is the number",
        "tools": "models here call no tools",
        "tool_choice": "models here call no tools",
        "functions": "models here call no tools",
        "function_call": "models here call no tools",
        "parallel_tool_calls": "models here call no tools",
        "modalities": "models here write text",
        "audio": "models here write text",
        "prediction": "a model guesses its own tokens here; see speculation",
        "store": "nothing is kept here",
        "metadata": "nothing is kept here",
        "service_tier": "there is one tier",
        "reasoning_effort": "models here have no separate reasoning",
        "verbosity": "max_tokens limits the length of a text",
        "web_search_options": "models here do not search",
        "min_p": "use top_p or top_k to keep only likely tokens",
    }
)
"""Fields of other servers, and why this one refuses them."""


def _is_text(value: str) -> str:
    """JSON can encode half of a surrogate pair, which is not text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text, and holds half of a surrogate pair") from None
    return value


Text = Annotated[str, AfterValidator(_is_text)]
_Stop = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
_Id = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
_IdKey = Annotated[int, Field(ge=0, lt=2**32)]  # not strict: JSON keys are texts
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Ids = Annotated[list[_Id], Field(min_length=1)]
_Number = Annotated[int, Field(strict=True, ge=0, le=MOST_ALTERNATIVES)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())


_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "best_of": (1,),
        "presence_penalty": (0,),
        "frequency_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "tools": ([],),
        "functions": ([],),
        "store": (False,),
        "min_p": (0,),
    }
)
"""Values with which refused fields ask for nothing. Many clients send them with every request."""


def _without_neutral_fields(body: Any) -> Any:
    """The request without fields that ask for nothing. null counts as absent."""
    if not isinstance(body, dict):
        return body
    return {
        name: value
        for name, value in body.items()
        if value is not None and not any(value == each for each in _NEUTRAL.get(name, ()))
    }


def _check_number(value: Any) -> Any:
    """Check the number first: validating a million prompts takes seconds."""
    if isinstance(value, list):
        most = _MOST_IDS if value and isinstance(value[0], int) else _MOST_PROMPTS
        if len(value) > most:
            raise ValueError(f"must hold at most {most:,} entries, and has {len(value):,}")
    return value


class StreamOptions(_Asked):
    include_usage: bool = False
    """Send a last chunk that counts tokens and passes."""


class JsonSchema(_Asked):
    name: Text = "schema"
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="Ignored: a schema is always followed.")


class AsText(_Asked):
    type: Literal["text"]


class AsJson(_Asked):
    type: Literal["json_object"]


class AsSchema(_Asked):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class AsRegex(_Asked):
    type: Literal["regex"]
    regex: Annotated[Text, StringConstraints(min_length=1, max_length=10_000)]


Format = Annotated[AsText | AsJson | AsSchema | AsRegex, Field(discriminator="type")]


class Ask(_Asked):
    """The fields of both kinds of requests."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, body: Any) -> Any:
        return _without_neutral_fields(body)

    model: Text | None = Field(None, description="The model's name, as in /v1/models.")
    temperature: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="Below 1, likely tokens become likelier. 0 always takes the likeliest token.",
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Draw only from the likeliest tokens that hold this much probability."
    )
    n: int = Field(1, ge=1, le=10_000, description="Number of texts for each prompt.")
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**63,
        description="The same seed writes the same text. By default the server draws a seed and returns it.",
    )
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = Field(
        None, description="Strings that end a text. The text ends before the string."
    )
    stream: bool = Field(False, description="Send the text piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = None
    events: bool = Field(
        False,
        description="Ours, needs stream: send everything that happens to the text, in `events` of each "
        "choice: blocks, revealed tokens, drafts. The text itself comes at the end.",
    )
    alternatives: _Number | None = Field(
        None,
        description="Ours, needs events: send the log-probability of each revealed token, and of this many "
        "of the likeliest tokens there.",
    )
    user: Text | None = Field(None, description="Ignored: OpenAI's clients may send it.")
    response_format: Format | None = Field(
        None,
        description="Constrain the text to JSON, a JSON schema or, ours, a regular expression. Causal law "
        "only.",
    )
    logit_bias: Annotated[dict[_IdKey, _Bias], Field(max_length=1024)] | None = Field(
        None,
        description="Add -100 to 100 to the logits of some token ids. Causal law only, without speculation.",
    )
    top_k: int | None = Field(
        None, ge=1, lt=2**31, description="Ours: draw only from this many of the likeliest tokens."
    )
    law: Literal["causal", "block"] | None = Field(
        None, description="Ours: the law of a joint model, token by token or block by block."
    )
    lean: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="Ours: the order within a block. 0 is uniform; larger numbers begin further left.",
    )
    unmasking: dict[str, Any] | None = Field(
        None,
        description='Ours: the unmasking rule, such as {"kind": "first_hitting", "tokens_per_pass": 2}.',
    )
    speculation: Literal["auto", "off"] | Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="Ours: guess this many tokens ahead. The text stays the same."
    )

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def tops(self) -> int | None:
        """How many of the likeliest tokens to report with each token of the text; None reports none."""
        return None

    def settings(self) -> dict[str, Any]:
        """The settings in the request. The model has defaults for the others."""
        said = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "unmasking", "speculation")
            if getattr(self, name) is not None
        }
        if self.logit_bias:
            said["logit_bias"] = list(self.logit_bias.items())
        numbers = [number for number in (self.tops, self.alternatives) if number is not None]
        if numbers:
            said["alternatives"] = max(numbers)
        return said | ({"stop": self.stops} if self.stops else {}) | self._grammar()

    def _grammar(self) -> dict[str, Any]:
        match self.response_format:
            case AsJson():
                return {"json_schema": {"type": "object"}}
            case AsSchema(json_schema=asked):
                return {"json_schema": asked.schema_}
            case AsRegex(regex=regex):
                return {"regex": regex}
        return {}


class CompletionAsk(Ask):
    """Continue a text, or fill the gaps of one."""

    prompt: Annotated[
        Text | _Ids | Annotated[list[Text | _Ids], Field(min_length=1)], BeforeValidator(_check_number)
    ] = Field("", description="A text or a list of token ids, or several of these.")
    max_tokens: int = Field(16, ge=1, lt=2**31, description="At most this many tokens after the prompt.")
    echo: bool = Field(False, description="Return the prompt too, before the text.")
    suffix: Text | None = Field(
        None,
        description="What comes after the text: max_tokens tokens are written between the prompt and it.",
    )
    template: Text | None = Field(
        None,
        description='Ours: fill the gaps of this text instead, such as "The {3} sat". {{ and }} are braces.',
    )
    fills: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Ours: how many fills to draw for gaps with text after them. One is chosen by how well "
        "that text fits.",
    )

    logprobs: _Number | None = Field(
        None,
        description="Return the log-probability of each written token, and of this many of the likeliest "
        "tokens there.",
    )

    @property
    def tops(self) -> int | None:
        return self.logprobs

    def settings(self) -> dict[str, Any]:
        return super().settings() | ({} if self.fills is None else {"fills": self.fills})


class Part(_Asked):
    type: Literal["text"]
    text: Text


class ChatMessage(_Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part] | None
    name: Text | None = Field(None, description="Ignored.")

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content or ())

    @property
    def speaker(self) -> str:
        """The role; "developer" is OpenAI's newer name of "system"."""
        return "system" if self.role == "developer" else self.role


class ChatAsk(Ask):
    """Answer in a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1000)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="The longest answer, in tokens.")
    max_completion_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="The newer name of max_tokens."
    )
    logprobs: StrictBool = Field(False, description="Return the log-probability of each token of the answer.")
    top_logprobs: _Number | None = Field(
        None, description="With logprobs: also return this many of the likeliest tokens there."
    )

    @property
    def tops(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
