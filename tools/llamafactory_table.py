"""Run every example file of a LLaMA-Factory checkout, and write the outcome of each to docs/llamafactory.md.

    python -m tools.llamafactory_table REPO_DIR [--only GLOB] [--former FILE ...] [--json FILE] [--check]

Each file is run by gym-fed's commands unchanged except for its size: the model becomes a tiny random model of the same
class, rows and steps are few, and the adapters and models that it expects from an earlier run are created first. Data
sets that are not in the checkout are replaced by others with the same columns. A file that runs must leave its result.
A file that is refused must get an error from gym-fed, whose text the table shows. Anything else is a defect, and the
exit status is then 1.

``--only`` runs a part of the files, and ``--json`` saves the outcomes; ``--former`` reads saved outcomes of the others.
The page is written once each file has an outcome. It counts the files that ran before the last change of gym-fed's
code.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "llamafactory.md"
BEGIN, END = "<!-- what became of each file, by tools/llamafactory_table.py -->\n", "<!-- until here -->\n"
NOT_JOBS = ("/accelerate/", "tokens_cfg")

KINDS = (
    ("awq", "awq"),
    ("gptq", "gptq"),
    ("aqlm", "aqlm"),
    ("moss-vl", "moss_vl"),
    (r"qwen3\.5-.*-a\d+b", "qwen3_5_moe"),
    (r"qwen3\.5", "qwen3_5"),
    (r"qwen3-vl-.*-a\d+b", "qwen3_vl_moe"),
    ("qwen3-vl", "qwen3_vl"),
    (r"qwen3-.*-a\d+b", "qwen3_moe"),
    ("qwen3-4b-instruct|saves/qwen3-4b", "qwen3_2507"),
    ("qwen3-8b", "qwen3_8b"),
    ("qwen3", "qwen3"),
    (r"qwen2[.]5-vl", "qwen2_5_vl"),
    ("qwen2-vl", "qwen2_vl"),
    ("qwen2", "qwen2"),
    ("llama-2", "llama2"),
    (r"llama-3\.2", "llama3"),
    ("llama-?3", "llama3_8b"),
    ("deepseek-v2", "deepseek_v2"),
    ("deepseek-v3", "deepseek_v3"),
)
"""The kind of tiny model by a pattern in a model's name; the first match is used."""

STAND_INS = {"ranking": "dpo_en_demo", "kto_tag": "kto_en_demo", "images": "mllm_demo"}
"""For a dataset on the Hub: one in the checkout with the same columns; ``identity`` for all others."""

OF_THIS_MACHINE = {
    "attention": "sdpa",
    "liger": "false",
    "optimizer": "adamw",
}
"""Settings to try if a file is refused because this machine has no CUDA GPU."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one file.

    Attributes:
        file: Its name below ``examples``.
        runs: True if it ran.
        text: ``runs``, or the reason.
        defect: True if it neither left its result nor was refused by a ``GymError``.
        code: Digest of the code that ran it; see ``code_now``.
    """

    file: str
    runs: bool
    text: str
    defect: bool = False
    code: str = ""


def code_now() -> str:
    """Return a digest of gym-fed's code, which identifies outcomes of earlier code."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "gym_fed").rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def example_files(repo: Path) -> list[Path]:
    """Return the YAML files in ``examples`` that are jobs, sorted."""
    files = sorted((repo / "examples").rglob("*.yaml"))
    return [file for file in files if not any(part in file.as_posix() for part in NOT_JOBS)]


def run_file(file: Path, repo: Path, work: Path) -> Outcome:
    """Run one file in the folder ``work``, which contains its data and models; see ``prepare``."""
    from gym_fed.interop.llamafactory.translation import job_of

    name = file.relative_to(repo / "examples").as_posix()
    config = yaml.safe_load(file.read_text(encoding="utf-8"))
    job, kind = job_of(config), kind_of(str(config.get("model_name_or_path", config.get("model"))))
    small = smaller(config, job, kind, work)
    copy = work / file.name
    copy.write_text(yaml.safe_dump(small, sort_keys=False), encoding="utf-8")
    result, settings, first = _run(copy, job, []), [], ""
    while not isinstance(result, str | None) and job == "train":
        reason = _plain(str(result.message), work)
        more = [f"{key}={value}" for key, value in OF_THIS_MACHINE.items() if key in reason]
        if "CUDA GPU" not in reason or not set(more) - set(settings):
            break
        settings, first = [*settings, *more], first or reason
        result = _run(copy, job, settings)
    changed = f"as it is: {first}. With `--set {' '.join(settings)}` " if settings else ""
    if result is None:
        return Outcome(name, True, f"{changed}it runs" if changed else "runs", code=code_now())
    if isinstance(result, str):
        return Outcome(name, False, result, defect=True, code=code_now())
    text = f"{changed}refused: {_plain(str(result.message), work)}"
    return Outcome(name, False, text, code=code_now())


def kind_of(model: str) -> str:
    """Return the kind of tiny model for a model's name."""
    found = next((kind for pattern, kind in KINDS if re.search(pattern, model.lower())), None)
    if found is None:
        raise SystemExit(f"no sibling is known for the model {model!r}: add it to KINDS")
    return found


def smaller(given: dict[str, Any], job: str, kind: str, work: Path) -> dict[str, Any]:
    """Return the file's values with a tiny model, few rows and few steps; create what it needs."""
    from gym_fed.interop.llamafactory.translation import is_version_1

    small = json.loads(json.dumps(given))
    key = "model" if is_version_1(given) else "model_name_or_path"
    small[key] = str(_sibling(kind, work))
    for name, value in given.items():
        if name in ("adapter_name_or_path", "reward_model"):
            _adapter(kind, work / str(value), work)
        if name == "peft_config" and isinstance(value, dict) and value.get("adapter_name_or_path"):
            _adapter(kind, work / str(value["adapter_name_or_path"]), work)
    section = given.get("peft_config") or {}
    written = given.get("export_dir") or section.get("export_dir") or given.get("output_dir")
    if written and str(written) not in (
        str(given.get("adapter_name_or_path")),
        str(given.get("reward_model")),
    ):
        shutil.rmtree(work / str(written), ignore_errors=True)  # another file may have written it
    if job in ("export", "inference"):
        return small
    small["max_steps"] = 2
    if "_vl" in kind or kind.startswith("qwen3_5"):  # their rows are never truncated
        small["cutoff_len"] = 8192
    if is_version_1(given):
        return small
    small["max_samples"] = 16
    if "freeze_trainable_layers" in given:  # the tiny model has only a few layers
        small["freeze_trainable_layers"] = 1
    if job == "predict":
        small["max_samples"], small["max_new_tokens"] = 2, 4
        del small["max_steps"]
        return small
    for key in ("gradient_accumulation_steps", "per_device_train_batch_size"):
        small[key] = min(int(given.get(key, 1)), 2)
    return small


def prepare(repo: Path, work: Path, files: list[Path]) -> None:
    """Copy the checkout's data to ``work``, and add replacements for missing datasets."""
    shutil.copytree(repo / "data", work / "data")
    info_file = work / "data" / "dataset_info.json"
    info = json.loads(info_file.read_text(encoding="utf-8"))
    for file in files:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        for key in ("dataset", "eval_dataset"):
            for name in str(config.get(key) or "").replace(" ", "").split(","):
                if name and not (work / "data" / info.get(name, {}).get("file_name", "?")).is_file():
                    info[name] = _stand_in(info, name, work / "data")
    info_file.write_text(json.dumps(info), encoding="utf-8")
    for file in (work / "data").glob("v1_*.yaml"):
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        for entry in entries.values():
            if entry.get("source", "hf_hub") == "hf_hub" and entry.get("converter") == "pair":
                entry.clear()
                entry |= {"path": "data/v1_dpo_demo.jsonl", "source": "local"}
        file.write_text(yaml.safe_dump(entries), encoding="utf-8")
    _cache(work)
    examples = repo / "examples" / "deepspeed"
    if examples.is_dir():
        shutil.copytree(examples, work / "examples" / "deepspeed")


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes in Markdown: how many files ran, and the others grouped by what happened."""
    ran, now = sum(outcome.runs for outcome in outcomes), code_now()
    earlier = sum(outcome.code != now for outcome in outcomes)
    lines = [f"Of {len(outcomes)} files, {ran} run and {len(outcomes) - ran} are refused."]
    if earlier:
        lines.append(f"{earlier} were not run again after the last change to our code.")
    groups: dict[str, list[str]] = {}
    for o in outcomes:
        groups.setdefault(o.text, []).append(f"`{o.file}`")
    unchanged = groups.pop("runs", [])
    lines += [f"{len(unchanged)} run as they are; the others:", "", "| what happens | files |", "|---|---|"]
    lines += [f"| {text.replace('|', '&#124;')} | {', '.join(files)} |" for text, files in groups.items()]
    return "\n".join(lines) + "\n"


def page(outcomes: list[Outcome], file: Path) -> str:
    """Return the page with the new table."""
    before, rest = file.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(outcomes)}\n{END}{after}"


def _stand_in(info: dict[str, Any], name: str, data: Path) -> dict[str, Any]:
    """Return an entry with the same columns and local rows; image preference pairs are built from the image demo."""
    entry = info.get(name, {})
    columns = entry.get("columns", {})
    if entry.get("ranking") and "images" in columns:
        rows = json.loads((data / "mllm_demo.json").read_text(encoding="utf-8"))
        pairs = [
            {
                "conversations": [{"from": "human", "value": row["messages"][0]["content"]}],
                "chosen": {"from": "gpt", "value": row["messages"][1]["content"]},
                "rejected": {"from": "gpt", "value": "I see nothing."},
                "images": row["images"][:1],
            }
            for row in rows
        ]
        (data / "stand_in_pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
        return {
            "file_name": "stand_in_pairs.json",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {
                **{"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
                "images": "images",
            },
        }
    found = next((other for key, other in STAND_INS.items() if entry.get(key) or key in columns), "identity")
    return dict(info[found])


def _cache(work: Path) -> None:
    """Link the data into the Hub's local cache, for files that refer to it as REMOTE:llamafactory/demo_data."""
    repository = work / "hf" / "hub" / "datasets--llamafactory--demo_data"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(work / "data")


def _sibling(kind: str, work: Path) -> Path:
    from tests.support.more_siblings import make_sibling

    folder = work / "models" / kind
    if not folder.is_dir():
        make_sibling(kind, folder)
    return folder


def _adapter(kind: str, folder: Path, work: Path) -> None:
    """Write a LoRA adapter with random weights for the tiny model, in place of that of an earlier run."""
    if folder.is_dir():
        return
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    base = _sibling("qwen3_vl" if kind == "moss_vl" else kind, work)
    reads_images = hasattr(AutoConfig.from_pretrained(base), "vision_config")
    auto: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    targets = r".*language_model.*\.(q|v)_proj" if reads_images else ["q_proj", "v_proj"]
    lora = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(auto.from_pretrained(base), lora).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)


def _run(file: Path, job: str, settings: list[str]) -> Any:
    """Return None if the file left its result, the ``GymError`` that refused it, or a description of the defect."""
    from typer.testing import CliRunner

    from gym_fed.cli.main import app
    from gym_fed.core.errors import GymError

    command = {
        "export": ["export", str(file), "--skip-check"],
        "inference": ["chat", str(file), "--prompt=Hello", "--max-tokens=4", "--device=cpu", "--json"],
    }.get(job, ["train", str(file), "--overwrite", "--set", "device=cpu", "--set", "num_threads=1"])
    for setting in settings:
        command += ["--set", setting]
    with _inside(file.parent):
        done = CliRunner().invoke(app, command)
        if isinstance(done.exception, GymError):
            return done.exception
        if done.exit_code != 0:
            return f"DEFECT: {done.exception!r}: {done.output[-300:]}"
        return _missing_result(file, job, done.stdout)


def _missing_result(file: Path, job: str, printed: str) -> str | None:
    """Return which result of a job is missing or wrong; None if all are as expected."""
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    if job == "inference":
        return None if json.loads(printed)["finish_reason"] in ("stop", "length") else "DEFECT: no answer"
    if job == "export":
        folder = Path(values.get("export_dir") or values["peft_config"]["export_dir"])
        return None if (folder / "config.json").is_file() else f"DEFECT: nothing in {folder}"
    results = {
        "train": [Path(values["output_dir"]) / "result.json"],
        "predict": [Path(values["output_dir"]) / "generated_predictions.jsonl"],
        "preprocess": [Path(str(values.get("tokenized_path")))],
    }.get(job, [])
    missing = [str(path) for path in results if not path.exists()]
    return f"DEFECT: no {missing[0]}" if missing else None


def _plain(message: str, work: Path) -> str:
    """Return a message as shown on the page: its first line, without the paths and line numbers of this run."""
    text = message.splitlines()[0].replace(f"{work}/models/", "").replace(f"{work}/", "")
    text = re.sub(r"^[\w.-]+\.yaml:\d+:\d+: ", "", text)
    more = len(message.splitlines()) - 1
    return text + (f" (and {more} more)" if more else "")


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main(arguments: list[str] | None = None) -> int:
    """Run the files, and write the page if each has an outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("repo", type=Path, help="LLaMA-Factory checkout")
    parser.add_argument("--only", default="*", metavar="GLOB", help="run only these files in examples/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the outcomes to FILE")
    parser.add_argument("--former", type=Path, nargs="*", default=[], metavar="FILE", help="saved outcomes")
    parser.add_argument(
        "--page", type=Path, default=PAGE, metavar="FILE", help="page to write (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page differs")
    options = parser.parse_args(arguments)
    repo = options.repo.resolve()
    every: dict[str, Outcome] = {}
    for former in options.former:
        every |= {values["file"]: Outcome(**values) for values in json.loads(former.read_text("utf-8"))}
    listed = {file.relative_to(repo / "examples").as_posix(): file for file in example_files(repo)}
    outcomes = _run_all(repo, [file for name, file in listed.items() if fnmatch.fnmatch(name, options.only)])
    print(table(outcomes).splitlines()[0])
    if options.json:
        options.json.write_text(
            json.dumps([vars(outcome) for outcome in outcomes], indent=1), encoding="utf-8"
        )
    every |= {outcome.file: outcome for outcome in outcomes}
    rows = [every[name] for name in listed if name in every]
    if any(outcome.defect for outcome in rows):
        return 1
    if missing := [name for name in listed if name not in every]:
        print(f"the page was not written: {len(missing)} files have no outcome, such as {missing[0]}")
        return 0
    if options.check:
        return 0 if options.page.read_text(encoding="utf-8") == page(rows, options.page) else 1
    options.page.write_text(page(rows, options.page), encoding="utf-8")
    return 0


def _run_all(repo: Path, files: list[Path]) -> list[Outcome]:
    """Run files one after the other, in a temporary folder."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        os.environ.update({"HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "hf")})  # before it is imported
        prepare(repo, work, files)
        for file in files:
            outcomes.append(run_file(file, repo, work))
            print(f"{outcomes[-1].file}: {outcomes[-1].text}", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
