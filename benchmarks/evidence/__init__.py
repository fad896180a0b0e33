"""The evidence: the paper's findings on real text at a small size, and what this project adds to them.

    python -m benchmarks.evidence.prepare SHARED evidence.tar.xz       # the text, as one small file
    python -m benchmarks.evidence --list                               # what there is to do, and its cost
    python -m benchmarks.evidence --data evidence.tar.xz --out OUT --seconds 560
    python -m benchmarks.evidence.samples OUT/samples*.jsonl.gz texts  # files for `bd3lm judge`
    python -m benchmarks.evidence.tables                               # Markdown, beside the paper's figures

Run from the repository root with `PYTHONPATH=src:.`.
"""
