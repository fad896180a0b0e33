"""Chat templates by name or from a file, for models that come without one."""

from pathlib import Path

from bd3lm.io.files import local_path, read_text

_MOST_BYTES = 4_000_000  # the limit for templates in characters, at up to four bytes each

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content | trim }}\n\n"
    "{% elif message.role == 'user' %}User: {{ message.content | trim }}\n\n"
    "{% else %}Assistant: {{ message.content | trim }}{{ eos_token }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Words that any tokenizer has: "User: ...", "Assistant: ...", a blank line between turns."""

TEMPLATES = {"plain": PLAIN}
"""The templates that come with this package, by name."""

_STOPS = {PLAIN: ("\n\nUser:",)}


def named_template(name_or_file: str | Path, flag: str = "--chat-template") -> str:
    """The template of that name, or the text of the file."""
    if name_or_file in TEMPLATES:
        return TEMPLATES[str(name_or_file)]
    path = local_path(name_or_file)
    if not path.exists():
        raise ValueError(f"{flag} must be {', '.join(TEMPLATES)} or a file, but there is no file {path}")
    if path.is_dir():
        raise ValueError(f"{flag} must be {', '.join(TEMPLATES)} or a file, but {path} is a folder")
    text = read_text(path, most=_MOST_BYTES, piped=True)
    if not text.strip():
        raise ValueError(f"{flag} must be a file with a chat template, but {path} is empty")
    return text


def template_stops(template: str) -> tuple[str, ...]:
    """Strings that end an answer, besides the end token. A model that was not trained on the plain template
    would continue with the user's next message."""
    return _STOPS.get(template, ())
