"""The schemas of a message's content parts."""

from __future__ import annotations

from typing import Literal

from gym_fed.serving.openai.fields import RequestModel


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class ImageUrl(RequestModel):
    """A picture as a data URL."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(RequestModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(RequestModel):
    """A sound in base64."""

    data: str
    format: str


class AudioPart(RequestModel):
    type: Literal["input_audio"]
    input_audio: InputAudio


class VideoUrl(RequestModel):
    """A video as a data URL."""

    url: str


class VideoPart(RequestModel):
    type: Literal["video_url"]
    video_url: VideoUrl
