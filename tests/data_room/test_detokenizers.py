"""Detokenizers: sentences as the corpora have them, and as people write them."""

import pytest

from bd3lm.data.detokenizers import lambada, lm1b, ptb, scientific_papers, wikitext


@pytest.mark.parametrize(
    ("printed", "written"),
    [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        (" = = Early life = = \n", " == Early life ==\n"),
        (" = = = Notes = = = \n", " === Notes ===\n"),
        ("a well @-@ known 10 @,@ 000 at 3 @.@ 5 points", "a well-known 10,000 at 3.5 points"),
        (
            "He said : yes , no ; perhaps . And then ? Now ! So",
            "He said: yes, no; perhaps. And then? Now! So",
        ),
        ('the " Herons " ( 2004 ) [ sic ] { x }', 'the "Herons" (2004) [sic] {x}'),
        ("the play 's end , the players ' end", "the play's end, the players' end"),
        ("at 20 ° C", "at 20°C"),
        ("one \n two", "one\ntwo"),
    ],
)
def test_wikitext(printed: str, written: str) -> None:
    assert wikitext(printed) == written


@pytest.mark.parametrize(
    ("printed", "written"),
    [
        ("It 's true , he said .", "It's true, he said."),
        ("Is it ? Yes ! No ?", "Is it? Yes! No?"),
        ("Go ! Go !", "Go! Go!"),
        ("He saw one . Two came .", "He saw one. Two came."),
        ("see http : / / example.org and https : / / x.org", "see http://example.org and https://x.org"),
        ('he called it " a start " ( a small one ) [ sic ]', 'he called it "a start" (a small one) [sic]'),
        ("$ 5 or £ 4 : and / or ; so", "$5 or £4: and/or; so"),
    ],
)
def test_lm1b(printed: str, written: str) -> None:
    assert lm1b(printed) == written


@pytest.mark.parametrize(
    ("printed", "written"),
    [
        ("the company 's workers ' pay does n't fall", "the company's workers' pay doesn't fall"),
        ("rose N N to $ N million from N N", "rose 1 1 to $1 million from 1 N"),
        ("the <unk> and\\/or # N each", "the ? and/or #1 each"),
    ],
)
def test_ptb(printed: str, written: str) -> None:
    assert ptb(printed) == written


def test_lambada() -> None:
    assert lambada(" “ yes , ” he said \n") == '\n" yes , " he said'
    assert lambada("\x1c\u3000 one\n two \xa0\n\n") == "\none\n two"
    assert lambada("") == "\n"


def test_scientific_papers_follow_both_rules() -> None:
    text = "we find @-@ as ' others ' do - a rate of 5 @.@ 2 ( n = 4 ) , it 's high ."
    assert scientific_papers(text) == lm1b(wikitext(text))
    assert scientific_papers("it 's high .") == "it's high."
