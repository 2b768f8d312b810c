"""What `gym train --plan` estimates: weights exactly, activations and optimiser state by what torch keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import OPTIMIZERS
from gym_fed.training.planning.memory import activation_bytes, block_bytes, memory_of, tokens_of_batch
from gym_fed.training.planning.plan import (
    BlockTiming,
    calibrate,
    duration,
    gib,
    plan_run,
    step_operations,
    step_seconds,
    steps_of,
)
from gym_fed.training.planning.sizes import sizes_of
from gym_fed.training.rows.batch_size import budget_bytes
from tests.support.siblings import make_sibling

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "tie_word_embeddings": True,
}
PUBLIC = {
    "Qwen3-0.6B": (
        596_049_920,
        {
            "model_type": "qwen3",
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.1-8B": (
        8_030_261_248,
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "tie_word_embeddings": False,
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        {
            "model_type": "mistral",
            "vocab_size": 32_768,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "tie_word_embeddings": False,
        },
    ),
}


def folder(path: Path, config: dict[str, Any]) -> str:
    """A model folder with a config alone."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def run(model: str, **changes: Any) -> TrainingConfig:
    return TrainingConfig(model=model, data=[{"tasks": ["copy"], "num_examples": 40}], **changes)


@pytest.fixture
def small(tmp_path: Path) -> str:
    return folder(tmp_path / "small", {"model_type": "llama", **SMALL})


@pytest.mark.parametrize("name", PUBLIC)
def test_the_weights_of_public_models_are_counted_from_their_config_alone(tmp_path: Path, name: str) -> None:
    total, config = PUBLIC[name]
    sizes = sizes_of(run(folder(tmp_path / "m", config)))
    assert sizes.total == sizes.num_trained == total
    assert sizes.frozen == 0


def test_lora_on_an_8b_model_trains_the_factors_of_its_matrices(tmp_path: Path) -> None:
    total, config = PUBLIC["Llama-3.1-8B"]
    sizes = sizes_of(run(folder(tmp_path / "m", config), finetuning="lora", lora={"r": 16}))
    pairs = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), *[(4096, 14_336)] * 3]
    assert sizes.num_trained == 32 * sum(16 * (a + b) for a, b in pairs)
    assert (sizes.total, sizes.frozen) == (total, total)
    assert sizes.linear == 32 * sum(a * b for a, b in pairs)


def test_the_active_weights_of_experts_are_the_share_that_a_token_passes(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sizes = sizes_of(run(folder(tmp_path / "m", {"model_type": "qwen3_moe", **SMALL, **experts})))
    attention = 2 * 32 * 64 + 2 * 32 * 32
    assert (
        sizes.active == 2 * (attention + 2 * 3 * 24 * 32) + 64 * 32
    )  # and a router of 8 rows, which counts for nothing
    assert sizes.shape.inner == 48


def kept(model: str, layers: int, dtype: str, attention: str, dropout: float | None = None) -> int:
    """Bytes that autograd keeps of a real forward pass of 2 rows of 8 tokens; with ``dropout``, under LoRA.

    Copies of weights, which autocast makes, are left out.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * layers
    made: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    made = made.to(torch.float32 if dtype == "mixed" else getattr(torch, dtype)).train()
    if dropout is not None:
        from peft import LoraConfig, get_peft_model

        made = get_peft_model(made, LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear"))
    shapes = {tuple(value.shape) for value in made.parameters()}
    weights = {value.untyped_storage().data_ptr() for value in made.parameters()}
    seen: dict[int, int] = {}

    def pack(value: Any) -> Any:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights and not shapes & {tuple(value.shape), tuple(value.shape[::-1])}:
            seen[storage.data_ptr()] = storage.nbytes()
        return value

    ids = torch.zeros(2, 8, dtype=torch.long)
    autocast = dtype == "mixed" or (dropout is not None and dtype == "bfloat16")
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with mixed, torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        made(input_ids=ids, labels=ids, use_cache=False)
    return sum(seen.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_activations_of_a_block_are_what_autograd_keeps(
    tmp_path: Path, kind: str, dtype: str, attention: str
) -> None:
    model = folder(tmp_path / "m", {"model_type": kind, **SMALL})
    config = run(model, dtype=dtype, attention=attention)
    found = (kept(model, 3, dtype, attention) - kept(model, 1, dtype, attention)) / 2 / 16
    assert block_bytes(config, sizes_of(config).shape, 8) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activations_under_lora_are_what_autograd_keeps(
    tmp_path: Path, kind: str, dtype: str, dropout: float
) -> None:
    model = folder(tmp_path / "m", {"model_type": kind, **SMALL})
    mixed = {"base_dtype": "bfloat16", "mixed_precision": "bf16"} if dtype == "bfloat16" else {}
    config = run(model, finetuning="lora", lora={"r": 4, "lora_dropout": dropout}, **mixed)
    found = (kept(model, 3, dtype, "sdpa", dropout) - kept(model, 1, dtype, "sdpa", dropout)) / 2 / 16
    assert block_bytes(config, sizes_of(config).shape, 8) == pytest.approx(found, rel=0.03)


def test_activations_of_mixed_precision_are_what_autograd_keeps(small: str) -> None:
    config = run(small, mixed_precision="bf16")
    sizes = sizes_of(config)
    found = (kept(small, 3, "mixed", "sdpa") - kept(small, 1, "mixed", "sdpa")) / 2 / 16
    assert block_bytes(config, sizes.shape, 8) == pytest.approx(found, rel=0.03)
    assert memory_of(config, sizes).weights == 4 * sizes.total + 2 * sizes.linear  # and a copy of each matrix


def test_checkpointing_keeps_one_block_and_the_inputs_of_the_others(small: str) -> None:
    plain, saving = run(small), run(small, gradient_checkpointing=True)
    shape = sizes_of(plain).shape
    norm = 32 * 12 + 4
    assert activation_bytes(plain, shape, 8) == 2 * block_bytes(plain, shape, 8) + norm
    assert activation_bytes(saving, shape, 8) == 2 * 32 * 4 + block_bytes(plain, shape, 8) + norm


def test_the_logits_of_a_batch_are_a_tile_where_the_loss_reads_tiles(small: str, tmp_path: Path) -> None:
    plain, eaft = run(small), run(small, sft={"loss_type": "eaft"})
    reward = run(small, algorithm="reward_model")
    tokens, sizes = tokens_of_batch(plain), sizes_of(plain)
    ends = 4 * 32 * (tokens + 64)  # gradients of what enters the head, and of the head
    assert memory_of(plain, sizes).logits == tokens * 64 * (4 + 29) + ends
    assert memory_of(plain, sizes, device="cuda").logits == tokens * 64 * 4 + ends
    assert memory_of(eaft, sizes).logits == tokens * 64 * 16
    assert memory_of(reward, sizes).logits == 0
    large = run(folder(tmp_path / "m", PUBLIC["Qwen3-0.6B"][1]), max_length=8192, finetuning="lora")
    tile = 4096 * 32768 * 4
    assert memory_of(large, sizes_of(large), device="cuda").logits == tile + 4 * 1024 * tokens_of_batch(large)


def test_differentiating_a_tile_takes_the_bytes_that_are_stated() -> None:
    import torch
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    hidden = torch.randn(256, 8, requires_grad=True)
    head, targets = torch.randn(4096, 8, requires_grad=True), torch.zeros(256, dtype=torch.long)
    loss = ChunkedLogProbFunction.apply(hidden, head, None, targets, 1.0, 4096)[0].sum()
    with torch.profiler.profile(profile_memory=True) as profile:
        loss.backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    tile = 256 * 4096 * (4 + 29)
    assert most == pytest.approx(tile + 4 * 8 * (256 + 4096), rel=0.02)


def held(value: Any) -> int:
    """Bytes of all tensors in an optimiser's state."""
    import torch

    if torch.is_tensor(value):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(held, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(held, value))
    return held(vars(value)) if hasattr(value, "__dict__") else 0


@pytest.mark.parametrize(
    "name",
    [
        *(
            "adamw",
            "adamw_8bit",
            "adafactor",
            "adagrad",
            "adam_mini",
            "ademamix",
            "apollo_adamw",
            "galore_adafactor",
        ),
        *(
            "galore_adamw",
            "lion",
            "lion_8bit",
            "muon",
            "rmsprop",
            "schedulefree_adamw",
            "schedulefree_sgd",
            "sgd",
            "soap",
        ),
    ],
)
def test_the_state_that_an_optimiser_states_is_the_state_that_it_keeps(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    wide = {**SMALL, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "vocab_size": 512}
    model = folder(tmp_path / "m", {"model_type": "llama", **wide})
    config = run(model, optimizer=name, lr_scheduler_type="constant")
    choice = OPTIMIZERS.new(name)
    try:
        choice.check(config)
    except GymError as error:
        if error.code is not ErrorCode.MISSING_DEPENDENCY:
            raise
        pytest.skip(error.message)
    made: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    optimizer = choice.make(made, config) or torch.optim.AdamW(made.parameters())
    if name.startswith("schedulefree"):
        optimizer.train()
    ids = torch.ones(1, 4, dtype=torch.long)
    made(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    stated = sum(choice.state_bytes(weight, config) for weight in sizes_of(config).trained)
    assert stated == pytest.approx(held(dict(optimizer.state)), rel=0.07, abs=2048)


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, (0, 0)),
        ({"algorithm": "dpo"}, (0, 0)),  # its reference has scored the rows before
        ({"algorithm": "dpo", "dpo": {"precompute_ref_log_probs": False}}, (1, 0)),
        ({"algorithm": "tdpo"}, (1, 0)),
        ({"algorithm": "dpo", "finetuning": "lora"}, (0, 0)),
        ({"algorithm": "ppo", "ppo": {"beta": 0.1}}, (1, 1)),
        ({"algorithm": "ppo", "ppo": {"train_critic_body": False}}, (1, 0)),
    ],
)
def test_copies_beside_the_model_are_those_of_the_algorithm(
    small: str, changes: dict[str, Any], copies: tuple[int, int]
) -> None:
    config = run(small, **changes)
    sizes = sizes_of(config)
    memory = memory_of(config, sizes)
    frozen, trained = copies
    body = sizes.total * 4
    kept_too = memory.activations if trained else 0
    assert memory.copies == frozen * body + trained * (2 * body + 8 * sizes.total) + kept_too
    pairs = 2 if changes.get("algorithm") in ("dpo", "tdpo") else 1
    assert tokens_of_batch(config) // tokens_of_batch(run(small)) in (pairs, 10)


def test_shards_bits_and_adapters_take_what_they_promise(tmp_path: Path) -> None:
    total, values = PUBLIC["Llama-3.1-8B"]
    model = folder(tmp_path / "m", values)
    full = run(model, dtype="bfloat16")
    whole = memory_of(full, sizes_of(full), device="cuda")
    assert (whole.weights, whole.gradients, whole.optimizer) == (2 * total, 2 * total, 4 * total)
    split = run(model, dtype="bfloat16", distributed={"strategy": "fsdp2"})
    assert memory_of(split, sizes_of(split), device="cuda", processes=8).weights == 2 * total / 8
    zero2 = run(model, dtype="bfloat16", distributed={"strategy": "deepspeed"})
    two = memory_of(zero2, sizes_of(zero2), device="cuda", processes=8)
    assert (two.weights, two.optimizer) == (2 * total, 4 * total / 8)
    mixed = {"base_dtype": "bfloat16", "mixed_precision": "bf16"}
    bits = run(model, finetuning="lora", quantization={"bits": 4}, **mixed)
    few = memory_of(bits, sizes_of(bits), device="cuda")
    assert (
        5.2e9 < few.weights < 6.2e9
    )  # 7 billion in half a byte and its scales, embeddings and head in two bytes
    assert few.peak < whole.peak / 2.5


def test_a_process_takes_more_under_an_adapter_on_a_cpu_alone(small: str) -> None:
    full, lora = run(small), run(small, finetuning="lora")
    more = {
        device: memory_of(lora, sizes_of(lora), device=device).process
        - memory_of(full, sizes_of(full), device=device).process
        for device in ("cpu", "cuda")
    }
    assert more == {"cpu": 44 << 20, "cuda": 0}


def test_steps_and_time_follow_rows_epochs_and_operations(small: str) -> None:
    config = run(small, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3)
    assert (steps_of(config), steps_of(config, processes=5)) == (15, 3)
    assert steps_of(config.model_copy(update={"eval_split": 0.1})) == 15  # 36 of 40 rows
    assert steps_of(config.model_copy(update={"eval_split": 8})) == 12
    assert steps_of(run(small, max_steps=7)) == 7
    assert steps_of(TrainingConfig(model=small, data=[{"hub": "a/b"}])) is None
    assert (
        steps_of(TrainingConfig(model=small, data=[{"name": "gsm8k"}], per_device_train_batch_size=100)) == 75
    )
    sizes, adapted = sizes_of(config), sizes_of(run(small, finetuning="lora"))
    tokens = 4 * 2 * 256
    matrices = 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48) + 64 * 32
    head = 64 * 32  # its tiles are computed again backwards
    assert step_operations(config, sizes) == tokens * (3 * (2 * matrices + 2 * 2 * 64 * 256) + 2 * head)
    assert step_operations(run(small, finetuning="lora"), adapted) < step_operations(run(small), sizes)
    timing = BlockTiming(block=2e-6, rest=1e-6, update=0.0, length=256)
    assert step_seconds(config, sizes, timing) == pytest.approx(tokens * 5e-6)
    updated = BlockTiming(
        block=0.0, rest=0.0, update=1e-9, length=256
    )  # AdamW moves ten values of each weight
    assert step_seconds(config, sizes, updated) == pytest.approx(1e-9 * 10 * 4 * sizes.num_trained)


def test_a_calibration_times_blocks_of_the_model_and_leaves_large_ones(small: str, tmp_path: Path) -> None:
    import torch

    config = run(small, per_device_train_batch_size=2, max_length=32)
    measured = calibrate(config, sizes_of(config), torch.device("cpu"))
    assert measured is not None
    assert measured.block >= 0 < measured.rest + measured.block
    assert measured.update > 0
    assert measured.length == 32
    large = run(folder(tmp_path / "m", PUBLIC["Llama-3.1-8B"][1]))
    assert calibrate(large, sizes_of(large), torch.device("cpu")) is None


def test_a_model_that_reads_images_is_planned_without_a_time(tmp_path: Path) -> None:
    model = make_sibling("qwen2_vl", tmp_path / "model")
    plan = plan_run(run(str(model), per_device_train_batch_size=2, max_length=32))
    assert plan.sizes.num_trained < plan.sizes.total, "tower and projector are frozen"
    assert plan.seconds is None


def test_the_command_prints_the_plan_and_writes_nothing(small: str, tmp_path: Path) -> None:
    from gym_fed.cli.main import app

    config = tmp_path / "c.yaml"
    out = tmp_path / "out"
    config.write_text(
        f"model: {small}\ndata: [{{tasks: [copy], num_examples: 40}}]\nmax_length: 16\noutput_dir: {out}\n"
    )
    printed = CliRunner().invoke(app, ["train", str(config), "--plan", "--json"])
    assert printed.exit_code == 0, printed.output
    facts = json.loads(printed.stdout)
    assert facts["weights"] == facts["trained"] == plan_run(run(small), timed=False).sizes.total
    assert facts["steps"] == 5
    assert facts["peak_bytes"] > facts["memory"]["process"]
    assert not out.exists()
    shown = CliRunner().invoke(app, ["train", str(config), "--plan"]).stdout
    assert "memory at the peak" in shown
    assert "time per step" in shown


def test_sizes_and_times_are_shown_in_the_unit_that_people_use() -> None:
    assert [gib(3 << 20), gib(3 << 30)] == ["3.0 MiB", "3.00 GiB"]
    assert [duration(90), duration(600), duration(9000), duration(400000)] == [
        "90 seconds",
        "10.0 minutes",
        "2.5 hours",
        "4.6 days",
    ]


def test_a_device_that_this_machine_lacks_is_planned_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = plan_run(TrainingConfig(model="gym-nano", device="cuda", max_steps=2))
    assert (plan.device, plan.available, plan.seconds) == ("cuda", None, None)
    lines = dict(plan.lines())
    assert lines["memory at the peak"].endswith("on cuda, which this machine lacks")
    assert lines["time"] == "not measured: this machine has no cuda"


def test_a_processor_has_no_more_memory_than_the_limit_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.doctor.checks.devices.GROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    config = TrainingConfig(
        model="gym-nano", device="cpu", max_steps=2, auto_batch_size={"memory_share": 0.5}
    )
    assert plan_run(config, timed=False).available == 5_000_000
    assert budget_bytes(config, on_cuda=False) == 2_000_000


_WINDOW = {"sliding_window": 8, "use_sliding_window": True}


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_a_calibration_of_a_model_with_fewer_layers_than_it_times_repeats_their_kinds(
    tmp_path: Path, kinds: list[str]
) -> None:
    import torch

    model = folder(tmp_path / "m", {"model_type": "qwen3", **SMALL, "layer_types": kinds, **_WINDOW})
    config = run(model, per_device_train_batch_size=2, max_length=32)
    measured = calibrate(config, sizes_of(config), torch.device("cpu"))
    assert measured is not None
    assert measured.rest + measured.block > 0


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
        {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
        {
            "model_type": "gemma4_text",
            **SMALL,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
        },
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_models_without_the_usual_sizes_in_their_config_are_planned(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    plan = plan_run(
        run(folder(tmp_path / "m", config), per_device_train_batch_size=1, max_length=16), timed=False
    )
    assert plan.sizes.shape.hidden == 32
    assert plan.memory.peak > 4 * plan.sizes.total


@pytest.mark.parametrize(
    ("config", "hidden", "head_dim", "inner"),
    [
        (
            {
                **{"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 96},
                **{"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64},
            },
            *(32, 8, 96),
        ),
        (
            {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 48},
            *(32, 16, 48),
        ),
        ({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}, 32, 16, 128),
    ],
    ids=["embeddings narrower than the blocks", "n_inner", "no n_inner"],
)
def test_the_widths_of_blocks_are_read_from_the_config(
    tmp_path: Path, config: dict[str, Any], hidden: int, head_dim: int, inner: int
) -> None:
    shape = sizes_of(run(folder(tmp_path / "m", config))).shape
    assert (shape.hidden, shape.head_dim, shape.inner, shape.vocabulary) == (hidden, head_dim, inner, 64)
