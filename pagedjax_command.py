"""The program `pagedjax`. Outside the package, since importing that imports jax.

Ctrl-C ends the process at once, whatever it does: importing, compiling, generating. It
raises no exception, since jax's callbacks swallow those, and XLA's threads crash under
an interpreter that is being taken down. Nothing is lost: what the command line prints
has been written when the next step begins.

Until this module runs Ctrl-C shows a traceback, so it imports next to nothing.
"""

import os
import signal
import sys
import threading

__all__ = ["run"]


def run() -> None:
    """Runs the command line as a program: the entry point."""
    _end_on_ctrl_c()
    from pagedjax.cli import main

    sys.exit(main())


def _end_on_ctrl_c() -> None:
    """Leaves SIGINT to a thread that waits for it.

    A handler would run when the main thread is back in Python, seconds later if XLA
    compiles. Threads made from here on inherit the mask, so no other takes the signal.
    """
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # in the background
    if ignored or not hasattr(signal, "pthread_sigmask"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_wait_for_ctrl_c, daemon=True).start()


def _wait_for_ctrl_c() -> None:
    signal.sigwait({signal.SIGINT})
    try:
        new_line = b"\n" if os.isatty(2) else b""  # after "^C" and a progress bar
        os.write(2, new_line + b"pagedjax: interrupted\n")
    finally:  # also where nobody reads stderr
        os._exit(130)
