"""What can be wrong with a checkpoint. Every message names the file and the way out."""

from __future__ import annotations


class CheckpointError(ValueError):
    """The checkpoint is not there, damaged, or of a kind that is not supported."""


class ModelSpecError(CheckpointError):
    """The checkpoint describes a model that is not supported, or describes it incompletely."""


class TokenizerError(CheckpointError):
    """The checkpoint has no tokenizer, a damaged one, or one of a kind that is not supported."""


class DefaultModelError(CheckpointError):
    """The default model is not in the cache and could not be put there."""


class HubError(CheckpointError):
    """A model of the Hugging Face hub could not be had."""
