"""What each row weighs in the loss, and the loss summed by weight."""

from .loss_weight import Weighed, loss_weight
from .stage import LossWeight
from .weighted_loss import weighted_loss

__all__ = ["LossWeight", "Weighed", "loss_weight", "weighted_loss"]
