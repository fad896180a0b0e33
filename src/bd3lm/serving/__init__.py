"""A model behind HTTP, with OpenAI's API.

It takes two processes. `worker` holds the model and writes texts with the engine. The server's own process
answers requests and never waits for a pass. They exchange lines of JSON (`link`). `asks` defines requests,
`answers` defines responses, and `app` has the routes.
"""

from bd3lm.serving.limits import Limits

__all__ = ["Limits"]
