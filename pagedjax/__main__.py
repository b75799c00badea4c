"""`python -m pagedjax`: the command line without the installed script."""

from pagedjax_command import run

if __name__ == "__main__":
    run()
