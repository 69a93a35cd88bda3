"""Common frame of all commands: argument parser, verbs, exit codes and signals.

The module uses only the standard library.

A command creates a `Parser` and calls ``run(program, main)``. A command with verbs has a table
``{"plan": Verb("tools.scaling.planned_runs", "purpose")}``. Only the module of the called verb is
imported. That module defines ``add_arguments(parser)`` and ``main(arguments)``. It imports torch
only inside ``main``, so that ``--help`` is fast. A command whose verbs share one module passes its
parser to ``call_verb``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import itertools
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn

from fem_common.errors import CommandError, ConfigError, Fault, end
from fem_common.exits import Exit
from fem_common.files import expand_home
from fem_common.signals import taken
from fem_common.text import nearest

CODES = """exit codes:
    0  done
    1  a fault, or a failed check: the same command may succeed later
    2  wrong input
    3  loss or gradient stayed non-finite
   75  another process uses the folder: the same command may succeed later
  130  Ctrl-C; 143  SIGTERM"""
KEPT = "the same command continues where it stopped"
SENT_AGAIN_SECONDS = 0.05  # until a swallowed signal is sent again
_ENDS: dict[int, str] = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal hung up",
}
# Texts of out-of-memory errors of other types: of zstd, lz4, C++, zlib, the dynamic linker and
# Python's threads.
_MEMORY = (
    "not enough memory",
    "allocation_failed",
    "bad_alloc",
    "Error -4 ",
    "failed to map segment",
    "can't start new thread",
)


class Ended(KeyboardInterrupt):
    """Exception raised when SIGTERM or SIGHUP arrives; ``number`` is the signal number.

    A subclass of KeyboardInterrupt, so a command handles the signal like Ctrl-C.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Parser(argparse.ArgumentParser):
    """argparse parser with one-line errors that suggest the nearest valid word.

    Its --help output also lists the exit codes.
    """

    def __init__(self, **given: Any) -> None:
        given.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        given.setdefault("allow_abbrev", False)
        given["epilog"] = "\n\n".join(filter(None, (given.get("epilog"), CODES)))
        super().__init__(**given)
        self.register("type", Path, _path)  # for every argument with type=Path

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but first refuse ``--section.key`` where settings are words."""
        words = sys.argv[1:] if args is None else list(args)
        if any("key=value" in str(action.metavar) for action in self._actions):
            for word, after in itertools.pairwise((*words, "-")):
                dashed = re.fullmatch(r"--(\w+(?:\.\w+)+)(=.*)?", word, re.DOTALL)
                if word == "--":
                    break
                if dashed:
                    value = dashed[2] or f"={'VALUE' if after.startswith('-') else after}"
                    setting = shlex.quote(f"{dashed[1]}{value}")
                    self.error(f"{word}: a setting has no dashes; write {setting}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print ``message`` with a suggestion on stderr and exit with code 2."""
        program = self.prog.removeprefix("python -m ").split()[0]
        print(
            f"{program}: error: {message}{self._meant(message)} (see: {self.prog} --help)",
            file=sys.stderr,
        )
        sys.exit(Exit.WRONG_INPUT)

    def _meant(self, message: str) -> str:
        choice = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
        if choice:
            near = nearest(choice[1], re.findall(r"[\w.-]+", choice[2]))
        else:
            odd = re.search(r"unrecognized arguments: (-[\w-]+)", message)
            near = nearest(odd[1], self._options()) if odd else None
        return f"; did you mean {near}?" if near else ""

    def _options(self) -> list[str]:
        """Return the option strings of this parser and of the parsers of its verbs."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for verb in action.choices.values():
                    found += verb._option_string_actions
        return found


def _path(text: str) -> Path:
    """Convert a command-line argument to a path and expand a leading ``~``.

    In ``--out=~/x`` the shell does not expand the ``~``.
    """
    try:
        return Path(expand_home(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Verb(NamedTuple):
    """Table entry of a verb: the function that runs it, and one line of help.

    place: ``package.module:function``, or ``package.module`` for its function ``main``.
    purpose: the line of help.
    """

    place: str
    purpose: str


def parse(
    program: str,
    description: str,
    verbs: Mapping[str, Verb],
    argv: Sequence[str],
    *,
    epilog: str = "",
) -> argparse.Namespace:
    """Parse the command line of a program with verbs, and return the arguments.

    The attribute ``main`` of the returned namespace is the function that runs the chosen verb. If a
    verb declares the positional ``words`` (``nargs="*"``), words between and after its options
    belong to ``words`` too. If a verb sets a default for ``rest``, ``rest`` receives the words
    after ``--``.
    """
    parser = Parser(prog=f"python -m {program}", description=description, epilog=epilog)
    group = parser.add_subparsers(required=True, metavar="VERB", parser_class=Parser)
    own, rest = list(argv), None
    for name, verb in verbs.items():
        if name not in own[:1]:
            group.add_parser(name, help=verb.purpose, add_help=False)
            continue
        place, _, function = verb.place.partition(":")
        module = importlib.import_module(place)
        # The part of the module's docstring after the verb's name.
        purpose = (module.__doc__ or "").partition("``: ")[2].replace("``", "") or verb.purpose
        called = group.add_parser(
            name, help=verb.purpose, description=purpose[:1].upper() + purpose[1:]
        )
        module.add_arguments(called)
        called.set_defaults(main=getattr(module, function or "main"))
        if called.get_default("rest") is not None and "--" in own:
            own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments, more = parser.parse_known_args(own)
    words: list[str] | None = getattr(arguments, "words", None)
    odd = [word for word in more if words is None or word.startswith("-")]
    if odd:
        parser.error(f"unrecognized arguments: {' '.join(odd)}")
    if words is not None:
        arguments.words = [*words, *more]  # words after options
    if rest is not None:
        arguments.rest = rest
    return arguments


def run(program: str, main: Callable[[], int | None], *, kept: str = KEPT) -> int:
    """Run ``main()`` and return the exit code. A failure prints one line on stderr.

    ``kept`` is the text that is shown after an interruption: the work that is not lost, and how to
    continue. SIGTERM and SIGHUP act like Ctrl-C, so that cleanup code runs. Unexpected exceptions
    (bugs) keep their traceback and give code 1.
    """
    try:
        with signals_as_interrupt():
            code = int(main() or 0)
            sys.stdout.flush()
            return code
    except (CommandError, BrokenPipeError) as error:
        return end(program, error)
    except Exception as error:
        if is_want_of_memory(error):
            return end(
                program,
                Fault(
                    "not enough memory: run the same command again with more memory; finished "
                    "work is kept"
                ),
            )
        if isinstance(error, OSError):
            return end(program, error)
        raise
    except KeyboardInterrupt as interrupt:
        number = interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT
        # asyncio would report the unfinished requests of a store's client.
        logging.getLogger("asyncio").disabled = True
        _print_if_possible(f"{program}: {_ENDS[number]}; {kept}")
        return 128 + number


def verb_main(
    program: str,
    description: str,
    verbs: Mapping[str, Verb],
    argv: Sequence[str] | None = None,
    *,
    kept: str = KEPT,
) -> int:
    """Parse the command line of a program with verbs, run the verb, and return the exit code.

    If ``argv`` is None, ``sys.argv[1:]`` is parsed. See `parse` and `run`.
    """

    def main() -> int:
        arguments = parse(program, description, verbs, sys.argv[1:] if argv is None else argv)
        return int(arguments.main(arguments) or 0)

    return run(program, main, kept=kept)


def call_verb(
    program: str, parser: argparse.ArgumentParser, argv: Sequence[str] | None, *, kept: str = KEPT
) -> int:
    """Parse the command line of a program whose parser knows all verbs, run the verb, and return
    the exit code.

    The parser sets ``function``, which is called with all other arguments as keywords. The exit
    code is 1 if it returns False. See `run`.
    """
    given = vars(parser.parse_args(argv))
    function = given.pop("function")
    return run(program, lambda: function(**given) is False, kept=kept)


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Raise `Ended` on SIGTERM and SIGHUP inside the block, in the main thread.

    In a process that is forked inside the block, these signals terminate the process at once. An
    exception could be lost in the child, because Python swallows exceptions that are raised before
    its fork hooks have finished.

    Python also swallows an exception that is raised in a finalizer or in the callback of a weak
    reference, and calls ``sys.unraisablehook``. Inside the block, the signal is then sent again, a
    moment later.
    """
    own = os.getpid()
    hook, timers = sys.unraisablehook, list[threading.Timer]()

    def swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            hook(unraisable)
            return
        number = getattr(unraisable.exc_value, "number", signal.SIGINT)
        timers.append(threading.Timer(SENT_AGAIN_SECONDS, os.kill, (os.getpid(), number)))
        timers[-1].start()

    def ended(number: int, _: FrameType | None) -> None:
        if os.getpid() == own:
            raise Ended(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with taken((signal.SIGTERM, signal.SIGHUP), ended):
        sys.unraisablehook = swallowed
        try:
            yield
        finally:
            sys.unraisablehook = hook
            for timer in timers:
                timer.cancel()


def is_want_of_memory(error: BaseException) -> bool:
    """Return True if the error, of any type, means that memory is exhausted."""
    named = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    return named or any(words in str(error) for words in _MEMORY)


def _report_absent_package(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exception hook: report a package that is not installed in one line, with exit code 2.

    Every command imports this module before other packages. All other errors, and absent modules of
    this repository, keep their traceback.
    """
    name = (getattr(error, "name", None) or "").partition(".")[0]
    root = Path(__file__).resolve().parents[1]
    if kind is not ModuleNotFoundError or not name or (root / name).exists():
        sys.__excepthook__(kind, error, trace)
        return
    main = getattr(sys.modules["__main__"].__spec__, "name", "") or "COMMAND"
    program = main.removesuffix(".__main__")
    _print_if_possible(
        f"{program}: error: {sys.executable} has no package {name}; run `make setup` in {root}, "
        f"then {root / '.venv/bin/python'} -m {program} ..."
    )
    sys.exit(Exit.WRONG_INPUT)


sys.excepthook = _report_absent_package


def _print_if_possible(line: str) -> None:
    """Print a line on stderr. If the terminal is closed, redirect stdout and stderr to /dev/null.

    Without the redirection Python would exit with code 120.
    """
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (sys.stdout, sys.stderr):
                os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
