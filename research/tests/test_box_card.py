"""The card of the model in the box: its figures are recorded ones, and these are of the weights that ship."""

import hashlib
import json

import bd3lm
from bd3lm import interop
from research.box_card import CARD, EVAL, shipped_lean, with_figures


def test_the_card_is_of_these_weights() -> None:
    records = json.loads(EVAL.read_text("utf-8"))
    weights = (CARD.parent / interop.WEIGHTS_NAME).read_bytes()
    assert len(weights) <= 16_000_000
    assert {record["weights"] for record in records} == {hashlib.sha256(weights).hexdigest()}
    card = CARD.read_text("utf-8")
    assert with_figures(card, records, shipped=shipped_lean()) == card
    assert "TODO" not in card


def test_what_is_measured_first_is_what_ships_and_the_rest_differs_in_the_order_alone() -> None:
    settings = [record["settings"] for record in json.loads(EVAL.read_text("utf-8"))]
    leans = [each.pop("lean") for each in settings]
    assert leans[0] == shipped_lean() == bd3lm.load("box").config.method.lean
    assert len(set(leans)) == len(leans)
    assert all(each == settings[0] for each in settings)
