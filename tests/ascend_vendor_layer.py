"""Runs the Ascend C kernels on the vendor's own headers, over a model of instructions.

    python tests/ascend_vendor_layer.py DEVKIT ASC_TOOLS 2201

DEVKIT and ASC_TOOLS are checkouts of the vendor's public repositories `asc-devkit`
(the Ascend C headers) and `asc-tools` (headers of the CPU twin). Nothing of them is in
this project, and their licence limits what they may be used for. No toolchain is
needed:

    kernels.cpp + DEVKIT headers + ascend_vendor_layer/intrinsics.h --(g++)--> library
    library --(ascend_kernels.py)--> the small cases, against the NumPy oracle

It shows that the kernels fit the real headers of an architecture, syntax and types, and
that the simulator means the same as the vendor's layer by masks, repeats, strides and
queues. It shows nothing about hardware: pipes run in order here.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import ascend_kernel_cases as cases
import ascend_kernels

from ascend_bridge.kernels import build

FOLDER = Path(__file__).parent / "ascend_vendor_layer"
# Enumerations that the headers name and the kernels do not come to.
_MORE_ENUMS = {
    "mem_t": "L1 L0A L0B L0C UB BT FB",
    "mem_dsb_t": "DSB_ALL DSB_DDR DSB_UB DSB_SEQ",
    "cache_line_t": "SINGLE_CACHE_LINE ENTIRE_DATA_CACHE",
    "dcci_dst_t": "CACHELINE_ALL CACHELINE_UB CACHELINE_OUT CACHELINE_ATOMIC",
    "pad_t": "PAD_NONE " + " ".join(f"PAD_MODE{i}" for i in range(1, 9)),
    "addr_cal_mode_t": "inc dec",
    "ub_addr8_t": " ".join(f"VA{i}" for i in range(8)),
    "QuantMode_t": "NoQuant F322F16 F322BF16 DEQF16 VDEQF16 QF322B8_PRE VQF322B8_PRE"
    " REQ8 VREQ8",
    "atomic_type_t": "ATOMIC_NONE ATOMIC_F32 ATOMIC_F16 ATOMIC_S16 ATOMIC_S32 ATOMIC_S8"
    " ATOMIC_BF16",
    "atomic_op_t": "ATOMIC_SUM ATOMIC_MAX ATOMIC_MIN",
    "half_t": "L128 H128",
}


def main() -> int:
    """Compile, run, and say how many cases were right."""
    devkit, tools, arch = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as name:
        library = make_library(devkit, tools, arch, Path(name))
        for case in cases.SMALL:
            case.check(library)
    print(f"arch {arch}: {len(cases.SMALL)} cases on the vendor's headers")
    return 0


def make_library(
    devkit: Path, tools: Path, arch: int, folder: Path
) -> ascend_kernels.Library:
    """Return the kernels on the vendor's headers, as a library in the folder."""
    command = ["g++", "-x", "c++", "-std=c++17", "-w", "-O1", "-fPIC"]
    command += ["-DASCENDC_CPU_DEBUG=1", "-DPAGEDJAX_ASCEND_SYNTAX_ONLY"]
    command += [*build._HEADER_FLAGS[arch], f"-DPAGEDJAX_ASCEND_ARCH={arch}"]
    includes = (folder, FOLDER, build.HERE, devkit, devkit / "include")
    includes += (devkit / "include/basic_api", tools / "cpudebug/include")
    command += [f"-I{include}" for include in includes]
    # The whole of the headers brings in more than kernels of this kind use.
    (folder / "kernel_operator.h").write_text(
        '#pragma once\n#include "basic_api/kernel_basic_intf.h"\n'
    )
    find_names(command, devkit, folder)
    objects = [folder / "run.o", folder / "plan.o", folder / "stubs.o"]
    compile_one([*command, "-c", str(FOLDER / "run.cpp"), "-o", str(objects[0])])
    plan = ["g++", "-std=c++17", "-O1", "-fPIC", "-c", str(build.HERE / "plan.cpp")]
    compile_one([*plan, "-o", str(objects[1])])
    (folder / "stubs.c").write_text(stand_ins(objects[0]))
    stubs = ["gcc", "-w", "-fPIC", "-c", str(folder / "stubs.c")]
    compile_one([*stubs, "-o", str(objects[2])])
    target = folder / "library.so"
    compile_one(["g++", "-shared", "-o", str(target), *map(str, objects)])
    return ascend_kernels.Library(target, arch)


def find_names(command: list[str], devkit: Path, folder: Path) -> None:
    """Write stub_fun.h, with an empty function for each name the headers lack."""
    text = (FOLDER / "intrinsics.h").read_text()
    mine = set(re.findall(r"^MODEL_\w+\((\w+)", text, re.MULTILINE))
    mine |= set(re.findall(r"\b(\w+)\(", text))
    enums = dict(_MORE_ENUMS)
    modes: set[str] = set()
    for header in (devkit / "impl/basic_api").rglob("*.h"):
        modes |= set(re.findall(r"\bCRMODE_\w+", header.read_text(errors="replace")))
    enums["crmode_t"] = " ".join(sorted(modes))
    lines = ['#pragma once\n#include "intrinsics.h"\n']
    lines += [f"enum {k} {{ {', '.join(v.split())} }};\n" for k, v in enums.items()]
    names: set[str] = set()
    missing = re.compile(
        r"'(\w+)' was not declared|no arguments to '(\w+)' that depend"
    )
    while True:
        functions = [
            f"template <class... A> uint64_t {name}(A...) {{ return 0; }}\n"
            for name in sorted(names)
        ]
        (folder / "stub_fun.h").write_text("".join(lines + functions))
        check = [*command, "-fmax-errors=0", "-fsyntax-only", str(FOLDER / "run.cpp")]
        run = subprocess.run(
            check, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
        )
        found = {a or b for a, b in missing.findall(run.stderr)}
        if run.returncode == 0:
            return
        if not found - names - mine:
            errors = [x for x in run.stderr.splitlines() if " error: " in x]
            raise SystemExit("\n".join(errors[:20]))
        names |= found - mine


def stand_ins(compiled: Path) -> str:
    """Return C for what the headers leave to closed libraries, by its linker name."""
    run = subprocess.run(
        ["nm", "-u", str(compiled)], check=True, capture_output=True, text=True
    )
    names = [line.split()[1] for line in run.stdout.splitlines()]
    code = ["#include <stdint.h>", "#include <string.h>"]
    code += [
        "int64_t block_idx, block_num;",
        "int32_t g_coreType = 2, g_taskRation = 1;",
    ]
    code += ["int32_t sub_block_idx;", "static char lock[256];"]
    for name in names:
        if "5check" in name:
            code.append(f"int {name}() {{ return 1; }}")
        elif "ProcessLock11processLock" in name:
            code.append(f"char {name}[64];")
        elif "ProcessLock" in name:
            code.append(f"void* {name}() {{ return lock; }}")
        elif name.endswith(("AIC_TYPEE", "AIV_TYPEE")):
            code.append(f"const int {name} = {1 + ('AIV' in name)};")
        elif name.startswith("_ZN7AscendC"):
            code.append(f"int64_t {name};")
        elif "Int32ToFp16" in name:
            body = "_Float16 h = *x; uint16_t b; memcpy(&b, &h, 2); return b;"
            code.append(f"uint16_t {name}(void* self, const int* x) {{ {body} }}")
        elif "FloatToBf16" in name:
            body = "uint32_t b; memcpy(&b, x, 4); return b >> 16;"
            code.append(f"uint16_t {name}(void* self, const float* x) {{ {body} }}")
    return "\n".join(code) + "\n"


def compile_one(command: list[str]) -> None:
    """Run a compiler; what it says ends the program if it fails."""
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(run.stderr[-4000:])


if __name__ == "__main__":
    sys.exit(main())
