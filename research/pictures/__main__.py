"""Draw the pictures anew.

PYTHONPATH=src python -m research.pictures
"""

from pathlib import Path

from research.pictures import idea, speculation

FOLDER = Path(__file__).parents[2] / "docs" / "images"
PICTURES = {
    **{f"idea/{name}.svg": draw for name, draw in idea.PICTURES.items()},
    **{f"speculation/{name}.svg": draw for name, draw in speculation.PICTURES.items()},
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        path = FOLDER / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(draw()), encoding="utf-8")
