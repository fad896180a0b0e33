"""What makes a release: one version everywhere, workflows that name what exists, links that work on PyPI."""

import re
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

import bd3lm

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# The sdist has neither workflows nor hooks; a test of them there would pass without looking.
pytestmark = pytest.mark.skipif(
    not WORKFLOWS, reason="only in the repository, whose .github and .ci these are about"
)


def _read(path: Path | str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _yaml(path: Path | str) -> Any:
    return yaml.safe_load(_read(path))


def _jobs() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{path.stem}/{name}", job) for path in WORKFLOWS for name, job in _yaml(path)["jobs"].items()]


def _steps() -> list[tuple[str, dict[str, Any]]]:
    return [(name, step) for name, job in _jobs() for step in job["steps"]]


def test_the_version_is_one() -> None:
    assert "version" not in PROJECT  # pyproject.toml takes it from the package
    assert _yaml("CITATION.cff")["version"] == bd3lm.__version__


def test_authors_of_the_paper_are_those_of_the_readme() -> None:
    (cited,) = _yaml("CITATION.cff")["references"]
    names = [f"{each['family-names']}, {each['given-names']}" for each in cited["authors"]]
    (bibtex,) = re.findall(r"author    = \{(.*?)\}", _read("README.md"), flags=re.DOTALL)
    assert names == re.split(r"\s+and\s+", bibtex)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_well_formed(path: Path) -> None:
    workflow = _yaml(path)
    assert set(workflow) <= {
        "name",
        True,
        "permissions",
        "concurrency",
        "env",
        "jobs",
    }  # YAML reads `on` as True
    assert workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job["runs-on"] == "ubuntu-24.04", name
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"]), name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step


def test_workflows_call_targets_of_make_that_exist() -> None:
    called = {target for _, step in _steps() for target in re.findall(r"make ([a-z-]+)", step.get("run", ""))}
    assert {"check", "docs", "test", "test-slow", "package"} <= called
    targets = set(re.findall(r"^([a-z-]+):", _read("Makefile"), flags=re.MULTILINE))
    assert called <= targets
    (loop,) = re.findall(r"for target in (.*); do", _read(".ci/run"))
    assert called == set(loop.split()), "what CI runs is what .ci/run runs"


def test_actions_are_named_with_a_version() -> None:
    for name, step in _steps():
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+|[0-9a-f]{40})", step["uses"]), name
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False, name


def test_workflows_have_the_pythons_and_the_torch_of_the_project() -> None:
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert dict(_jobs())["tests/test"]["strategy"]["matrix"]["python"] == pythons
    (torch,) = re.findall(r"TORCH_INSTALL_ARGS \?= (\S+)", _read("Makefile"))
    for path in WORKFLOWS:
        assert f"|| '{torch}' }}}}" in _yaml(path)["env"]["TORCH_INSTALL_ARGS"]


def test_only_jobs_that_publish_may_ask_for_a_token_and_they_run_nothing_of_ours() -> None:
    asking = {name for name, job in _jobs() if job.get("permissions", {}).get("id-token") == "write"}
    assert asking == {"docs/publish", "release/publish"}
    assert not [step for name, step in _steps() if name in asking and "run" in step]


def test_the_hooks_format_as_make_does() -> None:
    (ruff,) = re.findall(r"^ruff==.*$", _read("constraints.txt"), flags=re.MULTILINE)
    hooks = _yaml(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert [hook["additional_dependencies"] for hook in hooks] == [[ruff], [ruff]]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_something(path: Path) -> None:
    form = _yaml(path)
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= set(form)
        assert len({field["id"] for field in form["body"]}) == len(form["body"])


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hatch_build.py, which needs of hatchling only a class to extend."""
    interface = SimpleNamespace(MetadataHookInterface=type("MetadataHookInterface", (), {"root": str(ROOT)}))
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)  # type: ignore[arg-type]
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_readme_lead_to_the_tag_on_pypi(
    packing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "https://github.com/owner/name/")
    metadata: dict[str, Any] = {"version": "1.2.3"}
    packing.Readme().update(metadata)
    text = metadata["readme"]["text"]
    links = re.findall(r"\]\((?!#)([^)]+)\)", text)
    assert len(links) >= 20
    for link in links:
        if not link.startswith("https://github.com/owner/name/"):
            assert link.startswith("https://"), link
            continue
        kind, tag, path = link.removeprefix("https://github.com/owner/name/").split("/", 2)
        assert (ROOT / path.partition("#")[0]).is_file(), link
        assert (kind, tag) == ("raw" if path.startswith("docs/images/") else "blob", "v1.2.3")
    assert metadata["urls"]["Repository"] == "https://github.com/owner/name"


def test_without_an_address_the_readme_is_as_it_is(
    packing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    metadata: dict[str, Any] = {"version": "1.2.3"}
    packing.Readme().update(metadata)
    assert metadata == {
        "version": "1.2.3",
        "readme": {"content-type": "text/markdown", "text": _read("README.md")},
    }


def test_what_is_no_address_is_refused(packing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPOSITORY_URL", "owner/name")
    with pytest.raises(ValueError, match="REPOSITORY_URL must be like"):
        packing.Readme().update({"version": "1.2.3"})
