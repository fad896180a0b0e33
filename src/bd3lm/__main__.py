"""`bd3lm` and `python -m bd3lm`; torchrun uses the latter: `torchrun -m bd3lm train ...`.

It imports little, so that a signal handler is in place almost from the start.
"""

import signal
import sys
from types import TracebackType

from bd3lm.io.signals import line_and_status, signals_raise
from bd3lm.io.terminal import printable, say


def main() -> int:
    """Run the command. Ctrl-C and SIGTERM print one line at any time, even during imports."""
    sys.excepthook = _show
    try:
        with signals_raise():
            from bd3lm.cli import main as command

            return command()
    except KeyboardInterrupt as stop:
        line, status = line_and_status(stop)
        say(f"bd3lm: {line}", to=sys.stderr)
        return status
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python itself would exit with a traceback


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback may quote text from a stranger, just as a line may."""
    import traceback

    print(printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
