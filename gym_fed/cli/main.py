"""`gym`: each command is a module of this folder, imported only when it is called."""

from __future__ import annotations

from typing import Any, ClassVar

import click

from gym_fed.core.console import VersionOption, run_app
from gym_fed.core.errors import GymError
from gym_fed.core.help import App, DefaultCommandGroup, LazyCommandGroup


class _TakesOtherWords(LazyCommandGroup):
    """The commands of `gym`; unknown commands and flags are looked up in the aliases for other tools."""

    activities: ClassVar = {
        "Train": {
            "train": "fine-tune a model on your rows; run again to resume",
            "tune": "search for the settings that train best",
            "runs": "list, compare and draw training runs",
            "data": "show, convert, mix and share rows",
            "configs": "ready recipes; check or import a config file",
        },
        "Try": {
            "chat": "chat with a model",
            "eval": "measure a model on your rows or on suites of tasks",
            "predict": "answer rows and compare with their answers",
            "grade": "rewards of graders for a model's answers",
            "leaderboard": "signed results, and how to repeat them",
        },
        "Use": {
            "export": "write a model for other programs (GGUF, vLLM, ...)",
            "api": "serve a model and its variants over the OpenAI API",
            "batch": "answer a file of requests",
            "variant": "personal variants of one base model",
            "models": "fetch, publish and list models",
        },
        "Merge": {"soup": "merge fine-tunes by a rule", "delta": "create and apply .gymdelta files"},
        "More": {
            "webui": "all of this in a browser",
            "doctor": "check this machine and installation",
            "docs": "the guides, offline",
        },
    }

    sources: ClassVar = {
        "train": "gym_fed.cli.train.train:train",
        "predict": "gym_fed.cli.train.predict:predict",
        "tune": "gym_fed.cli.train.tune:tune",
        "chat": "gym_fed.cli.chat.command:chat",
        "batch": "gym_fed.cli.batch:batch",
        "export": "gym_fed.cli.export:export",
        "grade": "gym_fed.cli.grade:grade",
        "doctor": "gym_fed.cli.doctor:doctor",
        "docs": "gym_fed.cli.docs:docs",
        "api": "gym_fed.cli.api.app:app",
        "configs": "gym_fed.cli.configs:app",
        "data": "gym_fed.cli.data.app:app",
        "delta": "gym_fed.cli.delta.app:app",
        "leaderboard": "gym_fed.cli.leaderboard:app",
        "eval": "gym_fed.cli.evaluation.app:app",
        "models": "gym_fed.cli.models.app:app",
        "runs": "gym_fed.cli.runs:app",
        "soup": "gym_fed.cli.soup.app:app",
        "variant": "gym_fed.cli.variant.app:app",
        "webui": "gym_fed.cli.webui:app",
    }

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        if not ctx.resilient_parsing and (
            command is None or _has_unknown(args[1:], options := _options_of(command, args[1:]))
        ):
            from gym_fed.interop.commands import translate_command

            ctx.meta.setdefault("gym.typed", args)
            ours = translate_command(args, {} if command is None else options, command is not None)
            if command is None and ours != args:  # its flags may also have aliases
                return self.resolve_command(ctx, ours)
            args = ours
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GymError as error:
            if (typed := ctx.meta.get("gym.typed")) is None:
                raise
            from gym_fed.interop.flags import as_typed

            raise GymError(error.code, as_typed(error.message, typed), error.hint) from error


def _options_of(command: Any, words: list[str]) -> dict[str, bool]:
    """Return the options of a command, or of the group's command named in ``words``, and whether each takes a value."""
    if (below := getattr(command, "commands", None)) is not None:
        if isinstance(command, DefaultCommandGroup) and command.is_default(words):
            return _options_of(below[command.default_command], [])
        place = next((place for place, word in enumerate(words) if word in below), None)
        return {} if place is None else _options_of(below[words[place]], words[place + 1 :])
    options = {name: not param.is_flag for param in command.params for name in _names(param)}
    return {"--help": False, **options}


def _names(param: Any) -> list[str]:
    return [*param.opts, *param.secondary_opts] if isinstance(param, click.Option) else []


def _has_unknown(words: list[str], options: dict[str, bool]) -> bool:
    """True if there is an option that the command does not have, or a ``key=value`` after its arguments."""
    end = words.index("--") if "--" in words else len(words)
    return any(
        word.partition("=")[0] not in options if word.startswith("--") else "=" in word
        for word in words[:end]
    )


app = App(
    cls=_TakesOtherWords,
    name="gym",
    help="Train language models on this machine, and inspect what a community trains together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(version: VersionOption = False) -> None:
    """Train language models on this machine, and inspect what a community trains together."""


def main() -> None:
    """Console entry point."""
    run_app(app)


if __name__ == "__main__":
    main()
