"""How answers are sampled where neither a request nor serving.yaml says so: as the model's authors recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gym_fed.base.models import MAX_ADAPTERS, resolve
from gym_fed.config.schema.problems import first_problem
from gym_fed.config.serving import SamplingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

FILE = "generation_config.json"


def sampling_defaults(folder: Path, config: SamplingConfig) -> dict[str, Any]:
    """The fields of a request by their names: those that ``config`` sets, then those of generation_config.json.

    An adapter's folder without such a file has that of its base. A file that says ``do_sample: false`` means
    temperature 0. What is in neither is left out: it is OpenAI's default.

    Raises:
        GymError: ``MODEL_INVALID`` for a value of the file that no request may have; as ``resolve`` for the base.
    """
    set_here = config.model_dump(exclude_none=True)
    file = _file_of(folder)
    if file is None:
        return set_here
    written = read_object(file)
    found = {name: written.get(name) for name in SamplingConfig.model_fields}
    if written.get("do_sample") is False:
        found["temperature"] = 0.0
    theirs = {name: value for name, value in found.items() if value is not None and name not in set_here}
    try:
        checked = SamplingConfig.model_validate(theirs)
    except ValidationError as error:
        problem = first_problem(error)
        name = problem.partition(":")[0]
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{file}: {problem}",
            f"correct it, or serve with --set sampling.{name}=...",
        ) from error
    return {**checked.model_dump(exclude_none=True), **set_here}


def _file_of(folder: Path) -> Path | None:
    """Of a model, of an adapter, or of the base that an adapter stands on; None where nobody wrote one."""
    for _ in range(MAX_ADAPTERS):
        if (file := folder / FILE).is_file():
            return file
        adapter = folder / "adapter_config.json"
        base = read_object(adapter).get("base_model_name_or_path") if adapter.is_file() else None
        if not isinstance(base, str) or not base:
            return None  # of an adapter that names no base, loading says so
        folder = Path(resolve(base))
    return None
