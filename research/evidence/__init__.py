"""The evidence: the paper's findings on real text at a small size, and what this project adds to them.

    python -m research.evidence.prepare SHARED evidence.tar.xz       # the text, as one small file
    python -m research.evidence --list                               # what there is to do, and its cost
    python -m research.evidence --data evidence.tar.xz --out OUT --seconds 560
    research/evidence/together.sh ...                                # or in several processes on one GPU
    python -m research.evidence.samples texts                        # files for `bd3lm judge`
    python -m research.evidence.real evidence.tar.xz texts           # and real text beside them
    python -m research.evidence.document                             # the pages of results

Run from the repository root with `PYTHONPATH=src:.`.
"""
