"""`[trackers]`: the settings of trackers that get a run's incidents."""

from __future__ import annotations

import msgspec


class TrackerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[trackers]`: where the training process, which has a run open there, marks incidents and writes a summary."""

    wandb: bool = False
    """Mark incidents in the run that the script has open in Weights & Biases."""
    mlflow: bool = False
    """Mark incidents in the run that is open in MLflow."""
    trackio: bool = False
    """Mark incidents in the run that is open in Trackio."""
    tensorboard: bool = False
    """Mark incidents in TensorBoard, in a folder inside that of the script's `SummaryWriter`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trackers that are switched on."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name))
