"""Whether what would be released is whole: builds it, looks into it, and runs it where nothing else is.

    python scripts/check_package.py OUT [--python python3.12 ...] [--torch torch==2.13.0]

builds the sdist, and the wheel from it, into the new or empty folder OUT. Both must pass `twine check`, and
hold what they should and no more. For each Python the wheel is installed into an empty environment with the
versions of constraints.txt. There `bd3lm` must write a text with no repository around it and, if the kernel
allows it, without a network. A Python that is not on this machine is left out, and that is said.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "bd3lm/py.typed",
    "bd3lm/box/model.safetensors",
    "bd3lm/box/config.json",
    "bd3lm/box/tokenizer.json",
    "bd3lm/box/README.md",
    "bd3lm/serving/page/index.html",
)
OF_THE_SDIST = ("docs/", "scripts/", "src/", "tests/")
AT_ITS_ROOT = {
    *(
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "PKG-INFO",
        "README.md",
    ),
    *("SECURITY.md", "conftest.py", "constraints.txt", "hatch_build.py", "pyproject.toml"),
}
PROMPT = "The city of"


def run(*words: str | Path, **options: object) -> str:
    """A command's output; where it fails, that and its errors end the check."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, words)], capture_output=True, encoding="utf-8", env=env, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    version = wheel.name.split("-")[1]
    check_names(wheel.name, names, ("bd3lm/", f"bd3lm-{version}.dist-info/"), set())
    check_needed(wheel.name, names, NEEDED)
    tracked = [each.removeprefix("src/") for each in run("git", "-C", ROOT, "ls-files", "src").split()]
    check_needed(wheel.name, names, tracked)


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = [each.partition("/")[2] for each in archive.getnames()]
    check_names(sdist.name, names, OF_THE_SDIST, AT_ITS_ROOT)
    check_needed(sdist.name, names, [*(f"src/{each}" for each in NEEDED), *AT_ITS_ROOT])


def check_names(archive: str, names: list[str], folders: tuple[str, ...], files: set[str]) -> None:
    strangers = [name for name in names if not name.startswith(folders) and name not in files]
    strangers += [name for name in names if re.search(r"__pycache__|\.(pyc|log|ckpt|pt)$", name)]
    if strangers:
        sys.exit(f"{archive} holds what it should not: {', '.join(strangers)}")


def check_needed(archive: str, names: list[str], needed: list[str] | tuple[str, ...]) -> None:
    if missing := sorted(set(needed) - set(names)):
        sys.exit(f"{archive} lacks {', '.join(missing)}")


def interpreter(name: str) -> str | None:
    """A Python that runs: by its path or name, or, as pyenv keeps python3.12, under that version."""
    kept = Path.home() / ".pyenv" / "versions"
    others = sorted(kept.glob(f"{name.removeprefix('python')}.*/bin/python")) if name[:1] == "p" else []
    for each in (shutil.which(name), *others):
        if each and subprocess.run([each, "--version"], capture_output=True).returncode == 0:
            return str(each)
    return None


def check_installed(wheel: Path, python: str, torch: str) -> None:
    """Install the wheel into an empty environment, and let the model in the box write there."""
    started = time.monotonic()
    with TemporaryDirectory() as folder:
        place = Path(folder)
        run(python, "-m", "venv", place / "env")
        pip = [place / "env/bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        run(*pip, *torch.split())
        run(*pip, "-c", ROOT / "constraints.txt", wheel)
        alone = ["unshare", "--net"] if lets_unshare() else []
        command = [*alone, place / "env/bin/bd3lm"]
        version = run(*command, "--version", cwd=place).strip()
        text = run(
            *command, "sample", "box", PROMPT, "--length", "32", "--seed", "4", "--device", "cpu", cwd=place
        )
        if PROMPT not in text or len(text.strip()) < 2 * len(PROMPT):
            sys.exit(f"bd3lm sample wrote no text in an empty environment: {text!r}")
        how = "without a network" if alone else "with a network, since none can be taken away here"
        print(f"{python}: {version} runs {how} ({time.monotonic() - started:.0f} s)", flush=True)


def lets_unshare() -> bool:
    try:
        return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", action="append", default=[], help="an interpreter to install it for")
    parser.add_argument("--torch", default="torch", help="what pip installs first, for torch")
    asked = parser.parse_args()
    if asked.out.exists() and any(asked.out.iterdir()):
        sys.exit(f"{asked.out} is not empty")
    run(sys.executable, "-m", "build", "--outdir", asked.out, ROOT)
    (wheel,), (sdist,) = asked.out.glob("*.whl"), asked.out.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    check_wheel(wheel)
    check_sdist(sdist)
    for archive in (wheel, sdist):
        print(
            f"{archive.name}: {archive.stat().st_size / 2**20:.1f} MiB, whole, and `twine check` passes",
            flush=True,
        )
    for name in asked.python:
        python = interpreter(name)
        if python is None:
            print(f"{name}: left out, it is not on this machine")
        else:
            check_installed(wheel, python, asked.torch)


if __name__ == "__main__":
    main()
