"""Writes docs/reference/command-line.md from the parser of `edl-torch`: `python docs/command_line.py`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from edl_torch.cli.main import build_parser

PAGE = Path(__file__).parent / "reference" / "command-line.md"
HEAD = """\
# Command line

This page is made from the options themselves (`python docs/command_line.py`).
`edl-torch COMMAND --help` shows the same. Every option may be written with `-` or `_` between its words:
`--lease-timeout-s` and `--lease_timeout_s`.

A command that fails says why in one line. Its exit status is 2 where options, or the data that it is to
read, cannot be used, and 1 where something else failed. Those whose 1 is a verdict, `audit` and `check`, end
with 2 either way.
"""


def render() -> str:
    """Return the page."""
    (commands,) = (
        action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    helps = {choice.dest: choice.help for choice in commands._choices_actions}
    sections = [section(name, str(helps[name]), parser) for name, parser in commands.choices.items()]
    return HEAD + "".join(sections)


def section(name: str, purpose: str, parser: argparse.ArgumentParser) -> str:
    """Return the heading of one command, its arguments and its options."""
    lines = [f"\n## edl-torch {name}\n", f"\n{purpose[:1].upper()}{purpose[1:]}.\n"]
    for group in parser._action_groups:
        rows = list(table_rows(group._group_actions))
        if rows:
            title = f"{group.title}: {group.description}" if group.description else str(group.title)
            lines += [f"\n{title[:1].upper()}{title[1:]}\n\n| | |\n| --- | --- |\n", *rows]
    if parser.epilog:
        lines.append(f"\n{parser.epilog}\n")
    return "".join(lines)


def table_rows(actions: list[argparse.Action]) -> Iterator[str]:
    """Yield a row for each argument that `--help` shows."""
    for action in actions:
        if action.help is argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        name = next((name for name in reversed(action.option_strings)), str(action.metavar))
        value = "" if not action.option_strings or action.nargs == 0 else f" {value_name(action)}"
        yield f"| `{name}{value}` | {(action.help or '').replace('|', chr(92) + '|')} |\n"


def value_name(action: argparse.Action) -> str:
    """Return what stands for the option's value."""
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
