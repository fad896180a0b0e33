"""The pictures of docs/idea.md. Orders, masks, weights, attention and probabilities come from the library."""

import json
import math
from itertools import permutations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bd3lm
from bd3lm.diffusion import Counts, LevelSampler, MaskingRule, Times, log_reveal_rates
from bd3lm.evaluation import exact_likelihood
from bd3lm.methods import BlockDiffusionMethod
from bd3lm.models import BlockDiffusion
from bd3lm.objectives import BlockDenoiser, TokenBatch
from bd3lm.sampling import FirstHitting
from research.pictures.drawing import CELL, HIGH, STEP, WIDTH, Drawing

EVAL = Path(__file__).parents[1] / "results" / "box.json"
WORDS = ("The", "old", "river", "flows", "into", "the", "cold", "sea")
BLOCK = 4
LEFT = 12


def order(seed: int, masked: list[bool], *, start: int = 0) -> list[int]:
    """The places of a block in the order in which the sampler reveals them."""
    positions = torch.arange(start, start + len(masked)).unsqueeze(0)
    passes = FirstHitting().plan(torch.tensor([seed]), positions, torch.tensor([masked]))
    return [int(each.places[0, 0]) for each in passes]


def _place(x: int, index: int, gap: int = 8) -> int:
    """Where the cell of a token is, with a gap between blocks."""
    return x + index * STEP + index // BLOCK * gap


def lines() -> Drawing:
    """Three ways to write one line."""
    drawing = Drawing(
        "One line of eight tokens, written in three ways; a number says in which pass a token comes. "
        "Autoregression: from left to right. Diffusion: the whole line in any order. Block diffusion: the "
        "left block of four in any order, then the right one.",
        314,
    )
    whole = order(3, [True] * len(WORDS))
    blocks = [start + place for start in (0, BLOCK) for place in order(6, [True] * BLOCK, start=start)]
    rows = (
        ("Autoregression (GPT)", "left to right · any length · cache", range(8)),
        ("Diffusion", "any order · fixed length · no cache", whole),
        ("Block diffusion", "blocks left to right, any order inside · any length · cache", blocks),
    )
    for number, (name, note, places) in enumerate(rows):
        top = 30 + number * 102
        passes = {place: step for step, place in enumerate(places, 1)}
        drawing.text(LEFT, top, name, "head")
        drawing.text(WIDTH - LEFT, top, note, "small", anchor="end")
        gap = 8 if number == 2 else 0
        for index, word in enumerate(WORDS):
            x = _place(LEFT, index, gap) + (0 if gap else 4)
            drawing.cell(x, top + 12, word)
            drawing.text(x + CELL / 2, top + 58, str(passes[index]), "note", anchor="middle")
    return drawing


TRAINED = ("The", "river", "flows", "into", "the", "sea")
HIDDEN = (False, True, True, True, True, False)


def training() -> Drawing:
    """What one pass of training reads, and who sees whom: the grid is the layout's own."""
    layout = BlockDiffusion(len(TRAINED), 2)
    seen = layout.dense()
    noisy = layout.noisy
    kinds = [
        ["own" if column < noisy else "before" if row < noisy else "clean" for column in range(layout.size)]
        for row in range(layout.size)
    ]
    drawing = Drawing(
        "Attention in training, for six tokens in blocks of two. A row is a position that reads, a column "
        "one that it may see. A position of the noisy copy sees its own block there, and the clean copy "
        "of all blocks before. A position of the clean copy sees the clean copy up to the end of its own "
        "block.",
        566,
    )
    words = ["" if hidden else word for word, hidden in zip(TRAINED, HIDDEN, strict=True)] + list(TRAINED)
    size, x, y = 33, 132, 108
    for copy, name in enumerate(("noisy copy", "clean copy")):
        start = copy * noisy * size
        drawing.text(x + start + 3 * size, 24, name, "head", anchor="middle")
        drawing.upward(24, y + start + 3 * size + 36, name, "head")
    for index, word in enumerate(words):
        middle = index * size + size / 2
        if word:
            drawing.text(x - 10, y + middle + 4, word, anchor="end")
            drawing.upward(x + middle + 4, y - 10, word)
        else:
            drawing.box(x - 42, y + middle - 11, 32, 20, "mask", round_by=4)
            drawing.box(x + middle - 11, y - 42, 20, 32, "mask", round_by=4)
    drawing.grid(x, y, size, seen, kinds)
    for cut in range(2, layout.size, 2):
        kind = "line" if cut == noisy else "rule"
        drawing.line(x + cut * size - 0.75, y, x + cut * size - 0.75, y + layout.size * size, kind)
        drawing.line(x, y + cut * size - 0.75, x + layout.size * size, y + cut * size - 0.75, kind)
    for column, (kind, name) in enumerate(
        (("own", "its own noisy block"), ("before", "clean blocks before"), ("clean", "clean text so far"))
    ):
        left = LEFT + 16 + column * 178
        drawing.box(left, 524, 15, 15, kind)
        drawing.text(left + 22, 537, name, "note")
    return drawing


DRAWN = 8


def drawn(rule: MaskingRule, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Masks (blocks, 4), the weight of each masked token, and the noise level of each block."""
    draws = LevelSampler(assignment="ordered").draw(
        DRAWN, BLOCK, BLOCK, generator=torch.Generator().manual_seed(seed)
    )
    masks = rule(draws, torch.ones(DRAWN, BLOCK, dtype=torch.bool))
    masked, weight = masks.masked[:, 0], masks.weight[:, 0]
    return masked, torch.where(masked, weight, 0.0).amax(1), draws.levels[:, 0]


def masks() -> Drawing:
    """Masks by time and by count, with the weights that the training loss gives them."""
    drawing = Drawing(
        "Eight blocks of four, masked in two ways, with the weight of each masked token. By time: a mask "
        "rate t is drawn, each token is masked with probability t and weighs 1/t, so small rates weigh "
        "much and often mask nothing. By count: the number k of masked tokens is drawn, and each weighs "
        "4/k, never more than 4.",
        378,
    )
    for column, (rule, name, note) in enumerate(
        (
            (Times(), "By time", "rate t, weight 1/t"),
            (Counts(), "By count", "k of 4, weight 4/k"),
        )
    ):
        left = LEFT + 8 + column * 276
        drawing.text(left, 30, name, "head")
        drawing.text(left, 50, note, "note")
        masked, weight, level = drawn(rule)
        for row in range(DRAWN):
            top = 66 + row * 30
            hidden = masked[row].tolist()
            for place, each in enumerate(hidden):
                drawing.box(left + 62 + place * 21, top, 19, 19, "sure" if each else "text", round_by=3)
            said = f"t = {level[row]:.2f}" if column == 0 else f"k = {sum(hidden)}"
            drawing.text(left, top + 14, said, "note")
            drawing.box(left + 152, top + 4, 10 * float(weight[row]), 11, "over")
            shown = f"{weight[row]:.2g}" if any(hidden) else "nothing masked"
            drawing.text(left + 158 + 10 * float(weight[row]), top + 14, shown, "small")
    drawing.line(LEFT, 314, WIDTH - LEFT, 314)
    pair = torch.tensor([True, False, False, True])
    drawing.text(LEFT + 8, 345, "Complementary copies", "head")
    for copy, half in enumerate((pair, ~pair)):
        left = 206 + copy * 132
        for place, each in enumerate(half.tolist()):
            drawing.box(left + place * 21, 331, 19, 19, "sure" if each else "text", round_by=3)
    drawing.text(299, 345, "and", "note")
    drawing.text(430, 345, "each token once", "note")
    return drawing


def writing() -> Drawing:
    """How blocks are written, pass by pass."""
    given = 2
    drawing = Drawing(
        "A prompt of two tokens is continued by six, in six passes. The first two passes read the first "
        "block, with the prompt and masks, and reveal one token each. The third reads that block as "
        "finished, which puts it into the cache, and the second block all masked. The last three read the "
        "second block alone and look back at the cache.",
        386,
    )
    known = set(range(given))
    states: list[tuple[int, int, set[int]]] = []  # where the block is, what is revealed now, what was known
    for start in (0, BLOCK):
        masked = [place not in known for place in range(start, start + BLOCK)]
        for place in order(2, masked, start=start)[: sum(masked)]:
            states.append((start, start + place, set(known)))
            known.add(start + place)
    for row, (start, now, before) in enumerate(states):
        top = 52 + row * 40
        first_of_block = start and not any(place >= start for place in before)
        drawing.text(LEFT, top + 19, f"{row + 1}", "head")
        for index, word in enumerate(WORDS[: start + BLOCK]):
            kind = "kept" if index < start and not first_of_block else "text" if index in before else "mask"
            if index == now:
                kind = "sure"
            x = 36 + index * 62 + index // BLOCK * 8
            drawing.cell(x, top, word if kind != "mask" else "", kind, width=58)
    drawing.text(LEFT, 28, "pass", "note")
    drawing.text(36 + 2 * 62, 28, "first block", "note", anchor="middle")
    drawing.text(36 + 6 * 62 + 8, 28, "second block", "note", anchor="middle")
    for number, (kind, word, said) in enumerate(
        (
            ("text", "a", "read"),
            ("mask", "", "mask"),
            ("sure", "a", "revealed by this pass"),
            ("kept", "a", "in the cache"),
        )
    ):
        left = LEFT + (0, 92, 190, 382)[number]
        drawing.cell(left, 322, word, kind, width=34)
        drawing.text(left + 42, 341, said, "note")
    drawing.text(LEFT, 372, "Pass 3 reads the finished block and puts it into the cache on the way.", "note")
    return drawing


def chances_of_places(lean: float) -> list[list[float]]:
    """For each step of a block and each place, the chance that the step reveals the place."""
    rates = log_reveal_rates(BLOCK, lean).exp().tolist()
    chances = [[0.0] * BLOCK for _ in range(BLOCK)]
    for places in permutations(range(BLOCK)):
        left, chance = sum(rates), 1.0
        for place in places:
            chance *= rates[place] / left
            left -= rates[place]
        for step, place in enumerate(places):
            chances[step][place] += chance
    return chances


def _measured() -> dict[float, dict[str, dict[str, Any]]]:
    """Figures of the model in the box, by lean and name."""
    records = json.loads(EVAL.read_text(encoding="utf-8"))
    return {
        record["settings"]["lean"]: {each["name"]: each for each in record["result"]["figures"]}
        for record in records
    }


def lean() -> Drawing:
    """Orders that lean: which place comes when, and what the model in the box makes of it."""
    figures = _measured()
    drawing = Drawing(
        "For blocks of four and the leans 0, 1, 2 and 4: how likely each step is to reveal each place, in "
        "percent. At lean 0 all are 25. The larger the lean, the more the first step reveals the first "
        "place, the second the second, and so on. Below each, perplexity and bound of the model in the "
        "box.",
        556,
    )
    size = 42
    for number, value in enumerate((0.0, 1.0, 2.0, 4.0)):
        left, top = 82 + number % 2 * 266, 56 + number // 2 * 268
        drawing.text(left, top - 28, f"lean {value:g}", "head")
        drawing.text(left + 2 * size, top - 8, "places of the block", "small", anchor="middle")
        drawing.upward(left - 44, top + 2 * size + 20, "step", "small")
        for step, chances in enumerate(chances_of_places(value)):
            drawing.text(left - 22, top + step * size + 26, f"{step + 1}", "note")
            for place, chance in enumerate(chances):
                x, y = left + place * size, top + step * size
                drawing.shade(x, y, size, 0.95 * chance)
                drawing.text(
                    x + size / 2,
                    y + 26,
                    f"{100 * chance:.0f}",
                    "in-sure" if chance > 0.8 else "",
                    anchor="middle",
                )
        exact, bound = (figures[value][name]["perplexity"] for name in ("exact", "nelbo"))
        drawing.text(left, top + 4 * size + 24, f"perplexity {exact:.1f}, bound ≤ {bound:.1f}", "note")
    return drawing


BEGINNING = "The city of"


def conditionals() -> tuple[list[str], dict[tuple[frozenset[int], int], float], float, float]:
    """The three tokens of a first block, under the model in the box at lean 0: the probability of each, given
    those already revealed; and the exact nats of the block and their bound."""
    lm = bd3lm.load("box").with_lean(0)
    tokenizer, method = lm.tokenizer, lm.record.method
    assert tokenizer is not None
    assert isinstance(method, BlockDiffusionMethod)
    ids = tokenizer.encode(BEGINNING)
    tokens = torch.tensor([[tokenizer.eos_id, *ids]])
    batch, reading = TokenBatch.of(tokens), method.reading(lm.record.frame)
    probability: dict[tuple[frozenset[int], int], float] = {}
    with torch.no_grad():
        denoiser = BlockDenoiser(lm.network, batch, reading=reading)
        for revealed in product((False, True), repeat=len(ids)):
            masked = torch.tensor([[[False, *(not each for each in revealed)]]])
            if masked.any():
                nats = denoiser.nats(masked)[0, 0, 1:].tolist()
                known = frozenset(i for i, each in enumerate(revealed) if each)
                probability |= {(known, i): math.exp(-nats[i]) for i, each in enumerate(revealed) if not each}
    found = exact_likelihood(lm.network, batch, reading)
    return (
        [tokenizer.decode([each]).strip() for each in ids],
        probability,
        float(found.nll.sum()),
        float(found.nelbo.sum()),
    )


def bound() -> Drawing:
    """All orders of a block, with the model's own probabilities along them."""
    words, probability, nll, nelbo = conditionals()
    drawing = Drawing(
        f"The block “{BEGINNING}” under the model in the box. From three masks to the whole text there are "
        "six orders; each arrow reveals one token and shows its probability, given what stood before. The "
        f"likelihood is the mean over orders of the products, exactly {nll:.2f} nats. The bound is the "
        f"mean of the sums of minus log, {nelbo:.2f} nats.",
        400,
    )
    wide, rise = 90, 104
    columns = [LEFT + known * (WIDTH - 2 * LEFT - wide) / 3 for known in range(4)]
    middle = 44.0 + rise
    places = {frozenset[int](): (columns[0], middle), frozenset(range(3)): (columns[3], middle)}
    for i in range(3):
        places[frozenset({i})] = (columns[1], 44.0 + rise * i)
        places[frozenset(range(3)) - {2 - i}] = (columns[2], 44.0 + rise * i)
    for (known, i), chance in probability.items():
        (x, y), (to_x, to_y) = places[known], places[known | {i}]
        x, y, to_x, to_y = x + wide + 2, y + HIGH / 2, to_x - 2, to_y + HIGH / 2
        drawing.line(x, y, to_x, to_y, "faint")
        along = 0.33 if len(known) == 1 else 0.5
        at_x, at_y = x + along * (to_x - x), y + along * (to_y - y)
        if y == to_y:
            at_x, at_y = (x + to_x) / 2, y - 12
        drawing.box(at_x - 19, at_y - 9, 38, 17, "page", round_by=3)
        drawing.text(at_x, at_y + 4, _short(chance), "small", anchor="middle")
    for known, (x, y) in places.items():
        for i, word in enumerate(words):
            drawing.cell(
                x + 30.5 * i, y, word if i in known else "", "text" if i in known else "mask", width=29
            )
    drawing.text(LEFT, 26, "masked", "note")
    drawing.text(WIDTH - LEFT, 26, "revealed", "note", anchor="end")
    scale = 300 / math.ceil(nelbo)
    for row, (name, nats, kind) in enumerate((("exact", nll, "bar"), ("bound", nelbo, "over"))):
        top = 316 + row * 34
        drawing.text(LEFT, top + 15, name, "head")
        drawing.box(LEFT + 60, top, scale * nats, 20, kind)
        drawing.text(LEFT + 68 + scale * nats, top + 15, f"{nats:.2f} nats", "note")
    return drawing


def _short(chance: float) -> str:
    return f"{chance:.2f}".lstrip("0") if chance >= 0.01 else f"{chance:.4f}".lstrip("0")


PICTURES = {
    "lines": lines,
    "training": training,
    "masks": masks,
    "writing": writing,
    "lean": lean,
    "bound": bound,
}
