"""Build hook of the wheel: compiles the host executor where that is possible.

With a C++ compiler and jaxlib's FFI headers the wheel carries `_host.so` and the
platform's tag; it works with every Python 3. Without them it is a pure Python wheel
that carries the reason, which `ascend_bridge.host.usable()` tells.
"""

import importlib.util
import pathlib
import sys
import sysconfig
import tempfile
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class HostBuildHook(BuildHookInterface):
    """Adds the library, or the record of why there is none, to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is put together.

        Args:
            version: "standard", or "editable": then the library goes into the sources.
            build_data: what hatchling is told.
        """
        if self.target_name != "wheel":
            return
        build = _load_build(pathlib.Path(self.root) / "ascend_bridge" / "build.py")
        if version == "editable":
            record = build.build_host()
        else:
            self._folder = tempfile.TemporaryDirectory()
            record = build.build_host(self._folder.name)
            made = [build.RECORD, *([build.LIBRARY] if record.built else [])]
            for name in made:
                source = str(pathlib.Path(self._folder.name) / name)
                build_data["force_include"][source] = f"ascend_bridge/{name}"
        if record.built:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
        self.app.display_info(
            f"host executor {'built' if record.built else 'not built'}: {record.reason}"
        )

    def finalize(self, *_: Any) -> None:
        """Remove what was compiled; it is in the wheel now."""
        folder = getattr(self, "_folder", None)
        if folder is not None:
            folder.cleanup()


def _load_build(path: pathlib.Path) -> ModuleType:
    """Load the build module by its path: the package imports jax."""
    spec = importlib.util.spec_from_file_location("host_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
