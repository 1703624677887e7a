# SPDX-License-Identifier: Apache-2.0
"""The operator's implementation in C++: the same answers and errors as Python's, which it asks only once a kind."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ops import G, K, N, call, mm_arguments
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from awqjit import config, jit, ops
from awqjit.errors import ArgumentError
from awqjit.ops import dispatcher, matmul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def installed() -> None:
    """The dispatcher serves this process."""
    call("int4_mm", mm_arguments())
    if jit.choices()[-1].kernel.name == "torch":
        pytest.skip("no compiler: the operator stays in Python")
    assert dispatcher.state() is None


@pytest.fixture
def python_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls that reach the Python implementation."""
    seen: list[tuple[Any, ...]] = []
    inner = matmul.int4_mm

    def watched(*args: Any, **named: Any) -> Tensor:
        seen.append(args)
        return inner(*args, **named)

    monkeypatch.setattr(matmul, "int4_mm", watched)
    return seen


def python(arguments: dict[str, Any]) -> Tensor:
    return matmul.int4_mm(*arguments.values())


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of every kind that is served: shapes and strides of x, dtypes, zeros, bias, group_size -1 or not."""
    dtype = draw(st.sampled_from(DTYPES))
    form = draw(st.sampled_from(("1-D", "2-D", "3-D", "rows apart", "expanded", "transposed batch", "no rows")))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(4, 3, 2 * K, generator=generator).to(dtype)
    x = {
        "1-D": x[0, 0, :K].clone(),
        "2-D": x[0, :, :K].clone(),
        "3-D": x[:, :, :K].clone(),
        "rows apart": x[:, 1, :K],
        "expanded": x[:1, 0, :K].expand(5, K),
        "transposed batch": x[:, :, :K].clone().transpose(0, 1),
        "no rows": x[:0, 0, :K],
    }[form]
    bias = draw(st.sampled_from((None, *DTYPES)))
    values: dict[str, Any] = {"x": x, "act_bits": draw(st.sampled_from((8, 16)))}
    values["bias"] = None if bias is None else torch.randn(N, generator=generator).to(bias)
    if draw(st.booleans()):
        values["zeros"] = draw(st.sampled_from((None, torch.empty(0, dtype=torch.uint8))))
    return mm_arguments(**values)


@given(calls())
def test_the_answer_is_that_of_the_python_implementation_bit_for_bit(arguments: dict[str, Any]) -> None:
    expected = python(arguments)
    for _ in range(3):
        y = call("int4_mm", arguments)
        assert y.dtype == expected.dtype
        assert y.shape == expected.shape
        assert y.is_contiguous()
        assert torch.equal(y, expected)


def test_python_is_asked_once_for_a_kind_of_arguments_whatever_the_number_of_rows(python_calls: list[Any]) -> None:
    ops.forget()
    for rows in (1, 1, 2, 7, 300, 1):
        call("int4_mm", mm_arguments(x=torch.randn(rows, K)))
    assert len(python_calls) == 1


def test_python_is_not_asked_in_any_grad_mode_as_long_as_nothing_requires_grad(python_calls: list[Any]) -> None:
    arguments = mm_arguments()
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            call("int4_mm", arguments)
    with torch.inference_mode():
        call("int4_mm", {**arguments, "x": torch.randn(2, K)})
    assert not python_calls


@pytest.mark.parametrize("mode", ["torch.inference_mode()", "torch.no_grad()", "torch.device('meta')"])
def test_under_whatever_mode_the_first_call_comes_python_is_asked_once_a_kind(mode: str) -> None:
    """Most programs call a model under inference mode from the first time on, with weights that were made outside."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from test_ops import call, mm_arguments
        from awqjit.ops import dispatcher, matmul

        seen, inner = [], matmul.int4_mm
        matmul.int4_mm = lambda *args, **named: seen.append(args) or inner(*args, **named)
        arguments = mm_arguments()
        with {mode}:
            for _ in range(5):
                call("int4_mm", arguments)
        call("int4_mm", arguments)
        assert dispatcher.state() is None, dispatcher.state()
        print(len(seen))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2  # the very first call, and the first that the dispatcher could not answer


def test_after_forget_the_kernel_is_chosen_again() -> None:
    expected = call("int4_mm", mm_arguments(act_bits=8))
    with config.override(kernel="portable"):
        ops.forget()
        assert torch.equal(call("int4_mm", mm_arguments(act_bits=8)), expected)
        assert [choice.kernel.name for choice in jit.choices()] == ["portable"]
    ops.forget()


# ---- what Python has to see ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"x": torch.randn(2, K - 1)}, "x"),
        ({"x": torch.tensor(1.0)}, "x"),
        ({"x": torch.randn(2, K, dtype=torch.float64)}, "x"),
        ({"x": torch.randn(2, K, device="meta")}, "x"),
        ({"bias": torch.randn(N + 1)}, "bias"),
        ({"bias": torch.ones(N, dtype=torch.int32)}, "bias"),
        ({"in_features": K + 8}, "x"),
        ({"out_features": N + 32}, "out_features"),
        ({"act_bits": 4}, "act_bits"),
        ({"layout": 7}, "layout"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_wrong_arguments_raise_what_python_raises(wrong: dict[str, Any], name: str) -> None:
    arguments = mm_arguments(**wrong)
    with pytest.raises(ArgumentError) as direct:
        python(arguments)
    for _ in range(2):
        with pytest.raises(ArgumentError) as through:
            call("int4_mm", arguments)
        assert str(through.value) == str(direct.value)


def test_a_freed_tensor_is_refused_by_name() -> None:
    x = torch.randn(2, K)
    call("int4_mm", mm_arguments(x=x))
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="x"):
        call("int4_mm", mm_arguments(x=x))


def test_a_weight_that_is_not_contiguous_is_refused_though_its_twin_was_served() -> None:
    arguments = mm_arguments()
    call("int4_mm", arguments)
    twisted = arguments["weight"].transpose(1, 2).contiguous().transpose(1, 2)
    assert twisted.shape == arguments["weight"].shape
    with pytest.raises(ArgumentError):
        call("int4_mm", {**arguments, "weight": twisted})


@pytest.mark.parametrize("name", ["x", "bias"])
def test_what_requires_grad_is_refused_only_where_gradients_are_recorded(name: str) -> None:
    arguments = mm_arguments(x=torch.randn(2, K), bias=torch.randn(N))
    arguments[name].requires_grad_()
    with pytest.raises(ArgumentError, match="int4_linear"):
        call("int4_mm", arguments)
    with torch.no_grad():
        assert not call("int4_mm", arguments).requires_grad


def test_a_tangent_is_refused_where_gradients_are_not_recorded_too() -> None:
    x = torch.randn(2, K)
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ArgumentError, match="tangent"):
            call("int4_mm", mm_arguments(x=dual))
        call("int4_mm", mm_arguments(x=x))


def test_function_transforms_are_refused_or_served_as_by_python() -> None:
    x = torch.randn(5, 2, K)

    def f(rows: Tensor) -> Tensor:
        return call("int4_mm", mm_arguments(x=rows))

    with pytest.raises(ArgumentError, match="int4_linear"):
        torch.func.grad(lambda rows: f(rows).sum())(x[0])
    with pytest.raises(ArgumentError, match="tangent"):
        torch.func.jvp(f, (x[0],), (torch.ones_like(x[0]),))
    assert torch.equal(torch.func.vmap(f)(x), f(x))


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator() -> None:
    arguments = mm_arguments()
    expected = call("int4_mm", arguments)
    with _Watch() as mode:
        y = call("int4_mm", arguments)
    assert mode.seen == ["awqjit.int4_mm.default"]
    assert torch.equal(y, expected)


def test_a_tensor_subclass_handles_the_operator_itself() -> None:
    x = torch.randn(2, K)
    y = call("int4_mm", mm_arguments(x=TwoTensor(x, 2 * x)))
    assert isinstance(y, TwoTensor)
    assert torch.equal(y.a, call("int4_mm", mm_arguments(x=x)))
    assert torch.equal(y.b, call("int4_mm", mm_arguments(x=2 * x)))


def test_a_tensor_that_torch_negates_lazily_is_negated() -> None:
    values = torch.randn(2, K, dtype=torch.complex64)
    lazy = values.conj().imag
    assert lazy.is_neg()
    assert torch.equal(call("int4_mm", mm_arguments(x=lazy)), call("int4_mm", mm_arguments(x=-values.imag)))


def test_a_function_mode_does_not_change_the_answer() -> None:
    expected = call("int4_mm", mm_arguments())
    ops.forget()
    with torch.device("cpu"):
        assert torch.equal(call("int4_mm", mm_arguments()), expected)


def test_an_exception_leaves_nothing_behind() -> None:
    arguments = mm_arguments(x=torch.randn(2, K - 1))
    gc.collect()
    before = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
    for _ in range(100):
        with pytest.raises(ArgumentError):
            call("int4_mm", arguments)
    gc.collect()
    assert sum(isinstance(thing, Tensor) for thing in gc.get_objects()) <= before + 2


# ---- threads, forks, memory ----------------------------------------------------------------------------------------


def test_a_child_of_a_fork_that_python_does_not_know_of_answers_on_one_thread() -> None:
    arguments = mm_arguments(x=torch.randn(300, K))
    expected = call("int4_mm", arguments)
    pid = ctypes.CDLL(None).fork()  # without Python's hooks
    if pid == 0:
        # No assertion may leave the child: it would run the rest of the tests.
        os._exit(0 if torch.equal(call("int4_mm", arguments), expected) else 1)
    deadline = threading.Timer(60, os.kill, (pid, 9))
    deadline.start()
    _, status = os.waitpid(pid, 0)
    deadline.cancel()
    assert status == 0


def run(program: str, **environment: str) -> str:
    """Run a program in a fresh process with the same cache, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip()


def test_threads_that_all_call_for_the_first_time_get_the_right_answers() -> None:
    program = """
        import threading, torch
        from test_ops import K, N, call, mm_arguments
        from awqjit.ops import dispatcher, matmul
        expected = {rows: matmul.int4_mm(*mm_arguments(x=torch.ones(rows, K)).values()) for rows in range(1, 9)}
        assert dispatcher.state()
        wrong, barrier = [], threading.Barrier(8)
        def work(rows):
            barrier.wait()
            for _ in range(200):
                if not torch.equal(call("int4_mm", mm_arguments(x=torch.ones(rows, K))), expected[rows]):
                    wrong.append(rows)
        threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 9)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(wrong, dispatcher.state())
    """
    assert run(program) == "[] None"


def test_calls_leak_no_memory() -> None:
    program = """
        import torch
        from test_ops import K, N, call, mm_arguments
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4096
        arguments = tuple(mm_arguments(x=torch.ones(1, K), bias=torch.ones(N, dtype=torch.bfloat16)).values())
        op = torch.ops.awqjit.int4_mm.default
        for _ in range(20000): op(*arguments)
        before = resident()
        for _ in range(200000): op(*arguments)
        print((resident() - before) / 200000)
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc/self/statm")
    assert float(run(program)) < 1  # bytes a call: one leaked tensor handle would be 16


# ---- staying in Python ---------------------------------------------------------------------------------------------

_STATE = """
    import torch
    from test_ops import call, mm_arguments
    from awqjit.ops import dispatcher
    {before}
    first, second = call("int4_mm", mm_arguments()), call("int4_mm", mm_arguments())
    assert torch.equal(first, second)
    print(dispatcher.state())
"""


def test_the_variable_keeps_the_operator_in_python() -> None:
    assert run(_STATE.format(before=""), AWQJIT_DISPATCHER="0") == "AWQJIT_DISPATCHER=0"


@pytest.mark.parametrize(
    "before",
    [
        'dispatcher._FUNCTIONS = (*dispatcher._FUNCTIONS, ("c10", ("no_such_function",)))',
        "dispatcher._find_key_set = lambda library: (_ for _ in ()).throw(dispatcher._UnusableError('no_such_offset'))",
    ],
)
def test_a_torch_that_lacks_something_keeps_it_in_python_with_the_reason(before: str) -> None:
    assert "no_such_" in run(_STATE.format(before=before))


def test_a_kernel_in_plain_torch_needs_no_dispatcher() -> None:
    assert run(_STATE.format(before=""), AWQJIT_KERNEL="torch") == "no compiled kernel has been called yet"


def test_where_nothing_may_be_compiled_a_missing_dispatcher_is_no_error(tmp_path: Path) -> None:
    run(_STATE.format(before=""), AWQJIT_CACHE_DIR=str(tmp_path), AWQJIT_DISPATCHER="0")
    out = run(_STATE.format(before=""), AWQJIT_CACHE_DIR=str(tmp_path), AWQJIT_JIT="0")
    assert "AWQJIT_JIT=0" in out


def test_dispatch_keys_are_found_at_one_offset_or_not_at_all() -> None:
    library = dispatcher._state.library
    assert library is not None
    assert dispatcher._find_key_set(library) % 8 == 0
    find = library.awqjit_find_key_set
    tensor = torch.empty(1)
    with dispatcher._Handles(tensor) as handles:
        wrong = (ctypes.c_uint64 * 1)(0x123456789ABCDEF)
        assert find((ctypes.c_void_p * 1)(*handles), wrong, 1) == -1


def test_group_size_minus_one_and_k_are_one_kernel_and_two_kinds_of_call() -> None:
    from awqjit.layout import pack
    from awqjit.weight import QuantizedWeight

    weight = QuantizedWeight(torch.full((K // 8, N), 0x12345678, dtype=torch.int32), torch.ones(1, N), None, K, K, N)
    packed = pack(weight)
    x = torch.randn(2, K)
    answers = [
        torch.ops.awqjit.int4_mm(x, packed.weight, packed.scales, None, None, K, N, group_size, 16)
        for group_size in (-1, K, -1, K)
    ]
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert G != K
