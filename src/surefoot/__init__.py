"""surefoot: an LLM serving engine that decides once, isolates failures, and keeps evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surefoot.frontend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`surefoot.LLM` brings torch along, which the frontend and the supervisor must not load."""
    if name == "LLM":
        from surefoot.config.settings import limit_openmp_spinning

        limit_openmp_spinning()
        from surefoot.llm import LLM

        return LLM
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
