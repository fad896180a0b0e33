"""Run by tests in a process of its own, as `python -I`, over a folder of exported models: what they give.

bd3lm cannot be imported here, as on a machine that has only torch and transformers.
"""

import json
import sys
from pathlib import Path


class Absent:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "bd3lm":
            raise ModuleNotFoundError("bd3lm is not installed here", name="bd3lm")


sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def results(folder: Path) -> dict[str, object]:
    """The answers of the model in a folder to the requests in `asked.json` and `asked.safetensors`."""
    model, asked, tensors = load(folder), json.loads((folder / "asked.json").read_text()), {}
    given = load_file(folder / "asked.safetensors")
    noise = given.get("noise")
    for name in ("clean", "noisy"):
        with torch.no_grad():
            out = model(given[name], noise=noise, output_hidden_states=True)
        tensors[name] = out.logits
        tensors[f"{name} again"] = model.head(out.hidden_states[-1])
    prompts = torch.tensor(asked["prompts"])
    texts = [model.generate(prompts, **settings).tolist() for settings in asked["settings"]]
    refused = []
    for settings in asked["wrong"]:
        try:
            model.generate(prompts, **settings)
        except ValueError as error:
            refused.append(str(error))
    again = folder / "again"
    model.save_pretrained(again)
    copy = load(again)
    state = model.state_dict()
    same = all(torch.equal(tensor, state[name]) for name, tensor in copy.state_dict().items())
    texts_again = copy.generate(prompts, **asked["settings"][0]).tolist()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "given.safetensors")
    return {
        "texts": texts,
        "refused": refused,
        "files": sorted(each.name for each in again.iterdir()),
        "same": same and copy.state_dict().keys() == state.keys() and texts_again == texts[0],
        "training": model.training,
        "tied": model.output.weight is model.embedding.weight,
        "ids": None if "text" not in asked else encoded(folder, asked["text"]),
    }


def encoded(folder: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(text)["input_ids"]


if __name__ == "__main__":
    top = Path(sys.argv[1])
    for each in sorted(top.iterdir()):
        if (each / "asked.json").is_file():
            (each / "given.json").write_text(json.dumps(results(each)))
    if any(name.partition(".")[0] == "bd3lm" for name in sys.modules):
        sys.exit("bd3lm was imported")
