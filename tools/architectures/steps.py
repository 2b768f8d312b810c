"""The checks of a model class. Each compares numbers with those of transformers or PEFT, and raises if they differ."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.architectures.classes import Architecture
from tools.architectures.folders import NotTriedError, first_line, make_folder
from tools.architectures.shrinking import PAD

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (
        ("one", "two three"),
        ("red", "blue"),
        ("sun and moon", "stars"),
        ("up", "down again"),
    )
]
PROMPT = list(range(97, 109))
NEW_TOKENS = 6
_KV_BYTES = 64 << 20
_NO_PIECES = ("not a SentencePiece-style tokenizer", "tokenizer.model")
_LOST = {"full": 0.9, "lora": 1e-3}
"""Maximum share of a run's squared change that its delta may lose: with one bit per weight, and with 16-bit factors."""
_LARGEST_PART_LOST = 0.1
"""Maximum share of a run's change of the logits that an export may lose."""
COLUMNS = (
    "load",
    "full",
    "lora",
    "delta",
    "variant",
    "api",
    "api of full",
    "api of lora",
    "eval",
    "export",
    "gguf",
)


class Checks:
    """The checks of one class in one folder.

    Args:
        architecture: The class.
        folder: An empty folder.

    Attributes:
        no_processor: Why the folder has no processor; empty if it has one or needs none.
    """

    def __init__(self, architecture: Architecture, folder: Path) -> None:
        self.architecture = architecture
        self.folder = folder
        self.base = folder / "base"
        self._original, self.no_processor = make_folder(architecture, self.base)
        self._runs: dict[str, Any] = {}

    def run(self, column: str) -> str:
        """Run the check of a column, and describe its result."""
        text = self._run(column)
        return text.replace(f"{self.folder}/", "")

    def _run(self, column: str) -> str:
        from gym_fed.core.errors import ErrorCode, GymError

        try:
            note = getattr(self, f"check_{column.replace(' ', '_')}")()
            return "works" + (f" ({note})" if note else "")
        except NotTriedError as error:
            return f"not tried ({error})"
        except GymError as error:
            if error.code in (ErrorCode.EXPORT_DIFFERS, ErrorCode.INTERNAL):
                if any(missing in error.message for missing in _NO_PIECES):
                    return "not tried (llama.cpp's converter needs a SentencePiece tokenizer for it)"
                if "converter failed" not in error.message:
                    return f"FAULT ({error.message[:300]})"
            return f"refused ({error.code.value}: {error.message.splitlines()[0][:300]})"
        except Exception as error:  # noqa: BLE001 (a result of the table)
            return f"FAULT ({first_line(error)}; {_place(error)})"

    def check_load(self) -> None:
        """Compare the logits of the loaded model with those of the model that was saved."""
        require_close(_logits(self._loaded()), _logits(self._original), "logits")

    def check_full(self) -> None:
        """Train all weights for two steps; the first loss must match the model's own logits."""
        self._train("full")

    def check_lora(self) -> None:
        """Train LoRA factors for two steps on a base whose weights must not change."""
        require_unchanged(self._train("lora").unload(), self._loaded())

    def check_delta(self) -> None:
        """Encode both runs; the decoded LoRA factors must reproduce the merged model."""
        from gym_fed.delta.base import BaseSpec
        from gym_fed.delta.file import DeltaFile, apply_delta
        from gym_fed.quantization.config import CalibratedPolicy
        from gym_fed.quantization.quantizer import Quantizer

        base = self._loaded()
        for run, codec in (("full", "bitdelta"), ("lora", "lora")):
            tuned = self._tuned(run)
            path = self.folder / f"{run}.gymdelta"
            Quantizer(CalibratedPolicy(codec=codec)).quantize(
                str(self.base), str(self._runs[run].output_dir), out=path, progress=False
            )
            decoded = copy.deepcopy(base)
            with DeltaFile.open(path, BaseSpec.of(base, self.base.name)) as delta:
                apply_delta(decoded, delta)
            left = _distance(decoded, tuned) / _distance(base, tuned)
            if not left < _LOST[run]:
                raise AssertionError(f"the delta of the {run} run loses {left:.2f} of the squared change")

    def check_variant(self) -> None:
        """Add both deltas to a store and read them back."""
        from gym_fed.serving.store.signing import sign_variant
        from gym_fed.serving.store.store import VariantStore
        from gym_fed.trust.identity.keys import SigningKey

        deltas = {run: self.folder / f"{run}.gymdelta" for run in ("full", "lora")}
        if not all(path.exists() for path in deltas.values()):
            raise NotTriedError("needs the deltas")
        key = SigningKey.generate()
        with VariantStore.open(self.folder / "variants", create=True) as store:
            for run, path in deltas.items():
                store.add(path, sign_variant(path, key, name=run), name=run, owner=key.contributor)
                store.verify(run)
            names = set(store.names())
        if names != set(deltas):
            raise AssertionError(f"the store lists {sorted(names)}")

    def check_api(self) -> None:
        """Compare the greedy answer of the server with that of transformers."""
        with self._serving(None) as serving:
            _require_equal(_answer(serving, serving.served_name), _generated(self._original))

    def check_api_of_full(self) -> str:
        """Serve the delta of the full run as a variant."""
        return self._serve_variant("full")

    def check_api_of_lora(self) -> str:
        """Serve the delta of the LoRA run as a variant."""
        return self._serve_variant("lora")

    def _serve_variant(self, run: str) -> str:
        """Compare a variant's greedy answer with that of the model that its delta describes."""
        from gym_fed.delta.file import DeltaFile, apply_delta

        if not (self.folder / "variants").exists():
            raise NotTriedError("needs the variants")
        merged = self._loaded()
        with DeltaFile.open(self.folder / f"{run}.gymdelta") as delta:
            apply_delta(merged, delta)
        with self._serving(self.folder / "variants") as serving:
            _require_equal(_answer(serving, f"{serving.served_name}:{run}"), _generated(merged))
            return serving.description.forward

    def check_eval(self) -> None:
        """Compare the held-out loss with the cross-entropy of transformers' own logits."""
        from gym_fed.evaluation.loss import heldout_loss

        found = heldout_loss(self._loaded(), self._tokenizer(), ROWS)
        _require_number(found, _own_losses(self._original, self._tokenizer())[1], "held-out loss")

    def check_export(self) -> None:
        """Export the merged LoRA run, and compare the folder's logits as transformers loads it."""
        from gym_fed.base.models import quiet_loading
        from gym_fed.export.formats.base import Options
        from gym_fed.export.run import export
        from gym_fed.export.source import open_source

        tuned = self._tuned("lora")
        path = self.folder / "merged"
        export(open_source(str(self._runs["lora"].output_dir)), "huggingface", path, Options(), check=False)
        with quiet_loading():
            model = self.architecture.model_class().from_pretrained(path).eval()
        before = _logits(self._original)
        require_close(_logits(model), _logits(tuned), "logits of the exported model", before=before)

    def check_gguf(self) -> None:
        """Export the base as GGUF; the export reads the file back in a new process and compares the logits."""
        from gym_fed.export.formats.base import Options
        from gym_fed.export.run import export
        from gym_fed.export.source import open_source

        export(open_source(str(self.base)), "gguf", self.folder / "model.gguf", Options())

    def _train(self, finetuning: str) -> Any:
        """Train for two steps, compare the first loss with transformers', and return the trained model."""
        if self.no_processor:
            raise NotTriedError(self.no_processor)
        import torch

        from gym_fed.config.train.training import TrainingConfig
        from gym_fed.training.trainer import Trainer

        config = TrainingConfig(
            model=str(self.base), output_dir=self.folder / finetuning, finetuning=finetuning, max_steps=2,
            learning_rate=1e-2 if finetuning == "lora" else 2e-3, lr_scheduler_type="constant", warmup_steps=0,
            per_device_train_batch_size=len(ROWS), max_length=64, device="cpu", num_threads=1, logging_steps=1,
        )  # fmt: skip
        result = Trainer(config).train(ROWS)
        if result.steps != 2 or not all(torch.isfinite(torch.tensor(result.losses))):
            raise AssertionError(f"{result.steps} steps with losses {result.losses}")
        own = _own_losses(self._original, self._tokenizer())
        _require_number(
            result.losses[0], min(own, key=lambda loss: abs(loss - result.losses[0])), "first loss"
        )
        self._runs[finetuning] = result
        tuned = self._tuned(finetuning)
        if float((_logits(tuned) - _logits(self._original)).abs().max()) < 1e-4:
            raise AssertionError("training changed no logits")
        return result.model

    def _tuned(self, run: str) -> Any:
        """Load the finished run from its folder, with adapters merged."""
        from gym_fed.base.modeling.adapters import merged

        if run not in self._runs:
            raise NotTriedError(f"needs the {run} run")
        return merged(self._load(str(self._runs[run].output_dir)))

    def _serving(self, variants: Path | None) -> Any:
        if self.no_processor:
            raise NotTriedError(self.no_processor)
        from gym_fed.config.serving import EngineConfig, ServingConfig
        from gym_fed.serving.setup import open_serving

        return open_serving(
            ServingConfig(
                base=str(self.base), variants=variants, device="cpu", num_threads=1, served_name="tiny",
                engine=EngineConfig(kv_cache_size=_KV_BYTES),
            )
        )  # fmt: skip

    def _load(self, name: str) -> Any:
        from gym_fed.base.models import load_model

        return load_model(name, images=True).model

    def _loaded(self) -> Any:
        return self._load(str(self.base))

    def _tokenizer(self) -> Any:
        return self._tokenizer_once

    @cached_property
    def _tokenizer_once(self) -> Any:
        from gym_fed.base.models import load_tokenizer

        return load_tokenizer(str(self.base))


def _answer(serving: Any, model: str) -> list[int]:
    from gym_fed.serving.openai.catalogue import LOCAL
    from gym_fed.serving.openai.service import COMPLETIONS

    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": NEW_TOKENS}
    pending = serving.service.begin(COMPLETIONS, body, LOCAL)
    pending.run()
    (generation,) = pending._generations
    return list(generation.result().token_ids)


def _generated(model: Any) -> list[int]:
    import torch

    ids = torch.tensor([PROMPT])
    model.generation_config.forced_eos_token_id = (
        None  # BART forces its last token to be the end, regardless of the logits
    )
    with torch.inference_mode():
        tokens = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
        )
    return [int(token) for token in tokens[0, len(PROMPT) :]]


def _logits(model: Any) -> Any:
    import torch

    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()


def _own_losses(model: Any, tokenizer: Any) -> tuple[float, float]:
    """Return the mean loss of ``ROWS`` per token as the model returns it for a padded batch, and from its logits.

    They differ by the routers' loss, and in classes that do not ignore padding.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    from gym_fed.data.encoding import encode_rows

    rows = encode_rows(tokenizer, ROWS, max_length=64)
    ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=PAD)
    labels = pad_sequence([torch.tensor(row["labels"]) for row in rows], batch_first=True, padding_value=-100)
    mask = pad_sequence([torch.ones(len(row["labels"]), dtype=torch.long) for row in rows], batch_first=True)
    text = model.config.get_text_config()
    routers = {"output_router_logits": True} if _has_router_loss(text) else {}
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        loss = float(cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))
        try:
            own = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False, **routers).loss
        except ValueError:  # GIT also counts the tokens of an image, which is missing here
            return loss, loss
    return float(own), loss


def _has_router_loss(text: Any) -> bool:
    return hasattr(text, "output_router_logits") and bool(getattr(text, "router_aux_loss_coef", 0.0))


def _distance(one: Any, other: Any) -> float:
    own = dict(one.named_parameters())
    return sum(float((own[name] - value).detach().pow(2).sum()) for name, value in other.named_parameters())


def require_close(found: Any, wanted: Any, what: str, before: Any = None) -> None:
    """Require equal logits up to rounding, which must be a small part of their change from ``before`` training."""
    difference, size = float((found - wanted).abs().max()), float(wanted.abs().max())
    limit = 2e-4 * max(size, 1.0)
    if before is not None:
        limit = min(limit, _LARGEST_PART_LOST * float((wanted - before).abs().max()))
    if not difference <= limit:
        raise AssertionError(f"{what} differ by {difference:.1e} of {size:.1e}")


def require_unchanged(trained: Any, base: Any) -> None:
    """Require that training an adapter left every weight of its base unchanged."""
    import torch

    own = dict(trained.named_parameters())
    expected = dict(base.named_parameters())
    if own.keys() != expected.keys():
        raise AssertionError(f"the base has different weights: {sorted(own.keys() ^ expected.keys())[:3]}")
    changed = [name for name, value in expected.items() if not torch.equal(own[name], value)]
    if changed:
        raise AssertionError(
            f"training an adapter changed {changed[0]} and {len(changed) - 1} more of the base"
        )


def _require_number(found: float, wanted: float, what: str) -> None:
    if not abs(found - wanted) <= 1e-3 * max(abs(wanted), 1.0):
        raise AssertionError(f"{what} is {found:.5f}, but {wanted:.5f} in transformers")


def _require_equal(found: list[int], wanted: list[int]) -> None:
    if found != wanted:
        raise AssertionError(f"the answer is {found}, but {wanted} in transformers")


def _place(error: BaseException) -> str:
    """Return the last source line of this repository in an error's traceback, and the last line of all."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/gym_" in frame.filename and "site-packages" not in frame.filename]
    return ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in [*own[-1:], frames[-1]])
