"""LLaMA-Factory's files as a dialect of our config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_fed.config.parsed import Job, Translation
from gym_fed.interop.llamafactory.inference import translate_export, translate_inference, translate_predict
from gym_fed.interop.llamafactory.jobs import job_of
from gym_fed.interop.llamafactory.translate import translate
from gym_fed.interop.llamafactory.translation import is_llamafactory


class LlamaFactory:
    """See ``gym_fed.config.parsed.Dialect``."""

    title = "LLaMA-Factory"

    def matches(self, values: Mapping[str, Any]) -> bool:
        """True if the file names a model and a stage, or another key of LLaMA-Factory alone."""
        return is_llamafactory(values)

    def job_of(self, values: dict[str, Any]) -> Job:
        """See ``jobs.job_of``."""
        return job_of(values)

    def translate(self, values: dict[str, Any], job: Job, processes: int | None = None) -> Translation:
        """Translate to the keys of one command."""
        if job == "predict":
            return translate_predict(values)
        if job == "export":
            return translate_export(values)
        if job == "inference":
            return translate_inference(values)
        return translate(values, processes)


DIALECT = LlamaFactory()
