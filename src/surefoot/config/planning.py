"""From settings to a plan, with all that has to be read for it: the checkpoint's header and the machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from surefoot.checkpoint.default_model import fetch_default_model
from surefoot.checkpoint.locate import locate
from surefoot.config import hardware
from surefoot.config.engine_plan import CheckpointRef, EnginePlan
from surefoot.config.model_readers import read_model_spec
from surefoot.config.resolve import resolve
from surefoot.config.settings import Settings

DEFAULT_MODEL = "default"


def plan_engine(settings: Settings, console: Console) -> EnginePlan:
    """Fetches the default model if it is asked for and not there; `console` shows the progress.

    Raises CheckpointError or PlanError, both ValueErrors with a way out.
    """
    if settings.model == DEFAULT_MODEL:
        path = fetch_default_model(Path(settings.model_cache).expanduser(), console)
        checkpoint = CheckpointRef(str(path), "gguf")
    else:
        found, format = locate(settings.model)
        checkpoint = CheckpointRef(str(found), format)
    return resolve(settings, checkpoint, read_model_spec(checkpoint), hardware.probe())
