"""What differs between methods is asked of them: nothing outside their room looks at their class or kind."""

import ast
from pathlib import Path

import bd3lm
from bd3lm.methods import Method

SOURCE = Path(bd3lm.__file__).parent
CLASSES = {
    name for member in Method.members().values() for name in (member.__name__, member.Training.__name__)
}
KINDS = set(Method.members())
# A preset or a converted model is of a method, and so says which.
MAKERS = {
    "runs/presets.py",
    "runs/adapting.py",
    "interop/huggingface.py",
    "interop/reference.py",
    "interop/lightning.py",
    "interop/sdar.py",
    "bench/shapes.py",
    "bench/training.py",
}


# A network of ours, to be timed or proved, its names in another layout, its methods in a file for others.
NETWORK_MAKERS = {
    "bench/forward.py",
    "bench/sampling.py",
    "bench/training.py",
    "commands/prove.py",
    "interop/huggingface.py",
    "interop/reference.py",
    "interop/remote/modeling_bd3lm.py",
}


def branches(tree: ast.AST) -> list[int]:
    """The lines that look at the class of a method, or compare its kind."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, of]):
                named = {each.id for each in ast.walk(of) if isinstance(each, ast.Name)}
                found += [node.lineno] if named & CLASSES else []
            case ast.MatchClass(cls=ast.Name(id=name)) if name in CLASSES:
                found.append(node.cls.lineno)
            case ast.Compare(left=left, comparators=others):
                kinds = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                asks = any(
                    isinstance(each, ast.Attribute) and each.attr == "kind"
                    for side in (left, *others)
                    for each in ast.walk(side)
                )
                found += [node.lineno] if asks and kinds & KINDS else []
    return found


def test_no_room_but_its_own_branches_on_a_method() -> None:
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).as_posix()
        if not place.startswith("methods/"):
            assert branches(ast.parse(file.read_text("utf-8"))) == [], place


def test_only_makers_name_a_method() -> None:
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).as_posix()
        if not place.startswith("methods/") and place not in MAKERS:
            named = {
                node.id for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Name)
            }
            assert not named & (CLASSES - {"Training"}), place


def test_only_makers_name_our_network() -> None:
    """What a network can do is asked of it, so that anyone's will do."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        place = file.relative_to(SOURCE).as_posix()
        names = {
            each.id for each in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(each, ast.Name)
        }
        if not place.startswith("models/") and "Transformer" in names:
            found.add(place)
    assert found == NETWORK_MAKERS


def test_a_branch_would_be_found() -> None:
    for source in (
        "isinstance(method, D3PMMethod)",
        "isinstance(method, D3PMMethod | SimplexMethod)",
        "method.kind == 'simplex'",
        "model.config.method.kind in ('d3pm', 'simplex')",
        "match method:\n    case SimplexMethod():\n        pass",
    ):
        assert branches(ast.parse(source)), source
