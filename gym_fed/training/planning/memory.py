"""Estimate the peak memory of a run by component; docs/planning.md derives each formula.

Activations are the tensors that autograd saves. For one token in a block under ``sdpa``, these are ``6 h + 2 q + 2 k +
4 i`` values: residual stream, normed input and input of the matrices, before attention and before the MLP; queries,
keys, values and output; gate, its SiLU, up and their product. The tests confirm this by counting saved tensors. The
approach follows Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS
from gym_fed.training.planning.sizes import Sizes, TextShape, count_model

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LOSS_VALUES = 3
"""Float32 values per logit while the loss is differentiated: the log-softmax and two gradients."""

_TILE = (4096, 32768)
"""Number of tokens and vocabulary entries in the largest tile of logits that TRL's ``fused_lm_head`` computes."""

_TILE_BYTES = 29
"""Bytes per logit of a tile while torch differentiates it: 7 float32 values and a mask. Triton needs none."""

PROCESS_BYTES = {"cpu": 543 << 20, "cuda": 500 << 20, "mps": 500 << 20}
"""Bytes of a process without a model: Python and torch (measured), or a GPU context."""

ADAPTER_PROCESS_BYTES = {**PROCESS_BYTES, "cpu": 587 << 20}
"""Bytes of a process with an adapter, for which PEFT imports further packages such as bitsandbytes."""

ALLOCATOR_BYTES = {"cpu": 231 << 20, "cuda": 0, "mps": 0}
"""Bytes of freed blocks that glibc keeps: the mean over gym-nano's runs in benchmarks/plan.py. Not measured on GPUs."""


@dataclass(frozen=True)
class Memory:
    """The memory in bytes on one device at the peak of a step.

    Attributes:
        weights: All weights, trained and frozen, in their dtypes.
        gradients: Gradients of the trained weights.
        optimizer: Optimiser state.
        activations: Activations that autograd saves for a batch.
        logits: Output of the head, and intermediate values of the loss.
        copies: Reference, critic and teacher; for trained ones, including gradients and optimiser state.
        generation: Keys and values during generation.
        process: Libraries, and the GPU context.
        allocator: Freed blocks that are not returned to the system.
        embedding: The second gradient of a matrix that is both the embeddings and the head, before the two are added.
        accumulates: True if gradients are held while the next batch is computed.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    copies: float
    generation: float
    process: float
    allocator: float
    embedding: float
    accumulates: bool

    @property
    def peak(self) -> float:
        """The peak memory. Activations, gradients and generation do not overlap, unless gradients are accumulated."""
        batch = self.activations + self.logits + (self.gradients if self.accumulates else 0.0)
        temporary = max(batch, self.gradients + self.embedding, self.generation)
        permanent = self.process + self.allocator + self.weights + self.optimizer + self.copies
        return permanent + temporary

    def parts(self) -> dict[str, float]:
        """Return the bytes by component."""
        names = [f.name for f in fields(self) if f.name not in ("embedding", "accumulates")]
        return {name: getattr(self, name) for name in names}


def memory_of(config: TrainingConfig, sizes: Sizes, *, device: str = "cpu", processes: int = 1) -> Memory:
    """Estimate the memory of one process.

    Args:
        config: The run's config.
        sizes: Weights of the run's model.
        device: ``cpu``, ``cuda`` or ``mps``.
        processes: Number of processes across which parts are sharded.
    """
    weight_share, state_share = _shares(config, processes)
    width = _BYTES[config.dtype]
    gradients = float(sum(w.numel * w.itemsize for w in sizes.trained))
    optimizer = OPTIMIZERS.new(config.optimizer)
    state = sum(optimizer.state_bytes(w, config) for w in sizes.trained)
    algorithm = ALGORITHMS.type_of(config.algorithm)
    frozen, trained = algorithm.beside(config, adapted=sizes.adapted)
    others = sum(count_model(name) for name in algorithm.models_beside(config)) * width
    body = sizes.total * width
    copies = frozen * body + trained * (2 * body + sizes.total * 8) + others
    tokens, shape = tokens_of_batch(config), sizes.shape
    activations = activation_bytes(config, shape, row_length(config), device=device) * tokens
    activations *= _activation_share(config, processes)
    has_two_gradients = sizes.tied and _trains_all(sizes)
    cache = 2 * shape.layers * shape.keys * width * tokens
    return Memory(
        weights=_weight_bytes(config, sizes) * weight_share,
        gradients=gradients * state_share,
        optimizer=state * state_share,
        activations=activations,
        logits=_head_bytes(config, sizes, tokens, device),
        copies=copies + trained * activations,
        generation=cache if algorithm.writes_answers(config) else 0,
        process=(ADAPTER_PROCESS_BYTES if sizes.adapted else PROCESS_BYTES)[device],
        allocator=ALLOCATOR_BYTES[device],
        embedding=float(shape.vocabulary * shape.hidden * width) if has_two_gradients else 0.0,
        accumulates=config.gradient_accumulation_steps > 1,
    )


def _trains_all(sizes: Sizes) -> bool:
    return not sizes.adapted and sizes.num_trained == sizes.total


def row_length(config: TrainingConfig) -> int:
    """Return the number of tokens of the longest row in a batch, including the answer if it is generated."""
    if not ALGORITHMS.type_of(config.algorithm).writes_answers(config):
        return config.max_length
    section = config.chosen_sections().get(config.algorithm)
    return config.max_length + int(getattr(section, "max_completion_length", 0))


def tokens_of_batch(config: TrainingConfig) -> int:
    """Return the number of tokens in a batch of the longest rows on one device."""
    rows: int = config.per_device_train_batch_size * ALGORITHMS.type_of(config.algorithm).sequences_per_row
    return rows * row_length(config)


def activation_bytes(config: TrainingConfig, shape: TextShape, length: int, *, device: str = "cpu") -> float:
    """Return the bytes that autograd saves per token in a row of ``length``, over all blocks."""
    block = block_bytes(config, shape, length, device=device)
    if not config.gradient_checkpointing:
        return shape.layers * block + _norm_bytes(config, shape.hidden)
    return shape.layers * shape.hidden * _compute_width(config) + block + _norm_bytes(config, shape.hidden)


def block_bytes(config: TrainingConfig, shape: TextShape, length: int, *, device: str = "cpu") -> float:
    """Return the bytes that autograd saves per token in one block."""
    width = _compute_width(config)
    values = 2 * shape.queries + 2 * shape.keys + 4 * shape.inner
    norms = 2 * _norm_bytes(config, shape.hidden)
    if shape.normed_heads:
        norms += _norm_bytes(config, shape.queries, shape.heads)
        norms += _norm_bytes(config, shape.keys, shape.key_heads)
        norms -= (shape.queries + shape.keys) * width  # the outputs are already counted as queries and keys
    if config.attention == "eager":
        values += 2 * (shape.queries - shape.keys)  # keys and values are repeated for every head
        scores = shape.heads * length * (width if width == 4 else 4 + width)
    else:
        scores = 4 * shape.heads  # the logarithm of the sum of each row
    if config.lora is None and config.mixed_precision != "no":
        # The output of a norm is float32, like its weights, and each of five matrices copies its input.
        norms += shape.hidden * (2 * (4 - width) + 3 * width)
    return values * width + norms + scores + _adapter_bytes(config, shape, device)


def _head_bytes(config: TrainingConfig, sizes: Sizes, tokens: int, device: str) -> float:
    """Return the bytes of a batch's logits and their gradients."""
    shape, width = sizes.shape, _compute_width(config)
    kind = ALGORITHMS.type_of(config.algorithm).logits(config)
    if kind == "none":
        return 0.0
    if kind == "whole":
        return float(shape.vocabulary * tokens * (width + 4 * _LOSS_VALUES))
    tile = min(tokens, _TILE[0]) * min(shape.vocabulary, _TILE[1])
    weights = shape.vocabulary * shape.hidden if _trains_all(sizes) else 0
    tile_bytes = tile * (width + (0 if device == "cuda" else _TILE_BYTES))
    return float(tile_bytes + 4 * tokens * shape.hidden + 4 * weights)


def _norm_bytes(config: TrainingConfig, size: int, groups: int = 1) -> float:
    """Return the bytes that an RMS norm saves: input, output, normalised input if trained, one number per group."""
    width = _compute_width(config)
    return size * (4 + (1 if config.lora is not None else 2) * width) + 4 * groups


def _adapter_bytes(config: TrainingConfig, shape: TextShape, device: str) -> float:
    """Return the additional bytes that LoRA on the seven matrices of a block saves.

    These are the outputs of the first factors, and their inputs if those are copies (with dropout, or with a dtype
    other than the base's); the original inputs are then not saved.
    """
    if config.lora is None:
        return 0.0
    width = _compute_width(config)
    wide = width if config.mixed_precision != "no" else 4
    saved = 7.0 * config.lora.r * wide
    mixed = config.mixed_precision != "no" or config.loaded_dtype != "float32"
    if config.lora.lora_dropout or mixed:
        mask = (1 if device == "cuda" else 4) if config.lora.lora_dropout else 0
        inputs = 5 * shape.hidden + shape.queries + shape.inner
        saved += inputs * (wide + mask) - (2 * shape.hidden + shape.inner) * width
    return saved


def _compute_width(config: TrainingConfig) -> int:
    return 2 if config.mixed_precision != "no" else _BYTES[config.loaded_dtype]


def _weight_bytes(config: TrainingConfig, sizes: Sizes) -> float:
    width = _BYTES[config.loaded_dtype]
    if not sizes.adapted:
        copied = 2 * sizes.linear if config.mixed_precision != "no" else 0
        return float(sizes.total * _BYTES[config.dtype] + copied)
    adapter = sum(w.numel * w.itemsize for w in sizes.trained)
    if config.quantization is None:
        return float(sizes.total * width + adapter)
    rest = (sizes.total - sizes.linear) * width
    return sizes.linear * _quantised_bytes(config) + rest + adapter


def _quantised_bytes(config: TrainingConfig) -> float:
    """Return the bytes per quantised weight, including scales.

    bitsandbytes uses 8 bits, or 4 bits and a scale per 64 weights, which takes 8 bits with double quantisation. HQQ
    uses 2, 3 (ten weights in 32 bits), 4 or 8 bits, and a scale and a zero point per group. torchao uses 8 bits, and a
    scale per group.
    """
    assert config.quantization is not None
    settings = config.quantization
    scale = _BYTES[config.loaded_dtype] / settings.group_size
    if settings.method == "torchao":
        return 1 + scale
    if settings.method == "hqq":
        return {2: 0.25, 3: 0.4, 4: 0.5}.get(settings.bits, 1.0) + 2 * scale
    if settings.bits == 8:
        return 1.0
    return 0.5 + (1 / 64 + 4 / (64 * 256) if settings.double_quant else 4 / 64)


def _activation_share(config: TrainingConfig, processes: int) -> float:
    """Return the fraction of a batch's activations that one process holds.

    A pipeline stage holds the activations of its blocks, for as many micro-batches as there are stages (1f1b) or for
    all (gpipe).
    """
    distributed = config.distributed
    if distributed is None or processes == 1:
        return 1.0
    if distributed.strategy == "sequence_parallel":
        return 1 / (distributed.sequence_parallel_size or processes)
    if distributed.pipeline_schedule == "gpipe":
        return config.gradient_accumulation_steps / processes
    return 1.0


def _shares(config: TrainingConfig, processes: int) -> tuple[float, float]:
    """Return the fraction of weights, and of gradients and optimiser state, that one process holds."""
    distributed = config.distributed
    if distributed is None or processes == 1 or not config.splits_state:
        return 1.0, 1.0
    if distributed.strategy == "deepspeed" and distributed.zero_stage != 3:
        return 1.0, 1 / processes
    return 1 / processes, 1 / processes
