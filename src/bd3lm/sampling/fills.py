"""Gaps with text after them: draw several fills, and choose one by how well the text after it fits.

A writer fills a gap before it has read the text after it. So `Fills` asks for several fills of a template,
each with its own seed, and weighs them. One fill is then drawn with a probability proportional to its weight
(sampling importance resampling). As the number of fills grows, its distribution approaches that of the
model's texts that contain the given tokens. Text after the last given token is written once, after the chosen
fill.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform, derive_seed, gumbel_max
from bd3lm.models import Denoiser
from bd3lm.sampling.events import Event, Extended, Failed, Sample, Started, Stopped, Tell
from bd3lm.sampling.stopping import Ending, Stopping
from bd3lm.sampling.table import Cost, Seat
from bd3lm.sampling.writer import Writer

_MOST_TOKENS = 2048  # to weigh at once: each has logits over the whole vocabulary


@dataclass(frozen=True)
class Weights:
    """The weights of some fills, and the cost of weighing."""

    log_weights: Tensor
    """(fills,) float64, up to a common constant."""
    passes: int
    """Passes over each fill."""


class FillWeights(ABC):
    """Weighs fills: how likely they make the text after them, relative to how likely they were drawn."""

    @abstractmethod
    def weigh(self, model: Denoiser, texts: Tensor, gaps: Tensor, seeds: Sequence[int]) -> Weights:
        """The weights of texts (fills, length) on the host, which end with a given token. `gaps` (length,)
        marks the filled places. A random weight uses its fill's seed."""

    def weighs(self, gaps: Tensor) -> bool:
        """Whether fills of these gaps can have different weights."""
        return True


@dataclass(frozen=True)
class Fills:
    """How many fills of a template to draw, and how to weigh them."""

    number: int
    weights: FillWeights

    def __post_init__(self) -> None:
        if self.number < 2:
            raise ValueError(f"number must be at least 2, or there is nothing to weigh, got {self.number}")


def followed_to(given: Sequence[int], mask_id: int) -> int:
    """The end of the last given token with a gap before it; 0 if there is none."""
    known = [place for place, token in enumerate(given) if token != mask_id]
    end = known[-1] + 1 if known else 0
    return end if mask_id in given[:end] else 0


def fill_seeds(seed: int, number: int) -> list[int]:
    """A seed for each fill. The first is the text's own, so drawing more fills keeps the earlier ones."""
    return [seed, *(derive_seed(seed, "fill", index) for index in range(1, number))]


def choose_fill(log_weights: Tensor, seed: int) -> int:
    """Draw one fill with a probability proportional to its weight; if all weights are zero, any fill."""
    if not (log_weights > -math.inf).any():
        log_weights = torch.zeros_like(log_weights)
    where = torch.tensor(derive_seed(seed, "which fill")), torch.tensor(0)
    return int(gumbel_max(log_weights, counter_uniform(*where, Purpose.TOKEN, len(log_weights))))


def effective_number(log_weights: Tensor) -> float:
    """The effective number of fills: how many of equal weight would be worth as much, (Σ w)² / Σ w²."""
    if not (log_weights > -math.inf).any():
        return float(len(log_weights))
    share = torch.softmax(log_weights, 0)
    return float(1.0 / share.square().sum())


@dataclass(eq=False)
class _Filling:
    """A text with fills that are being written."""

    seat: Seat
    writer: Writer
    fills: Fills
    end: int  # of the given text that weighs the fills
    first: int  # the index of the first fill; the others count down from it
    has_failed: bool = False
    samples: dict[int, Sample] = field(default_factory=dict)  # by fill, from 0
    events: dict[int, list[Event]] = field(default_factory=dict)

    @property
    def indices(self) -> range:
        return range(self.first, self.first - self.fills.number, -1)

    def seats(self) -> Iterator[Seat]:
        """A seat for each fill. The fill ends with given tokens, so nothing else can end it."""
        request = replace(
            self.seat.request,
            given=self.seat.request.given[: self.end],
            length=self.end,
            stopping=Stopping(),
            fills=None,
        )
        tell: Tell = "passes" if self.seat.watched else "end"
        for index, seed in zip(self.indices, fill_seeds(request.seed, self.fills.number), strict=True):
            yield Seat(index, replace(request, seed=seed), tell)


@dataclass(eq=False)
class _Chosen:
    """A text that continues after its chosen fill."""

    seat: Seat
    cost: Cost
    effective: float
    is_begun: bool = False


class Fillings:
    """An engine's texts with several fills, between its requests and its seats."""

    def __init__(self) -> None:
        self._next = -1  # fills have negative indices; requests count from 0
        self._of: dict[int, _Filling] = {}
        self._chosen: dict[int, _Chosen] = {}

    def seats(self, seat: Seat, writer: Writer) -> list[Seat]:
        """The seats that a request needs: one, or one for each fill."""
        request = seat.request
        end = followed_to(request.given.tolist(), writer.mask_id)
        if request.fills is None or not end:
            return [seat]
        filling = _Filling(seat, writer, request.fills, end, self._next)
        self._next -= request.fills.number
        self._of.update(dict.fromkeys(filling.indices, filling))
        return list(filling.seats())

    def drop(self, indices: set[int]) -> set[int]:
        """Forget canceled texts. Returns the indices of their fills."""
        fills = {index for index, filling in self._of.items() if filling.seat.index in indices}
        for index in fills:
            del self._of[index]
        for index in indices:
            self._chosen.pop(index, None)
        return fills

    def clear(self) -> None:
        self._of.clear()
        self._chosen.clear()

    def pass_on(self, event: Event) -> tuple[list[Event], list[tuple[Writer, Seat]]]:
        """The events to report for an event, and the seats to write next because of it.

        Nothing is reported about fills until one is chosen. Then the events of that one follow, all at once.
        """
        if event.index in self._chosen:
            return self._after_chosen(event), []
        if event.index >= 0:
            return [event], []
        filling = self._of.get(event.index)
        if filling is None or filling.has_failed:  # the text is canceled or has failed
            return [], []
        fill = filling.first - event.index
        match event:
            case Failed(reason=reason):
                filling.has_failed = True  # the engine then drops its other fills
                reason = reason.replace(f"text {event.index} ", f"text {filling.seat.index} ", 1)
                return [Failed(filling.seat.index, reason)], []
            case Stopped(sample=sample):
                filling.samples[fill] = sample
            case _:
                filling.events.setdefault(fill, []).append(event)
        if len(filling.samples) < filling.fills.number:
            return [], []
        for index in filling.indices:
            del self._of[index]
        return self._choose(filling)

    def _choose(self, filling: _Filling) -> tuple[list[Event], list[tuple[Writer, Seat]]]:
        seat, request = filling.seat, filling.seat.request
        samples = [filling.samples[fill] for fill in range(filling.fills.number)]
        texts = torch.stack([sample.tokens for sample in samples])
        log_weights, passes = _weigh(filling, texts)
        if log_weights.isnan().any():
            return [Failed(seat.index, _not_finite(seat.index))], []
        fill = choose_fill(log_weights, request.seed)
        cost = Cost(evaluations=passes)
        for sample in samples:
            cost = cost.plus(sample)
        effective = effective_number(log_weights)
        told = [
            Started(seat.index, request) if isinstance(event, Started) else replace(event, index=seat.index)
            for event in filling.events.get(fill, ())
        ]
        if filling.end == request.length:
            ending = Ending("length", filling.end)
            finished = seat.finished(texts[fill].clone(), cost, ending, effective=effective)
            return [*told, Stopped(seat.index, finished)], []
        if seat.tell == "pieces":
            gap = request.given.tolist().index(filling.writer.mask_id)
            told.append(Extended(seat.index, gap, tuple(texts[fill, gap:].tolist())))
        filled = torch.cat((texts[fill], request.given[filling.end :]))
        self._chosen[seat.index] = _Chosen(seat, cost, effective)
        follows = replace(seat, request=replace(request, given=filled, fills=None))
        return told, [(filling.writer, follows)]

    def _after_chosen(self, event: Event) -> list[Event]:
        chosen = self._chosen[event.index]
        match event:
            case Started() if not chosen.is_begun:  # already reported by the fill's own events
                chosen.is_begun = True
                return []
            case Failed():
                del self._chosen[event.index]
            case Stopped(sample=sample):
                del self._chosen[event.index]
                ending = Ending(sample.stopped_by, len(sample.tokens), sample.stop_string)
                cost = chosen.cost.plus(sample)
                finished = chosen.seat.finished(sample.tokens, cost, ending, effective=chosen.effective)
                again = {name: getattr(sample, name) for name in ("seed", "redraws", "redrawn_passes")}
                return [replace(event, sample=replace(finished, **again))]
        return [event]


def _weigh(filling: _Filling, texts: Tensor) -> tuple[Tensor, int]:
    """The weights of all fills, and the total passes over them. The batch size does not depend on how many
    fills were written together, so the weights are equal to the last bit."""
    fills = filling.fills
    gaps = filling.seat.request.given[: filling.end] == filling.writer.mask_id
    seeds = fill_seeds(filling.seat.request.seed, fills.number)
    rows = max(_MOST_TOKENS // texts.shape[1], 1)
    found, passes = [], 0
    for start in range(0, len(texts), rows):
        some = slice(start, start + rows)
        weights = fills.weights.weigh(filling.writer.model, texts[some], gaps, seeds[some])
        found.append(weights.log_weights)
        passes += weights.passes * len(texts[some])
    return torch.cat(found), passes


def _not_finite(index: int) -> str:
    return (
        f"text {index} cannot be written: the weights of its fills are not finite; the model's weights may "
        "hold NaN"
    )
