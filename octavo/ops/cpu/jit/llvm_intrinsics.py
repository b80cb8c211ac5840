"""Vector code for numba kernels: expressions on LLVM values, atomics, futexes and memory access.

numba compiles loops well but has no vectors, no byte products and no atomics. A function decorated
with `intrinsic` below emits LLVM instructions instead: `emitter.load(...)`, `a * b + c`,
`with emitter.loop(n) as i`. A Python loop in it is unrolled. Kernels use int64 addresses instead of
arrays. LANES is the number of float32 values in a vector: 16 (AVX-512) or 8 (AVX2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from octavo.ops.cpu.cpu_features import InstructionSet, instruction_set

_isa = instruction_set()
if isinstance(_isa, str):
    raise ImportError(_isa)
ISA: InstructionSet = _isa
LANES = ISA.lanes

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16 = ir.HalfType()
f32 = ir.FloatType()
FLOATS, HALVES, INTS = (ir.VectorType(t, LANES) for t in (f32, f16, i32))
# These have the same number of bits as FLOATS.
BYTES = ir.VectorType(i8, 4 * LANES)
SHORTS = ir.VectorType(i16, 2 * LANES)
NARROW = ir.VectorType(i8, LANES)
POINTER = types.int64
FLOAT = types.float32
VOID = types.void

# The storage formats of numbers that kernels read and write as float32, and their sizes in bytes.
F32, F16, I8, F8 = range(4)
SIZES = (4, 2, 1, 1)


class Value:
    """An LLVM value with operators. A Python number as the other operand becomes a constant."""

    def __init__(self, emitter: Emitter, llvm: ir.Value):
        self.emitter = emitter
        self.llvm = llvm

    @property
    def is_float(self) -> bool:
        llvm_type = self.llvm.type
        return (llvm_type.element if isinstance(llvm_type, ir.VectorType) else llvm_type) in (
            f32,
            f16,
        )

    def _pair(self, other: Value | float) -> tuple[ir.Value, ir.Value]:
        return self.llvm, other.llvm if isinstance(other, Value) else self.emitter.constant(
            self.llvm.type, other
        ).llvm

    def _arithmetic(self, other: Value | float, on_floats: str, on_ints: str) -> Value:
        return Value(
            self.emitter,
            getattr(self.emitter.builder, on_floats if self.is_float else on_ints)(
                *self._pair(other)
            ),
        )

    def __add__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "fadd", "add")

    def __sub__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "fsub", "sub")

    def __mul__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "fmul", "mul")

    def __truediv__(self, other: Value | float) -> Value:
        return self._arithmetic(other, "fdiv", "sdiv")

    def __and__(self, other: Value | int) -> Value:
        return Value(self.emitter, self.emitter.builder.and_(*self._pair(other)))

    def __xor__(self, other: Value | int) -> Value:
        return Value(self.emitter, self.emitter.builder.xor(*self._pair(other)))

    def __lshift__(self, other: Value | int) -> Value:
        return Value(self.emitter, self.emitter.builder.shl(*self._pair(other)))

    def __rshift__(self, other: Value | int) -> Value:
        return Value(self.emitter, self.emitter.builder.lshr(*self._pair(other)))

    def compare(self, operator: str, other: Value | float) -> Value:
        left, right = self._pair(other)
        return Value(
            self.emitter,
            self.emitter.builder.fcmp_ordered(operator, left, right)
            if self.is_float
            else self.emitter.builder.icmp_signed(operator, left, right),
        )

    def bits(self, llvm_type: ir.Type) -> Value:
        return Value(self.emitter, self.emitter.builder.bitcast(self.llvm, llvm_type))


class Variable:
    """A value that loops may change. LLVM keeps it in a register."""

    def __init__(self, emitter: Emitter, initial: Value):
        self.emitter = emitter
        self.address = cgutils.alloca_once(emitter.builder, initial.llvm.type)
        self.set(initial)

    def get(self) -> Value:
        return Value(self.emitter, self.emitter.builder.load(self.address))

    def set(self, value: Value) -> None:
        self.emitter.builder.store(value.llvm, self.address)


class Emitter:
    def __init__(self, builder: ir.IRBuilder):
        self.builder = builder

    # ---- values ----------------------------------------------------------------------------------

    def constant(self, llvm_type: ir.Type, value: float) -> Value:
        if isinstance(llvm_type, ir.VectorType):
            return Value(self, ir.Constant(llvm_type, [value] * llvm_type.count))
        return Value(self, ir.Constant(llvm_type, value))

    def variable(self, initial: Value) -> Variable:
        return Variable(self, initial)

    def lane_numbers(self) -> Value:
        return Value(self, ir.Constant(INTS, list(range(LANES))))

    def splat(self, scalar: Value) -> Value:
        """Return a vector with this scalar in all lanes."""
        vector_type = ir.VectorType(scalar.llvm.type, LANES)
        first = self.builder.insert_element(
            ir.Constant(vector_type, ir.Undefined), scalar.llvm, ir.Constant(i32, 0)
        )
        return Value(
            self, self.builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))
        )

    def shuffle(self, first: Value, second: Value, indices: list[int]) -> Value:
        return Value(
            self,
            self.builder.shuffle_vector(
                first.llvm, second.llvm, ir.Constant(ir.VectorType(i32, len(indices)), indices)
            ),
        )

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.builder.select(condition.llvm, yes.llvm, no.llvm))

    # ---- memory ----------------------------------------------------------------------------------

    def load(self, address: Value, llvm_type: ir.Type) -> Value:
        loaded = self.builder.load(self.builder.inttoptr(address.llvm, llvm_type.as_pointer()))
        loaded.align = 1
        return Value(self, loaded)

    def store(self, value: Value, address: Value) -> None:
        self.builder.store(
            value.llvm, self.builder.inttoptr(address.llvm, value.llvm.type.as_pointer())
        ).align = 1

    def load_floats(self, address: Value, storage: int) -> Value:
        """Load LANES numbers in a storage format as float32.

        Numbers in float8 (e4m3) are returned times 2^-8, because the bits of a float8 are those of
        a half with another bias.
        """
        if storage == F32:
            return self.load(address, FLOATS)
        if storage == F16:
            return self.to_float(self.load(address, HALVES))
        stored = self.load(address, NARROW)
        if storage == I8:
            return self.to_float(Value(self, self.builder.sext(stored.llvm, INTS)))
        bits = Value(self, self.builder.zext(stored.llvm, ir.VectorType(i16, LANES)))
        return self.to_float((((bits & 0x80) << 8) + ((bits & 0x7F) << 7)).bits(HALVES))

    def store_floats(self, value: Value, address: Value, storage: int) -> None:
        """Store FLOATS in a storage format. Bytes must be in range: -127..127, or -448..448."""
        if storage == F32:
            return self.store(value, address)
        if storage == F16:
            return self.store(self.to_half(value), address)
        if storage == I8:
            return self.store(self.narrow(self.to_int(self.round(value))), address)
        magnitude = self.absolute(value)
        bits = value.bits(INTS)
        large = bits & 0x7FFFFFFF
        # Round to nearest, ties to even. The exponent's bias changes from 127 to 7.
        large = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the code counts steps of 2^-9.
        small = self.to_int(self.round(magnitude * 512.0))
        code = self.select(magnitude.compare("<", 2.0**-6), small, large) + ((bits >> 24) & 0x80)
        return self.store(self.narrow(code), address)

    def prefetch(self, address: Value, write: bool = False) -> None:
        """Prefetch a cache line that will be read or written soon."""
        argument_types = [i8.as_pointer(), i32, i32, i32]
        function = cgutils.get_or_insert_function(
            self.builder.module, ir.FunctionType(ir.VoidType(), argument_types), "llvm.prefetch.p0"
        )
        self.builder.call(
            function,
            [
                self.builder.inttoptr(address.llvm, argument_types[0]),
                i32(int(write)),
                i32(3),
                i32(1),
            ],
        )

    def opaque(self, value: Value) -> Value:
        """Return the same int64, of which LLVM does not know how it was computed.

        LLVM derives the addresses of rows that are one stride apart from each other, one after
        another. An opaque address of each row makes the loads independent.
        """
        signature = ir.FunctionType(i64, [i64])
        return Value(self, self.builder.asm(signature, "", "=r,0", [value.llvm], False))

    # ---- control ---------------------------------------------------------------------------------

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        with cgutils.for_range(self.builder, count.llvm) as loop:
            yield Value(self, loop.index)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.llvm):
            yield

    # ---- functions -------------------------------------------------------------------------------

    def call(self, name: str, return_type: ir.Type, *arguments: Value) -> Value:
        signature = ir.FunctionType(return_type, [argument.llvm.type for argument in arguments])
        return Value(
            self,
            self.builder.call(
                cgutils.get_or_insert_function(self.builder.module, signature, name),
                [argument.llvm for argument in arguments],
            ),
        )

    def _math(self, name: str, *operands: Value) -> Value:
        operand_type = operands[0].llvm.type
        suffix = f"v{operand_type.count}f32" if isinstance(operand_type, ir.VectorType) else "f32"
        return self.call(f"llvm.{name}.{suffix}", operand_type, *operands)

    def fma(self, first: Value, second: Value, addend: Value) -> Value:
        """Return first * second + addend, rounded once."""
        return self._math("fma", first, second, addend)

    def maximum(self, first: Value, second: Value) -> Value:
        return self._math("maxnum", first, second)

    def minimum(self, first: Value, second: Value) -> Value:
        return self._math("minnum", first, second)

    def absolute(self, operand: Value) -> Value:
        return self._math("fabs", operand)

    def round(self, operand: Value) -> Value:
        return self._math("rint", operand)

    def to_int(self, operand: Value) -> Value:
        int_type = INTS if isinstance(operand.llvm.type, ir.VectorType) else i32
        return Value(self, self.builder.fptosi(operand.llvm, int_type))

    def to_float(self, operand: Value) -> Value:
        """Convert int32 or half to float32."""
        float_type = FLOATS if isinstance(operand.llvm.type, ir.VectorType) else f32
        return Value(
            self,
            (self.builder.fpext if operand.is_float else self.builder.sitofp)(
                operand.llvm, float_type
            ),
        )

    def to_half(self, operand: Value) -> Value:
        return Value(
            self,
            self.builder.fptrunc(
                operand.llvm, HALVES if isinstance(operand.llvm.type, ir.VectorType) else f16
            ),
        )

    def narrow(self, operand: Value) -> Value:
        """Truncate INTS to bytes."""
        return Value(self, self.builder.trunc(operand.llvm, NARROW))

    def _folded(self, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Reduce the lanes by joining halves, always in the same order."""
        width = LANES
        while width > 1:
            width //= 2
            vector = join(
                vector,
                self.shuffle(
                    vector,
                    vector,
                    [(lane + width) % LANES if lane < width else lane for lane in range(LANES)],
                ),
            )
        return Value(self, self.builder.extract_element(vector.llvm, ir.Constant(i32, 0)))

    def total(self, vector: Value) -> Value:
        return self._folded(vector, lambda left, right: left + right)

    def largest(self, vector: Value) -> Value:
        return self._folded(vector, self.maximum)

    def exp(self, exponent: Value) -> Value:
        """Return e^x of FLOATS with an error of about 2e-7.

        It is 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
        """
        exponent = self.maximum(
            self.minimum(exponent, self.constant(FLOATS, 88.0)), self.constant(FLOATS, -87.0)
        )
        power = self.round(exponent * 1.4426950408889634)
        remainder = self.fma(power, self.constant(FLOATS, -0.693359375), exponent)
        remainder = self.fma(power, self.constant(FLOATS, 2.12194440e-4), remainder)
        polynomial = self.constant(FLOATS, 1.0 / 720)
        for coefficient in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
            polynomial = self.fma(polynomial, remainder, self.constant(FLOATS, coefficient))
        return polynomial * ((self.to_int(power) + 127) << 23).bits(FLOATS)

    def dot4(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        """Return sums [LANES] plus four products of neighbouring bytes each.

        Without VNNI, the sums of two products must fit 16 bits.
        """
        if ISA.dot:
            return self.call(
                f"llvm.x86.avx512.vpdpbusd.{LANES * 32}",
                INTS,
                sums,
                unsigned.bits(INTS),
                signed.bits(INTS),
            )
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", SHORTS, unsigned, signed)
        return sums + self.call("llvm.x86.avx2.pmadd.wd", INTS, pairs, self.constant(SHORTS, 1))

    def dot4_signed(self, sums: Value, first: Value, second: Value) -> Value:
        """Do what dot4 does for two signed operands, on AVX2.

        It multiplies |first| with second * sign(first). That fits 16 bits because |first| <= 128.
        """
        magnitude = self.call(f"llvm.abs.llvm{4 * LANES}i8", BYTES, first, self.constant(i1, 0))
        return self.dot4(sums, magnitude, self.call("llvm.x86.avx2.psign.b", BYTES, second, first))


def intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Turn `write(emitter, *arguments)`, which emits instructions, into a numba function."""

    def wrap(write: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            emitter = Emitter(builder)
            result_value = write(emitter, *(Value(emitter, argument) for argument in args))
            return context.get_dummy_value() if result_value is None else result_value.llvm

        def typed(typing_context: Any, *argument_types: Any) -> Any:
            return result(*arguments), codegen

        names = [
            "typing_context",
            *(f"a{index}" for index in range(len(arguments))),
        ]  # numba needs the names
        typed.__name__ = typed.__qualname__ = write.__name__
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return numba_intrinsic(typed)

    return wrap


# ---- atomics, futexes and prefetch ---------------------------------------------------------------


@intrinsic(types.int64, POINTER, types.int64)
def atomic_add(emitter: Emitter, address: Value, amount: Value) -> Value:
    """Return the previous value."""
    return Value(
        emitter,
        emitter.builder.atomic_rmw(
            "add", emitter.builder.inttoptr(address.llvm, i64.as_pointer()), amount.llvm, "seq_cst"
        ),
    )


@intrinsic(types.int64, POINTER)
def atomic_load(emitter: Emitter, address: Value) -> Value:
    return Value(
        emitter,
        emitter.builder.load_atomic(
            emitter.builder.inttoptr(address.llvm, i64.as_pointer()), "seq_cst", 8
        ),
    )


@intrinsic(VOID, POINTER, types.int64)
def atomic_store(emitter: Emitter, address: Value, value: Value) -> None:
    emitter.builder.store_atomic(
        value.llvm, emitter.builder.inttoptr(address.llvm, i64.as_pointer()), "seq_cst", 8
    )


@intrinsic(VOID)
def pause(emitter: Emitter) -> None:
    emitter.builder.call(
        cgutils.get_or_insert_function(
            emitter.builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
        ),
        [],
    )


@intrinsic(VOID)
def yield_core(emitter: Emitter) -> None:
    emitter.call("sched_yield", i32)


def _futex(emitter: Emitter, address: Value, operation: int, value: Value) -> None:
    syscall = cgutils.get_or_insert_function(
        emitter.builder.module, ir.FunctionType(i64, [i64], var_arg=True), "syscall"
    )
    unused = [ir.Constant(i64, 0)] * 3
    emitter.builder.call(
        syscall,
        [ir.Constant(i64, 202), address.llvm, ir.Constant(i64, operation), value.llvm, *unused],
    )


@intrinsic(VOID, POINTER, types.int64)
def sleep_while(emitter: Emitter, address: Value, value: Value) -> None:
    """Sleep until woken, unless the low 32 bits at the address differ from `value`."""
    _futex(emitter, address, 128, value & 0xFFFFFFFF)


@intrinsic(VOID, POINTER)
def wake(emitter: Emitter, address: Value) -> None:
    """Wake all threads that sleep on this address."""
    _futex(emitter, address, 129, emitter.constant(i64, 2**31 - 1))


@intrinsic(VOID, POINTER)
def prefetch(emitter: Emitter, address: Value) -> None:
    emitter.prefetch(address)


@intrinsic(VOID, POINTER, types.int64, types.int64)
def prefetch_column(emitter: Emitter, address: Value, stride: Value, rows: Value) -> None:
    """Prefetch a line of each of some rows for writing, because stores that miss are slow."""
    with emitter.loop(rows) as row:
        emitter.prefetch(address + row * stride, write=True)


# ---- memory access -------------------------------------------------------------------------------


@intrinsic(FLOAT, POINTER)
def load_f32(emitter: Emitter, address: Value) -> Value:
    return emitter.load(address, f32)


@intrinsic(VOID, POINTER, FLOAT)
def store_f32(emitter: Emitter, address: Value, value: Value) -> None:
    emitter.store(value, address)


@intrinsic(types.int64, POINTER)
def load_i64(emitter: Emitter, address: Value) -> Value:
    return emitter.load(address, i64)


@intrinsic(VOID, POINTER, types.int64)
def store_i64(emitter: Emitter, address: Value, value: Value) -> None:
    emitter.store(value, address)


# Records are arrays of int64. A float field is stored in the low half of its int64.


@intrinsic(types.int64, POINTER, types.int64)
def field(emitter: Emitter, record: Value, index: Value) -> Value:
    return emitter.load(record + index * 8, i64)


@intrinsic(FLOAT, POINTER, types.int64)
def float_field(emitter: Emitter, record: Value, index: Value) -> Value:
    return emitter.load(record + index * 8, f32)


@intrinsic(VOID, POINTER, types.int64, types.int64)
def set_field(emitter: Emitter, record: Value, index: Value, value: Value) -> None:
    emitter.store(value, record + index * 8)


@intrinsic(types.int64, POINTER)
def load_i32(emitter: Emitter, address: Value) -> Value:
    return Value(emitter, emitter.builder.sext(emitter.load(address, i32).llvm, i64))


@intrinsic(VOID, POINTER, types.int64)
def store_i32(emitter: Emitter, address: Value, value: Value) -> None:
    emitter.store(Value(emitter, emitter.builder.trunc(value.llvm, i32)), address)


@intrinsic(FLOAT, POINTER)
def load_f16(emitter: Emitter, address: Value) -> Value:
    return emitter.to_float(emitter.load(address, f16))


@intrinsic(types.int64, POINTER)
def load_u8(emitter: Emitter, address: Value) -> Value:
    return Value(emitter, emitter.builder.zext(emitter.load(address, i8).llvm, i64))


# fastmath must stay off, because the order of sums must not change.
OPTIONS: Any = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


def inner(function: Callable[..., Any]) -> Any:
    """Declare a nopython function that only kernels call. It is compiled into them."""
    return njit(**OPTIONS)(function)


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a nopython function that Python calls.

    It is compiled at once, cached on disk, and runs without the GIL.
    """
    return njit(signature, cache=True, **OPTIONS)
