"""Rows of text alone, for a processor that needs a picture in every row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gym_fed.base.modeling.processors import load_processor
from gym_fed.base.models import load_tokenizer
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.vision.trainer import ImageBatches
from tools.architectures.processors import save_processor

ROW = {
    "messages": json.dumps([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]),
    "images": [],
}


@pytest.mark.parametrize("model_type", ["paligemma", "got_ocr2"])
def test_rows_without_a_picture_are_refused_with_the_processor_that_needs_one(
    model_type: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer("gym-nano")
    tokenizer.save_pretrained(tmp_path)
    assert save_processor(model_type, tokenizer, tmp_path) == ""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    batches = ImageBatches(load_processor(str(tmp_path)), assistant_only=True)
    with pytest.raises(
        GymError, match=r"rows without a picture: \w+Processor needs one in every row"
    ) as caught:
        batches([ROW])
    assert caught.value.code is ErrorCode.DATA_INVALID
