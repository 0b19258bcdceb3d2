"""Builds `offload._C` with CMake. Everything else is declared in pyproject.toml.

Environment: `OFFLOAD_CUDA` is AUTO, ON or OFF, `OFFLOAD_CUDA_ARCHS` a list as CMake takes it,
`MAX_JOBS` the number of parallel compiler jobs.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = ["CMakeLists.txt", *(f"csrc/{path.name}" for path in sorted(ROOT.glob("csrc/*.*")))]


class CMakeBuild(build_ext):
    """Configures and builds into `build/`, then leaves the module where setuptools expects it."""

    def build_extension(self, ext: Extension) -> None:
        self._check_tools()
        import pybind11  # a build requirement, absent when only metadata is asked for

        hash_file = ROOT / "offload" / "_source_hash.py"
        source_hash = runpy.run_path(str(hash_file))["source_hash"](ROOT / "csrc")
        module = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_directory = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        definitions = {
            # The cache would keep the path into a build environment that pip has removed.
            "CMAKE_MAKE_PROGRAM": shutil.which("ninja"),
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "OFFLOAD_CUDA": os.environ.get("OFFLOAD_CUDA") or "AUTO",
            "OFFLOAD_OUTPUT_DIRECTORY": str(module.parent),
            "OFFLOAD_SOURCE_HASH": source_hash,
            "OFFLOAD_VERSION": self.distribution.get_version(),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        # CMake reads the architectures from the environment where its cache has none.
        flags = ["-UOFFLOAD_CUDA_ARCHS", *(f"-D{name}={definitions[name]}" for name in definitions)]
        self._run("-S", str(ROOT), "-B", str(build_directory), "-G", "Ninja", *flags)
        self._run("--build", str(build_directory), "--parallel", jobs)

    @staticmethod
    def _check_tools() -> None:
        named = os.environ.get("CXX", "").split()
        candidates = named[:1] or ["c++", "g++", "clang++"]
        if not any(shutil.which(candidate) for candidate in candidates):
            sys.exit(
                f"offload: expected a C++17 compiler, found none of {', '.join(candidates)}. "
                "Install one (Debian and Ubuntu: `apt install g++`) or set CXX."
            )
        # Without build isolation the environment's scripts need not be on PATH.
        os.environ["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
        )
        missing = [tool for tool in ("cmake", "ninja") if not shutil.which(tool)]
        if missing:
            sys.exit(f"offload: expected {' and '.join(missing)}. `pip install cmake ninja`.")

    @staticmethod
    def _run(*arguments: str) -> None:
        """CMake has told the reason when it fails; a traceback would only bury it."""
        code = subprocess.run(["cmake", *arguments], check=False).returncode
        if code != 0:
            sys.exit(f"offload: cmake failed with exit code {code}; its message is above.")


setup(
    packages=find_packages(include=["offload", "offload.*"]),
    package_data={"offload": ["py.typed", "_C.pyi"]},
    ext_modules=[Extension("offload._C", sources=[], depends=SOURCES)],
    cmdclass={"build_ext": CMakeBuild},
)
