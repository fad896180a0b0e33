"""Prometheus metrics of one server."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bd3lm.serving.engine import RemoteEngine
from bd3lm.serving.link import Line

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    def __init__(self, engine: RemoteEngine) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter(
            "bd3lm_answers", "Answers to requests for texts, by status.", ["status"], registry=self.registry
        )
        self.texts = Counter(
            "bd3lm_texts", "Finished texts, by what ended them.", ["by"], registry=self.registry
        )
        self.tokens = Counter("bd3lm_tokens", "Tokens of finished texts.", ["kind"], registry=self.registry)
        self.passes = Counter(
            "bd3lm_passes", "Passes of the network for finished texts.", ["kind"], registry=self.registry
        )
        self.drafts = Counter("bd3lm_drafts", "Verified drafts.", ["right"], registry=self.registry)
        self.first = Histogram(
            "bd3lm_first_token_seconds",
            "From a streamed request to its first text.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.whole = Histogram(
            "bd3lm_request_seconds",
            "From a request to the end of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        for name, what, value in (
            ("bd3lm_texts_running", "Texts being written.", lambda: engine.state.running),
            ("bd3lm_texts_under_way", "Texts being written or waiting.", lambda: len(engine)),
            ("bd3lm_engine_ready", "Whether the model is loaded.", lambda: engine.state.model is not None),
            ("bd3lm_engine_starts", "How often the model was loaded.", lambda: engine.state.starts),
        ):
            Gauge(name, what, registry=self.registry).set_function(value)

    def finished(self, done: Line) -> None:
        self.texts.labels(done["stopped_by"]).inc()
        self.tokens.labels("prompt").inc(done["given"])
        self.tokens.labels("written").inc(done["written"])
        self.passes.labels("writing").inc(done["passes"])
        self.passes.labels("reading").inc(done["fill_passes"])
        right = sum(done["accepted"])
        self.drafts.labels("yes").inc(right)
        self.drafts.labels("no").inc(sum(done["drafted"]) - right)

    def text(self) -> bytes:
        return generate_latest(self.registry)
