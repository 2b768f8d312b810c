"""The shapes of LLaMA-Factory's example files: every key is translated, needed by nobody, or named with its line."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_fed.config.parsed import dialects
from gym_fed.config.train.data_source import DataConfig
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.training_file import as_yaml, load_training_config
from gym_fed.config.yaml.file import dump_yaml, load_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.sources import source_rows
from gym_fed.interop.llamafactory.translate import translate
from gym_fed.interop.llamafactory.translation import is_llamafactory

# What nearly all of its examples share; each shape below changes some of it. None takes a key away.
COMMON: dict[str, Any] = {
    "model_name_or_path": "gym-nano",
    "trust_remote_code": True,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "llama3",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "overwrite_cache": True,
    "preprocessing_num_workers": 16,
    "dataloader_num_workers": 4,
    "output_dir": "saves/x",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "overwrite_output_dir": True,
    "save_only_model": False,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}
NO_LORA = {"lora_rank": None, "lora_target": None, "finetuning_type": "full"}
HELD_OUT = {"val_size": 0.1, "per_device_eval_batch_size": 1, "eval_strategy": "steps", "eval_steps": 500}
SHARED = {
    "model": "gym-nano",
    "max_length": 2048,
    "output_dir": Path("saves/x"),
    "logging_steps": 10,
    "save_steps": 500,
    "seed": 42,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "gradient_checkpointing": True,
    "mixed_precision": "bf16",
    "data.0.dataset": "identity",
    "data.0.dataset_info": Path("data/dataset_info.json"),
    "data.0.num_examples": 1000,
    "data.1.dataset": "alpaca_en_demo",
    "tracking": ["jsonl", "tensorboard"],
}
GALORE = {"use_galore": True, "galore_layerwise": True, "galore_target": "all", "galore_rank": 128}
Shape = tuple[dict[str, Any], dict[str, Any]]

SHAPES: dict[str, Shape] = {
    "train_lora/sft": (
        {},
        {
            "base_dtype": "bfloat16",
            "algorithm": "sft",
            "lora.r": 8,
            "lora.lora_alpha": 16,
            "lora.target_modules": "all-linear",
        },
    ),
    "train_lora/pretrain": (
        {"stage": "pt", "dataset": "c4_demo", "template": None},
        {"algorithm": "pretrain", "packing": None, "data.0.dataset": "c4_demo", "data.1.dataset": None},
    ),
    "train_lora/reward": (
        {"stage": "rm", "dataset": "dpo_en_demo"},
        {"algorithm": "reward_model", "data.0.dataset": "dpo_en_demo", "data.1.dataset": None},
    ),
    "train_lora/dpo": (
        {
            "stage": "dpo",
            "pref_beta": 0.2,
            "pref_loss": "sigmoid",
            "learning_rate": 5.0e-6,
            "dataset": "dpo_en_demo",
        },
        {
            "algorithm": "dpo",
            "dpo.beta": 0.2,
            "dpo.loss_type": ["sigmoid"],
            "learning_rate": 5e-6,
            "data.0.dataset": "dpo_en_demo",
            "data.1.dataset": None,
        },
    ),
    "train_lora/dpo with a supervised term": (
        {"stage": "dpo", "pref_loss": "ipo", "pref_ftx": 0.5},
        {"dpo.beta": 0.1, "dpo.loss_type": ["ipo", "sft"], "dpo.loss_weights": [1.0, 0.5]},
    ),
    "train_lora/orpo": ({"stage": "dpo", "pref_loss": "orpo"}, {"algorithm": "orpo", "orpo.beta": 0.1}),
    "train_lora/simpo": (
        {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.5, "simpo_gamma": 1.0},
        {"algorithm": "simpo", "simpo.beta": 2.5, "simpo.gamma": 1.0},
    ),
    "train_lora/kto": (
        {"stage": "kto", "pref_beta": 0.1, "kto_chosen_weight": 1.5, "dataset": "kto_en_demo"},
        {
            "algorithm": "kto",
            "kto.desirable_weight": 1.5,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 8,
            "data.0.dataset": "kto_en_demo",
            "data.1.dataset": None,
        },
    ),
    "train_lora/ppo": (
        {"stage": "ppo", "reward_model": "saves/reward", "max_new_tokens": 512, "top_k": 0, "top_p": 0.9},
        {
            "algorithm": "ppo",
            "graders.0.grader": "reward_model",
            "graders.0.model": "saves/reward",
            "ppo.max_completion_length": 512,
            "ppo.top_k": 0,
            "ppo.top_p": 0.9,
            "ppo.temperature": 0.95,
            "ppo.num_iterations": 4,
        },
    ),
    "train_lora/sft on several GPUs": (
        {"deepspeed": "examples/deepspeed/ds_z3_config.json", "eval_dataset": "alpaca_en_demo"},
        {
            "distributed.strategy": "deepspeed",
            "distributed.zero_stage": 3,
            "distributed.cpu_offload": False,
            "eval_data.0.dataset": "alpaca_en_demo",
        },
    ),
    "train_qlora/otfq": (
        {"quantization_bit": 4, "quantization_method": "bnb", "double_quantization": False},
        {
            "quantization.bits": 4,
            "quantization.quant_type": "nf4",
            "quantization.double_quant": False,
            "quantization.compute_dtype": "bfloat16",
        },
    ),
    "train_full/sft": (
        {**NO_LORA, "deepspeed": "ds_z2_offload_config.json", "learning_rate": 1.0e-5, **HELD_OUT},
        {
            "finetuning": "full",
            "lora": None,
            "distributed.zero_stage": 2,
            "distributed.cpu_offload": True,
            "learning_rate": 1e-5,
            "eval_split": 0.1,
            "eval_steps": 500,
        },
    ),
    "extras/galore": (
        {**NO_LORA, **GALORE, "galore_scale": 2.0, "bf16": None, "pure_bf16": True, "optim": "adamw_torch"},
        {
            "optimizer": "galore_adamw",
            "optimizer_args": {"rank": 128, "update_proj_gap": 200, "scale": 2.0, "proj_type": "std"},
            "dtype": "bfloat16",
            "mixed_precision": "no",
        },
    ),
    "extras/apollo": (
        {**NO_LORA, "use_apollo": True, "apollo_layerwise": True, "apollo_rank": 128, "apollo_scale": 32.0},
        {"optimizer": "apollo_adamw", "optimizer_args.rank": 128, "optimizer_args.scale": 32.0},
    ),
    "extras/badam": (
        {
            **NO_LORA,
            "use_badam": True,
            "badam_mode": "layer",
            "badam_switch_interval": 50,
            "badam_verbose": 2,
        },
        {
            "optimizer": "badam",
            "optimizer_args": {"switch_mode": "ascending", "switch_block_every": 50},
        },
    ),
    "extras/adam_mini": ({**NO_LORA, "use_adam_mini": True}, {"optimizer": "adam_mini"}),
    "extras/muon": ({**NO_LORA, "use_muon": True}, {"optimizer": "muon"}),
    "extras/loraplus": ({"loraplus_lr_ratio": 16.0}, {"lora.loraplus_lr_ratio": 16.0}),
    "extras/pissa": (
        {"pissa_init": True, "pissa_iter": 16, "pissa_convert": True},
        {"lora.init_lora_weights": "pissa_niter_16"},
    ),
    "extras/oft": (
        {**NO_LORA, "finetuning_type": "oft", "oft_block_size": 16, "oft_target": "q_proj,v_proj"},
        {
            "finetuning": "oft",
            "oft.oft_block_size": 16,
            "oft.r": 0,
            "oft.target_modules": ["q_proj", "v_proj"],
        },
    ),
    "extras/mod": (
        {
            **NO_LORA,
            "mixture_of_depths": "convert",
            "optim": "paged_adamw_8bit",
            "bf16": None,
            "pure_bf16": True,
        },
        {"mixture_of_depths.capacity": 0.125, "mixture_of_depths.every": 2, "optimizer": "paged_adamw_8bit"},
    ),
    "extras/fsdp_qlora": (
        {"quantization_bit": 4, "lora_target": "q_proj,v_proj", "bf16": None, "fp16": True, **HELD_OUT},
        {"lora.target_modules": ["q_proj", "v_proj"], "mixed_precision": "fp16", "eval_split": 0.1},
    ),
    "checkpoints at ends of epochs": (
        {**HELD_OUT, "save_strategy": "epoch", "eval_strategy": "epoch", "eval_steps": None},
        {"save_strategy": "epoch", "save_steps": 0, "eval_strategy": "epoch", "eval_steps": 0},
    ),
    "going on from adapters, beside a reference": (
        {
            **{"stage": "dpo", "adapter_name_or_path": "saves/a,saves/b", "create_new_adapter": True},
            **{"ref_model": "saves/start", "ref_model_adapters": "saves/c"},
        },
        {
            **{"adapter": ["saves/a", "saves/b"], "new_adapter": True},
            **{"reference_model": "saves/start", "reference_adapter": ["saves/c"]},
        },
    ),
    "extras/dft": ({**NO_LORA, "use_dft_loss": True}, {"sft.loss_type": "dft"}),
    "a system message and no thoughts": (
        {"default_system": "Be brief.", "enable_thinking": False},
        {"default_system": "Be brief.", "reasoning": "off"},
    ),
    "extras/asft": (
        {**NO_LORA, "use_asft_loss": True, "asft_alpha": 0.3},
        {"sft.loss_type": "asft", "sft.asft_alpha": 0.3},
    ),
    "extras/llama_pro": (
        {"finetuning_type": "freeze", "freeze_trainable_layers": 8, "use_llama_pro": True},
        {"freeze.llama_pro": True, "freeze.num_trainable_layers": 8},
    ),
    "extras/eaft": (
        {**NO_LORA, "use_eaft_loss": True, "eaft_alpha": 2.0},
        {"sft.loss_type": "eaft", "sft.eaft_alpha": 2.0},
    ),
    "smoothed labels in order": (
        {"label_smoothing_factor": 0.1, "disable_shuffling": True},
        {"sft.label_smoothing": 0.1, "shuffle": False},
    ),
    "evaluation alone": (
        {"do_train": None, "do_eval": True, "dataset": None, "eval_dataset": "identity"},
        {"evaluate_only": True, "eval_data.0.dataset": "identity", "data.0.dataset": None}
        | {"data.0.dataset_info": None, "data.0.num_examples": None, "data.1.dataset": None},
    ),
    "no checkpoints": ({"save_strategy": "no"}, {"save_strategy": "no", "save_steps": 0}),
    "train_lora/preprocess": (
        {"do_train": None, "tokenized_path": "saves/rows"},
        {"preprocess_only": True, "tokenized_path": "saves/rows"},
    ),
    "rows that were encoded before": (
        {"tokenized_path": "saves/rows"},
        {"preprocess_only": False, "tokenized_path": "saves/rows"},
    ),
    "rows of the hub by name": (
        {"dataset_dir": "ONLINE", "dataset": "owner/rows"},
        {
            "data.0.hub": "owner/rows",
            "data.0.dataset": None,
            "data.0.dataset_info": None,
            "data.1.dataset": None,
        },
    ),
    "grpo with a reward model": (
        {"stage": "grpo", "reward_model": "saves/reward", "max_new_tokens": 32, "num_generations": 4},
        {
            "algorithm": "grpo",
            "graders.0.model": "saves/reward",
            "grpo.max_completion_length": 32,
            "grpo.num_generations": 4,
            "grpo.temperature": 1.0,
        },
    ),
    "megatron's switches": (
        {
            **{"tensor_model_parallel_size": 1, "sequence_parallel": False, "mixed_precision": "bf16_mixed"},
            **{"overlap_grad_reduce": True, "use_packed_sequences": False},
        },
        {"distributed": None},
    ),
    "examples of ascend": (
        {"use_v1_kernels": True, "flash_attn": "fa2", "disable_gradient_checkpointing": True},
        {"attention": "flash_attention_2", "gradient_checkpointing": False},
    ),
    "gradient_checkpointing as transformers writes it": (
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": False},
    ),
    "freeze": (
        {
            **NO_LORA,
            "finetuning_type": "freeze",
            "freeze_trainable_layers": 2,
            "freeze_trainable_modules": "mlp,norm",
        },
        {"freeze.num_trainable_layers": 2, "freeze.trainable_modules": ["mlp", "norm"]},
    ),
    "long rows": (
        {
            **{"shift_attn": True, "rope_scaling": "yarn", "flash_attn": "auto", "neftune_noise_alpha": 5},
            **{
                "neat_packing": True,
                "use_rslora": True,
                "use_dora": True,
                "lora_dropout": 0.1,
                "lora_alpha": 64,
            },
        },
        {
            "shift_attention.group_size_ratio": 0.25,
            "rope_scaling.type": "yarn",
            "rope_scaling.factor": 8.0,
            "attention": "auto",
            "neftune_noise_alpha": 5.0,
            "packing": "bfd",
            "lora.use_rslora": True,
            "lora.use_dora": True,
            "lora.lora_dropout": 0.1,
            "lora.lora_alpha": 64,
        },
    ),
    "a GPU's kernels": (
        {
            "flash_attn": "fa2",
            "enable_liger_kernel": True,
            "use_unsloth": True,
            "report_to": "wandb",
            "run_name": "a",
        },
        {
            "attention": "flash_attention_2",
            "liger": True,
            "unsloth": True,
            "tracking": ["jsonl", "tensorboard", "wandb"],
            "tracker.name": "a",
        },
    ),
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    file = folder / "llamafactory.yaml"
    values = {**COMMON, **changes}
    file.write_text(
        yaml.safe_dump(
            {key: value for key, value in values.items() if value is not None or key not in changes},
            sort_keys=False,
        )
    )
    return file


def at(config: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(config, list):
            config = config[int(key)] if int(key) < len(config) else None
        elif isinstance(config, dict):
            config = config[key]
        else:
            config = getattr(config, key, None)
    return config


@pytest.mark.parametrize("name", SHAPES)
def test_an_example_file_is_translated_key_by_key(tmp_path: Path, name: str) -> None:
    changes, expected = SHAPES[name]
    config, notes = load_training_config(written(tmp_path, changes))
    default = {"mixed_precision": "no"} if "bf16" in changes else {}
    for path, value in {**SHARED, **default, **expected}.items():
        assert at(config, path) == value, path
    for note in notes:
        place, _, rest = note.removeprefix(f"{tmp_path / 'llamafactory.yaml'}:").partition(":")
        key = rest.split(": ")[1]
        line = (tmp_path / "llamafactory.yaml").read_text().splitlines()[int(place) - 1]
        assert line.startswith(f"{key}:"), note


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_imported_reads_the_same_as_the_file(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, SHAPES[name][0])
    text, comments = as_yaml(file)
    (tmp_path / "ours.yaml").write_text(text)
    ours = load_config(tmp_path / "ours.yaml", TrainingConfig)
    assert ours == load_training_config(file)[0]
    assert all(comment in text for comment in comments)
    (tmp_path / "resolved.yaml").write_text(dump_yaml(ours))
    assert load_config(tmp_path / "resolved.yaml", TrainingConfig) == ours


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_reward_models_and_checkpoints_are_named_by_their_folders(tmp_path: Path, kind: str) -> None:
    ppo = {"stage": "ppo", "reward_model": "saves/score", "reward_model_type": kind, "dataset": "identity"}
    config, _ = load_training_config(written(tmp_path, ppo))
    assert [(grader.grader, grader.model) for grader in config.graders] == [("reward_model", "saves/score")]
    going_on = {"resume_from_checkpoint": "saves/x/checkpoint-40"}
    config, _ = load_training_config(written(tmp_path, going_on))
    assert config.resume_from_checkpoint == "saves/x/checkpoint-40"


def test_a_file_that_says_little_gets_the_defaults_of_there_and_not_ours(tmp_path: Path) -> None:
    file = tmp_path / "short.yaml"
    file.write_text("model_name_or_path: gym-nano\nstage: sft\ndo_train: true\ndataset: a\n")
    config, notes = load_training_config(file)
    assert notes == []
    assert (config.finetuning, config.lora.r, config.lora.lora_alpha) == ("lora", 8, 16)
    assert (config.learning_rate, config.num_train_epochs, config.seed) == (5e-5, 3.0, 42)
    assert (config.max_length, config.save_steps, config.gradient_checkpointing) == (2048, 500, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"crop_to_patches": True}, "crop_to_patches: no counterpart"),
        ({"stage": "dpo", "enable_thinking": False}, "enable_thinking: no counterpart: only sft"),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_method: no counterpart: hqq"),
        ({"stage": "dpo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing: no counterpart"),
        ({"stage": "ppo", "reward_model": "http://x", "reward_model_type": "api"}, "use our grader remote"),
        (
            {"stage": "ppo", "reward_model": "x", "reward_model_type": "fool"},
            "'fool' is not one of lora, oft, full",
        ),
        ({"fp8": True, "fp8_backend": "torchao"}, "fp8: no counterpart: float8 training needs torchao"),
        ({"use_kt": True, "kt_weight_path": "x"}, "use_kt: no counterpart: KTransformers computes"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size: no counterpart: Megatron's"),
        (
            {"dataset_dir": "REMOTE:owner/none"},
            "owner/none is not on this machine; download it with: hf down",
        ),
        ({"save_strategy": "best"}, "'best' is not one of no, steps, epoch"),
        ({"mix_strategy": "interleave_over", "interleave_probs": "0.3,0.7"}, "mix_strategy: no counterpart"),
        ({"use_badam": True, "badam_mode": "ratio"}, "badam_mode: no counterpart"),
        ({"lora_rnak": 4}, r"did you mean 'lora_rank'"),
        ({"finetuning_type": "full", "lora_rnak": 4}, r"did you mean 'lora_rank'"),
        ({"cutof_len": 4}, r"did you mean 'cutoff_len'"),
        ({"learning_rat": 4}, r"did you mean 'learning_rate'"),
        ({"deepspeed": "mine.json"}, "does not contain the ZeRO stage"),
    ],
)
def test_what_decides_the_result_and_has_no_counterpart_stops_the_run_with_its_line(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    file = written(tmp_path, changes)
    with pytest.raises(GymError, match=words) as caught:
        load_training_config(file)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert "--ignore-unsupported" in caught.value.hint
    lines = file.read_text().splitlines()
    for problem in caught.value.message.splitlines():
        place, key = problem.removeprefix(f"{file}:").split(":")[0], problem.split(": ")[1]
        assert lines[int(place) - 1].startswith(key)


def test_all_of_them_are_named_at_once_and_may_be_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, {"fp8": True, "crop_to_patches": True, "tool_format": "glm4"})
    with pytest.raises(GymError) as caught:
        load_training_config(file)
    assert len(caught.value.message.splitlines()) == 3
    config, notes = load_training_config(file, ["max_steps=3"], ignore_unsupported=True)
    assert config.max_steps == 3
    assert sum("no counterpart" in note for note in notes) == 3
    assert "# fp8: float8 training" in as_yaml(file, ignore_unsupported=True)[0]


def test_a_wrong_value_is_reported_with_the_line_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, {"lora_rank": 0, "lr_scheduler_type": "sawtooth"})
    lines = file.read_text().splitlines()
    with pytest.raises(GymError) as caught:
        load_training_config(file)
    for key in ("lora_rank", "lr_scheduler_type"):
        number = next(i for i, line in enumerate(lines, 1) if line.startswith(key))
        assert f"{file}:{number}:1: " in caught.value.message
    with pytest.raises(GymError, match=r"--set: lora\.r"):
        load_training_config(written(tmp_path, {}), ["lora.r=0"])


def test_switched_off_keys_are_no_obstacle() -> None:
    off = {
        "mask_history": False,
        "use_dft_loss": False,
        "fp8": False,
        "pref_bco_weight": 0.0,
        "use_galore": False,
    }
    assert translate({**COMMON, **off}).lost == {}


def test_a_deepspeed_file_that_is_here_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    config, _ = load_training_config(written(tmp_path, {"deepspeed": str(file)}))
    assert (config.distributed.zero_stage, config.distributed.cpu_offload) == (3, True)


def test_rope_scaling_stretches_by_what_cutoff_len_needs(tmp_path: Path) -> None:
    config, notes = load_training_config(written(tmp_path, {"rope_scaling": "linear", "cutoff_len": 256}))
    assert config.rope_scaling is None
    assert any("rope_scaling: not needed" in note for note in notes)


def test_our_own_files_are_not_taken_for_llamafactorys(tmp_path: Path) -> None:
    assert is_llamafactory(COMMON)
    assert not is_llamafactory({"model": "gym-nano", "algorithm": "sft"})
    assert not is_llamafactory({"model_name_or_path": "gym-nano"})
    file = tmp_path / "ours.yaml"
    file.write_text("model: gym-nano\n")
    with pytest.raises(GymError, match="not a LLaMA-Factory file") as caught:
        as_yaml(file)
    assert caught.value.code is ErrorCode.USAGE


def test_a_set_of_the_hub_is_the_catalogues_where_there_is_no_list_of_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = translate({**COMMON, "dataset": "alpaca_gpt4_en,alpaca_en_demo,mine"})
    info = {"dataset_info": "data/dataset_info.json", "num_examples": 1000}
    wanted = [{"dataset": "alpaca_en_demo", **info}, {"dataset": "mine", **info}]
    assert done.values["data"] == [{"name": "alpaca_gpt4_en", "num_examples": 1000}, *wanted]
    assert (
        "data/dataset_info.json does not exist; read from the catalogue (gym data catalogue): alpaca_gpt4_en"
        in done.notes["dataset"]
    )
    with pytest.raises(
        GymError, match=r"no dataset_info.json at .*'alpaca_en_demo' are in LLaMA-Factory's"
    ) as caught:
        list(source_rows(DataConfig(**wanted[0])))
    assert "dataset_dir: LLaMA-Factory/data" in str(caught.value.hint)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text('{"alpaca_gpt4_en": {"file_name": "a.json"}}')
    assert translate({**COMMON, "dataset": "alpaca_gpt4_en"}).values["data"][0]["dataset"] == "alpaca_gpt4_en"


@pytest.mark.parametrize("key", ["add_tokens", "add_special_tokens", "resize_vocab"])
def test_tokens_that_would_be_added_are_refused_with_the_line_and_what_to_do(
    tmp_path: Path, key: str
) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(
        yaml.safe_dump({**COMMON, key: True if key == "resize_vocab" else "<a>,<b>"}, sort_keys=False)
    )
    with pytest.raises(GymError, match=rf"tokens.yaml:\d+:1: {key}: no counterpart") as caught:
        load_training_config(file)
    assert "resize_token_embeddings" in caught.value.message
    assert "additional_target: embed_tokens,lm_head" in caught.value.message


def test_the_installed_entry_points_are_those_of_pyproject() -> None:
    """Without them a file of LLaMA-Factory would only have unknown keys."""
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    for group, points in project["entry-points"].items():
        installed = {point.name: point.value for point in entry_points(group=group)}
        assert points.items() <= installed.items(), f"{group}: run make install"
    assert [dialect.title for dialect in dialects()] == ["LLaMA-Factory"]
