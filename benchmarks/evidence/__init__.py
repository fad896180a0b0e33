"""The evidence: the paper's findings on real text at a small size, and what this project adds to them.

    python -m benchmarks.evidence.prepare SHARED evidence.tar.xz       # the text, as one small file
    python -m benchmarks.evidence --list                               # what there is to do, and its cost
    python -m benchmarks.evidence --data evidence.tar.xz --out OUT --seconds 560
    benchmarks/evidence/together.sh ...                                # or in several processes on one GPU
    python -m benchmarks.evidence.samples texts                        # files for `bd3lm judge`
    python -m benchmarks.evidence.real evidence.tar.xz texts           # and real text beside them
    python -m benchmarks.evidence.document                             # docs/results.md and its plots

Run from the repository root with `PYTHONPATH=src:.`.
"""
