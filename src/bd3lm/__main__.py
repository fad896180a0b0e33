"""`python -m bd3lm`, which is also what torchrun starts: `torchrun -m bd3lm train ...`."""

import sys

from bd3lm.cli import main

if __name__ == "__main__":
    sys.exit(main())
