"""Events that carry the text so far, for watching a text while it is written."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from bd3lm.data import Tokenizer
from bd3lm.lm.generation import Generation
from bd3lm.sampling import BlockStarted, Event, Sample, Started, Stopped, TokenHidden, TokenRevealed

MASK_SIGN = "░"


def with_texts(events: Iterator[Event], tokenizer: Tokenizer | None, mask_id: int) -> Iterator[Event]:
    """The same events, each able to show its text so far. Without a tokenizer they are unchanged.

    A text is decoded only when somebody reads it.
    """
    if tokenizer is None:
        yield from events
        return
    texts: dict[int, list[int]] = {}
    for event in events:
        match event:
            case Started(index=index, request=request):
                texts[index] = request.given.tolist()
            case BlockStarted(index=index, stop=stop):
                texts[index] += [mask_id] * (stop - len(texts[index]))
            case TokenRevealed(index=index, position=position, token=token):
                texts[index][position] = token
            case TokenHidden(index=index, position=position):
                texts[index][position] = mask_id
            case Stopped(index=index, sample=sample):
                texts.pop(index, None)
                yield replace(event, tell=partial(_finished, sample, tokenizer))
                continue
        if event.index in texts:
            event = replace(event, tell=partial(_so_far, tuple(texts[event.index]), tokenizer, mask_id))
        yield event


def _finished(sample: Sample, tokenizer: Tokenizer) -> str:
    return Generation.of(sample, tokenizer).text or ""


def _so_far(tokens: Sequence[int], tokenizer: Tokenizer, mask_id: int) -> str:
    """The text so far. Each run of tokens between masks is decoded together: a character may span several."""
    shown = []
    for masked, run in groupby(tokens, lambda token: token == mask_id):
        same = list(run)
        shown.append(MASK_SIGN * len(same) if masked else tokenizer.decode(same))
    return "".join(shown)
