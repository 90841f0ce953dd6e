"""The commands of the package: efficient-densenet or python -m efficient_densenet."""

import importlib
import signal
import sys

COMMANDS = {
    "memory": ("memory.__main__", "the memory of a training step, and the largest batch on a card, without running it"),
    "doctor": ("doctor", "what runs on this machine, and why"),
    "predict": ("classify", "the likeliest classes of images"),
}
"""The module of each command, and what it shows."""


def main() -> None:
    command, *words = sys.argv[1:] or ["--help"]
    if command in COMMANDS:
        importlib.import_module(f".{COMMANDS[command][0]}", __package__).main(words)
    else:
        print("usage: efficient-densenet COMMAND ..., and --help after a command for its options\n")
        print("\n".join(f"  {name:9}{shows}" for name, (_, shows) in COMMANDS.items()))
        if command not in ("-h", "--help"):
            sys.exit(f"\nerror: unknown command {command!r}: give one of {', '.join(COMMANDS)}")


def script() -> None:
    """Run a command that ends without a traceback where nobody reads any more, as after `| head`, and at Ctrl-C."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    script()
