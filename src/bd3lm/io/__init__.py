"""The outside world: files and folders, ids of the Hugging Face hub, optional packages."""
