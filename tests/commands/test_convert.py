"""`bd3lm convert`: a model that is there already is not written over."""

from bd3lm.cli import main
from tests.data_room.documents import contents
from tests.lm import of_bytes


def test_convert_writes_into_a_new_or_empty_folder_only(tmp_path, capsys):
    source, other, empty = (tmp_path / name for name in ("source", "other", "empty"))
    of_bytes(4).save_pretrained(source)
    of_bytes(4, seed=1).save_pretrained(other)
    before = contents(other)
    assert main(["convert", str(source), str(other)]) == 1
    said = f"bd3lm: OUT must be a new or empty folder, and {other} holds config.json\n"
    assert capsys.readouterr().err == said
    assert contents(other) == before
    empty.mkdir()
    assert main(["convert", str(source), str(empty)]) == 0
    assert contents(empty) == contents(source)
