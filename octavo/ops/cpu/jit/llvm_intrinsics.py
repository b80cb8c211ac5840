"""Vector code from Python: arithmetic on LLVM values as expressions, and what nopython code needs of the machine.

numba compiles loops well but has no vectors, no byte products and no atomics. A function decorated with `intrinsic` below
writes LLVM instructions instead: `e.load(...)`, `a * b + c`, `with e.loop(n) as i`. It may loop in Python too, which unrolls.

    i64 addresses everywhere: kernels see memory, not arrays
    LANES   float32 values in a vector: 16 (AVX-512) or 8 (AVX2)
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
# as wide as FLOATS
BYTES = ir.VectorType(i8, 4 * LANES)
SHORTS = ir.VectorType(i16, 2 * LANES)
NARROW = ir.VectorType(i8, LANES)
POINTER = types.int64
FLOAT = types.float32
VOID = types.void

# How numbers are stored that kernels read and write as float32, and the bytes of one.
F32, F16, I8, F8 = range(4)
SIZES = (4, 2, 1, 1)


class Value:
    """An LLVM value that can be calculated with; a Python number on the other side becomes a constant of its type."""

    def __init__(self, e: Emitter, v: ir.Value):
        self.e = e
        self.v = v

    @property
    def is_float(self) -> bool:
        kind = self.v.type
        return (kind.element if isinstance(kind, ir.VectorType) else kind) in (f32, f16)

    def _pair(self, other: Value | float) -> tuple[ir.Value, ir.Value]:
        return self.v, other.v if isinstance(other, Value) else self.e.constant(
            self.v.type, other
        ).v

    def _do(self, other: Value | float, on_floats: str, on_ints: str) -> Value:
        return Value(
            self.e, getattr(self.e.b, on_floats if self.is_float else on_ints)(*self._pair(other))
        )

    def __add__(self, other: Value | float) -> Value:
        return self._do(other, "fadd", "add")

    def __sub__(self, other: Value | float) -> Value:
        return self._do(other, "fsub", "sub")

    def __mul__(self, other: Value | float) -> Value:
        return self._do(other, "fmul", "mul")

    def __truediv__(self, other: Value | float) -> Value:
        return self._do(other, "fdiv", "sdiv")

    def __and__(self, other: Value | int) -> Value:
        return Value(self.e, self.e.b.and_(*self._pair(other)))

    def __xor__(self, other: Value | int) -> Value:
        return Value(self.e, self.e.b.xor(*self._pair(other)))

    def __lshift__(self, other: Value | int) -> Value:
        return Value(self.e, self.e.b.shl(*self._pair(other)))

    def __rshift__(self, other: Value | int) -> Value:
        return Value(self.e, self.e.b.lshr(*self._pair(other)))

    def compare(self, operator: str, other: Value | float) -> Value:
        a, b = self._pair(other)
        return Value(
            self.e,
            self.e.b.fcmp_ordered(operator, a, b)
            if self.is_float
            else self.e.b.icmp_signed(operator, a, b),
        )

    def bits(self, kind: ir.Type) -> Value:
        return Value(self.e, self.e.b.bitcast(self.v, kind))


class Variable:
    """A value that loops change. LLVM keeps it in a register."""

    def __init__(self, e: Emitter, first: Value):
        self.e = e
        self.at = cgutils.alloca_once(e.b, first.v.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self.e, self.e.b.load(self.at))

    def set(self, value: Value) -> None:
        self.e.b.store(value.v, self.at)


class Emitter:
    def __init__(self, builder: ir.IRBuilder):
        self.b = builder

    # ---- values --------------------------------------------------------------------------------------

    def constant(self, kind: ir.Type, value: float) -> Value:
        if isinstance(kind, ir.VectorType):
            return Value(self, ir.Constant(kind, [value] * kind.count))
        return Value(self, ir.Constant(kind, value))

    def variable(self, first: Value) -> Variable:
        return Variable(self, first)

    def lane_numbers(self) -> Value:
        return Value(self, ir.Constant(INTS, list(range(LANES))))

    def splat(self, scalar: Value) -> Value:
        """A vector of LANES times this scalar."""
        kind = ir.VectorType(scalar.v.type, LANES)
        first = self.b.insert_element(
            ir.Constant(kind, ir.Undefined), scalar.v, ir.Constant(i32, 0)
        )
        return Value(self, self.b.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES)))

    def shuffle(self, a: Value, b: Value, index: list[int]) -> Value:
        return Value(
            self,
            self.b.shuffle_vector(a.v, b.v, ir.Constant(ir.VectorType(i32, len(index)), index)),
        )

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.b.select(condition.v, yes.v, no.v))

    # ---- memory --------------------------------------------------------------------------------------

    def load(self, address: Value, kind: ir.Type) -> Value:
        found = self.b.load(self.b.inttoptr(address.v, kind.as_pointer()))
        found.align = 1
        return Value(self, found)

    def store(self, value: Value, address: Value) -> None:
        self.b.store(value.v, self.b.inttoptr(address.v, value.v.type.as_pointer())).align = 1

    def load_floats(self, address: Value, kind: int) -> Value:
        """LANES float32 from how they are stored. Of float8 (e4m3) they are 2^-8 times what they should be: its bits are those
        of a half with another bias."""
        if kind == F32:
            return self.load(address, FLOATS)
        if kind == F16:
            return self.to_float(self.load(address, HALVES))
        stored = self.load(address, NARROW)
        if kind == I8:
            return self.to_float(Value(self, self.b.sext(stored.v, INTS)))
        bits = Value(self, self.b.zext(stored.v, ir.VectorType(i16, LANES)))
        return self.to_float((((bits & 0x80) << 8) + ((bits & 0x7F) << 7)).bits(HALVES))

    def store_floats(self, value: Value, address: Value, kind: int) -> None:
        """FLOATS as they are to be stored. Of bytes they must be in range: -127..127, or -448..448."""
        if kind == F32:
            return self.store(value, address)
        if kind == F16:
            return self.store(self.to_half(value), address)
        if kind == I8:
            return self.store(self.narrow(self.to_int(self.round(value))), address)
        size = self.absolute(value)
        bits = value.bits(INTS)
        large = bits & 0x7FFFFFFF
        # to nearest, ties to even; exponent's bias 127 to 7
        large = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - (120 << 3)
        # below 2^-6 the steps are 2^-9 wide, and the code counts them
        small = self.to_int(self.round(size * 512.0))
        code = self.select(size.compare("<", 2.0**-6), small, large) + ((bits >> 24) & 0x80)
        return self.store(self.narrow(code), address)

    def prefetch(self, address: Value, write: bool = False) -> None:
        """Ask for a cache line that will be read or written soon."""
        kinds = [i8.as_pointer(), i32, i32, i32]
        function = cgutils.get_or_insert_function(
            self.b.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
        )
        self.b.call(
            function, [self.b.inttoptr(address.v, kinds[0]), i32(int(write)), i32(3), i32(1)]
        )

    # ---- control -------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        with cgutils.for_range(self.b, count.v) as loop:
            yield Value(self, loop.index)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.v):
            yield

    # ---- functions -----------------------------------------------------------------------------------

    def call(self, name: str, kind: ir.Type, *args: Value) -> Value:
        signature = ir.FunctionType(kind, [a.v.type for a in args])
        return Value(
            self,
            self.b.call(
                cgutils.get_or_insert_function(self.b.module, signature, name), [a.v for a in args]
            ),
        )

    def _math(self, name: str, *args: Value) -> Value:
        kind = args[0].v.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        return self.call(f"llvm.{name}.{suffix}", kind, *args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self._math("fma", a, b, c)

    def maximum(self, a: Value, b: Value) -> Value:
        return self._math("maxnum", a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        return self._math("minnum", a, b)

    def absolute(self, a: Value) -> Value:
        return self._math("fabs", a)

    def round(self, a: Value) -> Value:
        return self._math("rint", a)

    def to_int(self, a: Value) -> Value:
        kind = INTS if isinstance(a.v.type, ir.VectorType) else i32
        return Value(self, self.b.fptosi(a.v, kind))

    def to_float(self, a: Value) -> Value:
        """From int32 or half."""
        kind = FLOATS if isinstance(a.v.type, ir.VectorType) else f32
        return Value(self, (self.b.fpext if a.is_float else self.b.sitofp)(a.v, kind))

    def to_half(self, a: Value) -> Value:
        return Value(
            self, self.b.fptrunc(a.v, HALVES if isinstance(a.v.type, ir.VectorType) else f16)
        )

    def narrow(self, a: Value) -> Value:
        """INTS, small ones, as bytes."""
        return Value(self, self.b.trunc(a.v, NARROW))

    def _folded(self, a: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Halves upon halves: always in this order, so the result is the same wherever the row stands."""
        width = LANES
        while width > 1:
            width //= 2
            a = join(
                a,
                self.shuffle(a, a, [(i + width) % LANES if i < width else i for i in range(LANES)]),
            )
        return Value(self, self.b.extract_element(a.v, ir.Constant(i32, 0)))

    def total(self, a: Value) -> Value:
        return self._folded(a, lambda x, y: x + y)

    def largest(self, a: Value) -> Value:
        return self._folded(a, self.maximum)

    def exp(self, x: Value) -> Value:
        """e^x of FLOATS, to about 2e-7: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]."""
        x = self.maximum(self.minimum(x, self.constant(FLOATS, 88.0)), self.constant(FLOATS, -87.0))
        n = self.round(x * 1.4426950408889634)
        r = self.fma(n, self.constant(FLOATS, -0.693359375), x)
        r = self.fma(n, self.constant(FLOATS, 2.12194440e-4), r)
        p = self.constant(FLOATS, 1.0 / 720)
        for c in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
            p = self.fma(p, r, self.constant(FLOATS, c))
        return p * ((self.to_int(n) + 127) << 23).bits(FLOATS)

    def dot4(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        """sums [LANES] += four products of neighbouring bytes each. Without VNNI, sums of two products must fit 16 bits."""
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

    def dot4_signed(self, sums: Value, a: Value, b: Value) -> Value:
        """dot4 of signed bytes by signed bytes for AVX2: |a| times b with a's sign, which fits 16 bits as |a| <= 128."""
        size = self.call(f"llvm.abs.v{4 * LANES}i8", BYTES, a, self.constant(i1, 0))
        return self.dot4(sums, size, self.call("llvm.x86.avx2.psign.b", BYTES, b, a))


def intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make `write(e, *arguments)`, which emits instructions for its arguments, a function that nopython code can call."""

    def wrap(write: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            e = Emitter(builder)
            found = write(e, *(Value(e, a) for a in args))
            return context.get_dummy_value() if found is None else found.v

        def typed(typing_context: Any, *given: Any) -> Any:
            return result(*arguments), codegen

        names = ["typing_context", *(f"a{i}" for i in range(len(arguments)))]  # numba asks for them
        typed.__name__ = typed.__qualname__ = write.__name__
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return numba_intrinsic(typed)

    return wrap


# ---- what threads need ------------------------------------------------------------------------------------


@intrinsic(types.int64, POINTER, types.int64)
def atomic_add(e: Emitter, address: Value, amount: Value) -> Value:
    """Returns what was there before."""
    return Value(
        e, e.b.atomic_rmw("add", e.b.inttoptr(address.v, i64.as_pointer()), amount.v, "seq_cst")
    )


@intrinsic(types.int64, POINTER)
def atomic_load(e: Emitter, address: Value) -> Value:
    return Value(e, e.b.load_atomic(e.b.inttoptr(address.v, i64.as_pointer()), "seq_cst", 8))


@intrinsic(VOID, POINTER, types.int64)
def atomic_store(e: Emitter, address: Value, value: Value) -> None:
    e.b.store_atomic(value.v, e.b.inttoptr(address.v, i64.as_pointer()), "seq_cst", 8)


@intrinsic(VOID)
def pause(e: Emitter) -> None:
    e.b.call(
        cgutils.get_or_insert_function(
            e.b.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
        ),
        [],
    )


@intrinsic(VOID)
def yield_core(e: Emitter) -> None:
    e.call("sched_yield", i32)


def _futex(e: Emitter, address: Value, operation: int, value: Value) -> None:
    syscall = cgutils.get_or_insert_function(
        e.b.module, ir.FunctionType(i64, [i64], var_arg=True), "syscall"
    )
    rest = [ir.Constant(i64, 0)] * 3
    e.b.call(
        syscall, [ir.Constant(i64, 202), address.v, ir.Constant(i64, operation), value.v, *rest]
    )


@intrinsic(VOID, POINTER, types.int64)
def sleep_while(e: Emitter, address: Value, value: Value) -> None:
    """Sleep until woken, unless the low 32 bits there are no longer those of `value`."""
    _futex(e, address, 128, value & 0xFFFFFFFF)


@intrinsic(VOID, POINTER)
def wake(e: Emitter, address: Value) -> None:
    """Wake all who sleep on this address."""
    _futex(e, address, 129, e.constant(i64, 2**31 - 1))


@intrinsic(VOID, POINTER)
def prefetch(e: Emitter, address: Value) -> None:
    e.prefetch(address)


@intrinsic(VOID, POINTER, types.int64, types.int64)
def prefetch_column(e: Emitter, address: Value, stride: Value, rows: Value) -> None:
    """A line of each of some rows, to be written: stores that miss go out one by one."""
    with e.loop(rows) as r:
        e.prefetch(address + r * stride, write=True)


# ---- plain access ------------------------------------------------------------------------------------------


@intrinsic(FLOAT, POINTER)
def load_f32(e: Emitter, address: Value) -> Value:
    return e.load(address, f32)


@intrinsic(VOID, POINTER, FLOAT)
def store_f32(e: Emitter, address: Value, value: Value) -> None:
    e.store(value, address)


@intrinsic(types.int64, POINTER)
def load_i64(e: Emitter, address: Value) -> Value:
    return e.load(address, i64)


@intrinsic(VOID, POINTER, types.int64)
def store_i64(e: Emitter, address: Value, value: Value) -> None:
    e.store(value, address)


@intrinsic(types.int64, POINTER)
def load_i32(e: Emitter, address: Value) -> Value:
    return Value(e, e.b.sext(e.load(address, i32).v, i64))


@intrinsic(FLOAT, POINTER)
def load_f16(e: Emitter, address: Value) -> Value:
    return e.to_float(e.load(address, f16))


@intrinsic(types.int64, POINTER)
def load_u8(e: Emitter, address: Value) -> Value:
    return Value(e, e.b.zext(e.load(address, i8).v, i64))


# never fastmath: a sum's order must not change
OPTIONS: Any = {"nogil": True, "boundscheck": False, "error_model": "numpy"}


def inner(function: Callable[..., Any]) -> Any:
    """A nopython function that only others call: it is compiled into them and never loaded by itself."""
    return njit(**OPTIONS)(function)


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A nopython function that Python calls: compiled when declared, kept on disk, run without the GIL."""
    return njit(signature, cache=True, **OPTIONS)
