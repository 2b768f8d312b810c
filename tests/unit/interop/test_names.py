"""Every line that people bring from elsewhere runs as written, or is refused with the two lines to write instead."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import load_config
from gym_fed.core import aliases as other_words
from gym_fed.core.aliases import OtherWordNote
from gym_fed.core.errors import GymError
from tests.conftest import SHARED

ROWS = [{"prompt": f"double: {word}", "completion": word * 2} for word in ("ab", "cd", "ef", "gh")]
Case = Callable[[Path], None]
CASES: dict[str, Case] = {}


def line(*texts: str) -> Callable[[Case], Case]:
    """Marks what runs a line of the page, by how the line begins there."""

    def keep(case: Case) -> Case:
        CASES.update(dict.fromkeys(texts, case))
        return case

    return keep


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("GYM_DATASETS", raising=False)
    monkeypatch.setattr(other_words, "_said", set())
    Path("my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def gym(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def refused(error: pytest.ExceptionInfo[GymError], *lines: str) -> None:
    """The error has exactly two lines to write instead, these."""
    assert error.value.hint == "write instead:\n" + "\n".join(f"  {text}" for text in lines)
    assert len(lines) == 2


def tiny(**keys: Any) -> Any:
    """A trainer of gym-nano that takes one step."""
    from gym_fed import Trainer, TrainingConfig

    return Trainer(
        TrainingConfig(model="gym-nano", max_steps=1, device="cpu", output_dir=Path("run"), **keys)
    )


@line("TrainingConfig(model=, optimizer=")
def whole_batches(tmp_path: Path) -> None:
    from gym_fed import TrainingConfig

    with pytest.warns(
        OtherWordNote, match="`per_device_train_batch_size: 8` x `gradient_accumulation_steps: 256`"
    ):
        config = TrainingConfig(
            model="gym-nano",
            optimizer="adamw",
            learning_rate=1e-4,
            batch_size=2048,
            max_steps=10,
            warmup_steps=2,
            weight_decay=0.1,
        )
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (8, 256)


@line("TrainingConfig(model=, algorithm=")
def bitdelta_and_unsloth(tmp_path: Path) -> None:
    from gym_fed import TrainingConfig

    config = TrainingConfig(model="gym-nano", algorithm="gspo", quantization="bitdelta", use_unsloth=True)
    assert config.unsloth
    assert config.save_delta is not None
    assert (config.save_delta.codec, config.save_delta.error_feedback) == ("bitdelta", False)


@line("trainer.fit(dataset)")
def fit_and_data_by_name(tmp_path: Path) -> None:
    with pytest.warns(OtherWordNote, match=r"`trainer\.fit` is `trainer\.train` here"):
        assert tiny(quantization="bitdelta").fit(ROWS).steps == 1
    assert Path("run/tuned.gymdelta").stat().st_size > 10_000
    Path("data").mkdir()
    Path("my.jsonl").rename("data/rows.jsonl")
    columns = {"prompt": "prompt", "response": "completion"}
    Path("data/dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.jsonl", "columns": columns}})
    )
    trainer = tiny(save_final=False, logging_steps=1)
    trainer.config = trainer.config.model_copy(update={"output_dir": Path("run2")})
    assert trainer.train(dataset="mine").num_examples == 4


@line("trainer.apply_deltasoup()")
def the_hubs_soup(tmp_path: Path) -> None:
    trainer = tiny(save_final=False)
    trainer.train(ROWS)
    with pytest.raises(GymError) as error:
        trainer.apply_deltasoup()
    refused(
        error,
        'trainer.apply_deltasoup({"ada": "ada.gymdelta", "ben": "ben.gymdelta"})',
        "gym-client join HUB --data my.jsonl",
    )
    lead = soup_of_a_hub(tmp_path / "home")
    with pytest.warns(OtherWordNote, match=r"`trainer\.apply_deltasoup\(\)` is"):
        soup = trainer.apply_deltasoup(settings=mean_of_values())
    assert soup.merged == ("self", "hub")
    base, moved = weights(load("gym-nano")), weights(trainer.result.model)
    assert (moved[NORM] - base[NORM]).mean() == pytest.approx(lead / 2, rel=0.02)


NORM = "model.norm.weight"


def load(name: str) -> Any:
    from gym_fed.base.models import load_model

    return load_model(name).model


def weights(model: Any) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def mean_of_values() -> Any:
    from gym_fed.quantization import DeltaSoupConfig

    exact = {"codec": "dense", "dense_dtype": "float32", "error_feedback": False}
    return DeltaSoupConfig(method="mean", norm_ratio=None, codec=exact)


def soup_of_a_hub(folder: Path) -> float:
    """A contributor's home after two rounds; returns how far the second's soups lead the last norm from the base.

    The first round's version is the base, the second's is one soup ahead.
    """
    import torch
    from gym_client.agent.tasks import TaskFolder
    from gym_client.hub.transfers import ObjectCache
    from gym_client.identity.home import Home

    from gym_fed.config.hub.task import SoupReference, TaskSpec
    from gym_fed.delta.base import BaseSpec, tensors_digest
    from gym_fed.delta.writer import DeltaEntry, write_delta

    lead = 0.5
    model, home = load("gym-nano"), Home.open(folder)
    base = BaseSpec.of(model, "gym-nano")
    ahead = torch.full_like(weights(model)[NORM], lead)
    write_delta(folder / "soup", [DeltaEntry.of(NORM, ahead, "dense", dtype="float32")], base)
    data = (folder / "soup").read_bytes()
    kept = ObjectCache(home.objects).put(data)
    with torch.no_grad():
        dict(model.named_parameters())[NORM].add_(ahead)
    version = tensors_digest(model)
    reference = SoupReference(sha256=kept.name, size_bytes=len(data), version_digest=version, server_round=1)
    for number, (hub, soups) in enumerate((("0", []), ("1", [reference])), 1):
        spec = TaskSpec(
            server="s" + hub * 16,
            server_round=number,
            base_model="gym-nano",
            base_digest=base.digest,
            version_digest=version if soups else base.digest,
            soups=soups,
            max_update_bytes=10**6,
            deadline_seconds=4e9,
        )
        TaskFolder(home.task_folder(f"m{number}")).begin(spec, {"data": "my.jsonl"})
    return lead


@line('trainer.export("model.gguf"')
def gguf(tmp_path: Path) -> None:
    trainer = tiny(save_final=False)
    trainer.train(ROWS)
    with pytest.raises(GymError, match="not a one-bit delta") as error:
        trainer.export("model.gguf", quantization="bitdelta")
    refused(
        error,
        'trainer.export("model.gguf", quantization="q4_k_m")',
        'trainer.export("mine.gymdelta")',
    )
    assert not Path("model.gguf").exists()
    trained = weights(trainer.result.model)[NORM]
    assert weights(load(str(trainer.export("model-folder", check=False))))[NORM].equal(trained)
    for words in ({}, {"quantization": "bitdelta"}):
        assert trainer.export(f"mine{len(words)}.gymdelta", **words, check=False).is_file()


@line("from gym_fed.train import run_sft")
def llamafactorys_functions(tmp_path: Path) -> None:
    from gym_fed.hparams import get_train_args  # type: ignore[import-not-found]
    from gym_fed.train import run_sft  # type: ignore[import-not-found]

    Path("data").mkdir()
    Path("my.jsonl").rename("data/rows.jsonl")
    columns = {"prompt": "prompt", "response": "completion"}
    Path("data/dataset_info.json").write_text(
        json.dumps({"mine": {"file_name": "rows.jsonl", "columns": columns}})
    )
    groups = get_train_args(
        {
            "model_name_or_path": "gym-nano",
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": 4,
            "dataset": "mine",
            "cutoff_len": 64,
            "output_dir": "run",
            "max_steps": 1,
            "learning_rate": 1e-4,
            "do_sample": False,
        }
    )
    model, data, training, finetuning, generating = groups
    assert (model.model_name_or_path, data.dataset, training.output_dir) == ("gym-nano", "mine", "run")
    assert (finetuning.lora_rank, generating.do_sample, training.seed) == (4, False, 42)
    assert run_sft(*groups).steps == 1
    assert Path("run/adapter_config.json").is_file()


@line('with Experiment("zen-7b-v2")')
def an_experiment_without_steps(tmp_path: Path) -> None:
    from gym_fed import Experiment, TrainingConfig

    Path("model.pt").write_bytes(b"weights")
    Path("tokenizer").mkdir()
    with Experiment("zen-7b-v2") as exp:
        exp.log_config(TrainingConfig(model="gym-nano"))
        exp.log_metrics({"loss": 0.5})
        exp.log_metrics({"loss": 0.25})
        exp.log_artifacts(["model.pt", "tokenizer/"])
    found = [json.loads(text) for text in Path("runs/zen-7b-v2/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found if "loss" in row] == [1, 2]


@line("from gym_fed import quickstart")
def the_quickstart(tmp_path: Path) -> None:
    from gym_fed import quickstart

    quickstart.train_tiny_model("my-model", max_steps=1, num_examples=32)
    figures = quickstart.evaluate_model("my-model", num_examples=4)
    assert 0 <= figures["exact_match"] <= 1
    assert figures["loss"] > 0


@line("from gym_fed.evaluation import Evaluator")
def the_evaluator(tmp_path: Path) -> None:
    import gym_fed.eval  # type: ignore[import-not-found]
    from gym_fed.evaluation import Evaluator

    assert gym_fed.eval.Evaluator is Evaluator
    with pytest.raises(GymError, match="mmlu") as error:
        Evaluator(benchmarks=["mmlu", "hellaswag", "winogrande", "arc"], model="gym-nano")
    assert "gym eval fetch" in error.value.hint
    evaluator = Evaluator(benchmarks=["reverse"], model="gym-nano", num_examples=4)
    results = evaluator.run()
    assert json.loads(results.save("figures.json").read_text())["reverse"]["num_examples"] == 4
    line = results.submit_to_leaderboard(model_name="m", organization="o")
    assert line.content.model_name == "m"


@line("from gym_fed.registry import ModelRegistry")
def the_registry_of_models(tmp_path: Path) -> None:
    from gym_fed.base.models import load_model
    from gym_fed.registry import ModelRegistry

    loaded = load_model("gym-nano")
    config = TrainingConfig(model="gym-nano", max_steps=3, data=[{"path": "my.jsonl"}])  # type: ignore[list-item]
    for registry in (ModelRegistry, ModelRegistry()):
        assert registry.push("my-org/my-model", loaded, config).version == 1
    folder = ModelRegistry.pull("my-org/my-model")  # type: ignore[arg-type, call-arg]
    assert load_config(folder / "config.yaml", TrainingConfig) == config
    assert load_model(str(folder)).model.config.hidden_size == loaded.model.config.hidden_size


@line("DatasetRegistry.push(")
def the_registry_of_data(tmp_path: Path) -> None:
    from gym_fed.data import DatasetRegistry

    push: Any = DatasetRegistry.push
    pull: Any = DatasetRegistry.pull
    with pytest.warns(OtherWordNote, match="licence="):
        assert push("my-corpus", ROWS, license="cc-by-4.0").licence == "CC-BY-4.0"
    assert push("org/corpus", "my.jsonl", license="cc-by-4.0").version == 1
    rows = list(pull("org/corpus"))
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in ROWS]
    assert tiny(save_final=False).train(dataset="my-corpus").num_examples == 4


@line("from gym_fed.data import DataPipeline, MixedDataset")
def a_pipeline_of_files(tmp_path: Path) -> None:
    from gym_fed.data import (
        DataPipeline,
        MixedDataset,  # type: ignore[attr-defined]
    )

    sources = [("my.jsonl", 0.3), ("my.jsonl", 0.7)]
    built = DataPipeline(sources=sources, tokenizer="gym-nano", sequence_length=64).build()  # type: ignore[attr-defined]
    assert {"input_ids", "labels"} <= set(next(iter(built)))
    assert next(iter(MixedDataset(sources)))["prompt"]


@line("BitDeltaConfig(bits=1")
def a_delta_for_soups(tmp_path: Path) -> None:
    from gym_fed.quantization import BitDeltaConfig

    config: Any = BitDeltaConfig(bits=1, group_size=128, safety_threshold=0.6, enable_deltasoup=True)  # type: ignore[call-arg]
    assert (config.group_size, config.safety_threshold) == (128, 0.6)


@line("DeltaSoupConfig(method=")
def privacy_without_numbers(tmp_path: Path) -> None:
    from gym_fed.config.hub.privacy import ReleasePrivacy
    from gym_fed.quantization import AggregationMethod, DeltaSoupConfig

    with pytest.warns(OtherWordNote, match=r"method mean, .*clipping_norm 1: epsilon 4\.38 at delta 1e-05"):
        config = DeltaSoupConfig(differential_privacy=True, enable_rewards=True)  # type: ignore[arg-type]
    assert (config.method, config.differential_privacy) == (AggregationMethod.MEAN, ReleasePrivacy())
    clean = DeltaSoupConfig(differential_privacy=True, root="clean.gymdelta")  # type: ignore[arg-type]
    assert clean.method is AggregationMethod.ROOT_GATE, (
        "the best of the accounted rules, where it has what it needs"
    )
    with pytest.raises(ValidationError, match=r"byzantine_robust.*no known bound.*use mean"):
        DeltaSoupConfig(
            method=AggregationMethod.BYZANTINE_ROBUST,
            differential_privacy=True,  # type: ignore[arg-type]
            enable_rewards=True,
        )


@line("gym webui --port 8080")
def commands_of_elsewhere(tmp_path: Path) -> None:
    assert "--port" in gym("webui", "serve", "--help")
    with pytest.raises(
        GymError, match=r"^saves/model: (no local folder has this name|is not on this machine)"
    ):
        gym("export", "--model", "saves/model", "--format", "gguf")
    with pytest.warns(OtherWordNote, match="`gym inference` is `gym batch` here"):
        assert "gym batch" in gym("inference", "--help")


@line("gym train --model_name_or_path X")
def llamafactorys_flags(tmp_path: Path) -> None:
    Path("data").mkdir()
    Path("my.jsonl").rename("data/rows.jsonl")
    columns = {"prompt": "prompt", "response": "completion"}
    described = {"alpaca_en_demo": {"file_name": "rows.jsonl", "columns": columns}}
    Path("data/dataset_info.json").write_text(json.dumps(described))
    words = "--model_name_or_path gym-nano --template qwen3 --dataset alpaca_en_demo --finetuning_type lora"
    words += " --output_dir D --max_steps 1 --learning_rate 1e-4 --bf16 false --no-check"
    gym("train", *words.split())
    assert json.loads(Path("D/adapter_config.json").read_text())["r"] == 8
    words = "--model gym-nano --data data/rows.jsonl --max-steps 1 --finetuning lora --lora.r 4 --no-check"
    gym("train", *words.split())
    assert json.loads(Path("runs/train/adapter_config.json").read_text())["r"] == 4


@line("gym chat --model_name_or_path X")
def chat_with_their_flags(tmp_path: Path) -> None:
    words = ("--model_name_or_path", "gym-nano", "--prompt", "copy: hello", "--max_new_tokens", "8")
    with pytest.warns(OtherWordNote, match="`--chat-template`"):
        assert "hello" in gym("chat", *words, "--template", "chatml")
    with pytest.raises(GymError, match="nearest: qwen3"):
        gym("chat", *words, "--template", "qwen33")
    with pytest.raises(GymError, match="nearest: qwen3"):
        gym("api", "--model_name_or_path", "gym-nano", "--template", "qwen33", "--port", "0")


@line("gym-cli = gym")
def other_names_of_extras(tmp_path: Path) -> None:
    """The second command is gone: one word, ``gym``, does everything."""
    import tomllib

    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert set(project["scripts"]) == {"gym", "gym-client", "gym-server"}
    extras = project["optional-dependencies"]
    assert extras["distributed"] == extras["dist"]
    assert set(extras["eval"]) == {"lm-eval>=0.4.13,<0.5", *extras["judge"], *extras["plot"]}
    whole = {row for name, rows in extras.items() if name not in ("dev", "all") for row in rows}
    assert (len(extras["all"]), set(extras["all"])) == (len(whole), whole)


@line("group_size: 8, sequence_parallel")
def keys_of_a_group_algorithm(tmp_path: Path) -> None:
    file = Path("run.yaml")
    text = "model: gym-nano\nalgorithm: gspo\ngroup_size: 8\nuse_unsloth: true\n"
    file.write_text(text + "quantization: {method: bitdelta, bits: 1, enable_deltasoup: true}\n")
    with pytest.warns(OtherWordNote) as notes:
        config = load_config(file, TrainingConfig)
    assert [str(note.message) for note in notes][:1] == ["run.yaml:4:1: `use_unsloth` is `unsloth` here"]
    assert config.gspo is not None
    assert config.gspo.num_generations == 8
    assert config.save_delta is not None
    file.write_text(text + "sequence_parallel: true\n")
    with pytest.raises(GymError, match=r"run\.yaml:5:1: sequence_parallel: true") as error:
        load_config(file, TrainingConfig)
    refused(error, "gradient_checkpointing: true", "distributed: {strategy: fsdp2}")


@line("distributed: {backend: nccl")
def a_sharded_run(tmp_path: Path) -> None:
    Path("run.yaml").write_text(
        "model: gym-nano\ndistributed: {backend: nccl, strategy: fsdp, world_size: 64, sharding_strategy: full_shard, "
        "mixed_precision: bf16, gradient_checkpointing: true}\n"
    )
    config = load_config("run.yaml", TrainingConfig)
    assert config.distributed is not None
    assert (config.distributed.strategy, config.distributed.world_size) == ("fsdp2", 64)
    assert (config.mixed_precision, config.gradient_checkpointing) == ("bf16", True)
    from gym_fed.training.run.checks import check_config

    with pytest.raises(GymError, match="the run needs 64, but has 2"):
        check_config(config, num_processes=2)


@line("reproducibility: {seed: 42")
def repeatable(tmp_path: Path) -> None:
    text = 'reproducibility: {seed: 42, deterministic_algorithms: true, cublas_workspace_config: ":4096:8"}\n'
    Path("run.yaml").write_text("model: gym-nano\n" + text)
    config = load_config("run.yaml", TrainingConfig)
    assert (config.seed, config.reproducibility.deterministic) == (42, True)
    assert config.reproducibility.cublas_workspace == ":4096:8"


@line("model: {architecture: llama")
def a_new_model(tmp_path: Path) -> None:
    Path("run.yaml").write_text(
        "model: {architecture: llama, hidden_size: 4096, num_layers: 32, num_heads: 32, vocab_size: 32000}\n"
        "training: {batch_size: 256, learning_rate: 3.0e-4, max_steps: 10}\n"
    )
    config = load_config("run.yaml", TrainingConfig)
    assert config.model_init is not None
    assert (config.model_init.intermediate_size, config.model_init.head_dim) == (11008, 128)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (8, 32)
    small = {"architecture": "llama", "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 320}
    from gym_fed import Trainer
    from gym_fed import TrainingConfig as Config

    result = Trainer(
        Config(model=small, training={"max_steps": 1, "batch_size": 4}, output_dir=Path("new"))
    ).train(ROWS)  # type: ignore[arg-type, call-arg]
    assert type(result.model).__name__ == "LlamaForCausalLM"
    assert result.model.get_input_embeddings().weight.shape == (320, 16)


@line("serving: {model_format: gguf")
def a_serving_level(tmp_path: Path) -> None:
    file = Path("serving.yaml")
    file.write_text("serving: {batch_size: 32, max_concurrent: 100, cache_size: 10GB}\n")
    config = load_config(file, ServingConfig)
    assert (config.engine.max_concurrent, config.engine.max_queued, config.cache_size) == (32, 68, 10**10)
    file.write_text("serving: {model_format: onnx, quantization: int4}\n")
    with pytest.raises(GymError, match="model_format: onnx") as error:
        load_config(file, ServingConfig)
    refused(error, "base: path/to/model-folder", "base: path/to/model.gguf")
    file.write_text("serving: {model_format: gguf, quantization: int4}\n")
    assert load_config(file, ServingConfig).base_format == "int4"
    file.write_text("serving: {model_format: gguf, quantization: awq}\n")
    with pytest.raises(GymError, match="quantization: awq") as error:
        load_config(file, ServingConfig)
    refused(error, "base_format: int8", "base_format: int4")


@line("recipe context")
def loops_of_recipes(tmp_path: Path) -> None:
    from gym_fed.training.loops import DPO, GRPO, PPO, SFT, StringThread
    from gym_fed.training.recipe import RecipeContext

    class Short:
        ready = 0

        def setup(self) -> None:
            self.ready += 1

        def __call__(self, thread: StringThread) -> float:
            assert self.ready
            return 1.0 / (1 + len(thread.last_content()))

    grader = Short()
    threads = [StringThread.of_row(row).assistant(row["completion"]) for row in ROWS[:2]]
    worse = [thread.prompt().assistant("no") for thread in threads]
    batch: dict[str, Any] = {"samples_per_batch": 2, "samples_per_mini_batch": 1, "max_grad_norm": 1.0}
    with RecipeContext(tmp_path / "recipe", devices="cpu") as ctx:
        assert ctx.world_size == 1
        model = ctx.spawn_train("gym-nano", tp=1)
        batch |= {"context": ctx, "settings": {"max_length": 32}}
        short: dict[str, Any] = {**batch, "grader": grader, "kl_beta": 0.01, "max_completion_length": 4}
        value = ctx.spawn("value", model=model)
        sft = SFT(dataset=threads, model=model, lr=1e-4, max_steps=1, **batch)
        dpo = DPO(
            dataset=list(zip(threads, worse, strict=True)),
            model=model,
            lr=1e-5,
            beta=0.1,
            max_steps=1,
            **batch,
        )
        ppo = PPO(
            dataset=threads,
            policy_model=model,
            value_model=value,
            lr_policy=1e-5,
            lr_value=1e-4,
            max_num_ppo_steps=1,
            num_iterations=1,
            **short,
        )
        grpo = GRPO(dataset=threads, model=model, lr=1e-5, completions_per_sample=2, max_steps=1, **short)
        assert [loop.run().steps for loop in (sft, dpo, ppo, grpo)] == [1, 1, 2, 1]
        assert grader.ready == 2
        assert (ctx.save_model_safely("model", model) / "config.json").is_file()


@line("LLaMA-Factory stage: grpo")
def groups_graded_by_a_reward_model(tmp_path: Path) -> None:
    from gym_fed.config.training_file import load_training_config

    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in ROWS]
    reward = tiny(algorithm="reward_model", max_length=32)
    reward.train(pairs)
    Path("run").rename("reward")
    Path("data").mkdir()
    Path("my.jsonl").rename("data/rows.jsonl")
    columns = {"prompt": "prompt", "response": "completion"}
    described = {"mine": {"file_name": "rows.jsonl", "columns": columns}}
    Path("data/dataset_info.json").write_text(json.dumps(described))
    Path("theirs.yaml").write_text(
        "model_name_or_path: gym-nano\nstage: grpo\ndo_train: true\nreward_model: reward\n"
        "reward_model_type: full\nfinetuning_type: full\ndataset: mine\ntemplate: chatml\ncutoff_len: 64\n"
        "output_dir: answers\nmax_steps: 1\nlearning_rate: 1.0e-5\nper_device_train_batch_size: 2\n"
        "num_generations: 2\nmax_new_tokens: 4\n"
    )
    config, _ = load_training_config(Path("theirs.yaml"))
    assert (config.algorithm, [grader.model for grader in config.graders]) == ("grpo", ["reward"])  # type: ignore[attr-defined]
    gym("train", "theirs.yaml", "--no-check")
    steps = [json.loads(text) for text in Path("answers/metrics.jsonl").read_text().splitlines()]
    assert any("reward" in row for row in steps), steps


@line("recipes for public models")
def recipes_by_name(tmp_path: Path) -> None:
    names = [f"qwen3-{way}" for way in ("lora", "qlora", "gspo", "moe-lora")]
    names += ["llama3-lora", "gemma3-lora", "mistral-lora", "mixtral-lora", "qwen-vl-lora", "llava-lora"]
    owners = {}
    for name in (*names, "eco-grpo", "agent-dpo"):
        gym("configs", "copy", name)
        owners[name] = str(load_config(f"{name}.yaml", TrainingConfig).model).partition("/")[0]
    assert set(owners.values()) == {"Qwen", "meta-llama", "google", "mistralai", "llava-hf"}
    for size, machine in (("32B", "cuda"), ("4B", "mps"), ("0.6B", "cpu")):
        gym("configs", "copy", "qwen3-lora", "--size", size, "--on", machine, "--overwrite")
        assert load_config("qwen3-lora.yaml", TrainingConfig).model == f"Qwen/Qwen3-{size}"
    gym("configs", "copy", "nano-lora")
    assert load_config("nano-lora.yaml", TrainingConfig).finetuning == "lora"


@line("a catalogue of named data sets")
def the_catalogue(tmp_path: Path) -> None:
    named = "Alpaca ShareGPT UltraChat CodeAlpaca Magicoder GSM8K MATH ToolBench APIBank LLaVA ShareGPT4V"
    found = {name: json.loads(gym("data", "catalogue", name.lower(), "--json")) for name in named.split()}
    assert [
        name for name, facts in found.items() if not re.fullmatch(r"[\w.-]+/[\w.-]+", facts["place"])
    ] == []
    assert [name for name, facts in found.items() if not facts["columns"]] == []
    assert [name for name, facts in found.items() if facts["licence"] is None] == ["ShareGPT"]
    assert "licence  not stated" in gym("data", "catalogue", "sharegpt")
    config = TrainingConfig(model="gym-nano", data="gsm8k")
    assert config.data[0].name == "gsm8k"


@pytest.mark.few(9, "one table for every line")
@pytest.mark.parametrize("text", CASES)
def test_a_line_runs_as_written_or_is_refused_with_two_lines(text: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always", OtherWordNote)
        CASES[text](tmp_path)


def lines_of(page: str) -> Iterator[str]:
    """What is wanted, of every table but those of the last section, without marks."""
    for text in page.split("## Models and modes")[0].splitlines():
        if text.startswith("| ") and not text.startswith(("| wanted", "|---")):
            yield text.split(" | ")[0].removeprefix("| ").replace("`", "")


@pytest.mark.shared
def test_every_line_of_the_teams_page_is_in_the_table() -> None:
    page = SHARED / "NAMES.md"
    if not page.is_file():
        pytest.skip(f"{page} is absent")
    known = tuple(CASES)
    assert [text for text in lines_of(page.read_text(encoding="utf-8")) if not text.startswith(known)] == []


def test_vllms_serve_and_ollamas_run_are_our_commands() -> None:
    with pytest.warns(OtherWordNote, match="`gym serve` is `gym api` here"):
        assert "gym api FILE" in gym("serve", "--help")
    with (
        pytest.warns(OtherWordNote, match="`gym api --base MODEL`"),
        pytest.raises(GymError, match=r"^\./no-such-model: "),
    ):
        gym("serve", "./no-such-model", "--port", "0")
    Path("serving.yaml").write_text("base: ./nor-this\n")
    with pytest.raises(GymError, match="nor-this"):
        gym("serve", "serving.yaml")
    with pytest.warns(OtherWordNote, match="`gym chat MODEL --prompt PROMPT`"):
        assert "hello" in gym("run", "gym-nano", "copy: hello", "--max-tokens", "8")


def test_sampling_flags_of_other_tools_are_settings_of_a_chat() -> None:
    with (
        pytest.warns(OtherWordNote, match="`gym chat --top_p` is `--set top_p=VALUE` here"),
        pytest.raises(GymError, match="top_p"),
    ):
        gym("chat", "gym-nano", "--prompt", "x", "--top_p", "2")


def test_flags_behind_another_name_of_a_command_are_looked_up_too() -> None:
    with pytest.warns(OtherWordNote, match="`--chat-template`"), pytest.raises(GymError, match="qwen33"):
        gym("run", "gym-nano", "--template", "qwen33", "--prompt", "x")


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("served_model_name: mine", "served_name", "mine"),
        ("served_model_name: [mine]", "served_name", "mine"),
        ("max_num_seqs: 8", "engine.max_concurrent", 8),
        ("ctx_size: 2048", "engine.max_context", 2048),
        ("max_model_len: 2048", "engine.max_context", 2048),
        ("temperature: 0.5", "sampling.temperature", 0.5),
        ("top_p: 0.5", "sampling.top_p", 0.5),
        ("top_k: 5", "sampling.top_k", 5),
        ("min_p: 0.5", "sampling.min_p", 0.5),
        ("repetition_penalty: 1.5", "sampling.repetition_penalty", 1.5),
        ("kv_cache_dtype: int8", "engine.kv_dtype", "int8"),
        ("tool_call_parser: hermes", "tool_format", "hermes"),
        ("tool_call_parser: llama3_json", "tool_format", "llama"),
        ("enable_prefix_caching: false", "engine.prefix_cache", False),
        ("ssl_certfile: c.pem\nssl_keyfile: k.pem", "tls.certificate", Path("c.pem")),
        ("ssl_certfile: c.pem\nssl_keyfile: k.pem", "tls.key", Path("k.pem")),
    ],
)
def test_keys_of_other_servers_are_ours_in_serving_yaml(text: str, path: str, value: object) -> None:
    Path("serving.yaml").write_text(f"{text}\n")
    with pytest.warns(OtherWordNote):
        found: Any = load_config("serving.yaml", ServingConfig)
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("served_model_name: [a, b]", r"^serving\.yaml:1:1: served_model_name: 2 names"),
        ("kv_cache_dtype: fp8", r"^serving\.yaml:1:1: engine\.kv_dtype: .*'int8'"),
        ("tool_call_parser: internlm", r"^serving\.yaml:1:1: tool_format: .*hermes"),
        (
            "max_num_seqs: 8\nengine: {max_concurrent: 9}",
            r"^serving\.yaml:1:1: max_num_seqs: .*both are given",
        ),
    ],
)
def test_a_value_of_another_server_that_is_none_of_ours_is_refused_at_its_place(text: str, said: str) -> None:
    Path("serving.yaml").write_text(f"{text}\n")
    with pytest.raises(GymError, match=said):
        load_config("serving.yaml", ServingConfig)


def test_the_words_are_imported_when_the_first_of_them_is_met() -> None:
    import subprocess

    code = (
        "import sys, gym_fed, gym_fed.cli.main; gym_fed.TrainingConfig(model='gym-nano'); "
        "print([name for name in sys.modules if name.startswith('gym_fed.interop')]); "
        "gym_fed.TrainingConfig(model='gym-nano', use_unsloth=True); print('gym_fed.interop.words' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epochs: 3", r"run\.yaml:2:1: epochs: unknown key \(did you mean 'num_train_epochs'\?\)"),
        (
            "batch_size: 24",
            r"run\.yaml:2:1: batch_size: .*'per_device_train_batch_size'.*8 and 3 on one device",
        ),
        ("lr: 1.0e-3", r"run\.yaml:2:1: lr: .*'learning_rate'"),
        ("max_seq_length: 512", r"run\.yaml:2:1: max_seq_length: .*'max_length'"),
        ("lora: {rank: 4}\nfinetuning: lora", r"run\.yaml:2:8: lora\.rank: .*'r'"),
        ("algorithm: gpro", r"run\.yaml:2:1: algorithm: unknown algorithm 'gpro'; did you mean 'grpo'\?"),
        ("algorithm: rm", r"algorithm: unknown algorithm 'rm'; did you mean 'reward_model'\?"),
        ("optimizer: adam", r"run\.yaml:2:1: optimizer: unknown optimizer 'adam'; did you mean 'adamw'\?"),
        ("optimizer: adamm_8bit", r"optimizer: .*; did you mean 'adamw_8bit'\?"),
        ("training: {learning_rat: 1.0}", r"run\.yaml:2:12: learning_rat: .*'learning_rate'"),
    ],
)
def test_a_near_miss_names_our_key_with_file_and_line(text: str, said: str) -> None:
    Path("run.yaml").write_text(f"model: gym-nano\n{text}\n")
    with pytest.raises(GymError, match=said):
        load_config("run.yaml", TrainingConfig)


def test_a_near_miss_in_a_section_of_elsewhere_is_reported_at_its_place() -> None:
    Path("run.yaml").write_text("model: {architecture: llama, hidden_size: 64, num_layer: 2, num_heads: 4}\n")
    with pytest.raises(GymError, match=r"run\.yaml:1:47: model_init\.num_layer: .*'num_hidden_layers'"):
        load_config("run.yaml", TrainingConfig)


def test_a_note_or_refusal_of_a_key_that_moved_names_the_line_that_it_stands_on() -> None:
    file = Path("run.yaml")
    head = "model: gym-nano\nseed: 1\ntraining:\n  max_steps: 1\n"
    file.write_text(head + "  batch_size: 16\n")
    with pytest.warns(OtherWordNote) as notes:
        load_config(file, TrainingConfig)
    said = [str(note.message) for note in notes]
    assert [text.partition(": ")[0] for text in said] == ["run.yaml:3:1", "run.yaml:5:3"], said
    file.write_text(head + "  batch_size: 0\n")
    with pytest.raises(GymError, match=r"^run\.yaml:5:3: batch_size: 0 rows"):
        load_config(file, TrainingConfig)
    file.write_text(head + "  quantization: {method: bitdelta, colour: red}\n")
    with pytest.raises(GymError, match=r"^run\.yaml:5:36: quantization\.colour: "):
        load_config(file, TrainingConfig)
    file.write_text(head + "  sequence_parallel: true\n")
    with pytest.raises(GymError, match=r"^run\.yaml:5:3: sequence_parallel: true"):
        load_config(file, TrainingConfig)


def test_a_word_and_ours_with_another_value_are_refused() -> None:
    Path("run.yaml").write_text("model: gym-nano\nunsloth: false\nuse_unsloth: true\n")
    with pytest.raises(
        GymError, match=r"run\.yaml:3:1: use_unsloth: is called unsloth in gym-fed, but both are given"
    ):
        load_config("run.yaml", TrainingConfig)


@pytest.mark.parametrize(
    ("total", "processes", "at_once", "found"),
    [
        (2048, 1, None, (8, 256)),
        (6, 1, None, (6, 1)),
        (64, 4, 2, (2, 8)),
        (7, 1, 2, None),
        (10, 4, None, None),
    ],
)
def test_a_global_batch_is_shared_out_evenly_or_not_at_all(
    total: int, processes: int, at_once: int | None, found: tuple[int, int] | None
) -> None:
    from gym_fed.interop.training_sections import split_batch

    assert split_batch(total, processes, at_once) == found


def test_an_unknown_command_or_option_is_refused_as_ever() -> None:
    done = CliRunner().invoke(app, ["trian"])
    assert (done.exit_code, "trian" in done.output) == (2, True)
    done = CliRunner().invoke(app, ["chat", "gym-nano", "--tempertaure", "1"])
    assert (done.exit_code, "--tempertaure" in done.output) == (2, True)
    with pytest.raises(GymError, match=r"^--lerning_rate: unknown key \(did you mean 'learning_rate'\?\)"):
        gym("train", "--model", "gym-nano", "--lerning_rate", "1")


def test_a_refused_flag_is_named_as_it_was_typed_and_a_setting_as_a_setting() -> None:
    with pytest.raises(GymError) as error:
        gym("train", "--model", "gym-nano", "--learning-rate=x", "--lora.rnk", "8", "--set", "epochs=3")
    lines = error.value.message.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["--learning-rate", "--lora.rnk", "--set"]
    assert lines[2].startswith("--set: epochs: unknown key")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (("--max_steps", "--model", "gym-nano"), "--max_steps: no value", "--max_steps VALUE"),
        (("--model", "gym-nano", "--lora"), "--lora is a section, not a key", "--finetuning lora"),
        (
            ("--model_name_or_path", "gym-nano", "--stage", "sft", "--max_steps"),
            "--max_steps: no value",
            "VALUE",
        ),
        (("my.jsonl",), "my.jsonl: this is a data file, not a config", "--data my.jsonl"),
        (("gym-nano", "--max_steps", "1"), "gym-nano: this is a model, not a config", "--model gym-nano"),
    ],
)
def test_a_word_in_the_wrong_place_is_refused_with_the_flag_to_write(
    words: tuple[str, ...], message: str, hint: str
) -> None:
    with pytest.raises(GymError) as error:
        gym("train", *words)
    assert error.value.message == message
    assert hint in error.value.hint


def test_columns_are_named_by_a_flag_for_every_file() -> None:
    from gym_fed.interop.flags import as_settings

    columns = ["--columns", "prompt=question,completion=answer"]
    words = as_settings(["--data", "a.jsonl", "--eval_data", "b.jsonl", *columns], {})
    named = {"prompt": "question", "completion": "answer"}
    given = {word.partition("=")[0]: json.loads(word.partition("=")[2]) for word in words if word != "--set"}
    assert given == {
        "data": [{"path": "a.jsonl", "columns": named}],
        "eval_data": [{"path": "b.jsonl", "columns": named}],
    }
    assert as_settings(["run.yaml", *columns], {})[-1] == f"data.0.columns={json.dumps(named)}"


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--packing", "bfd"], ['packing="bfd"']),
        (["--packing=bfd", "run.yaml"], ["run.yaml", 'packing="bfd"']),
        (["--packing", "run.yaml"], ["run.yaml", "packing=true"]),
        (["--packing", "false", "run.yaml"], ["run.yaml", "packing=false"]),
        (["--packing", "bfd", "run.yaml"], ["run.yaml", 'packing="bfd"']),
        (
            ["--resume-from-checkpoint", "a/checkpoints/checkpoint-4"],
            ['resume_from_checkpoint="a/checkpoints/checkpoint-4"'],
        ),
        (["run.yaml", "--resume-from-checkpoint"], ["run.yaml", "resume_from_checkpoint=true"]),
        (["run.yaml", "--resume-from-checkpoint", "no"], ["run.yaml", "resume_from_checkpoint=false"]),
    ],
)
def test_a_switch_that_takes_words_too_has_the_one_behind_it(words: list[str], settings: list[str]) -> None:
    from gym_fed.interop.flags import as_settings

    assert [word for word in as_settings(words, {}) if word != "--set"] == settings


def test_words_of_one_class_are_no_words_of_another() -> None:
    assert re.search("unexpected keyword|not permitted", _error(lambda: ServingConfig(use_unsloth=True)))  # type: ignore[call-arg]
    assert not hasattr(SimpleNamespace(), "fit")


def _error(act: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011 (pydantic's own)
        act()
    return str(error.value)
