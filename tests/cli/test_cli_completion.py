"""Completion as a user has it: installed from a real shell, and asked for by Tab in a new one."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
LIMIT = 60.0


class Terminal:
    """A shell at a terminal of its own."""

    def __init__(self, shell: str, home: Path) -> None:
        self.said = ""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        told = {"HOME": str(home), "PATH": path, "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "200"}
        told |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(home)
            os.execvpe(shell, [shell, "-i"], told)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def shows(self, text: str) -> bool:
        """Wait until the terminal has shown a text since it was last asked."""
        end = time.monotonic() + LIMIT
        while text not in self.said and time.monotonic() < end:
            if select.select([self.fd], [], [], 0.2)[0]:
                self.said += os.read(self.fd, 65536).decode("utf-8", "replace")
        found, self.said = text in self.said, ""
        return found

    def close(self) -> None:
        os.close(self.fd)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_completes_commands_and_options(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    if not (BIN / "trilemma").is_file():
        pytest.skip("needs the command trilemma beside this Python")
    (tmp_path / ".zshrc").write_text("autoload -Uz compinit\ncompinit -u\n")
    terminal = Terminal(shell, tmp_path)
    try:
        terminal.type("trilemma --install-completion; echo do''ne\n")
        assert terminal.shows("done\r")
    finally:
        terminal.close()
    terminal = Terminal(shell, tmp_path)
    try:
        terminal.type("echo rea''dy\n")
        assert terminal.shows("ready\r")
        terminal.type("trilemma expo\t")
        if shell == "zsh":  # the first Tab of all loads what typer wrote, and rings
            assert terminal.shows("\a")
            terminal.type("\t")
        assert terminal.shows("rt")
        terminal.type("--as-rec\t")
        assert terminal.shows("eived")
    finally:
        terminal.close()


def test_the_script_is_shown(tmp_path: Path) -> None:
    asked = {
        **os.environ,
        "_TRILEMMA_COMPLETE": "complete_bash",
        "COMP_WORDS": "trilemma ru",
        "COMP_CWORD": "1",
    }
    command = [sys.executable, "-m", "trilemma"]
    done = subprocess.run(command, env=asked, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["run"]
