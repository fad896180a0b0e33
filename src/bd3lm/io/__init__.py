"""The outside world: files and folders, ids of the Hugging Face hub, packages that may not be installed."""
