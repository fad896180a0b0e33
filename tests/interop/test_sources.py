import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from bd3lm.interop import load, save, sources
from tests.interop.small import assert_same, small_model


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A hub with one model; it records each download."""
    calls: list[dict[str, Any]] = []
    save(*small_model(), tmp_path / "snapshot")

    def download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(sources, "snapshot_download", download)
    return calls


class TestHub:
    def test_only_json_and_safetensors_are_downloaded(self, downloads: list[dict[str, Any]]) -> None:
        model, _ = load("owner/name")
        allowed, not_these = ["*.json", "*.safetensors", "*.jinja"], ["*/*", "consolidated*.safetensors"]
        assert downloads == [
            {"repo_id": "owner/name", "allow_patterns": allowed, "ignore_patterns": not_these}
        ]
        assert_same(model, small_model()[0])

    def test_options(self, downloads: list[dict[str, Any]], tmp_path: Path) -> None:
        load("owner/name", revision="v2", cache_dir=tmp_path, local_files_only=True)
        assert downloads[0]["revision"] == "v2"
        assert downloads[0]["cache_dir"] == tmp_path
        assert downloads[0]["local_files_only"] is True

    @pytest.mark.parametrize(
        "source",
        [
            "./owner/name",
            "/owner/name",
            "~/owner/name",
            "../name",
            "owner/name/deeper",
            "owner\\name",
            "name",
            "owner/model.ckpt",
            "owner/model.safetensors",
            "owner/",
            "",
            Path("owner/name"),
        ],
    )
    def test_paths_are_never_downloaded(self, source: str | Path, downloads: list[dict[str, Any]]) -> None:
        with pytest.raises(ValueError, match=r"source: there is no (folder|file) .* It must be an existing"):
            load(source)
        assert downloads == []

    def test_local_folders_come_first(
        self, downloads: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        save(*small_model(seed=5), "owner/name")
        assert_same(load("owner/name")[0], small_model(seed=5)[0])
        assert downloads == []
        with pytest.raises(ValueError, match="revision must be None for a local path, got 'v2' with "):
            load("owner/name", revision="v2")

    @pytest.mark.parametrize(
        "error", [LocalEntryNotFoundError("offline"), OfflineModeIsEnabled("offline"), OSError("offline")]
    )
    def test_failures_are_one_clear_error(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> str:
            raise error

        monkeypatch.setattr(sources, "snapshot_download", fail)
        message = r"no folder 'owner/name' here\. As a hub id it could not be downloaded: offline"
        with pytest.raises(ValueError, match=message):
            load("owner/name")
        with pytest.raises(ValueError, match=r"^source 'hf://owner/name' could not be downloaded: offline$"):
            load("hf://owner/name")

    def test_without_a_network(self, tmp_path: Path) -> None:
        """The real client, kept offline."""
        with pytest.raises(ValueError, match="As a hub id it could not be downloaded"):
            load("owner/name", local_files_only=True, cache_dir=tmp_path)


class TestMistypedPaths:
    @pytest.fixture(autouse=True)
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("runs/demo/block", "runs/demo/ar", "models"):
            (tmp_path / name).mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    @pytest.mark.parametrize(
        ("source", "meant"),
        [("runs/dmo", "runs/demo"), ("rnus/demo", "runs/demo"), ("rusn/demmo", "runs/demo")],
    )
    def test_a_mistyped_path_is_not_looked_up_on_the_hub(
        self, source: str, meant: str, downloads: list[dict[str, Any]]
    ) -> None:
        said = (
            f"source: there is no folder '{source}' here, did you mean '{meant}'? "
            f"To load it from the Hugging Face hub, write 'hf://{source}'"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            load(source)
        assert downloads == []

    def test_a_folder_of_the_owner_s_name_is_enough(self, downloads: list[dict[str, Any]]) -> None:
        with pytest.raises(
            ValueError, match=r"'models/gpt' here\. To load it from the .* write 'hf://models/gpt'"
        ):
            load("models/gpt")
        assert downloads == []

    def test_the_hub_is_used_if_requested_or_if_no_local_path_is_similar(
        self, here: Path, downloads: list[dict[str, Any]]
    ) -> None:
        (here / "runs" / "real").mkdir()
        for source in ("hf://runs/dmo", "hf://runs/real", "owner/name"):
            load(source)
        assert [each["repo_id"] for each in downloads] == ["runs/dmo", "runs/real", "owner/name"]

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            ("runs/demo/blok", "folder 'runs/demo/blok' here, did you mean 'runs/demo/block'? It must be"),
            ("./rus/demo/ar", "folder './rus/demo/ar' here, did you mean 'runs/demo/ar'? It must be"),
            ("HERE/model", "here, did you mean 'HERE/models'? It must be"),
            ("HERE/zebra/demo", "folder 'HERE/zebra/demo' here. It must be"),
            ("zebra", "folder 'zebra' here. It must be"),
            ("", "folder '' here. It must be"),
            ("~nobodyhere/x", "folder '~nobodyhere/x' here. It must be"),
            ("last.ckpt", "file 'last.ckpt' here. It must be"),
        ],
    )
    def test_other_paths(self, source: str, said: str, here: Path) -> None:
        with pytest.raises(ValueError, match=re.escape(said.replace("HERE", str(here)))):
            load(source.replace("HERE", str(here)))

    @pytest.mark.parametrize(
        "source", ["hf://name", "hf://a/b.gguf", "hf://a/b/c", "hf://two words/x", "hf://~/x", "hf://"]
    )
    def test_malformed_hub_ids_are_explained(self, source: str, downloads: list[dict[str, Any]]) -> None:
        said = f"source: a hub id must look like 'hf://owner/name' without a file name, got '{source}'"
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            load(source)
        assert downloads == []

    def test_where_only_a_folder_will_do(self, here: Path) -> None:
        sources.check_folder("runs", Path("runs/demo"))
        (here / "file").touch()
        for name in ("runs/dmo", "file", "~nobodyhere/x"):
            with pytest.raises(
                ValueError, match=rf"^runs: there is no folder '{name}' here.* an existing fol"
            ):
                sources.check_folder("runs", Path(name))


class TestPickles:
    @pytest.mark.parametrize(
        "name", ["pytorch_model.bin", "model.pt", "model.pth", "weights.pkl", "last.ckpt"]
    )
    @pytest.mark.parametrize("with_config", [True, False])
    def test_folders_of_pickles(self, name: str, with_config: bool, tmp_path: Path) -> None:
        save(*small_model(), tmp_path)
        (tmp_path / "model.safetensors").unlink()
        if not with_config:
            (tmp_path / "config.json").unlink()
        torch.save({}, tmp_path / name)
        with pytest.raises(
            ValueError, match="pickles are not loaded, because they can run any code"
        ) as caught:
            load(tmp_path)
        assert name in str(caught.value)
        assert "save_file" in str(caught.value)

    def test_folders_of_pickles_of_the_reference(self, tmp_path: Path) -> None:
        shutil.copy(Path(__file__).parents[1] / "data/parity/bd3lm-block4/config.json", tmp_path)
        torch.save({}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"got pytorch_model\.bin: pickles are not loaded"):
            load(tmp_path)

    def test_pickles_next_to_safetensors_are_ignored(self, tmp_path: Path) -> None:
        save(*small_model(), tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
        load(tmp_path)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
    def test_files(self, name: str, tmp_path: Path) -> None:
        torch.save({}, tmp_path / name)
        with pytest.raises(ValueError, match="pickles are not loaded, because they can run any code"):
            load(tmp_path / name)


def test_other_files(tmp_path: Path) -> None:
    save(*small_model(), tmp_path)
    with pytest.raises(ValueError, match=r"got the file .*model\.safetensors; try its folder"):
        load(tmp_path / "model.safetensors")


def test_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold a model\.safetensors, got none"):
        load(tmp_path)


def test_a_run_of_several_stages_is_its_last_stage_with_a_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for stage in ("ar", "block"):
        save(*small_model(), run / stage / "model")
    save(*small_model(), tmp_path / "outside" / "model")
    (run / "stages.yaml").write_text("block: {}\nar: {}\nlater: {}\n../outside: {}\n..: {}\n3: {}\n")
    assert sources.resolve(run) == run / "ar" / "model"
    assert_same(load(run)[0], small_model()[0])
    shutil.rmtree(run / "ar")
    assert sources.resolve(run) == run / "block" / "model"
    (run / "stages.yaml").write_text("block: [")
    with pytest.raises(ValueError, match=r"stages\.yaml: is not YAML"):
        sources.resolve(run)


def test_stages_without_their_order_are_named(tmp_path: Path) -> None:
    for stage in ("ar", "block"):
        (tmp_path / stage / "model").mkdir(parents=True)
        (tmp_path / stage / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds a run with the stages ar, block: name one .*block"):
        sources.read_config(tmp_path)
