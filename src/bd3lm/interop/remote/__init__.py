"""Code that leaves the package beside an exported model, for transformers. Nothing here is imported by us."""
