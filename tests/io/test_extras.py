"""Packages that may not be installed: imported, or one line that says how to get them."""

import json

import pytest

from bd3lm.io.extras import require


def test_a_package_that_is_there_is_imported():
    assert require("json", "data", "reading") is json


@pytest.mark.parametrize("module", ["no_such", "no_such.part"])
def test_a_missing_package_is_one_line(module):
    with pytest.raises(
        ImportError, match=r"^a judge needs the package no_such: pip install 'bd3lm\[judge\]'$"
    ):
        require(module, "judge", "a judge")
