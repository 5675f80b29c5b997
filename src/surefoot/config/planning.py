"""From settings to a plan, with all that has to be read for it: the checkpoint's header and the machine."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from surefoot.checkpoint.default_model import fetch_default_model
from surefoot.checkpoint.errors import CheckpointError
from surefoot.checkpoint.locate import HubModel, locate
from surefoot.config import hardware
from surefoot.config.engine_plan import CheckpointRef, EnginePlan
from surefoot.config.model_readers import read_model_spec
from surefoot.config.resolve import resolve
from surefoot.config.settings import Settings

DEFAULT_MODEL = "default"


def plan_engine(settings: Settings, console: Console, fetch_weights: bool = True) -> EnginePlan:
    """Fetches a model that is not here; `console` shows the progress. Weights that nobody will read are not fetched.

    Raises CheckpointError or PlanError, both ValueErrors with a way out.
    """
    checkpoint = _find_checkpoint(settings, console, fetch_weights and settings.load_format == "checkpoint")
    return resolve(settings, checkpoint, read_model_spec(checkpoint), hardware.probe())


def _find_checkpoint(settings: Settings, console: Console, fetch_weights: bool) -> CheckpointRef:
    hub_model = HubModel.parse(settings.model)
    if hub_model is not None and not Path(settings.model).exists():
        from surefoot.checkpoint import hub  # takes a third of a second to import

        path, format = hub.fetch(hub_model, settings.revision, fetch_weights, console)
        return CheckpointRef(str(path), format)
    if settings.revision:
        raise CheckpointError(
            f"--revision {settings.revision} means nothing for {settings.model}, which is not a model of the Hugging "
            "Face hub: leave it out"
        )
    if settings.model == DEFAULT_MODEL:
        return CheckpointRef(str(fetch_default_model(Path(settings.model_cache).expanduser(), console)), "gguf")
    path, format = locate(settings.model)
    return CheckpointRef(str(path), format)
