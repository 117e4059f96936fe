"""TorchRL's base classes of a stage. Without TorchRL, they have only the parts that a stage uses.

An installed TorchRL may fail to import beside another version of tensordict, so this module tries it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict import NestedKey
from torch import nn

if TYPE_CHECKING:
    from torchrl.envs import EnvBase
    from torchrl.envs.transforms import Transform
else:
    try:
        from torchrl.envs import EnvBase
        from torchrl.envs.transforms import Transform
    except ImportError:

        class EnvBase(nn.Module):
            """Stands for TorchRL's class. No object of it exists."""

        class Transform(nn.Module):
            """A module with keys and a container.

            Its attributes have TorchRL's names. So a pickle that was made with TorchRL loads without TorchRL,
            and the reverse.
            """

            def __init__(self, in_keys: Sequence[NestedKey] = (), out_keys: Sequence[NestedKey] = ()):
                super().__init__()
                self._in_keys, self._out_keys = list(in_keys), list(out_keys)
                self._in_keys_inv = self._out_keys_inv = None
                self._missing_tolerance = False
                self.reset_parent()

            in_keys = property(lambda self: self._in_keys, lambda self, keys: setattr(self, "_in_keys", keys))
            out_keys = property(
                lambda self: self._out_keys, lambda self, keys: setattr(self, "_out_keys", keys)
            )

            def set_container(self, container: Any) -> None:
                """Note what contains this transform."""
                self.__dict__["_container"] = None if container is None else weakref.ref(container)

            def reset_parent(self) -> None:
                """Forget what contains this transform."""
                self.__dict__["_container"] = self.__dict__["_parent"] = None

            def __getstate__(self) -> dict[str, Any]:
                return self.__dict__ | {"_container": None}


__all__ = ["EnvBase", "Transform"]
