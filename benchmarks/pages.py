"""Documents whose tables a script writes.

A comment with the command stands above what the command prints, and `<!-- end of the counts -->` below it.
"""

import re
import shlex
from collections.abc import Callable

from options import parse_arguments


def rewritten(text: str, script: str, function: Callable[..., object], printed: Callable[..., str]) -> str:
    """A document with what the commands of `script` print now.

    Args:
        text: the document.
        script: the file's name in benchmarks.
        function: what the script's command line calls; it has an option `page`.
        printed: returns what is printed with all other options.
    """
    command = re.compile(
        rf"(<!-- python benchmarks/{re.escape(script)} (.+?) -->\n)(.*?)(<!-- end of the counts -->)", re.DOTALL
    )

    def output(match: re.Match[str]) -> str:
        _, options = parse_arguments(function, shlex.split(match[2]))
        del options["page"]
        return f"{match[1]}{printed(**options)}\n{match[4]}"

    return command.sub(output, text)
