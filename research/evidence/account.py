"""How the results came about: the setting, what is left to do, what failed, and what it took."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bd3lm.reports.document import Listing, Prose, Table
from research.evidence.figures import NONE, Evidence
from research.evidence.measures import TRAINED_ON, Documents, Perplexity, Texts
from research.evidence.noise import NOT_MEASURED, Nats
from research.evidence.records import Line
from research.evidence.runs import TIED_AR, Run
from research.evidence.samples import text_name
from research.evidence.settings import COMMON, Settings, parameters


def setting(evidence: Evidence) -> Listing:
    """What is the same in all runs, from the settings of the first, what is not, and what the lines say."""
    run = evidence.named("ar")[0]
    network, optimizer, train = (run.settings[part] for part in ("network", "optimizer", "train"))
    (first, second), tokens = optimizer["betas"], run.tokens
    return Listing(
        [
            f"Network: {network['layers']} layers of {network['hidden']}, {network['heads']} heads, context "
            f"{run.context}{_vocabulary(evidence)}{_parameters(evidence, run)}, dropout "
            f"{network['dropout']:g}.{_timed(evidence)}{_tied(evidence)}",
            f"First weights: {_first_weights(evidence)}.",
            f"Training: {run.steps:,} steps of {train['global_batch']} sequences, {tokens / 1e6:.1f} M tokens"
            f"{_read(evidence, tokens)}.{_other_tokens(evidence, tokens)}",
            f"AdamW at {optimizer['lr']:g}, betas {first:g} and {second:g}; "
            f"{optimizer['warmup_steps']} steps of warm-up, then {_decay(optimizer)}; gradients clipped at "
            f"{optimizer['clip_norm']:g}; weights averaged with decay {train['ema_decay']:g}.",
            _stages(evidence),
            f"Perplexities: {_scored(evidence, data=TRAINED_ON, split='test', part=False)} tokens of the "
            f"test split, {_scored(evidence, part=True)} where they take many passes, "
            f"{_scored(evidence, split='valid')} of the validation split, {_scored(evidence, data='ptb')} of "
            "each zero-shot text.",
            f"Texts: {Texts().count} of one context, 64 of two and for each rule of decoding, fewer where a "
            f"method is slow; {Documents().count} documents of at most {Documents().contexts} contexts.",
            "Tokens are drawn from a nucleus of 0.9, by SEDD of 0.99, so texts are not of the very "
            "distribution whose likelihood is measured.",
            _machine(evidence),
        ]
    )


def conditions(evidence: Evidence) -> Prose:
    """The same in short, with what all of it took."""
    run, tied = evidence.named("ar")[0], evidence.named(TIED_AR)[0]
    network, train = run.settings["network"], run.settings["train"]
    lines = [line for line in evidence.results.lines if line["kind"] in ("trained", "measured")]
    trained = [line for line in lines if line["kind"] == "trained"]
    hours = sum(line["seconds"] for line in lines) / 3600
    devices = " and ".join(dict.fromkeys(str(line["device"]) for line in trained if "device" in line))
    return Prose(
        f"All runs: {network['layers']} layers of {network['hidden']}, {network['heads']} heads"
        f"{_parameters(evidence, run)} (with tied embeddings{_parameters(evidence, tied)[1:]}), context "
        f"{run.context}, GPT-2's tokenizer{_vocabulary(evidence)}. Training: {run.steps:,} steps of "
        f"{train['global_batch']} sequences of English Wikipedia, {run.tokens / 1e6:.1f} M tokens, at the "
        "learning rate and with the first weights that are best for AR and for masks by count. Test: "
        f"{_scored(evidence, data=TRAINED_ON, split='test', part=False)} tokens of other articles. Device: "
        f"{devices or NOT_MEASURED}; {len(trained)} trainings and all measures took {hours:.1f} hours. "
        "Exceptions are in the long version."
    )


def _first_weights(evidence: Evidence) -> str:
    """The usual ones, and who begins with others; alternatives are told apart by their names."""
    usual = COMMON["network"]["initialisation"]
    others: dict[str, list[Run]] = {}
    for first in (run.lineage[0] for run in evidence.runs if run.table != "alternatives"):
        if (start := first.settings["network"]["initialisation"]) != usual:
            others.setdefault(start, []).append(first)
    told = (f"`{start}` for what begins as {_kinds(runs)}" for start, runs in others.items())
    return ", ".join((f"`{usual}`", *told))


def _decay(optimizer: Settings) -> str:
    if optimizer["decay"] == "constant":
        return "constant"
    falling = f"falling to {optimizer['min_lr_ratio']:g} of it ({optimizer['decay']})"
    return f"constant, {falling} over the last {optimizer['decay_steps']:,}"


def _stages(evidence: Evidence) -> str:
    """How the rate goes in runs of two stages, whose second may be shorter than its fall."""
    second = [run for run in evidence.runs if run.parent]
    first = dict.fromkeys(_decay(run.parent.settings["optimizer"]) for run in second if run.parent)
    falls: dict[str, list[Run]] = {}
    for run in second:
        optimizer = run.settings["optimizer"]
        fall = min(run.steps - optimizer["warmup_steps"], optimizer["decay_steps"])
        said = f"{fall} of {run.steps} steps" if not run.same_time_as else f"at most {fall} steps"
        falls.setdefault(said, []).append(run)
    kinds = "; ".join(f"{steps} ({_kinds(runs)})" for steps, runs in falls.items())
    warm = " or ".join(dict.fromkeys(str(run.settings["optimizer"]["warmup_steps"]) for run in second))
    return (
        f"Of two stages the rate of the first is {' or '.join(first)} after its warm-up; that of the second, "
        f"after {warm} steps of one, falls over {kinds}."
    )


def _kinds(runs: Iterable[Run]) -> str:
    """Names without block sizes and what follows them."""
    return ", ".join(dict.fromkeys(f"`{re.split(r'-(?:[0-9]|L)', run.name)[0]}`" for run in runs))


def _other_tokens(evidence: Evidence, usual: int) -> str:
    """Who sees more or fewer, first stages aside."""
    parents = {run.parent.name for run in evidence.runs if run.parent}
    found: dict[int, list[Run]] = {}
    for run in evidence.runs:
        if run.name not in parents and not run.same_time_as:
            found.setdefault(run.tokens, []).append(run)
    others = [
        f"{tokens / 1e6:.1f} M ({tokens / usual:.3g} times as many) for {_kinds(runs)}"
        for tokens, runs in sorted(found.items())
        if tokens != usual
    ]
    return f" But {', '.join(others)}." if others else ""


def _timed(evidence: Evidence) -> str:
    """Whose network is another one."""
    runs = [run for run in evidence.runs if run.settings["network"]["adaln"]]
    if not runs:
        return ""
    timed = ", and conditioned on time" * all(run.settings["network"]["time_conditioning"] for run in runs)
    return f" With adaptive norms{_parameters(evidence, runs[0])}{timed}: {_kinds(runs)}."


def _tied(evidence: Evidence) -> str:
    """Whose embedding is the head too."""
    runs = [run for run in evidence.runs if run.is_tied]
    return f" Tied{_parameters(evidence, runs[0])}: {_kinds(runs)}." if runs else ""


def _vocabulary(evidence: Evidence) -> str:
    return f", a vocabulary of {evidence.real['vocabulary']:,}" if evidence.real else ""


def _parameters(evidence: Evidence, run: Run) -> str:
    if not evidence.real:
        return ""
    return f", {parameters(run.settings, evidence.real['vocabulary']) / 1e6:.1f} M parameters"


def _read(evidence: Evidence, tokens: int) -> str:
    if not evidence.real:
        return ""
    there = evidence.real["tokens"]
    return f", {tokens / there:.1f} times the {there / 1e6:.1f} M of the training text, in one order a seed"


def _scored(evidence: Evidence, **where: object) -> str:
    """How many tokens a perplexity of some kind is of."""
    asked = [
        each.sequences * run.context
        for run in evidence.runs
        for each in run.measures
        if isinstance(each, Perplexity) and all(getattr(each, name) == value for name, value in where.items())
    ]
    return f"{max(asked):,}" if asked else "no"


def _machine(evidence: Evidence) -> str:
    known = _digests(evidence)
    lines = [line for line in evidence.results.lines if line["kind"] == "trained" and line["digest"] in known]
    if not lines:
        return "Nothing has been trained with these settings yet."

    def all_of(field: str) -> str:
        return ", ".join(dict.fromkeys(str(line[field]) for line in lines))

    return (
        f"Trained on {all_of('device')}, torch {all_of('torch')}, {all_of('precision')}; commit "
        f"{all_of('commit')}; data {all_of('data')}."
    )


def _digests(evidence: Evidence) -> dict[str, str]:
    """The names of all runs, and of what they start from."""
    return {each.digest: each.name for run in evidence.runs for each in run.lineage}


def progress_table(evidence: Evidence) -> Table:
    rows = []
    for table in dict.fromkeys(run.table for run in evidence.runs):
        runs = [run for run in evidence.runs if run.table == table]
        asked = sum(len(run.measures) for run in runs)
        left = sum(len(evidence.results.missing(run)) for run in runs)
        failed = sum(evidence.results.failed(run) for run in runs)
        rows.append([table, f"{len(runs)}", f"{failed}", f"{asked}", f"{left}"])
    headings = ["table", "runs", "diverged", "measures", "of them left"]
    return Table("What was to be done, and what is left of it.", headings, rows)


def failure_table(evidence: Evidence) -> Table:
    rows = []
    for run in evidence.runs:
        rows += [[run.key, "diverged", line["error"]] for line in evidence.results.of(run, "failed")]
        broken = evidence.results.of(run, "broken") if evidence.results.missing(run) else []
        rows += [[run.key, "broke", line["error"].strip().splitlines()[-1]] for line in broken]
    rows = rows or [["none", NONE, NONE]]
    return Table(
        "Runs that failed, and measures that broke.", ["run", "what", "error"], rows, text_columns=[1, 2]
    )


def earlier_table(evidence: Evidence) -> Table:
    """What was trained with settings that no run has any more."""
    known = _digests(evidence)
    lines = [line for line in evidence.results.lines if line["digest"] not in known]
    trained = {line["digest"]: line for line in lines if line["kind"] == "trained"}
    rows = [_earlier_row(evidence, line, lines) for line in trained.values()]
    perplexities = ["exact perplexity", "bound", "exact, validation text", "generative perplexities"]
    headings = ["run", "commit", "steps", *perplexities]
    return Table("Trained with settings that were given up.", headings, rows or [["none", *[NONE] * 6]])


def _earlier_row(evidence: Evidence, trained: Line, lines: Sequence[Line]) -> list[str]:
    figures = {
        (split, figure["meaning"]): figure["nats"]
        for line in lines
        if (line["kind"], line["digest"]) == ("measured", trained["digest"])
        and (split := _whole_split(line["measure"]))
        for figure in line["result"]["figures"]
    }
    shown = [
        str(Nats((figures[split, meaning],), meaning == "bound")) if (split, meaning) in figures else NONE
        for split, meaning in (("test", "exact"), ("test", "bound"), ("valid", "exact"))
    ]
    start = text_name(trained["run"], trained["seed"], trained["digest"], "")
    verdicts = [each["result"] for name, each in evidence.verdicts.items() if name.startswith(start)]
    judged = ", ".join(f"{each['perplexity']:.1f}" for each in verdicts if each["perplexity"]) or NONE
    key, steps = f"{trained['run']}/{trained['seed']}", f"{trained['steps']:,}"
    return [key, str(trained["commit"]), steps, *shown, judged]


def _whole_split(asked: Mapping[str, Any]) -> str | None:
    """The split of Wikipedia of which it is the model's own likelihood."""
    if asked["kind"] != "perplexity" or asked["estimator"] == "next-token":
        return None
    split: str = asked["split"]
    return split if (asked["data"], asked["part"]) == (TRAINED_ON, False) else None


def cost_table(evidence: Evidence) -> Table:
    """Seconds by run, from the lines; one that others start from may have been trained several times."""
    known = _digests(evidence)
    spent: dict[str, list[float]] = {}
    for line in evidence.results.lines:
        if line["kind"] in ("trained", "measured"):
            name = known.get(line["digest"], "earlier settings")
            trained = line["kind"] == "trained"
            each = spent.setdefault(name, [0, 0.0, 0.0])
            each[0] += trained
            each[1 if trained else 2] += line["seconds"]
    totals = [sum(each[place] for each in spent.values()) for place in range(3)]
    rows = [
        [name, f"{each[0]:g}", *(f"{seconds:,.0f}" for seconds in (*each[1:], sum(each[1:])))]
        for name, each in (*spent.items(), ("all", totals))
    ]
    headings = ["run", "times trained", "training, s", "measuring, s", "together, s"]
    caption = (
        "Time on the device by run, all seeds, compiling included. What ran at the same time counts for each."
    )
    return Table(caption, headings, rows)
