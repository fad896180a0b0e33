"""The pictures of docs/speculation.md. Attention comes from the layouts, and trees from the sampler."""

import torch
from torch import Tensor

from bd3lm.evaluation import coupled_acceptance, rejection_acceptance
from bd3lm.models import BlockCopies, Drafting
from bd3lm.sampling.verifying import Tree
from research.pictures.drawing import CELL, HIGH, STEP, WIDTH, Drawing

LEFT = 12
NOTES = 420  # where notes beside six cells begin


def passes() -> Drawing:
    """A pass drafts, the next verifies."""
    drawing = Drawing(
        "The first pass reads “The river” and three masks. It draws one token, “flows”, and drafts three "
        "more: into, the, sea. The second pass reads these drafts and draws what follows each token: "
        "“into” is as drafted and stays; “a” is not “the” and replaces it; “lake”, which followed the "
        "wrong draft, is dropped.",
        358,
    )
    drawing.text(LEFT, 30, "One pass reads", "head")
    drawing.row(LEFT, 42, ("The", "river", "", "", ""))
    drawing.text(NOTES, 54, "masks behind", "note")
    drawing.text(NOTES, 71, "the text", "note")
    for place in range(1, 5):
        x = LEFT + place * STEP + CELL / 2
        drawing.line(x, 42 + HIGH + 2, x + STEP - 16, 104, "arrow" if place == 1 else "faint")
    drawing.text(LEFT, 126, "and draws", "head")
    for place, word in enumerate(("flows", "into", "the", "sea"), 2):
        drawing.cell(LEFT + place * STEP, 107, word, "sure" if place == 2 else "draft")
    drawing.text(NOTES, 119, "one token,", "note")
    drawing.text(NOTES, 136, "three drafts", "note")
    drawing.line(LEFT, 162, WIDTH - LEFT, 162)
    drawing.text(LEFT, 192, "The next reads", "head")
    drawing.row(LEFT, 204, ("The", "river", "flows"))
    drawing.row(LEFT + 3 * STEP, 204, ("into", "the", "sea"), "draft")
    drawing.text(NOTES, 216, "the drafts", "note")
    drawing.text(NOTES, 233, "as text", "note")
    for place in range(2, 5):
        x = LEFT + place * STEP + CELL / 2
        drawing.line(x, 204 + HIGH + 2, x + STEP - 16, 266, "faint" if place == 4 else "arrow")
    drawing.text(LEFT, 288, "and draws", "head")
    for place, (word, kind, said, how) in enumerate(
        (
            ("into", "sure", "same", "ok"),
            ("a", "sure", "not “the”", "no"),
            ("lake", "gone", "dropped", "note"),
        ),
        3,
    ):
        drawing.cell(LEFT + place * STEP, 269, word, kind)
        drawing.text(LEFT + place * STEP + CELL / 2, 316, said, how, anchor="middle")
    drawing.text(NOTES, 281, "two tokens in", "note")
    drawing.text(NOTES, 298, "one pass", "note")
    drawing.text(LEFT, 344, "Blue tokens are what the model itself draws. Drafts only save passes.", "note")
    return drawing


TOKENS = ("the", "a", "its", "an")
P = torch.tensor([0.40, 0.35, 0.15, 0.10], dtype=torch.float64)
Q = torch.tensor([0.60, 0.15, 0.20, 0.05], dtype=torch.float64)
SEEDS = 12


def drawn_together(noise: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of p and of q by the same noise (draws, vocabulary)."""
    return (P.log() + noise).argmax(-1), (Q.log() + noise).argmax(-1)


def coupled() -> Drawing:
    """Draft and token of twelve seeds, by one noise each."""
    uniform = torch.rand(SEEDS, len(TOKENS), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    token, draft = drawn_together(-torch.log(-torch.log(uniform)))
    same = (token == draft).sum()
    chance = float(coupled_acceptance(P.log(), Q.log()))
    drawing = Drawing(
        f"An example with four tokens and {SEEDS} seeds. For each seed the draft is the token with the "
        "largest log q plus noise, and the model's token the one with the largest log p plus the same "
        f"noise. They agree for {int(same)} of these {SEEDS} seeds; the formula gives {chance:.0%}. The "
        "upper row shows the model's tokens, which do not depend on the drafts.",
        274,
    )
    _bars(drawing, 20)
    drawing.text(LEFT, 148, "Twelve seeds; both rows use the noise of the seed", "head")
    size = 37
    for row, (name, drawn) in enumerate((("token", token), ("draft", draft))):
        top = 164 + row * 34
        drawing.text(LEFT, top + 17, name, "note")
        for seed in range(SEEDS):
            agrees = bool(token[seed] == draft[seed])
            kind = "sure" if row == 0 else "draft" if agrees else "gone"
            x = LEFT + 54 + seed * (size + 3)
            drawing.box(x, top, size, 26, kind, round_by=4)
            inside = "in-sure" if row == 0 else "in-draft" if agrees else "no"
            drawing.text(x + size / 2, top + 17, TOKENS[drawn[seed]], inside, anchor="middle")
    drawing.text(
        LEFT,
        256,
        f"Equal for {int(same)} of {SEEDS}. Over all seeds: {chance:.0%}.",
        "note",
    )
    return drawing


def _bars(drawing: Drawing, top: int) -> None:
    """p and q of every token, as bars."""
    for index, word in enumerate(TOKENS):
        left = LEFT + index * 138
        drawing.text(left, top + 14, word, "head")
        for row, (name, law, kind) in enumerate((("p", P, "bar"), ("q", Q, "over"))):
            y = top + 26 + row * 26
            drawing.text(left, y + 13, name, "note")
            drawing.box(left + 16, y, 120 * float(law[index]), 16, kind)
            drawing.text(left + 22 + 120 * float(law[index]), y + 13, f"{law[index]:.2f}", "small")
    drawing.text(LEFT, top + 96, "p: the model, given the text so far. q: the draft, from a mask.", "note")


def rejection() -> Drawing:
    """What of q is accepted, and what a rejected draft is replaced by."""
    share = float(rejection_acceptance(P.log(), Q.log()))
    rest = (P - Q).clamp_min(0)
    parts = ", ".join(
        f"{word} {each / rest.sum():.2f}" for word, each in zip(TOKENS, rest, strict=True) if each
    )
    drawing = Drawing(
        f"The same example. A draft is accepted with probability min(1, p/q), in all {share:.2f}: the "
        "smaller of p and q, summed over tokens. Otherwise the token is drawn from what p has more than "
        f"q: {parts}. Together each token comes as often as p says.",
        268,
    )
    scale, bottom = 300, 196
    for index, word in enumerate(TOKENS):
        left = LEFT + 24 + index * 134
        p, q = float(P[index]), float(Q[index])
        both = min(p, q)
        drawing.box(left, bottom - scale * both, 66, scale * both, "pale")
        if p > q:
            drawing.box(left, bottom - scale * p, 66, scale * (p - q), "bar")
        else:
            drawing.box(left, bottom - scale * q, 66, scale * (q - p), "draft")
        drawing.text(left + 33, bottom + 18, word, "head", anchor="middle")
        drawing.text(left + 74, bottom - scale * p + 5, f"p {p:.2f}", "small")
        shift = 5 if abs(p - q) * scale > 14 else 19
        drawing.text(left + 74, bottom - scale * q + shift, f"q {q:.2f}", "small")
    drawing.line(LEFT, bottom, WIDTH - LEFT, bottom, "line")
    for column, (kind, said) in enumerate(
        (
            ("pale", f"draft accepted, {share:.2f} in all"),
            ("draft", "draft rejected"),
            ("bar", "drawn in its place"),
        )
    ):
        left = LEFT + (0, 220, 366)[column]
        drawing.box(left, 238, 15, 15, kind)
        drawing.text(left + 22, 250, said, "note")
    return drawing


def one_pass() -> Drawing:
    """Who sees whom in a pass that verifies three drafts and makes new ones behind each."""
    words = ("flows", "into", "the", "sea")
    tree = Tree(3)
    layout = Drafting.of(tree.parents, 3)
    seen = layout.dense()
    places = layout.text_positions().tolist()
    drawing = Drawing(
        "Attention in one pass that verifies three drafts and makes the next ones. Four positions hold "
        "text: the last token, “flows”, and the drafts into, the, sea. Each sees those before it. Behind "
        "each stand three masks, which see the text up to there and one another. All of them see the "
        "cache.",
        520,
    )
    size, x, y = 22, 172, 74
    drawing.upward(x - 28, y - 8, "cache", "small")
    for column, word in enumerate(words):
        drawing.upward(x + column * size + 15, y - 8, word)
    for group, word in enumerate(words):
        middle = x + (layout.clean + (group + 0.5) * layout.masks) * size
        drawing.text(middle, y - 26, "after", "small", anchor="middle")
        drawing.text(middle, y - 10, word, "small", anchor="middle")
    kinds = [
        ["clean" if column < layout.clean else "own" for column in range(layout.size)]
        for _ in range(layout.size)
    ]
    drawing.grid(x, y, size, seen, kinds)
    for row in range(layout.size):
        middle = y + row * size
        drawing.box(x - 42, middle, size - 1.5, size - 1.5, "clean")
        if row < layout.clean:
            drawing.text(x - 54, middle + 15, words[row], anchor="end")
        elif (row - layout.clean) % layout.masks == 0:
            drawing.text(
                x - 54,
                middle + 15,
                f"masks after {words[(row - layout.clean) // layout.masks]}",
                "small",
                anchor="end",
            )
        drawing.text(x + layout.size * size + 6, middle + 15, f"{places[row]:+d}", "small")
    for cut in range(layout.clean, layout.size, layout.masks):
        drawing.line(x - 42, y + cut * size - 0.75, x + layout.size * size, y + cut * size - 0.75)
        drawing.line(x + cut * size - 0.75, y, x + cut * size - 0.75, y + layout.size * size)
    top = y + layout.size * size + 24
    for column, (kind, said) in enumerate((("clean", "text and drafts"), ("own", "masks of the same group"))):
        left = LEFT + 20 + column * 160
        drawing.box(left, top, 15, 15, kind)
        drawing.text(left + 22, top + 12, said, "note")
    drawing.text(
        LEFT + 20, top + 42, "Rows read, columns are seen. At the right: the place after “flows”.", "note"
    )
    return drawing


def candidates() -> Drawing:
    """Two candidates a place: a tree of drafts, as the sampler has it."""
    tree = Tree(2, 2)
    words = ("into", "the", "past", "a")  # in the tree's order: the chain, then the other candidates
    drawing = Drawing(
        "Two candidates for each of two places. After “flows” come into and past; after into come the and "
        "a. The model draws “into”, which is a candidate, and then “a”, which is one too: two drafts are "
        "right, and with “small”, which the model draws behind them, the pass writes three tokens.",
        212,
    )
    spots = {0: (LEFT, 76)}
    drawing.cell(*spots[0], "flows")
    picked = {1, 4}
    rows = {(0, 0): 40, (0, 1): 112, (1, 0): 24, (1, 1): 76}
    for index, (parent, (place, candidate)) in enumerate(zip(tree.parents, tree.order, strict=True), 1):
        spots[index] = (LEFT + (place + 1) * 142, rows[place, candidate])
        (x, y), (to_x, to_y) = spots[parent], spots[index]
        kind = "arrow" if index in picked else "faint"
        drawing.line(x + CELL, y + HIGH / 2, to_x - 2, to_y + HIGH / 2, kind)
        drawing.cell(to_x, to_y, words[index - 1], "sure" if index in picked else "draft")
    x, y = spots[4]
    drawing.line(x + CELL, y + HIGH / 2, LEFT + 3 * 142 - 2, y + HIGH / 2, "arrow")
    drawing.cell(LEFT + 3 * 142, y, "small", "sure")
    drawing.text(
        LEFT, 168, "Blue: what the model draws. At both places it is one of the candidates, so both", "note"
    )
    drawing.text(LEFT, 186, "are kept. The pass also gives the token that follows them, “small”.", "note")
    return drawing


BLOCK = ("into", "the", "cold", "sea")
ORDER = (1, 3, 0, 2)  # places of the block in the order in which they are revealed
DRAFTED = ("into", "the", "old", "sea")


def copies() -> Drawing:
    """Two passes over a block: drafts of all places, then copies that verify them."""
    layout = BlockCopies.of(len(BLOCK), len(BLOCK) - 1, causal_clean=False)
    drawing = Drawing(
        "A block of four places that is revealed in the order 2, 4, 1, 3. The first pass reads four "
        "masks: the token of place 2 is right, the other three are drafts. The second pass reads the "
        "block with all drafts, the next block behind it, and three copies: with place 2 alone, with the "
        "first draft, with the first two. Each copy draws the place that comes next. The first two agree "
        "with their drafts, the third draws “cold” in place of “old”. The block is finished after two "
        "passes.",
        448,
    )
    x = 150
    drawing.text(LEFT, 30, "order of reveal", "note")
    for step, place in enumerate(ORDER, 1):
        drawing.text(x + place * STEP + CELL / 2, 30, str(step), "note", anchor="middle")
    drawing.text(LEFT, 62, "Pass 1 reads", "head")
    drawing.row(x, 43, ("",) * 4)
    drawing.text(LEFT, 98, "and draws", "head")
    for place, word in enumerate(DRAFTED):
        drawing.cell(x + place * STEP, 79, word, "sure" if place == ORDER[0] else "draft")
    drawing.text(x + 4 * STEP + 8, 90, "one token is right,", "note")
    drawing.text(x + 4 * STEP + 8, 106, "three are drafts", "note")
    drawing.line(LEFT, 124, WIDTH - LEFT, 124)
    drawing.text(LEFT, 152, "Pass 2 reads", "head")
    drawing.text(LEFT, 186, "all drafts", "note")
    drawing.row(x, 167, DRAFTED, "draft")
    drawing.cell(x + ORDER[0] * STEP, 167, DRAFTED[ORDER[0]])
    drawing.text(x + 4 * STEP + 4, 186, "and the next block:", "note")
    for index in range(4):
        drawing.box(x + 4 * STEP + 4 + index * 24, 194, 20, 16, "mask", round_by=3)
    for copy in range(layout.copies):
        top = 222 + copy * 46
        known, asked = ORDER[: copy + 1], ORDER[copy + 1]
        drawing.text(LEFT, top + 19, f"copy {copy + 1}", "note")
        for place in range(4):
            left = x + place * STEP
            if place == asked:
                right = BLOCK[place] == DRAFTED[place]
                drawing.cell(left, top, BLOCK[place], "sure")
                said = "as drafted" if right else f"not “{DRAFTED[place]}”"
                drawing.text(x + 4 * STEP + 8, top + 19, said, "ok" if right else "no")
            elif place in known:
                drawing.cell(left, top, DRAFTED[place], "text" if place == ORDER[0] else "draft")
            else:
                drawing.cell(left, top, "", "mask")
    drawing.line(LEFT, 364, WIDTH - LEFT, 364)
    drawing.text(LEFT, 395, "The block", "head")
    drawing.row(x, 376, BLOCK)
    drawing.text(x + 4 * STEP + 8, 395, "after two passes", "note")
    drawing.text(LEFT, 432, "Had “old” been right, pass 2 would have begun the next block as well.", "note")
    return drawing


PICTURES = {
    "passes": passes,
    "coupled": coupled,
    "rejection": rejection,
    "one-pass": one_pass,
    "candidates": candidates,
    "copies": copies,
}
