"""Variants removed and replaced while their answers stream, under load: each answer is of one revision throughout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gym_fed.base.models import load_model
from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.service import COMPLETIONS
from gym_fed.serving.setup import Serving, open_serving
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.store.store import VariantStore
from gym_fed.trust.identity.keys import SigningKey
from tests.support.nano_store import signs
from tests.support.variants import write_random_delta
from tests.support.wait import until

KEY = SigningKey.generate()
REVISIONS, TOKENS, READERS = 3, 40, 4


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, model = tmp_path_factory.mktemp("deltas"), load_model("gym-nano").model
    return [
        write_random_delta(model, folder / f"ada-{seed}.gymdelta", signs, seed=seed, size=0.2)
        for seed in range(REVISIONS)
    ]


class Elsewhere:
    """The store, as another process writes to it."""

    def __init__(self, folder: Path, deltas: list[Path]) -> None:
        self.folder, self.deltas = folder, deltas
        self.base = BaseSpec.of(load_model("gym-nano").model, "gym-nano")

    def add(self, index: int) -> None:
        manifest = sign_variant(self.deltas[index], KEY, name="ada", revision=index + 1)
        with VariantStore.open(self.folder, base=self.base) as store:
            store.add(self.deltas[index], manifest, name="ada", owner=KEY.contributor, replace=index > 0)

    def remove(self) -> None:
        with VariantStore.open(self.folder, base=self.base) as store:
            store.remove("ada")

    def serve(self) -> Serving:
        return open_serving(ServingConfig(variants=self.folder, device="cpu", num_threads=1))


def body(serving: Serving) -> dict[str, Any]:
    return {
        "model": f"{serving.served_name}:ada",
        "prompt": "once",
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }


def text_of(serving: Serving) -> str:
    return str(serving.service.handle(COMPLETIONS, body(serving), LOCAL)["choices"][0]["text"])


def texts_of_revisions(folder: Path, deltas: list[Path]) -> list[str]:
    texts = []
    for index in range(REVISIONS):
        alone = Elsewhere(folder / str(index), [deltas[index]])
        alone.add(0)
        with alone.serve() as serving:
            texts.append(text_of(serving))
    assert len(set(texts)) == REVISIONS
    return texts


def test_a_variant_removed_during_its_own_stream_finishes_it_and_is_then_gone(
    tmp_path: Path, deltas: list[Path]
) -> None:
    elsewhere = Elsewhere(tmp_path / "store", deltas)
    elsewhere.add(0)
    with elsewhere.serve() as serving:
        whole = text_of(serving)
        chunks = serving.service.stream(COMPLETIONS, body(serving), LOCAL)
        first = next(chunks)
        elsewhere.remove()
        with pytest.raises(GymError) as refused:
            text_of(serving)
        assert refused.value.code is ErrorCode.NOT_FOUND
        text = "".join(choice["text"] for chunk in (first, *chunks) for choice in chunk["choices"])
        assert text == whole
        assert serving.store is not None
        stats = serving.store.stats
        until(lambda: stats().pinned == 0, "its weights are released")


def test_under_load_a_swap_changes_no_answer_that_runs(tmp_path: Path, deltas: list[Path]) -> None:
    known = texts_of_revisions(tmp_path, deltas)
    elsewhere = Elsewhere(tmp_path / "store", deltas)
    elsewhere.add(0)
    with elsewhere.serve() as serving, ThreadPoolExecutor(READERS) as pool:
        ended = False

        def read() -> list[str]:
            texts = [text_of(serving)]
            while not ended:
                texts.append(text_of(serving))
            return texts

        readers = [pool.submit(read) for _ in range(READERS)]
        for index in range(1, REVISIONS):
            text_of(serving)
            elsewhere.add(index)
            assert text_of(serving) == known[index]  # the next request has the new revision
        ended = True
        answers = [reader.result() for reader in readers]
        assert {text for texts in answers for text in texts} <= set(known)
        for texts in answers:
            order = [known.index(text) for text in texts]
            assert order == sorted(order)
