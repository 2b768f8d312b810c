"""The screen ``train``."""

from __future__ import annotations

from fastapi import APIRouter

from gym_fed.webui.workbench import Workbench


def routes(workbench: Workbench) -> APIRouter:
    """Its part of the API."""
    return APIRouter()
