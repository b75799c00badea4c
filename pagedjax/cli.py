"""The command line: `pagedjax generate` and `pagedjax doctor`.

Exit codes:

    0    done; samples that ran out of pages too, they have their `finish_reason`
    2    something the user can change: one line on stderr says what
    130  Ctrl-C
    141  nobody reads the output any more

Parsing needs no model, and no device: the subcommands look for those. The program that
an installation makes starts in `pagedjax_command`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import NoReturn

from pagedjax import __version__
from pagedjax._cli_output import ReaderGoneError, replace_closed_streams, say, write
from pagedjax._cli_prompts import CommandError, GenerateOptions

__all__ = ["main"]

_DTYPES = ("float32", "bfloat16", "float16")
_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234663852886e38
_LONGEST_VALUE = 40  # characters of a wrong value that are shown

_PROMPTS_FILE = """\
A prompts file holds one JSON value per line: a string, {"prompt": "..."},
{"messages": [{"role": "user", "content": "..."}]} or {"prompt_token_ids": [1, 2]}.
Other keys are ignored.

Samples that run out of pages keep their tokens and have the finish_reason
out_of_pages; the exit code is 0. Exit code 2: one line says what to change.

PAGEDJAX_CACHE_DIR: where compiled programs are kept (default ~/.cache/pagedjax;
empty: nowhere).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: the arguments after the program's name; default those of the process.

    Returns:
      The exit code, see the top of this file.

    Raises:
      SystemExit: after `--help`, `--version`, or arguments that do not parse.

    Example:
      >>> from pagedjax.cli import main
      >>> main(["generate", "--model", "smollm2-135m", "--prompt", ""])
      2
    """
    replace_closed_streams()
    try:
        options = vars(_parser().parse_args(argv))
        if options.pop("command") == "doctor":
            from pagedjax._cli_doctor import run_doctor

            run_doctor()
        else:
            from pagedjax._cli_generate import run_generate

            run_generate(GenerateOptions(**options))
    except CommandError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except ReaderGoneError:
        return 141
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        say(f"error: {where}{error.strerror or error}")
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage; and that of a full disk."""

    def error(self, message: str) -> NoReturn:
        say(f"error: {message} (see {self.prog} --help)")
        raise SystemExit(2)

    def print_help(self, file: object = None) -> None:
        write(self.format_help())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pagedjax",
        description="Language models on a paged KV cache in JAX.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor",
        help="show versions, devices, attention implementations and models",
        description="Show what pagedjax finds on this machine.",
        allow_abbrev=False,
    )
    generate = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continue prompts with a language model.",
        epilog=_PROMPTS_FILE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_generate_arguments(generate)
    return parser


class _Version(argparse.Action):
    """Prints the version."""

    def __init__(self, option_strings: Sequence[str], dest: str):
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, help="show the version"
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        write(f"pagedjax {__version__}\n")
        parser.exit()


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(GenerateOptions)
        if field.default is not dataclasses.MISSING
    }

    def add(
        flag: str, metavar: str, text: str, kind: Callable[[str], object] = str
    ) -> None:
        default = defaults.get(flag[2:].replace("-", "_"))
        shown = "" if default is None else f" (default {default})"
        parser.add_argument(
            flag, metavar=metavar, type=kind, default=default, help=text + shown
        )

    parser.add_argument(
        "--model",
        required=True,
        metavar="NAME|PATH|HUB_ID",
        help="smollm2-135m, a GGUF file, a Hugging Face folder, or OWNER/NAME",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        metavar="TEXT",
        help="a prompt; may be given several times",
    )
    source.add_argument(
        "--prompts-file", metavar="F.jsonl", help="a file of prompts; - is stdin"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a message to the model, in its chat template",
    )
    add("--system", "TEXT", "system message, for --chat and for messages")
    add(
        "--max-tokens",
        "N",
        "most tokens to produce per sample; fewer where the model's context ends",
        _whole(1),
    )
    add("--n", "N", "samples of each prompt; of its beams, the best N", _whole(1))
    add("--num-beams", "K", "search with K beams instead of sampling", _whole(1))
    parser.add_argument(
        "--draft",
        choices=("ngram",),
        help="guess tokens by looking up what the latest ones led to before, and check"
        " several in one step; changes the speed and no token",
    )
    add("--temperature", "T", "0 takes the likeliest token", _number)
    add("--top-k", "K", "draw from the K likeliest tokens; 0 = all", _whole(0))
    add("--top-p", "P", "draw from the likeliest tokens that hold P", _share)
    add("--seed", "S", "seed of the samples (default: a new one)", _whole(0))
    add("--page-size", "P", "tokens in a page", _whole(1))
    add("--num-pages", "N", "pages in the pool (default: enough)", _whole(1))
    add("--batch-size", "B", "most prompts in one batch", _whole(1))
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of weights and cache (default: float32 on CPU, bfloat16 elsewhere)",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on past the model's end tokens",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per sample"
    )


def _whole(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be a whole number, got {_shown(text)!r}"
            ) from None
        if not low <= value <= _INT32_MAX:
            raise argparse.ArgumentTypeError(
                f"must be between {low} and {_INT32_MAX}, got {_shown(text)}"
            )
        return value

    return parse


def _number(text: str) -> float:
    """Reads a number from 0 that float32 has: the programs compute in that."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number, got {_shown(text)!r}"
        ) from None
    # Written so that NaN fails.
    if not 0 <= value <= _FLOAT32_MAX:
        raise argparse.ArgumentTypeError(
            f"must be between 0 and {_FLOAT32_MAX:.1e}, got {_shown(text)}"
        )
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {_shown(text)}")
    return value


def _shown(text: str) -> str:
    """Cuts a wrong value short."""
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
