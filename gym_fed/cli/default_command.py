"""Groups of commands one of which needs no name: ``gym api serving.yaml`` is ``gym api serve serving.yaml``."""

from __future__ import annotations

import click

from gym_fed.core.help import CommandGroup


class DefaultCommandGroup(CommandGroup):
    """A group whose ``default_command`` is meant where the first word is none of its commands."""

    default_command = ""
    runs_without_words = False
    """Whether no word at all is the default command, too."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if (self.runs_without_words or args) and self.is_default(args):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def is_default(self, words: list[str]) -> bool:
        """True if the words after the group's name belong to its default command."""
        return words[:1] != ["--help"] and not any(word in self.commands for word in words[:1])
