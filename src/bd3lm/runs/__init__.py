"""Training runs: recipes as plain values, their checks, and training, stage by stage."""
