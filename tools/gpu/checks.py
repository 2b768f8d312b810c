"""The checks, in the order in which `make test-gpu` runs them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tools.gpu.check import Check, falls, trained
from tools.gpu.network import federation_round, served_answers

_LORA = {"finetuning": "lora", "lora": {"r": 8, "lora_alpha": 16}}


def sign_kernel(device: str, folder: Path) -> str:
    """Compare Triton's sign matmul with the CPU's, on the shapes of a 7B layer and on odd ones."""
    import torch
    from gym_quant import kernels
    from gym_quant.kernels import SignMatrix
    from gym_quant.kernels.triton_matmul import signed_matmul_cuda

    worst = 0.0
    for out, cols, group in ((64, 64, None), (70, 100, 16), (300, 2056, 128), (4096, 4096, None)):
        torch.manual_seed(0)
        encoded = [kernels.encode_signs(torch.randn(out, cols), None, group) for _ in range(3)]
        variants = [SignMatrix(bits, scales, cols, group) for bits, scales in encoded]
        x, y, index = torch.randn(5, cols), torch.randn(5, out), [0, 2, -1, 1, 0]
        expected = kernels.signed_matmul(x, variants, index, y.clone())
        found = signed_matmul_cuda(x.to(device), variants, index, y.to(device)).cpu()
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    assert worst < 4e-5, f"{worst:.1e} apart"
    return f"at most {worst:.1e} of the largest value apart"


def slot_kernel(device: str, folder: Path) -> str:
    """Compare the sign matmul with slots, in a replayed CUDA graph as in vLLM, with the reference."""
    import torch
    from gym_quant.kernels.triton_slots import add_signed_reference, add_signed_slots

    worst = 0.0
    for out, cols, rows in ((70, 100, 5), (300, 2056, 40), (4096, 4096, 16)):
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            bits = torch.randint(0, 256, (8, out, -(-cols // 8)), dtype=torch.uint8, device=device)
            scales = torch.rand(8, out, device=device)
            slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
            x, y = torch.randn(rows, cols, device=device).to(dtype), torch.zeros(rows, out, device=device)
            add_signed_slots(x, bits, scales, slots, y)  # compiled before the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                add_signed_slots(x, bits, scales, slots, y)
            slots.copy_(torch.randint(-1, 8, (rows,), dtype=torch.int32))
            y.zero_()
            graph.replay()
            expected = torch.zeros_like(y)
            add_signed_reference(x, bits, scales, slots, expected)
            worst = max(worst, float((y - expected).abs().max() / expected.abs().max()))
    assert worst < 1e-4, f"{worst:.1e} apart"
    return f"at most {worst:.1e} of the largest value apart, in a CUDA graph whose slots changed"


def same_as_on_cpu(device: str, folder: Path) -> str:
    """Compare the losses of a float32 run on the device and on the CPU, which differ only by the order of sums."""
    found = trained(device, folder / "device", learning_rate=1e-3).losses
    expected = trained("cpu", folder / "cpu", learning_rate=1e-3).losses
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert apart < 2e-2, f"{found} against {expected}"
    return f"losses at most {apart:.1e} apart"


def resumed(device: str, folder: Path) -> str:
    """Check that a run that is stopped after two steps and resumed has the losses of an uninterrupted run."""
    from gym_fed import GymError, Trainer, TrainingConfig
    from gym_fed.data import generate

    whole = trained(device, folder / "whole", save_steps=1).losses
    values = {
        "model": "gym-nano",
        "output_dir": folder / "stopped" / "run",
        "max_steps": len(whole),
        "per_device_train_batch_size": 4,
        "max_length": 64,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "device": device,
        "save_final": False,
        "save_steps": 1,
    }
    rows = generate("shout", 4) * len(whole)
    steps = []
    stopping = Trainer(
        TrainingConfig(**values),
        on_step=lambda step, total, loss: steps.append(step),
        should_stop=lambda: len(steps) == 2,
    )
    with contextlib.suppress(GymError):
        stopping.train(rows)
    assert steps == [1, 2], f"the run was not stopped after two steps: {steps}"
    after = Trainer(TrainingConfig(**values)).train(rows).losses
    apart = max(abs(a - b) for a, b in zip(whole[2:], after[-len(whole[2:]) :], strict=True))
    assert apart < 1e-3, f"{whole} against {after}"
    return f"later losses at most {apart:.1e} apart"


def grpo(device: str, folder: Path) -> str:
    """Train with GRPO and a grader; answers are sampled on the device."""
    from gym_fed import Trainer, TrainingConfig
    from gym_fed.data import generate

    rows = [
        {"prompt": row["messages"][:-1], "answer": row["messages"][-1]["content"]}
        for row in generate("shout", 8)
    ]
    config = TrainingConfig(
        algorithm="grpo",
        model="gym-nano",
        output_dir=folder / "run",
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        device=device,
        grpo={"num_generations": 4, "max_completion_length": 16},
        graders=[{"grader": "length", "unit": "characters", "max": 8}],
        logging_steps=1,
        save_final=False,
    )
    result = Trainer(config).train(rows)
    rewards = [entry["reward"] for entry in result.history if "reward" in entry]
    assert len(rewards) == 2, result.history
    assert next(result.model.parameters()).device.type == device
    return f"{len(rewards)} steps, mean reward {sum(rewards) / 2:.2f}"


def batch_size(device: str, folder: Path) -> str:
    """Check that the search for the largest batch within a memory budget finds one."""
    result = trained(device, folder, auto_batch_size={"memory_gib": 2.0}, gradient_accumulation_steps=1)
    return f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}"


CHECKS = (
    Check(
        "Triton's sign kernel",
        "equal to the CPU's to 4e-5",
        sign_kernel,
        "not on one CUDA device|need Triton",
        ("triton",),
    ),
    Check(
        "Triton's kernel of slots, for vLLM",
        "equal to the reference to 1e-4, in a CUDA graph",
        slot_kernel,
        "not on one CUDA device|need Triton",
        ("triton",),
    ),
    Check("float32 training", "the same losses as on the CPU", same_as_on_cpu),
    Check("stop and resume", "the later losses of a run that was not stopped", resumed),
    Check("bf16 training, full", "the loss falls", falls(mixed_precision="bf16")),
    Check("bf16 training, LoRA", "the loss falls", falls(mixed_precision="bf16", **_LORA)),
    Check("fp16 training", "the loss falls", falls(mixed_precision="fp16"), "needs a CUDA GPU"),
    Check(
        "FlashAttention-2",
        "the loss falls",
        falls(mixed_precision="bf16", attention="flash_attention_2"),
        "needs a CUDA GPU",
        ("flash_attn",),
    ),
    Check("flex_attention", "the loss falls", falls(attention="flex_attention"), "needs a CUDA GPU"),
    Check("Liger's kernels", "the loss falls", falls(liger=True), "needs a CUDA GPU", ("liger_kernel",)),
    Check(
        "QLoRA, 4 bits",
        "the loss falls",
        falls(quantization={"bits": 4}, **_LORA),
        packages=("bitsandbytes",),
    ),
    Check(
        "QLoRA, 8 bits",
        "the loss falls",
        falls(quantization={"bits": 8}, **_LORA),
        packages=("bitsandbytes",),
    ),
    *(
        Check(f"`{name}`", "the loss falls", falls(optimizer=name), "needs a CUDA GPU", ("bitsandbytes",))
        for name in ("paged_adamw", "paged_adamw_8bit", "paged_lion", "paged_lion_8bit")
    ),
    Check(
        "`galore_adamw_8bit`",
        "the loss falls",
        falls(optimizer="galore_adamw_8bit"),
        "needs a CUDA GPU",
        ("galore_torch",),
    ),
    Check(
        "BOFT, two butterfly factors",
        "the loss falls",
        falls(finetuning="boft", boft={"boft_n_butterfly_factor": 2}),
        "needs a CUDA GPU",
        ("ninja",),
    ),
    Check("GRPO", "answers and steps on the device", grpo),
    Check("automatic batch size", "a size is found and trained with", batch_size),
    Check("`gym api`", "greedy answers of base and variant as on the CPU", served_answers),
    Check("a federated round", "two contributors on the device, one committed round", federation_round),
)
