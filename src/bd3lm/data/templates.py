"""Chat templates by name or in a file, for models that came without one."""

from pathlib import Path

from bd3lm.io.files import local_path, read_text

_MOST_BYTES = 4_000_000  # what a template may have in characters, at most four bytes each

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content | trim }}\n\n"
    "{% elif message.role == 'user' %}User: {{ message.content | trim }}\n\n"
    "{% else %}Assistant: {{ message.content | trim }}{{ eos_token }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Words that any tokenizer has: "User: ...", "Assistant: ...", a blank line between turns."""

TEMPLATES = {"plain": PLAIN}
"""Those that come with this package, by their names."""

_STOPS = {PLAIN: ("\n\nUser:",)}


def named_template(name_or_file: str | Path, flag: str = "--chat-template") -> str:
    """The template of that name, or the text of the file."""
    if name_or_file in TEMPLATES:
        return TEMPLATES[str(name_or_file)]
    path = local_path(name_or_file)
    if not path.exists():
        raise ValueError(f"{flag} must be {', '.join(TEMPLATES)} or a file, and there is no file {path}")
    if path.is_dir():
        raise ValueError(f"{flag} must be {', '.join(TEMPLATES)} or a file, and {path} is a folder")
    text = read_text(path, most=_MOST_BYTES, piped=True)
    if not text.strip():
        raise ValueError(f"{flag} must be a file with a chat template in it, and {path} is empty")
    return text


def template_stops(template: str) -> tuple[str, ...]:
    """Strings at which an answer ends, beside the end token: a model that was not trained on the plain
    template goes on with what the user might say next."""
    return _STOPS.get(template, ())
