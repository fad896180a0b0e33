"""A model behind HTTP, as OpenAI's clients expect it.

Two processes: `worker` holds the model and writes texts on the engine; the server's own answers requests and
never waits for a pass. Between them go lines of JSON (`link`). `asks` is what clients may say, `answers` what
they are told, `app` the routes.
"""

from bd3lm.serving.limits import Limits

__all__ = ["Limits"]
