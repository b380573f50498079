"""Compile every Triton kernel for a GPU of the given capability, for each dtype it takes."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rgpr._backend.cuda import distances, moments, pooling, probit, small_layers, weighted_squares
from rgpr._backend.small_layers import COLUMNS, STEP


def build(kernel: Any, *types: str, more_than_one: str = "", **constants: Any) -> None:
    """Compile a kernel twice: for sizes that are all above one, and for sizes that are all one.

    Args:
        kernel: A function with ``@triton.jit``.
        types: The types of its parameters that are no constants.
        more_than_one: The name of a size that is never one.
        constants: The values of its parameters that are constants.
    """
    names = kernel.arg_names
    values = dict(zip(names, (*types, *["constexpr"] * len(constants)), strict=True))
    compile_one(kernel, values, constants)
    # Triton makes a constant of every size that is one, and compiles the kernel again for it.
    ones = {name: 1 for name, kind in values.items() if kind == "i32" and name != more_than_one}
    compile_one(kernel, values | dict.fromkeys(ones, "constexpr"), ones | constants)


def compile_one(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile a kernel down to machine code, and print that it was done."""
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    options = (
        {"num_stages": small_layers.stages(constants["CLASSES"])}
        if "CLASSES" in constants and "PRECISION" in constants
        else {}
    )
    binary = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    assert binary.asm["cubin"]
    print("compiled", kernel.__name__, signature)


def main() -> None:
    wide = "*fp64"
    for dtype in ("*fp32", "*bf16", "*fp16", "*fp64"):
        own = wide if dtype == wide else "*fp32"
        build(
            distances._mean_cubes, dtype, own, own, own, wide, "i32", "i32",
            OFFSET=True, CHANNELS_LAST=True, BLOCK=1024,
        )  # fmt: skip
        build(
            moments._add_moments, dtype, own, wide, wide, "i32", "i32", "i32",
            CHANNELS_LAST=True, ROWS=32, COLUMNS=64,
        )  # fmt: skip
        for last in (False, True):
            build(
                pooling._pooled, dtype, own, "i32", "i32", "i32",
                CHANNELS_LAST=last, TALL=64, WIDE=32,
            )  # fmt: skip
        for onset in (False, True):
            build(
                probit._probit, dtype, *[wide] * 7, dtype, "fp32", "fp32", "i32", "i32",
                more_than_one="classes", ONSET=onset, CLASSES=16, LAYERS=4,
            )  # fmt: skip
    for own in ("*fp32", wide):
        build(distances._peak_out, own, own, own, "i32", BLOCK=512)
    for own in ("*fp32", wide):
        build(distances._nearest_cubes, *[own] * 5, wide, "i32", "i32", OFFSET=True, BLOCK=512)
    for classes, aligned in ((16, True), (64, False)):
        build(
            small_layers._packed_squares, "*fp32", "*fp32", "*i64", wide, "*fp32", "i32", "i32",
            CLASSES=classes, ALIGNED=aligned, PRECISION=small_layers.PRECISION,
            ROWS=small_layers.ROWS, COLUMNS=COLUMNS, STEP=STEP,
        )  # fmt: skip
    for outputs in (16, 64):
        build(
            weighted_squares._weighted_squares, *["*fp32"] * 4, *["i32"] * 6,
            OUTPUTS=outputs, PRECISION=small_layers.PRECISION, ROWS=weighted_squares.ROWS,
            COLUMNS=weighted_squares.COLUMNS, STEP=weighted_squares.STEP,
        )  # fmt: skip
    build(small_layers._cubed_up, wide, "*fp32", "*i64", wide, wide, "i32", "i32", ROWS=128)


if __name__ == "__main__":
    main()
