"""What the compilers make of the codecs: vector loops on the host, no spills on cards."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "csrc" / "codec_host_kernels.h"
MARK = "// vectorised"
ARCHS = ["75", "80", "86", "89", "90", "100", "120"]


def options_of(source: str) -> list[str]:
    """The compiler options that CMakeLists.txt sets for a source of the codecs."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.search(
        rf"set_source_files_properties\(csrc/{re.escape(source)} PROPERTIES\s+"
        r'COMPILE_OPTIONS "([^"]+)"\)',
        text,
    )
    assert found, source
    return found[1].split(";")


def compiler_output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_neither_compiler_may_fuse_a_multiplication_with_an_addition():
    assert "-ffp-contract=off" in options_of("codec_host.cpp")
    assert "--fmad=false" in options_of("codec_cuda.cu")
    assert not {"-ffast-math", "-Ofast", "--use_fast_math"} & {
        *options_of("codec_host.cpp"),
        *options_of("codec_cuda.cu"),
    }


def gcc() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    version = compiler_output(compiler, "-dumpfullversion")
    machine = compiler_output(compiler, "-dumpmachine")
    if int(version.split(".")[0]) < 12 or not machine.startswith("x86_64"):
        pytest.skip("needs g++ 12 or newer for x86-64, which clones functions for x86-64-v3")
    return compiler


def test_gcc_vectorises_every_marked_loop(tmp_path):
    output = compiler_output(
        gcc(),
        *("-std=c++17", *options_of("codec_host.cpp"), "-Icsrc", "-march=x86-64-v3"),
        *("-fopt-info-vec-optimized-missed", "-c", "csrc/codec_host.cpp"),
        *("-o", str(tmp_path / "codec_host.o")),
    )
    place = rf"{KERNELS.name}:(\d+):\d+:"
    refused = set(re.findall(rf"{place} missed: couldn't vectorize loop", output))
    vectors = set(re.findall(rf"{place} optimized: loop vectorized using 32 byte", output))
    lines = enumerate(KERNELS.read_text().splitlines(), 1)
    marked = {str(number) for number, text in lines if text.endswith("// vectorised")}
    assert len(marked) >= 10
    assert not marked & refused
    assert marked <= vectors


def test_gcc_compiles_the_loops_for_newer_instruction_sets(tmp_path):
    target = tmp_path / "codec_host.o"
    compiler_output(
        gcc(), "-std=c++17", "-O0", "-Icsrc", "-c", "csrc/codec_host.cpp", "-o", str(target)
    )
    symbols = compiler_output("nm", str(target))
    for function in ("encode_blocks", "decode_blocks"):
        for version in ("default", "arch_x86_64_v3", "arch_x86_64_v4", "resolver"):
            assert re.search(rf"{function}.*\.{version}\b", symbols), (function, version)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_kernel_spills_or_has_a_stack(arch, tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    output = compiler_output(
        nvcc,
        *("-std=c++17", "-O3", *options_of("codec_cuda.cu"), "-Icsrc", f"-arch=sm_{arch}"),
        *("-Xptxas", "-v", "-cubin", "csrc/codec_cuda.cu", "-o", str(tmp_path / "codec.cubin")),
    )
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", output)
    # Two codecs times three dtypes, each way, and the two of the bits.
    assert len(frames) == 14
    assert set(frames) == {("0", "0", "0")}
    registers = [int(used) for used in re.findall(r"Used (\d+) registers", output)]
    assert len(registers) == 14
    assert max(registers) <= 64  # else four thread blocks no longer fit a multiprocessor


def test_kernels_move_four_values_in_one_access(tmp_path):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    target = tmp_path / "codec.ptx"
    compiler_output(
        nvcc,
        *("-std=c++17", "-O3", *options_of("codec_cuda.cu"), "-Icsrc", "-arch=sm_90"),
        *("-ptx", "csrc/codec_cuda.cu", "-o", str(target)),
    )
    kernels = re.findall(r"\.entry (\w+)\((.*?)\n}", target.read_text(), re.DOTALL)
    assert len(kernels) == 14
    for name, body in kernels:
        assert "fma.rn.f32" not in body, name
        if "encode_kernel" in name or "decode_kernel" in name:
            assert re.search(r"ld\.global(\.nc)?\.v4", body), name
            assert re.search(r"st\.global\.v4", body), name
