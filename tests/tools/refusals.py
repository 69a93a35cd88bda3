"""Check of invalid input for any tool: exit code 2, one line, nothing on stdout. The text of the
line is in tests/wording.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fem_common.errors import ConfigError
from tests.wording import Wording

Refused = Callable[..., None]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], wording: Wording) -> Refused:
    """Check ``refused(main, program, *arguments, WORD=value)``; the words replace values that
    differ from run to run.
    """

    def check(
        main: Callable[[list[str]], int], program: str, *arguments: Any, **names: Any
    ) -> None:
        capsys.readouterr()
        try:
            code: object = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        # A run that its own checkpoints refuse has already started.
        out = re.sub(r"^.*: starting in run directory .*\n", "", out)
        assert (code, out) == (2, ""), err
        assert err.startswith(f"{program}: error: "), err
        assert err.count("\n") == 1, err
        wording(err, **names)

    return check


@pytest.fixture
def raised(wording: Wording) -> Refused:
    """Check ``raised(function, *arguments)`` for a function that raises ConfigError; ``error``:
    another type; ``words``: as above.
    """

    def check(
        function: Callable[..., Any],
        *given: Any,
        error: type[Exception] = ConfigError,
        words: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        with pytest.raises(error) as caught:
            function(*given, **more)
        assert "\n" not in str(caught.value)
        wording(caught.value, **(words or {}))

    return check
