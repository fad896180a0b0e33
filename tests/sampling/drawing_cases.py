"""What the kernel that draws tokens is asked: the same in Triton's interpreter and on a GPU."""

from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from bd3lm.diffusion import Purpose, counter_uniform, gumbel, subs_at_masks, temper
from bd3lm.sampling import Sharpening


@dataclass(frozen=True, kw_only=True)
class Case:
    """Logits (rows, vocabulary), and what is drawn from them how."""

    rows: int
    vocabulary: int
    mask_id: int
    rule: Sharpening
    logits: str = "random"
    dtype: torch.dtype = torch.bfloat16
    padding: int = 0  # what lies between two rows, which must not be read
    repeats: int = 1  # how many: one for all rows, or one for each
    tiles: tuple[int, int] | None = None  # small ones, so that a small row has several
    programs: int | None = (
        None  # that share a row's tiles: few, so that each has many; None is as many as ever
    )
    offset: float = 0.0  # added to all logits, which changes no distribution

    def make_logits(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.rows + self.vocabulary)
        noise = torch.randn(self.rows, self.vocabulary + self.padding, generator=generator)
        noise[:, self.mask_id] = noise[:, self.vocabulary :] = -torch.inf  # no peak where no token may be
        values = {
            "random": 3.0 * noise,
            "flat": 0.1 * noise,
            "ties": noise.round(),  # some seven values
            "equal": torch.zeros_like(noise),
            "peaked": torch.where(noise == noise.amax(1, keepdim=True), 30.0, noise),
            "impossible": torch.where(noise < 0.0, -torch.inf, noise),
        }[self.logits]
        values += self.offset
        values[:, self.mask_id] = 50.0  # it would be all of the softmax
        values[:, self.vocabulary :] = 60.0
        return values.to(device, self.dtype)[:, : self.vocabulary]


def drawn(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel, by `RowSharpening.draw`, and by how much the latter's token scores higher."""
    from bd3lm.models.kernels import drawing as kernel

    logits = case.make_logits(device)
    row = torch.arange(case.rows, device=device)
    seeds, positions = (row - 2) * 0x123456789ABCDEF, row * row + 3
    repeat = torch.arange(case.repeats, device=device) + 2
    tile, row_tile = case.tiles or (kernel._TILE, kernel._ROW_TILE)
    rule, how = case.rule, case.rule.rows(1, device)
    programs = case.programs or kernel._PROGRAMS
    with mock.patch.multiple(kernel, _TILE=tile, _ROW_TILE=row_tile, _PROGRAMS=programs):
        found = kernel.draw(
            *(logits, seeds, positions, repeat),
            mask_id=case.mask_id,
            temperature=how.temperature,
            top_p=how.top_p,
            inclusive=how.inclusive,
        )
    log_p = subs_at_masks(logits, case.mask_id).unsqueeze(1)
    repeat = repeat.unsqueeze(1)
    expected = how.draw(log_p, seeds, positions.unsqueeze(1), repeat=repeat)
    uniform = counter_uniform(
        seeds.unsqueeze(1), positions.unsqueeze(1), Purpose.TOKEN, case.vocabulary, repeat=repeat
    )
    scores = (temper(log_p, rule.temperature).double() + gumbel(uniform)).squeeze(1)
    ahead = scores.gather(1, expected) - scores.gather(1, found.unsqueeze(1))
    return found, expected.squeeze(1), ahead.squeeze(1)


def assert_equal_tokens(case: Case) -> None:
    found, expected, _ = drawn(case, torch.device("cpu"))
    assert (found.dtype, found.shape) == (torch.int64, (case.rows,))
    assert found.tolist() == expected.tolist()
    if case.logits == "peaked" and case.rule.top_p < 1.0:
        logits = case.make_logits(torch.device("cpu"))
        logits[:, case.mask_id] = -torch.inf
        assert found.tolist() == logits.argmax(1).tolist()


def assert_it_ends_whatever_the_logits_are(device: torch.device) -> None:
    """No rows at all, and rows in which some or all are no numbers or infinite.

    Some token is drawn, the mask where no logit is a number above −∞, and the first of infinite ones.
    """
    from bd3lm.models.kernels import drawing as kernel

    one = torch.ones(1, dtype=torch.float64, device=device)
    several = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    several[0, 40] = several[0, 21] = several[1, 20] = torch.inf  # each in a tile of its own
    several[1, 3] = several[1, 50] = torch.nan
    numbers = torch.arange(2, device=device)
    with mock.patch.multiple(kernel, _TILE=16, _PROGRAMS=1):
        tokens = kernel.draw(
            *(several.to(device), numbers, numbers, numbers),
            mask_id=63,
            temperature=one,
            top_p=None,
            inclusive=one.bool(),
        )
    assert tokens.tolist() == [21, 20]
    spoilt = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        spoilt[row, 3] = spoilt[row + 3] = value
    for logits in (spoilt, spoilt[:0]):
        numbers = torch.arange(len(logits), device=device)
        for top_p, inclusive in ((0.5, True), (0.5, False), (1.0, True)):
            tokens = kernel.draw(
                *(logits.to(device), numbers, numbers, numbers),
                mask_id=9,
                temperature=one,
                top_p=one * top_p,
                inclusive=one.bool() & inclusive,
            )
            assert tokens.shape == (len(logits),)
            assert all(0 <= token < 10 for token in tokens.tolist())
            assert all(tokens[row] == 9 for row in (3, 5) if row < len(logits))
            assert all(tokens[row] != 9 for row in (0, 1, 2) if row < len(logits))


def assert_the_bound_of_a_gumbel_number_holds(device: torch.device) -> None:
    """For the least and the largest words, at steps of the bound, and for random ones; and it is close."""
    from tests.sampling.gumbel_kernel import gumbel_and_bound

    step = 2**40
    edges = [0, 1, step - 1, step, step + 1, 2**63 - 1, -(2**63), -1, -step, -step - 1, -2 * step, -4096]
    random = torch.randint(
        -(2**63), 2**63 - 1, (4096 - len(edges),), generator=torch.Generator().manual_seed(0)
    )
    words = torch.cat((torch.tensor(edges), random)).to(device)
    gumbels = torch.empty(len(words), dtype=torch.float64, device=device)
    bounds = torch.empty(len(words), dtype=torch.float32, device=device)
    gumbel_and_bound[(1,)](words, gumbels, bounds, COUNT=len(words))
    # As unsigned numbers over 2^64 words are uniform, and the Gumbel number rises with them.
    uniform = ((words >> 12) & (2**52 - 1)).double().add(0.5).mul(2.0**-52)
    torch.testing.assert_close(gumbels, gumbel(uniform), rtol=1e-12, atol=1e-12)
    above = bounds.double() - gumbels
    assert (above > -1e-5).all()  # but for the rounding of a logarithm of up to 37
    usual = (gumbels > 3.0) & (gumbels < 10.0)
    assert usual.sum() > 100
    assert (above[usual] < 0.05).all()
