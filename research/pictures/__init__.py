"""The pictures of docs/idea.md and docs/speculation.md."""
