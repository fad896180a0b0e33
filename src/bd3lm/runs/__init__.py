"""Training runs: what they are as plain values, their checks, and training them, stage by stage."""
