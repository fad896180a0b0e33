"""Several tokens a pass: how many there are, and what they do for the speed, of a drafter or a joint model.

    PYTHONPATH=src python research/speculation.py MODEL --commit COMMIT --out speculation.jsonl

`tokens` counts passes of real samplers for fixed prompts: by scheme, candidates and passes a round, drawn in
three ways, under each law of the model. `one` times one text at a time, `batches` several side by side. Both
have the sides turn about in one process: without speculation, with a fixed number of drafts, and auto; for
one text of a drafter also the model that it was made of, and greedy `generate` with a static cache.
On a GPU, alone. Texts end where they end, so that speeds are of tokens that are kept.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import bd3lm
from bd3lm import interop
from bd3lm.bench.records import device_name
from bd3lm.commands.shared.models import one_model
from bd3lm.data.chat import user_message
from bd3lm.lm import LanguageModel
from bd3lm.methods import Law
from bd3lm.runs.own_texts import builtin_prompts
from bd3lm.sampling import Sample, Speculation

PARTS = ("tokens", "one", "batches")
PROMPTS = (
    # Questions, short answers.
    "What is the tallest mountain in Africa?",
    "How many minutes are there in a week?",
    "Who painted the ceiling of the Sistine Chapel?",
    "Which planet has the most moons?",
    "What does a barometer measure?",
    "Why is the sea salty?",
    "What language do people speak in Brazil?",
    "When do hedgehogs sleep through the winter?",
    # Explanations.
    "Explain how a sailing boat can move against the wind.",
    "How does a refrigerator stay cold inside?",
    "Explain compound interest to somebody who has just opened a savings account.",
    "What happens in a forest in the years after a fire?",
    "Why do we have leap years?",
    "How do noise-cancelling headphones work?",
    "Explain what a virtual machine is, in plain words.",
    "What is the role of yeast in baking?",
    # Lists.
    "List seven things to pack for a day of hiking.",
    "Name six instruments of an orchestra and say how each makes its sound.",
    "Give me ten adjectives for a rainy city.",
    "List the steps of changing a flat tyre.",
    "Which tools does a beginner in woodworking need? Answer with a list.",
    "Give four examples of irony in everyday life.",
    "List five questions to ask at a job interview.",
    "Name three rivers in Asia, with the countries that each flows through.",
    # Code.
    "Write a Python function that merges two sorted lists.",
    "Write a JavaScript function that turns seconds into hours, minutes and seconds.",
    "Show me a shell command that finds the ten largest files in a folder.",
    "Write a Python class for a bank account with deposits and withdrawals.",
    "What does this do: sorted(words, key=len, reverse=True)[:3]?",
    "Write an SQL table for the books of a library, with two example rows.",
    "Write a C function that counts the vowels of a string.",
    "Explain the difference between a list and a tuple in Python, with code.",
    # Letters and other texts of use.
    "Write a note to my landlord that the heating has been broken since Monday.",
    "Write a thank-you card to a teacher who retires.",
    "Draft an invitation to a street party in June.",
    "Write an advertisement for a second-hand piano.",
    "Write a short apology to a customer whose parcel came late.",
    "Write minutes of a meeting about a new playground.",
    "Write a cover letter for a job in a flower shop.",
    "Write the text of a sign that asks visitors not to feed the ducks.",
    # Stories, verse and talk.
    "Tell a story about a lighthouse keeper and a lost whale.",
    "Write a limerick about a cat that is afraid of mice.",
    "Begin a science-fiction novel that is set on a comet.",
    "Write a conversation between a bus driver and a passenger who has forgotten her stop.",
    "Write a haiku about snow on a railway line.",
    "Tell me a fable with a tortoise and a drone.",
    "Describe an old harbour at dawn in one paragraph.",
    "Write a bedtime story about a spoon.",
    # Sums and reasoning.
    "A shirt costs 40 dollars after a discount of 20 percent. What did it cost before?",
    "If a train leaves at 9:40 and takes 2 hours and 35 minutes, when does it arrive?",
    "Anna is twice as old as Ben, and together they are 36. How old is each?",
    "What is 17 times 24? Show your work.",
    "Is a tomato a fruit or a vegetable? Give reasons for both.",
    "A farmer has hens and cows, 30 heads and 86 legs. How many of each?",
    "Which is heavier, a litre of water or a litre of oil, and how would one find out?",
    "Sort these by size: a gram, a tonne, an ounce, a kilogram.",
    # Changes of a text.
    "Translate into Spanish: The train to Madrid leaves from platform four.",
    "Make this more polite: Send me the report now.",
    "Correct the mistakes: Yesterday we goes to the market and buyed three apple.",
    "Shorten to one sentence: The shop was closed, because it was Sunday, so we walked home without bread.",
    "Turn this into questions and answers: Bees make honey from nectar and keep it in combs of wax.",
    "Rewrite as a newspaper headline: A baker in a small village has made a pie of nine metres.",
    "Put into the past tense: She opens the window, sees the fox and calls her brother.",
    "Give the main point: Birds fly south in autumn not because of the cold, but because food is scarce.",
)
"""Of our own, and none of those that own texts are written from."""

T1, COOLER, GREEDY = (1.0, 1.0), (0.6, 0.9), (0.0, 1.0)
"""A temperature and a nucleus."""
_REPEATED = 8  # tokens that a text without loops has only once

Prompt = str | list[int]
Write = Callable[[Sequence[Prompt]], list[Sample]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    texts: int = 64
    new: int = 256
    """Tokens that a text may have after its prompt."""
    alone: int = 8
    """Texts that are timed one by one."""
    turns: int = 3
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    drafts: int = 3


TINY = Sizes(texts=3, new=8, alone=2, turns=1, batches=(1, 2), drafts=2)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to write, by a model of its own: so that it keeps its writer, and a GPU what it recorded."""

    name: str
    model: LanguageModel
    speculation: Speculation
    drawn: tuple[float, float]
    new: int
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings."""

    def write(self, prompts: Sequence[Prompt], *, batch: int, seed: int = 0) -> list[Sample]:
        temperature, top_p = self.drawn
        texts = self.model.generate(
            prompts,
            speculation=self.speculation,
            temperature=temperature,
            top_p=top_p,
            batch_size=batch,
            max_new_tokens=self.new,
            seed=seed,
            **self.more,
        )
        return [text.sample for text in texts]

    @property
    def said(self) -> dict[str, Any]:
        temperature, top_p = self.drawn
        return {
            "side": self.name,
            "law": self.model.law,
            "lean": getattr(self.model.config.method, "lean", None),
            "temperature": temperature,
            "top_p": top_p,
            "speculation": asdict(self.speculation),
        }


def prompts_for(model: LanguageModel, number: int) -> list[Prompt]:
    """The fixed prompts as the model takes them: in its chat template, or beginnings of texts without one."""
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return list(islice(cycle(builtin_prompts(chat=False)), number))
    template = tokenizer.chat_template
    return [user_message(template, prompt, tokenizer) for prompt in islice(cycle(PROMPTS), number)]


def repeats(tokens: Sequence[int], length: int = _REPEATED) -> bool:
    """Whether some tokens in a row come twice."""
    runs = [tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]
    return len(set(runs)) < len(runs)


def is_loopy(sample: Sample) -> bool:
    return repeats(sample.tokens[sample.prompt :].tolist())


def counted(samples: Sequence[Sample]) -> dict[str, Any]:
    """What texts have and what they took: tokens a pass, and how many drafts of each place were right."""
    tokens, passes = sum(each.written for each in samples), sum(each.evaluations for each in samples)
    drafted, accepted = (
        [sum(places) for places in zip(*(getattr(each, name) for each in samples), strict=True)]
        for name in ("drafted", "accepted")
    )
    return {
        "texts": len(samples),
        "tokens": tokens,
        "passes": passes,
        "fill_passes": sum(each.fill_passes for each in samples),
        "tokens_per_pass": tokens / passes if passes else None,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": [right / of if of else None for right, of in zip(accepted, drafted, strict=True)],
    }


# --- tokens a pass ---


def ways_of(drafts: int) -> dict[str, Speculation]:
    return {
        "coupled": Speculation(drafts=drafts),
        "coupled, 2 candidates": Speculation(drafts=drafts, candidates=2),
        "coupled, 2 passes a round": Speculation(drafts=drafts, passes=2),
        "rejection": Speculation(drafts=drafts, scheme="rejection"),
        "rejection, 2 candidates": Speculation(drafts=drafts, scheme="rejection", candidates=2),
    }


def under(model: LanguageModel, law: Law) -> LanguageModel:
    """The same network under one of its laws; the block law in the uniform order, as the theory has it."""
    found = model.with_law(law)
    return found.with_lean(0.0) if law == "block" else found


def measure_tokens(model: LanguageModel, sizes: Sizes, batch: int) -> Iterator[dict[str, Any]]:
    prompts = prompts_for(model, sizes.texts)
    for law in model.record.method.laws:
        for name, speculation in ways_of(sizes.drafts).items():
            side = Side(name=name, model=under(model, law), speculation=speculation, drawn=T1, new=sizes.new)
            for drawn in (T1, COOLER, GREEDY):
                side = replace(side, drawn=drawn)  # with the writer that it has
                record = {"part": "tokens", **side.said}
                try:
                    samples = side.write(prompts, batch=batch)
                except ValueError as error:  # a way that a law does not have
                    yield {**record, "refused": str(error)}
                    continue
                plain = [each for each in samples if not is_loopy(each)]
                yield {**record, **counted(samples), "without_repeats": counted(plain)}


# --- speed ---


def timed(write: Write, prompts: Sequence[Prompt], device: torch.device) -> tuple[float, list[Sample]]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    samples = write(prompts)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun, samples


def sides_of(model: LanguageModel, base: LanguageModel | None, drawn: Any, sizes: Sizes) -> list[Side]:
    """Without speculation first, which the others are compared with."""
    ways = {
        "off": Speculation(drafts=0),
        f"{sizes.drafts} drafts": Speculation(drafts=sizes.drafts),
        f"{sizes.drafts} drafts by rejection": Speculation(drafts=sizes.drafts, scheme="rejection"),
        "auto": Speculation(),
    }
    make = partial(Side, drawn=drawn, new=sizes.new)
    found = [make(name=name, model=model.with_law("causal"), speculation=way) for name, way in ways.items()]
    if base is not None:  # its writer is that of any autoregressive model
        found.insert(0, make(name="the model itself", model=base, speculation=Speculation(drafts=0)))
    return found


class Peer:
    """Greedy `generate` of transformers, static cache: the same weights, by way of our export.

    The cache is as long for every prompt, or it would be compiled for each."""

    def __init__(self, base: LanguageModel, length: int) -> None:
        from transformers import AutoModelForCausalLM  # not there in every place that needs the rest

        with TemporaryDirectory() as folder:
            interop.save_huggingface(base.network, base.config, folder)
            self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=base.network.dtype)
        self.model = self.model.to(base.device).eval()
        self.length = length
        self.eos = None if base.tokenizer is None else base.tokenizer.eos_id

    @torch.no_grad()
    def write(self, prompt: list[int]) -> int:
        """How many tokens were written."""
        given = torch.tensor([prompt], device=self.model.device)
        found = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_length=self.length,
            max_new_tokens=None,
            eos_token_id=self.eos,
            pad_token_id=0 if self.eos is None else self.eos,
            cache_implementation="static",
        )
        return int(found.shape[1]) - len(prompt)


def measure_one(
    model: LanguageModel, base: LanguageModel | None, sizes: Sizes, device: torch.device, *, peer: bool
) -> Iterator[dict[str, Any]]:
    """One text at a time, each with a clock of its own; all sides before the next turn."""
    prompts = prompts_for(model, sizes.alone)
    made = sides_of(model, base, COOLER, sizes)
    for drawn in (COOLER, GREEDY):
        sides = [replace(side, drawn=drawn) for side in made]
        seconds: dict[str, list[list[float]]] = {side.name: [[] for _ in prompts] for side in sides}
        samples: dict[str, list[Sample]] = {}
        for turn in range(1 + sizes.turns):  # the first warms up
            for side in sides:
                samples[side.name] = []
                for number, prompt in enumerate(prompts):
                    write = partial(side.write, batch=1, seed=number)
                    taken, texts = timed(write, [prompt], device)
                    samples[side.name] += texts
                    if turn:
                        seconds[side.name][number].append(taken)
        for side in sides:
            found = samples[side.name]
            yield {
                "part": "one",
                "batch": 1,
                **side.said,
                **counted(found),
                **_speeds([each.written for each in found], seconds[side.name]),
                "loopy": [is_loopy(each) for each in found],
            }
        if drawn == GREEDY and peer and base is not None:
            yield _peer(base, prompts, sizes, device)


def _peer(
    base: LanguageModel, prompts: Sequence[Prompt], sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    encoded = [each if isinstance(each, list) else _encoded(base, each) for each in prompts]
    theirs = Peer(base, max(map(len, encoded)) + sizes.new)
    seconds: list[list[float]] = [[] for _ in encoded]
    written: list[int] = []
    for turn in range(1 + sizes.turns):
        written = []
        for number, prompt in enumerate(encoded):
            begun = time.perf_counter()
            written.append(theirs.write(prompt))  # which reads the tokens, and so waits for the device
            if turn:
                seconds[number].append(time.perf_counter() - begun)
    temperature, top_p = GREEDY
    return {
        "part": "one",
        "batch": 1,
        "side": "transformers, static cache",
        "law": "causal",
        "temperature": temperature,
        "top_p": top_p,
        "texts": len(encoded),
        "tokens": sum(written),
        **_speeds(written, seconds),
    }


def _encoded(model: LanguageModel, text: str) -> list[int]:
    assert model.tokenizer is not None
    return model.tokenizer.encode(text)


def _speeds(written: Sequence[int], seconds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of each text the median of its turns: tokens and seconds of all of them, and each text's own."""
    medians = [median(each) for each in seconds]
    return {
        "tokens_per_second": sum(written) / sum(medians),
        "seconds": sum(medians),
        "written_by_text": list(written),
        "seconds_by_text": [list(each) for each in seconds],
    }


def measure_batches(model: LanguageModel, sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Several side by side, two texts a seat, so that seats are taken again as texts end."""
    for batch in sizes.batches:
        prompts = prompts_for(model, max(2 * batch, 4))
        made = sides_of(model, None, COOLER, sizes)
        sides = [side for side in made if side.speculation.scheme == "coupled"]
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        samples: dict[str, list[Sample]] = {}
        for turn in range(1 + sizes.turns):
            for side in sides:
                taken, samples[side.name] = timed(partial(side.write, batch=batch), prompts, device)
                if turn:
                    seconds[side.name].append(taken)
        for side in sides:
            found, taken = samples[side.name], median(seconds[side.name])
            tokens = sum(each.written for each in found)
            yield {
                "part": "batches",
                "batch": batch,
                **side.said,
                **counted(found),
                "tokens_per_second": tokens / taken,
                "seconds": taken,
                "each": seconds[side.name],
            }
        del made, sides, side  # and with them the memory of their writers


# --- the table ---


HEADING = f"{'part':8}{'law':8}{'drawn':14}{'batch':>6}  {'side':32}{'a pass':>8}{'tokens/s':>11}{'times':>7}"


class Lines:
    """A line for each record; how many times as fast is by the first side of its group."""

    def __init__(self) -> None:
        self._first: dict[Any, float] = {}

    def of(self, record: dict[str, Any]) -> str:
        temperature, top_p = record["temperature"], record["top_p"]
        drawn = f"T {temperature:g}, p {top_p:g}" if temperature else "greedy"
        part, law, batch = record["part"], record["law"], record.get("batch", "")
        line = f"{part:8}{law:8}{drawn:14}{batch:>6}  {record['side']:32}"
        if "refused" in record:
            return f"{line} refused: {record['refused'][:60]}"
        line += _cell(record.get("tokens_per_pass"), 8, ".3f")
        if speed := record.get("tokens_per_second"):
            line += _cell(speed, 11, ",.0f")
            line += _cell(speed / self._first.setdefault((part, law, drawn, batch), speed), 7, ".2f")
        plain = record.get("without_repeats")
        if plain and not temperature and plain["passes"]:
            line += f"  {plain['texts']} texts without repeats: {plain['tokens_per_pass']:.3f}"
        return line.rstrip()


def _cell(value: float | None, width: int, form: str) -> str:
    return " " * width if value is None else format(value, f"{width}{form}")


def base_of(model: LanguageModel, name: str | None, **options: Any) -> LanguageModel | None:
    """The model that a drafter was made of."""
    if name is None and model.record.base is not None:
        name = model.record.base.source
    return None if name is None else bd3lm.load(name, **options)


def _without_out(words: Sequence[str]) -> list[str]:
    """Where a machine put its files says nothing."""
    return [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a run, a model folder, or box")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--base", help="the model that a drafter was made of, if not where it was")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without transformers")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: a few tokens of everything")
    parser.add_argument("--device")
    for name in ("texts", "new", "alone", "turns", "drafts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--batches", type=int, nargs="+")
    options = parser.parse_args(words)
    if not options.out.parent.is_dir():
        parser.error(f"--out must be in an existing folder, and {options.out.parent} is none")
    given = {name: getattr(options, name) for name in asdict(TINY) if getattr(options, name) is not None}
    if "batches" in given:
        given["batches"] = tuple(given["batches"])
    sizes = replace(TINY if options.tiny else Sizes(), **given)
    if bad := [name for name in given if min([given[name]] if name != "batches" else given[name]) < 1]:
        parser.error(f"--{bad[0]} must be at least 1")

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = {"device": device, "dtype": "bfloat16" if device.type == "cuda" else None}
    model = bd3lm.load(one_model(options.model), **kind)
    base = base_of(model, options.base, **kind) if "one" in options.parts else None
    work = {
        "tokens": lambda: measure_tokens(model, sizes, min(sizes.texts, 64)),
        "one": lambda: measure_one(model, base, sizes, device, peer=options.peer),
        "batches": lambda: measure_batches(model, sizes, device),
    }
    about = {
        "model": options.model,
        "title": model.record.title,
        "sizes": asdict(sizes),
        "dtype": str(model.network.dtype).removeprefix("torch."),
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": options.commit,
        "command": " ".join(
            ["research/speculation.py", *_without_out(sys.argv[1:] if words is None else words)]
        ),
    }
    lines, printed = Lines(), [HEADING]
    with options.out.open("a", encoding="utf-8") as file:
        for record in chain.from_iterable(work[part]() for part in options.parts):
            measured = datetime.now(UTC).isoformat(timespec="seconds")
            file.write(json.dumps({**record, **about, "measured": measured}) + "\n")
            file.flush()
            printed.append(lines.of(record))
            print(printed[-1], file=sys.stderr, flush=True)
    print(f"{options.model}, {about['device']}, {about['dtype']}", *printed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
