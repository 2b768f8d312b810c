"""Untrusted chat templates that never end, exhaust the memory or write endless output are stopped and named."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from gym_fed.base.models import load_tokenizer, nano_path
from gym_fed.core.bounded import chat, chat_operations, pool
from gym_fed.core.bounded.trusted import is_trusted
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.chat_templates import batches
from gym_fed.data.chat_templates.batches import render_rows
from gym_fed.data.chat_templates.conversation import ChatRenderer
from gym_fed.data.chat_templates.rendering import template_of, trl_templates
from tests.support.evaluation_pool import reach_deadlines
from tests.support.wait import SECONDS

NESTED = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
CAPTURES = "{% set a %}{{ 'x' * 9000000 }}{% endset %}" + "{% set a %}{{ a }}{{ a }}{{ a }}{% endset %}" * 4
"""Each line is three times as long as the one before: 730 MB."""
ENDLESS = "{% for a in range(99999) %}{{ 'x' * 90000 }}{% endfor %}"
FOLDED = "{{ 9 ** (9 ** 9) }}"
"""Computed by Jinja's compiler, before anything is rendered."""
ROW = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "therefore"}]


def model_with(template: str, folder: Path) -> Path:
    """gym-nano with another chat template."""
    shutil.copytree(nano_path(), folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SECONDS", 0.5)
    monkeypatch.setattr(batches, "SECONDS", 0.5)


@pytest.mark.parametrize(
    ("template", "need"),
    [
        (NESTED, "takes longer than"),
        (FOLDED, "takes longer than"),
        (CAPTURES + "{{ a }}", "needs more than 768 MiB of memory"),
        (ENDLESS, "needs more than 768 MiB of memory"),
        ("{{ 'x' * 17000000 }}", "writes more than 16,777,216 characters"),
    ],
    ids=["nested", "folded", "captures", "endless", "long"],
)
@pytest.mark.usefixtures("quick")
def test_a_template_that_needs_too_much_is_refused_by_the_models_name(
    template: str, need: str, tmp_path: Path
) -> None:
    folder = model_with(template, tmp_path / "hostile")
    tokenizer = load_tokenizer(str(folder))
    if "longer" not in need:
        pool.SECONDS = 60.0
    with pytest.raises(GymError, match=f"hostile: its chat template {need}") as caught:
        tokenizer.apply_chat_template(ROW, tokenize=False)
    assert caught.value.code is ErrorCode.MODEL_INVALID
    assert "chat_template.jinja" in caught.value.hint
    pool.SECONDS = 60.0
    assert chat.render_chat([ROW], chat_template="{# x #}{{ messages[0].content }}")[0] == ["why"]


@pytest.mark.usefixtures("quick")
def test_rows_of_a_hanging_template_are_refused_with_their_places(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(model_with(NESTED, tmp_path / "hostile")))
    rows = [({"messages": ROW}, f"row {number}") for number in (1, 2)]
    with pytest.raises(GymError, match=r"longer than 0\.5 s on the rows from row 1 to row 2"):
        render_rows(ChatRenderer(tokenizer), rows)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gptoss", "deepseekv3"])
def test_the_bounded_process_renders_what_transformers_does(name: str) -> None:
    source = (trl_templates() / f"{name}.jinja").read_text()
    tool = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}
    how: dict[str, Any] = {"tools": [tool], "add_generation_prompt": True, "bos_token": "<s>"}
    theirs = chat_operations.transformers_render()
    wanted = theirs(conversations=[ROW, ROW[:1]], chat_template="{# x #}" + source, **how)
    assert not is_trusted("{# x #}" + source)
    assert chat.render_chat([ROW, ROW[:1]], chat_template="{# x #}" + source, **how) == tuple(wanted)


def test_marks_and_refusals_are_as_in_transformers() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    )
    found = chat.render_chat([ROW], chat_template=source, return_assistant_tokens_mask=True)
    assert found == (["why|therefore|"], [[(0, 3), (4, 13)]])
    from jinja2 import TemplateError, TemplateSyntaxError

    with pytest.raises(TemplateError, match=r"^no system$"):
        chat.render_chat([[{"role": "system", "content": "x"}]], chat_template=source)
    with pytest.raises(TypeError):
        chat.render_chat([ROW], chat_template="{{ 'a' + 1 }}")
    with pytest.raises(TemplateSyntaxError) as caught:
        chat.render_chat([ROW], chat_template="a\n{{")
    assert caught.value.lineno == 2


def test_rows_are_rendered_alike_by_the_bounded_process_and_here() -> None:
    tokenizer = load_tokenizer("gym-nano")
    untrusted = copy.copy(tokenizer)
    untrusted.chat_template = "{# x #}" + tokenizer.chat_template
    rows = [({"messages": ROW * (1 + number % 3)}, f"row {number}") for number in range(70)]
    assert render_rows(ChatRenderer(untrusted), rows) == render_rows(ChatRenderer(tokenizer), rows)
    broken = [*rows, ({"messages": [{**ROW[0], "weight": 3}]}, "row 70")]
    with pytest.raises(GymError, match="row 70: a message has weight 3") as caught:
        render_rows(ChatRenderer(untrusted), broken)
    assert caught.value.code is ErrorCode.DATA_INVALID


def test_every_tokenizer_of_transformers_renders_in_the_bounded_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_tokenizer("gym-nano")
    tokenizer = AutoTokenizer.from_pretrained(nano_path())
    tokenizer.chat_template = "{# y #}{{ messages[0].content }}"
    asked = []
    evaluate = chat.evaluate
    monkeypatch.setattr(chat, "evaluate", lambda *a, **k: asked.append(a) or evaluate(*a, **k))
    assert tokenizer.apply_chat_template(ROW, tokenize=False) == "why"
    assert template_of(tokenizer).text(ROW) == "why"
    assert len(asked) == 2
    assert chat_template_utils.render_jinja_template is chat.render_chat


def test_a_hung_template_keeps_no_other_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SECONDS", SECONDS)
    chat.render_chat([ROW], chat_template="{# z #}")
    errors = []

    def hang() -> None:
        try:
            chat.render_chat([ROW], chat_template=NESTED)
        except GymError as error:
            errors.append(error)

    hung = [threading.Thread(target=hang) for _ in range(pool.MAX_PROCESSES - 1)]
    for one in hung:
        one.start()
    answered = [chat.render_chat([ROW], chat_template="{# z #}{{ messages | length }}") for _ in range(3)]
    still_hung = [one.is_alive() for one in hung]
    reach_deadlines()
    for one in hung:
        one.join()
    assert (len(answered), still_hung) == (3, [True] * len(hung))
    assert len(errors) == len(hung)


def test_a_forked_process_gets_its_own_answers() -> None:
    source = "{# w #}{{ messages[0].content }}"
    chat.render_chat([ROW], chat_template=source)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if _answers_of("c", source) else 1)
        finally:
            os._exit(2)
    assert _answers_of("p", source)
    assert os.waitpid(child, 0)[1] == 0


def _answers_of(name: str, source: str) -> bool:
    """True if each of fifty conversations is answered with its own text."""
    asked = [f"{name}{number}" for number in range(50)]
    rows = [[{"role": "user", "content": text}] for text in asked]
    return [chat.render_chat([row], chat_template=source) for row in rows] == [([text], []) for text in asked]


def test_ctrl_c_ends_a_command_whose_template_hangs(tmp_path: Path) -> None:
    folder = model_with(NESTED, tmp_path / "hostile")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": ROW}) + "\n")
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {folder}\ndata: {rows}\nalgorithm: sft\nmax_steps: 1\noutput_dir: {tmp_path / 'out'}\n"
    )
    words = [sys.executable, "-P", "-m", "gym_fed.cli.main", "configs", "validate", str(config)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not _is_computing(children):
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert time.monotonic() - begun < pool.SECONDS
    assert not (tmp_path / "out").exists()


def _is_computing(children: Path) -> bool:
    """True once the child has computed for as long as it takes to start, and a second."""
    for child in children.read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        if (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") > 1.5:
            return True
    return False


def renderer_of(template: str) -> ChatRenderer:
    tokenizer = load_tokenizer("gym-nano")
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


PLAIN = "{% for m in messages %}{{ m.role + '> ' + m.content }}\n{% endfor %}"


def test_a_template_that_fails_by_itself_is_refused_with_the_row() -> None:
    template = PLAIN + "{% if messages[0].content == 'bad' %}{{ 1 / 0 }}{% endif %}"
    rows = [({"messages": ROW}, "row 1"), ({"messages": [{"role": "user", "content": "bad"}]}, "row 2")]
    with pytest.raises(GymError, match=r"division by zero.* on row 2") as refusal:
        render_rows(renderer_of(template), rows)
    assert refusal.value.code is ErrorCode.MODEL_INVALID


def test_many_long_rows_are_rendered_in_requests_that_fit_into_the_memory() -> None:
    long = [{"role": "user", "content": "\U0001f600" + "a" * 1_000_000}, ROW[1]]
    rendered = render_rows(
        renderer_of(PLAIN), [({"messages": long}, f"row {number}") for number in range(12)]
    )
    assert len(rendered) == 12


def test_a_waiting_process_that_the_system_ended_is_replaced() -> None:
    renderer, rows = renderer_of(PLAIN), [({"messages": ROW}, "row 1")]
    (first,) = render_rows(renderer, rows)
    for process in pool._pool._idle:
        process.kill()
        process._child.wait()
    (again,) = render_rows(renderer, rows)
    assert again.text == first.text
