"""The native engines without Python: under sanitizers, and for another processor by emulation.

Each test needs tools that not every machine has; it is skipped by their names.
"""

import hashlib
import json
import shutil
import struct
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ecckpt.coding import gf256

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "codec.json").read_text())
COMMON = [
    *("checksums", "coding", "copying", "crc_combine", "dispatch"),
    *("kernels_scalar", "parallel_for"),
]
X86 = {
    "kernels_avx2": ["-mavx2", "-msse4.2"],
    "kernels_gfni": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mgfni"),
        *("-mvpclmulqdq", "-mpclmul", "-msse4.2"),
    ],
}
ARM = {"kernels_neon": ["-march=armv8-a+crypto+crc"]}
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def tool(name):
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def ran(*command, timeout_s=100):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compiled(folder, compiler, kernels, flags):
    """Compile all of the native code but the Python module; return the object files."""
    sources = {ROOT / "native" / f"{name}.cpp": [] for name in COMMON}
    sources |= {ROOT / "native" / f"{name}.cpp": own for name, own in kernels.items()}
    sources[ROOT / "tests" / "native" / "check.cpp"] = []
    shared = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'native'}", *flags]

    def compile_one(source):
        target = folder / f"{source.stem}.o"
        ran(compiler, *shared, *sources[source], "-c", str(source), "-o", str(target))
        return target

    with ThreadPoolExecutor(2) as pool:
        slow_first = sorted(sources, reverse=True)
        return list(pool.map(compile_one, slow_first))


def linked(folder, compiler, objects, flags):
    program = folder / "check"
    ran(compiler, *map(str, objects), *flags, "-pthread", "-o", str(program))
    return str(program)


# -- vectors from the oracle ----------------------------------------------------------------------


def parts(k, length):
    stream = hashlib.shake_128(b"ecckpt 1").digest(k * length)
    return [stream[i * length : (i + 1) * length] for i in range(k)]


def sums(fragments, block_bytes):
    blocks = [
        [fragment[at : at + block_bytes] for at in range(0, len(fragment), block_bytes)]
        for fragment in fragments
    ]
    return [gf256.crc32c(block) for row in blocks for block in row]


def record(coefficients, inputs, coded_count, outputs, block_bytes):
    numbers = (len(inputs), coded_count, len(outputs), len(inputs[0]), block_bytes)
    checksums = [*sums(inputs, block_bytes), *sums(outputs, block_bytes)]
    head = struct.pack("=5I", *numbers)
    tail = struct.pack(f"={len(checksums)}I", *checksums)
    return b"".join([head, *coefficients, *inputs, *outputs, tail])


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """A file of encodings whose hashes are pinned, and of rebuilding what each of them lost."""
    records = []
    for golden in GOLDEN.values():
        k, m, block_bytes = golden["k"], golden["m"], golden["block_bytes"]
        data = parts(k, golden["length"])
        parity = gf256.encode(k, m, data)
        assert hashlib.sha256(b"".join(parity)).hexdigest() == golden["parity_sha256"]
        rows = gf256.generator_matrix(k, k + m)[k:]
        records.append(record(rows, data, k, parity, block_bytes))
        lost = list(range(0, k + m, 2))[:m]
        present = [index for index in range(k + m) if index not in lost]
        fragments = [*data, *parity]
        records.append(
            record(
                gf256.decode_matrix(k, k + m, present[:k], lost),
                [fragments[index] for index in present],  # more than k: not all are coded
                k,
                [fragments[index] for index in lost],
                block_bytes,
            )
        )
    path = tmp_path_factory.mktemp("vectors") / "vectors.bin"
    path.write_bytes(struct.pack("=I", len(records)) + b"".join(records))
    return str(path)


# -- tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The check program for this processor, with AddressSanitizer and UBSan, and its objects."""
    compiler, folder = tool("g++"), tmp_path_factory.mktemp("sanitized")
    machine = ran(compiler, "-dumpmachine")
    if not machine.startswith("x86_64"):
        pytest.skip(f"these flags are for x86_64, not {machine.strip()}")
    objects = compiled(folder, compiler, X86, ["-O0", "-g1", *SANITIZERS])
    return linked(folder, compiler, objects, SANITIZERS)


def test_sanitizers_and_the_oracle(sanitized, vectors):
    assert "scalar: " in ran(sanitized, "vectors", vectors)


def test_sanitizers_and_random_cases(sanitized):
    seed = np.random.default_rng().integers(1 << 31)
    print("seed", seed)
    assert "scalar: 60 cases" in ran(sanitized, "random", str(seed), "60")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """How to run the check program for 64-bit Arm here, and its objects."""
    emulator, compiler = tool("qemu-aarch64"), tool("aarch64-linux-gnu-g++")
    folder = tmp_path_factory.mktemp("arm")
    objects = compiled(folder, compiler, ARM, ["-O2"])
    return emulator, linked(folder, compiler, objects, ["-static"])


def test_neon_and_the_oracle(emulated, vectors):
    assert "neon: " in ran(*emulated, "vectors", vectors)


def test_neon_and_random_cases(emulated):
    assert "neon: 40 cases" in ran(*emulated, "random", "1", "40")


@pytest.mark.parametrize(("compiler", "kernels"), [("g++", X86), ("aarch64-linux-gnu-g++", ARM)])
def test_no_kernel_leaks_its_instructions(compiler, kernels, tmp_path):
    # A weak symbol may be chosen by the linker for every file. Without optimization nothing is
    # inlined, so whatever could be emitted is.
    compiler, names = tool(compiler), tool("nm")
    if kernels is X86 and not ran(compiler, "-dumpmachine").startswith("x86_64"):
        pytest.skip("these flags are for x86_64")
    for name, flags in {"kernels_scalar": [], **kernels}.items():
        source, target = str(ROOT / "native" / f"{name}.cpp"), str(tmp_path / f"{name}.o")
        ran(compiler, "-std=c++20", "-O0", *flags, "-c", source, "-o", target)
        kinds = [line.split()[-2:] for line in ran(names, target).splitlines()]
        shared = {symbol for kind, symbol in kinds if kind not in "tdbrnUN"}
        assert shared == {f"_ZN6ecckpt{len(name) - 1}{name.removeprefix('kernels_')}_engineE"}
