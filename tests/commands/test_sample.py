"""`bd3lm sample --film`."""

from xml.etree import ElementTree

from bd3lm.cli import main


def test_a_film_of_one_text_is_written_beside_it(tmp_path, capsys):
    film, words = tmp_path / "film.svg", ["sample", "box", "The city", "--length", "12", "--seed", "1"]
    assert main([*words, "--film", str(film)]) == 0
    printed = capsys.readouterr()
    assert f"wrote {film}" in " ".join(printed.err.split())
    title = ElementTree.fromstring(film.read_text("utf-8")).find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == printed.out.rstrip("\n")
    for asked, message in (
        (["--film", str(film)], f"--film must be a new file, and {film} exists"),
        (["--film", str(tmp_path / "film.gif")], "--film must be a file called .svg"),
        (["--film", str(tmp_path / "a.svg"), "--out", str(tmp_path / "a.svg")], "must be two files"),
        (["--count", "2", "--film", str(tmp_path / "two.svg")], "--film is of one text, got 2"),
    ):
        assert main([*words, *asked]) == 1
        assert message in capsys.readouterr().err
