"""Code that is exported with a model, for transformers. The package itself never imports it."""
