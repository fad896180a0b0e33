"""What the commands do, as functions: each file is one command, parsed by `bd3lm.cli`."""
