"""Flags of lm-evaluation-harness's command become those of `gym eval`, or are refused with what to write instead."""

from __future__ import annotations

import pytest

from gym_fed.cli.evaluation.app import app
from gym_fed.cli.main import _options_of
from gym_fed.core import aliases as other_words
from gym_fed.core.aliases import OtherWordNote
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.interop.commands import EVAL_REFUSED, translate_command


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_words, "_said", set())


def ours(line: str) -> str:
    from typer.main import get_command

    words = line.split()
    return " ".join(translate_command(words, _options_of(get_command(app), words[1:]), known=True))


@pytest.mark.parametrize(
    ("theirs", "written"),
    [
        (
            "eval --model hf --model_args pretrained=gym-nano,dtype=bfloat16,peft=a,trust_remote_code=True "
            "--tasks arc_easy,piqa --num_fewshot 5 --limit 10 --apply_chat_template",
            "eval gym-nano --tasks arc_easy,piqa --limit 10 --dtype bfloat16 --adapter a --num-fewshot 5 "
            "--apply-chat-template",
        ),
        (
            "eval run --model_args pretrained=me dtype=float32 --tasks a",
            "eval run me --tasks a --dtype float32",
        ),
        ("eval --model gym-nano --tasks a", "eval gym-nano --tasks a"),
        ("eval --model gym-nano --tasks a b c --limit 5", "eval gym-nano --tasks a,b,c --limit 5"),
        (
            "eval --model local-completions "
            "--model_args model=m,base_url=http://127.0.0.1:8000/v1/completions,num_concurrent=4 --tasks a",
            "eval m --tasks a --api http://127.0.0.1:8000/v1",
        ),
        (
            "eval --model local-chat-completions --model_args model=m,base_url=http://h/v1/chat/completions",
            "eval m --api http://h/v1",
        ),
        (
            "eval --log_samples gym-nano --batch_size auto:4 --use_cache c --output_path out --tasks a",
            "eval gym-nano --tasks a --output out",
        ),
    ],
)
def test_a_line_of_lm_eval_is_one_of_gym_eval(theirs: str, written: str) -> None:
    with pytest.warns(OtherWordNote):
        found = ours(theirs).split()
    assert sorted(found) == sorted(written.split())
    assert found[:2] == written.split()[:2]


@pytest.mark.parametrize("flag", EVAL_REFUSED)
def test_a_flag_without_a_counterpart_is_refused_with_two_lines(flag: str) -> None:
    with pytest.raises(GymError, match=f"^--{flag}: ") as error:
        ours(f"eval gym-nano --tasks a --{flag} x=1")
    assert error.value.code is ErrorCode.USAGE
    assert error.value.hint is not None
    assert error.value.hint.count("\n") == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--model vllm --model_args pretrained=x",
            "--model vllm: a model folder is evaluated with gym-fed's own",
        ),
        ("--model hf", "--model hf: no model is given"),
        ("--model hf --model_args pretrained=x,max_length=9", "--model_args max_length: unknown"),
        ("--model hf --model_args pretrained", "--model_args pretrained: no value"),
    ],
)
def test_a_model_that_is_not_ours_is_refused_by_its_flag(flags: str, said: str) -> None:
    with pytest.raises(GymError, match=said):
        ours(f"eval {flags} --tasks a")


def test_other_commands_of_eval_keep_their_words() -> None:
    assert ours("eval fetch core --batch_size 8").split()[:2] == ["eval", "fetch"]
    assert "--batch-size" in ours("eval fetch core --batch_size 8")
