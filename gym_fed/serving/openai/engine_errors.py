"""The engine's errors as OpenAI's clients know them, with the field of the request that is to blame."""

from __future__ import annotations

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.openai.catalogue import Model
from gym_fed.serving.openai.guided_fields import refusal_name
from gym_fed.serving.openai.refusals import RequestError, model_not_found


class EngineErrors:
    """The engine's errors in OpenAI's form; as a context manager, those of ``submit`` and ``embed``.

    Args:
        model: The requested model.
        param: The field that has the text.
        schema_param: The field that has the schema.
    """

    def __init__(self, model: Model, param: str, schema_param: str = "response_format") -> None:
        self._model = model
        self._param = param
        self._schema_param = schema_param

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, GymError):
            return
        if (
            error.code is ErrorCode.TOO_LARGE
        ):  # after submission it is the variant that is too large, not the text
            raise RequestError(
                error.message, param=self._param, name="context_length_exceeded", hint=error.hint
            ) from error
        if (translated := self.translate(error)) is not error:
            raise translated from error

    def translate(self, error: GymError) -> GymError:
        """An error of any time, after submission too."""
        if error.code is ErrorCode.NOT_FOUND:  # removed since it was looked up
            return model_not_found(self._model.name)
        if error.code is ErrorCode.DATA_INVALID:
            return RequestError(
                error.message,
                param=self._schema_param,
                name=refusal_name(self._schema_param),
                hint=error.hint,
            )
        return error
