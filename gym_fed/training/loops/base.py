"""Define conversations as text (``StringThread``), and the base classes of loops, which train on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gym_fed.base.models import LoadedModel, load_model
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.graders.base import Grader, Sample

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig
    from gym_fed.training.recipe import RecipeContext
    from gym_fed.training.run.hooks import ShouldStop, StepReport
    from gym_fed.training.run.result import TrainResult

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class StringThread:
    """A conversation; methods that add a turn return a new thread.

    ::

        thread = StringThread([("user", "2 + 2?")], {"answer": "4"})
        thread.assistant("4").last_content()

    Attributes:
        turns: Pairs of role (``system``, ``user``, ``assistant``) and text.
        metadata: Values for graders, such as ``answer`` and ``tests``.

    Raises:
        GymError: ``DATA_INVALID`` for an unknown role, or for content that is not text.
    """

    turns: Sequence[tuple[str, str]] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, turn in enumerate(self.turns, 1):
            if len(turn) != 2 or turn[0] not in ROLES or not isinstance(turn[1], str):
                reason = f"turn {number} of a StringThread is {str(turn)[:60]!r}"
                remedy = f"write (role, text), where role is one of {', '.join(ROLES)}"
                raise GymError(ErrorCode.DATA_INVALID, reason, remedy)
        object.__setattr__(self, "turns", tuple((role, text) for role, text in self.turns))

    @classmethod
    def of_messages(
        cls, messages: Iterable[Mapping[str, Any]], metadata: Mapping[str, Any] | None = None
    ) -> StringThread:
        """Create a thread from messages with ``role`` and ``content``."""
        return cls([(str(m.get("role")), m.get("content")) for m in messages], dict(metadata or {}))  # type: ignore[misc]

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> StringThread:
        """Create a thread from the conversation or prompt of a ``gym_fed.data`` row; other columns become metadata.

        Raises:
            GymError: ``DATA_INVALID`` for a row without a conversation or prompt.
        """
        rest = {key: value for key, value in row.items() if key not in ("messages", "prompt")}
        if "messages" in row:
            return cls.of_messages(row["messages"], rest)
        if isinstance(row.get("prompt"), str):
            return cls([("user", row["prompt"])], rest)
        if isinstance(row.get("prompt"), list):
            return cls.of_messages(row["prompt"], rest)
        reason = f"cannot create a thread from a row with {', '.join(row)}"
        raise GymError(ErrorCode.DATA_INVALID, reason, "use messages or a prompt")

    def system(self, text: str) -> StringThread:
        """Return the thread with a system turn added."""
        return self._with("system", text)

    def user(self, text: str) -> StringThread:
        """Return the thread with a user turn added."""
        return self._with("user", text)

    def assistant(self, text: str) -> StringThread:
        """Return the thread with an assistant turn added."""
        return self._with("assistant", text)

    def last_content(self) -> str:
        """Return the text of the last turn; empty without one."""
        return self.turns[-1][1] if self.turns else ""

    def messages(self) -> list[dict[str, str]]:
        """Return the turns as messages for chat templates."""
        return [{"role": role, "content": text} for role, text in self.turns]

    def prompt(self) -> StringThread:
        """Return the thread without its final answer, if it has one."""
        return replace(self, turns=self.turns[:-1]) if self.answered else self

    @property
    def answered(self) -> bool:
        """True if the last turn is the assistant's."""
        return bool(self.turns) and self.turns[-1][0] == "assistant"

    def _with(self, role: str, text: str) -> StringThread:
        return replace(self, turns=(*self.turns, (role, text)))


ThreadGrader = Callable[[StringThread], float]


class Loop(ABC):
    """One run of an algorithm on threads. ``run`` trains the model in place.

    Args:
        dataset: The threads to learn from.
        model: The model to train: a model from ``RecipeContext.spawn``, or a name or folder as for ``load_model``, such
            as one that ``ModelRegistry.pull`` has returned.
        lr: Learning rate.
        samples_per_batch: Number of samples per optimiser step.
        samples_per_mini_batch: Number of samples per forward pass; by default the whole batch.
        max_grad_norm: Norm to which gradients are clipped.
        max_steps: Number of steps; by default, the number that ``epochs`` takes.
        epochs: Number of passes over the dataset.
        context: Provides device, seed, tracker, and the parent of the loop's default folder.
        output_dir: The loop's folder, from which a stopped loop resumes; by default below the context's.
        settings: Further config keys, such as ``{"max_length": 512}``.
        should_stop: Called after every step; if it returns True, a checkpoint is saved and ``INTERRUPTED`` is raised.

    Raises:
        GymError: ``USAGE`` if batches do not divide evenly, ``CONFIG_INVALID`` for unsupported values.
    """

    algorithm: ClassVar[str]

    def __init__(
        self,
        dataset: Sequence[Any],
        model: LoadedModel | str | Path,
        *,
        lr: float,
        samples_per_batch: int,
        samples_per_mini_batch: int | None = None,
        max_grad_norm: float = 1.0,
        max_steps: int | None = None,
        epochs: float = 1.0,
        context: RecipeContext | None = None,
        output_dir: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        should_stop: ShouldStop | None = None,
    ) -> None:
        self.dataset = dataset
        if isinstance(model, str | Path):
            model = load_model(str(model), device="auto" if context is None else str(context.devices[0]))
        self.model = model
        self.context = context
        self.result: TrainResult | None = None
        self._should_stop = should_stop
        self._mini = samples_per_batch if samples_per_mini_batch is None else samples_per_mini_batch
        if self._mini < 1 or samples_per_batch % self._mini:
            reason = (
                f"samples_per_mini_batch: {self._mini} does not divide samples_per_batch {samples_per_batch}"
            )
            raise GymError(
                ErrorCode.USAGE, reason, "make samples_per_batch a multiple of samples_per_mini_batch"
            )
        self._parts = samples_per_batch // self._mini
        if output_dir is None:
            output_dir = Path("runs") if context is None else context.output_dir
            output_dir = output_dir / type(self).__name__.lower()
        self.output_dir = Path(output_dir)
        self._values: dict[str, Any] = {
            "algorithm": self.algorithm,
            "learning_rate": lr,
            "max_grad_norm": max_grad_norm,
            "max_steps": max_steps,
            "num_train_epochs": epochs,
            "per_device_train_batch_size": self._mini,
            "gradient_accumulation_steps": self._parts,
            "output_dir": self.output_dir,
            "logging_steps": 1,
            "lr_scheduler_type": "constant",
            **({} if context is None else {"seed": context.seed, "device": context.devices[0].type}),
            **(settings or {}),
        }

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return the dataset as rows of ``gym_fed.data``."""

    def section(self) -> dict[str, Any]:
        """Return the algorithm's section of the config."""
        return {}

    def graders(self) -> list[Grader]:
        """Return the graders that reward answers."""
        return []

    def config(self) -> TrainingConfig:
        """Return the run's config, as from a `gym train` file.

        Raises:
            GymError: ``CONFIG_INVALID`` naming an invalid value.
        """
        from gym_fed.config.train.defaults import as_given
        from gym_fed.config.train.training import TrainingConfig
        from gym_fed.config.yaml.file import validate

        section = self.section()
        values = {**self._values, **({self.algorithm: section} if section else {})}
        return as_given(validate(values, TrainingConfig, type(self).__name__))

    def run(self) -> TrainResult:
        """Train the model in place to the end, from the last checkpoint if there is one.

        Raises:
            GymError: See ``Trainer.train``.
        """
        from gym_fed.training.trainer import Trainer

        if hasattr(self.model.model, "peft_config"):
            reason = f"{type(self).__name__}: the model is an adapter on a base"
            remedy = 'spawn the base, and give settings={"finetuning": "lora"} to train a new adapter'
            raise GymError(ErrorCode.USAGE, reason, remedy)
        trainer = Trainer(
            self.config(),
            model=self.model.model,
            tokenizer=self.model.tokenizer,
            graders=self.graders(),
            on_report=self._track,
            should_stop=self._should_stop,
        )
        self.result = trainer.train(self.rows())
        self.model.model = self.result.model.eval()
        return self.result

    def _track(self, report: StepReport) -> None:
        """Log a step's metrics to the context's tracker, under the loop's name."""
        if self.context is None or report.evaluation:
            return
        name = type(self).__name__.lower()
        figures = {f"{name}/loss": report.loss}
        if report.reward is not None:
            figures[f"{name}/reward"] = report.reward
        self.context.track(figures, report.step)


class Graded(Loop):
    """A loop that learns from graded answers.

    Args:
        dataset: Threads, without their final answers; graders read their metadata.
        model: The model that generates the answers and is trained; see ``Loop``.
        grader: A ``Grader``, or a function that maps an answered thread to a number; or a list of these.
        kl_beta: Weight of the divergence from the initial model.
        options: Options of ``Loop``.
    """

    def __init__(
        self,
        dataset: Sequence[StringThread],
        model: LoadedModel | str | Path,
        grader: Grader | ThreadGrader | Sequence[Grader | ThreadGrader],
        *,
        kl_beta: float,
        **options: Any,
    ) -> None:
        super().__init__(dataset, model, **options)
        self.kl_beta = kl_beta
        graders = list(grader) if isinstance(grader, Sequence) else [grader]
        self._graders = [entry if isinstance(entry, Grader) else _OfThreads(entry) for entry in graders]

    def rows(self) -> list[dict[str, Any]]:
        return [{**thread.metadata, "prompt": thread.prompt().messages()} for thread in self.dataset]

    def graders(self) -> list[Grader]:
        return self._graders


class _OfThreads(Grader):
    """Wraps a function of an answered thread, with optional ``setup`` and ``teardown``, as a grader."""

    def __init__(self, function: ThreadGrader) -> None:
        super().__init__()
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._function = function

    def setup(self) -> None:
        getattr(self._function, "setup", lambda: None)()

    def grade(self, samples: Sequence[Sample]) -> list[float]:
        return [float(self._function(_thread(sample))) for sample in samples]

    def teardown(self) -> None:
        getattr(self._function, "teardown", lambda: None)()


def _thread(sample: Sample) -> StringThread:
    if isinstance(sample.prompt, str):
        return StringThread([("user", sample.prompt)], sample.row).assistant(sample.completion)
    return StringThread.of_messages(sample.prompt, sample.row).assistant(sample.completion)


def answered(threads: Sequence[StringThread]) -> list[StringThread]:
    """Return ``threads`` after checking that all end with an assistant turn.

    Raises:
        GymError: ``DATA_INVALID`` naming the first thread that does not.
    """
    for number, thread in enumerate(threads, 1):
        if not thread.answered:
            reason = f"thread {number} does not end with an answer"
            raise GymError(ErrorCode.DATA_INVALID, reason, "end it with assistant(...)")
    return list(threads)
