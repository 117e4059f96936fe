"""Collect rollouts from TorchRL, Ray and queues, and assemble them into groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.faces import lazy

if TYPE_CHECKING:
    from .assembling import POLL, assembled, check_patience, wait_until
    from .drain import DrainWriter, drained
    from .group_unit import GroupUnit
    from .informing import informative
    from .lockstep import on_every_rank
    from .on_ray import RayAssembler
    from .on_write import AssembleOnWrite, BufferAccount, buffer_account, groups_on_write
    from .pacing import paced
    from .rollout_stream import RolloutStream
    from .stamping import StampIds, stamp_ids
    from .thin_rows import ColumnsRead, pack_thin, unpack_thin
    from .torchrl_configs import register_configs

__all__ = [
    "POLL",
    "AssembleOnWrite",
    "BufferAccount",
    "ColumnsRead",
    "DrainWriter",
    "GroupUnit",
    "RayAssembler",
    "RolloutStream",
    "StampIds",
    "assembled",
    "buffer_account",
    "check_patience",
    "drained",
    "groups_on_write",
    "informative",
    "on_every_rank",
    "paced",
    "pack_thin",
    "register_configs",
    "stamp_ids",
    "unpack_thin",
    "wait_until",
]

__getattr__, __dir__ = lazy(__name__, __all__)
