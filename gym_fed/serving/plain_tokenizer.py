"""A fast tokenizer on the ``tokenizers`` library, without importing transformers' classes.

Importing them takes as long as the rest of a start without torch. Chat templates are rendered by transformers'
functions, which a server imports after it has started to answer. Tests compare every method with transformers'
tokenizer. Folders with unknown settings are left to transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gym_fed.base.modeling.split_patterns import require_quick_tokenizer
from gym_fed.core.bounded.chat import literal_text, name_templates, render_chat
from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.system_errors import is_panic
from gym_fed.core.tokenizer_errors import tokenizer_errors

_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose tokenizers are supported; for others, transformers has special code that their files do not
show."""
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_ALLOWED = {
    *_NAMED,
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "extra_special_tokens",
    "is_local",
    "local_files_only",
    "model_max_length",
    "padding_side",
    "tokenizer_class",
}
"""Known keys of tokenizer_config.json; those that this module does not read have no effect on this tokenizer."""
_FOREIGN = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
_TEMPLATE_FILE = "chat_template.jinja"
_MAX_TEMPLATE_BYTES = 4 << 20
_MAX_TOKENS = 100_000
"""Maximum vocabulary size; transformers checks larger tokenizers for a known defect of Mistral's."""


def _role(name: str) -> property:
    """Return a property for the text of a named control token."""

    def put(tokenizer: PlainTokenizer, token: str) -> None:
        tokenizer.special_tokens_map[name] = token

    return property(lambda tokenizer: tokenizer.special_tokens_map.get(name), put)


def _role_id(name: str) -> property:
    """Return a property for the id of a named control token; None without it."""
    return property(lambda tokenizer: tokenizer.convert_tokens_to_ids(tokenizer.special_tokens_map.get(name)))


class PlainTokenizer:
    """Convert text to token ids and back like transformers' ``TokenizersBackend``, from any number of threads.

    Attributes:
        backend_tokenizer: The tokenizer of the ``tokenizers`` library; never changed.
        special_tokens_map: The texts of the named control tokens.
        chat_template: A Jinja template, or None.
        name_or_path: The model's folder.
    """

    def __init__(
        self, backend: Tokenizer, named: dict[str, str], chat_template: str | None, name_or_path: str
    ) -> None:
        """Use ``plain_tokenizer`` instead."""
        self.backend_tokenizer, self.chat_template, self.name_or_path = backend, chat_template, name_or_path
        self.special_tokens_map = named
        self._added: dict[int, AddedToken] | None = None
        self._control: tuple[str, tuple[str, ...]] | None = None

    bos_token, eos_token = _role("bos_token"), _role("eos_token")
    unk_token, pad_token = _role("unk_token"), _role("pad_token")
    bos_token_id, eos_token_id, pad_token_id = map(_role_id, ("bos_token", "eos_token", "pad_token"))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __copy__(self) -> PlainTokenizer:
        named = dict(self.special_tokens_map)
        copy = PlainTokenizer(self.backend_tokenizer, named, self.chat_template, self.name_or_path)
        copy._added, copy._control = self._added, self._control
        return copy

    def __deepcopy__(self, _memo: Any) -> PlainTokenizer:
        return self.__copy__()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return token ids; if ``add_special_tokens`` is False, without the special tokens added around a text."""
        with tokenizer_errors(self):
            return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of token ids. Raises ``NotImplementedError`` for ``clean_up_tokenization_spaces=True``."""
        if clean_up_tokenization_spaces:
            raise NotImplementedError("spaces are never cleaned up")
        with tokenizer_errors(self):
            return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's text for each id; None for an unknown id."""
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in ids]

    def convert_tokens_to_ids(self, token: str | None) -> int | None:
        """Return the id of a token, or that of ``unk_token`` for an unknown token; None if there is none."""
        token_id = None if token is None else self.backend_tokenizer.token_to_id(token)
        unknown = self.special_tokens_map.get("unk_token")
        return (
            token_id
            if token_id is not None or token in (None, unknown)
            else self.convert_tokens_to_ids(unknown)
        )

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens and their ids."""
        return self.backend_tokenizer.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The added tokens by id, in the order of the ids."""
        if self._added is None:  # with thousands of tokens, the library takes 0.1 s for this
            self._added = dict(sorted(self.backend_tokenizer.get_added_tokens_decoder().items()))
        return self._added

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """The ids of added tokens by text, in the order of the ids."""
        return {token.content: at for at, token in self.added_tokens_decoder.items()}

    def add_tokens(self, tokens: Sequence[AddedToken], special_tokens: bool = False) -> int:
        """Add tokens, and return the number of new ones; copies of this tokenizer do not change."""
        extended = Tokenizer.from_str(self.backend_tokenizer.to_str())
        add = extended.add_special_tokens if special_tokens else extended.add_tokens
        count: int = add(list(tokens))
        self.backend_tokenizer = extended
        self._added = self._control = None
        return count

    def warm(self) -> None:
        """Prepare the chat renderer, so that the first chat does not wait for it."""
        if self.chat_template:
            from transformers.utils import chat_template_utils as theirs

            for tokens in (self._control_tokens(self.chat_template), tuple(self.added_tokens_encoder)):
                theirs._get_control_token_patterns(tokens)

    def get_chat_template(self, _name: str | None = None, _tools: Any = None) -> str:
        """Return the chat template.

        Raises:
            ValueError: If there is none.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        return self.chat_template

    def apply_chat_template(
        self,
        conversation: Sequence[dict[str, Any]],
        tools: Any = None,
        *,
        tokenize: bool = True,
        return_dict: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        sanitize_control_tokens: bool = False,
        **variables: Any,
    ) -> Any:
        """Render and encode a conversation with transformers' own functions."""
        from transformers.utils import chat_template_utils as theirs

        template = self.get_chat_template()
        if not conversation:
            raise ValueError("the conversation has no messages")
        rows: Any = [{key: value for key, value in row.items() if value is not None} for row in conversation]
        if sanitize_control_tokens:
            pattern, _ = theirs._get_control_token_patterns(self._control_tokens(template))
            rows, tools, variables = (
                theirs.mark_control_tokens(given, pattern) for given in (rows, tools, variables)
            )
        texts, _ = render_chat(
            [rows],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{**self.special_tokens_map, **variables},
        )
        if not tokenize:
            return texts[0]
        encode = theirs.encode_marked_chat if sanitize_control_tokens else PlainTokenizer._unmarked
        ids = encode(self, texts[0])
        return {"input_ids": ids} if return_dict else ids

    def _unmarked(self, text: str) -> list[int]:
        return self.encode(text, add_special_tokens=False)

    def _control_tokens(self, template: str) -> tuple[str, ...]:
        """Return the texts that only the template may write as control tokens."""
        if self._control is None or self._control[0] != template:
            literal = literal_text(template)
            tokens = tuple(
                token.content
                for token in self.added_tokens_decoder.values()
                if token.special or (token.content in literal and not token.content.isspace())
            )
            self._control = template, tokens
        return self._control[1]

    def _encode_without_added_tokens(self, text: str) -> list[int]:
        """Encode a text whose control tokens are plain text; ``encode_marked_chat`` calls it."""
        backend = self.backend_tokenizer
        with tokenizer_errors(self):
            if backend.normalizer is not None:
                text = backend.normalizer.normalize_str(text)
            splits = [text]
            if backend.pre_tokenizer is not None:
                splits = [split for split, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
            return [token.id for split in splits for token in backend.model.tokenize(split)]


def plain_tokenizer(folder: Path, architecture: str) -> PlainTokenizer | None:
    """Load the tokenizer of a model folder; None if transformers must load it.

    Args:
        folder: The folder.
        architecture: transformers' name of the model's class.

    Raises:
        GymError: ``MODEL_INVALID`` for a pattern whose matching may take too long.
    """
    if architecture not in _ARCHITECTURES or any((folder / name).exists() for name in _FOREIGN):
        return None
    try:
        config = read_object(folder / "tokenizer_config.json")
        template = _template(folder, config)
    except (OSError, ValueError, GymError):  # transformers will report the error
        return None
    if config.get("tokenizer_class") != "TokenizersBackend" or config.keys() - _ALLOWED:
        return None
    named = {key: config[key] for key in _NAMED if config.get(key) is not None}
    more = config.get("extra_special_tokens") or []
    if config.get("clean_up_tokenization_spaces") or not isinstance(more, list):
        return None
    control = [*named.values(), *more]
    require_quick_tokenizer(folder, str(folder))
    backend = _backend(folder / "tokenizer.json")
    if (
        backend is None
        or not all(isinstance(token, str) for token in control)
        or not _is_ordinary(backend, control)
    ):
        return None
    if (pad := named.get("pad_token") or named.get("eos_token") or named.get("unk_token")) is not None:
        named["pad_token"] = pad
    tokenizer = PlainTokenizer(backend, named, template, str(folder))
    name_templates(tokenizer, str(folder))
    return tokenizer


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """Read the chat template.

    Raises:
        ValueError: If there are several, or one is too large.
    """
    file = folder / _TEMPLATE_FILE
    if file.is_file():
        if file.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise ValueError("too large")
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError("several")
    return template


def _backend(file: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(file))
    except BaseException as error:
        # the library raises bare exceptions; transformers will report the reason
        if isinstance(error, Exception) or is_panic(error):
            return None
        raise


def _is_ordinary(backend: Tokenizer, control: Sequence[str]) -> bool:
    """Return True if transformers would use the tokenizer unchanged."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    return (
        backend.truncation is None
        and backend.padding is None
        and backend.post_processor is not None
        and backend.get_vocab_size() <= _MAX_TOKENS
        and special.issuperset(control)
    )
