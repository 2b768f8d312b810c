"""`gym chat`: talk to a model in the terminal, or ask it one thing with ``--prompt``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gym_fed.console import err, print_json


def chat(
    model: Annotated[str, typer.Argument(help="gym-nano, a model folder, or the output_dir of a run.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Ask this, print the answer, leave.")] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="A system message before everything.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest answer.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="With --prompt: print the answer as JSON.")] = False,
) -> None:
    """Chat with a model: history, streaming, /reset to forget, /exit to leave."""
    from gym_fed.evaluation.chat import ChatSession
    from gym_fed.models import load_model

    loaded = load_model(model, device=device)
    session = ChatSession(
        loaded.model, loaded.tokenizer, system=system, max_new_tokens=max_new_tokens, temperature=temperature
    )
    if prompt is not None:
        if as_json:
            print_json({"model": model, "prompt": prompt, "answer": session.say(prompt)})
        else:
            session.say(prompt, on_text=_write)
            _write("\n")
        return
    err.print(f"{model}: /reset forgets the conversation, /exit leaves", markup=False, style="dim")
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            session.reset()
            err.print("forgotten", markup=False, style="dim")
        elif line.startswith("/"):
            err.print(f"{line.split()[0]} is no command; there are /reset and /exit", markup=False)
        elif line:
            session.say(line, on_text=_write)
            _write("\n")


def _read_line() -> str | None:
    """One line of the user's, or None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
