"""Rows with sound and video: the columns and parts of other tools, with paths beside the data file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gym_fed.core.errors import GymError
from gym_fed.data.reading import converted, load_rows
from gym_fed.training.vision.media import source_of

GOOD = {"role": "assistant", "content": "good"}


def read(folder: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "rows.json").write_text(json.dumps(rows))
    return load_rows(folder / "rows.json")


def test_media_are_found_in_columns_and_parts_of_every_tool(tmp_path: Path) -> None:
    for name in ("a.wav", "b.mp3", "c.mp4", "1.png", "2.png"):
        (tmp_path / name).write_bytes(b"x")
    wav, mp3, mp4, one, two = (str(tmp_path / name) for name in ("a.wav", "b.mp3", "c.mp4", "1.png", "2.png"))

    def user(content: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": content}, GOOD]

    sound = {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}
    (
        llama_factory,
        swift,
        frames,
        qwen,
        openai,
        sharegpt,
        chosen,
    ) = read(
        tmp_path,
        {"messages": user("<audio>what?"), "audios": ["a.wav"]},
        {"messages": user("<audio><video>what?"), "audio": "b.mp3", "videos": ["c.mp4"]},
        {"messages": user("<video>what?"), "videos": [["1.png", "2.png"]]},
        {"messages": user([{"type": "audio", "audio_url": "a.wav"}, {"type": "text", "text": "what?"}])},
        {"messages": user([sound, {"type": "text", "text": "what?"}])},
        {"messages": user([{"type": "video_url", "video_url": {"url": "c.mp4"}}])},
        {
            "messages": user(
                [{"type": "video", "video": ["1.png", "2.png"]}, {"type": "audio", "audio": "a.wav"}]
            )
        },
    )
    assert llama_factory["audios"] == [wav]
    assert (swift["audios"], swift["videos"]) == ([mp3], [mp4])
    assert frames["videos"] == [[one, two]]
    assert qwen["audios"] == [wav]
    assert qwen["messages"][0]["content"] == [{"type": "audio"}, {"type": "text", "text": "what?"}]
    assert openai["audios"] == ["data:audio/wav;base64,UklG"]
    assert sharegpt["videos"] == [mp4]
    assert (chosen["videos"], chosen["audios"]) == ([[one, two]], [wav])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"audios": ["a.wav", "a.wav"]}, "1 placeholder for audios, but 2 audio"),
        ({"audios": ["missing.wav"]}, "no audio file at 'missing.wav'"),
        ({"audios": ["a.wav"], "videos": [["a.wav", "missing.png"]]}, "no video file at 'missing.png'"),
        ({"audios": ["https://example.org/a.wav"]}, "is a URL"),
        ({"audios": [{"a": 1}]}, "'audios' holds dict"),
    ],
)
def test_media_that_do_not_fit_are_refused_with_place_and_column(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    (tmp_path / "a.wav").write_bytes(b"x")
    messages = [{"role": "user", "content": "<audio>what?"}, GOOD]
    with pytest.raises(GymError, match="row 1") as caught:
        read(tmp_path, {"messages": messages, **row})
    assert problem in caught.value.message
    assert caught.value.hint


def test_a_sound_in_a_column_and_in_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"x")
    part = {"type": "audio", "audio": "a.wav"}
    with pytest.raises(GymError, match="has 'audios' and parts with their own audios"):
        read(tmp_path, {"messages": [{"role": "user", "content": [part]}, GOOD], "audios": ["a.wav"]})


def test_empty_bytes_are_not_replaced_by_the_file_at_their_path(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    empty = {"bytes": b"", "path": str(tmp_path / "a.png")}
    assert source_of(empty, "images", "row 1") == "data:image/unknown;base64,"
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    ((_, found),) = converted([("row 1", {**row, "images": [empty]})], "auto")
    assert found["images"] == [empty]


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_part_without_a_file_is_refused_by_its_row(kind: str, tmp_path: Path) -> None:
    content = [{"type": kind}, {"type": "text", "text": "what?"}]
    good = {"messages": [{"role": "user", "content": f"a <{kind}> is a word"}, GOOD]}
    assert len(read(tmp_path, good)) == 1
    with pytest.raises(GymError, match=rf"row 2.*: has 1 placeholder for {kind}s, but 0 {kind}s"):
        read(tmp_path, good, {"messages": [{"role": "user", "content": content}, GOOD]})


@pytest.mark.parametrize("kind", ["audio_transcript", "my_video", "audios"])
def test_a_part_of_a_type_that_only_contains_a_known_one_is_refused(kind: str, tmp_path: Path) -> None:
    part = {"type": kind, "text": "said", "audio": "a.wav"}
    with pytest.raises(GymError, match=f"such as type '{kind}'"):
        read(tmp_path, {"messages": [{"role": "user", "content": [part]}, GOOD]})
