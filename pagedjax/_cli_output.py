"""What the command line writes: results to stdout, lines about them to stderr."""

import contextlib
import os
import sys

from pagedjax._cli_prompts import CommandError

_LONGEST = 1000  # characters of a line on stderr


class ReaderGoneError(Exception):
    """Nobody reads stdout any more.

    Example:
      >>> from pagedjax._cli_output import ReaderGoneError
      >>> issubclass(ReaderGoneError, OSError)  # no error of a file
      False
    """


def write(text: str) -> None:
    """Writes to stdout at once; characters that it cannot encode become "?".

    Args:
      text: whole lines, or a part of one.

    Raises:
      CommandError: stdout cannot be written, as on a full disk.
      ReaderGoneError: it is a pipe that nobody reads.

    Example:
      >>> from pagedjax._cli_output import write
      >>> write("done\\n")
      done
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError as error:
        _discard_output()
        raise ReaderGoneError from error
    except OSError as error:
        _discard_output()
        reason = error.strerror or error
        raise CommandError(f"cannot write the output: {reason}") from error


def say(line: str) -> None:
    """Prints one line to stderr; where that cannot be written, nowhere.

    Args:
      line: what to say; what is not printable becomes "?", and the middle of a very
        long one is left out.
    """
    line = "".join(c if c.isprintable() else "?" for c in line)
    if len(line) > _LONGEST:
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    tell(f"pagedjax: {line}\n")


def tell(text: str) -> None:
    """Prints to stderr as it is; where that cannot be written, nowhere."""
    with contextlib.suppress(OSError):
        print(text, end="", file=sys.stderr, flush=True)


def replace_closed_streams() -> None:
    """Reads nothing from, and writes nowhere to, streams the caller has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _discard_output() -> None:
    """Sends nowhere what is still buffered: it would fail again when Python ends."""
    with contextlib.suppress(OSError):  # a stream without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
