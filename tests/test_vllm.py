# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin's kernel class layer by layer, and its place in vLLM's table; no engine runs here.

Runs in an environment with vLLM (``tox run -e vllm``).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

linear = pytest.importorskip("vllm.model_executor.kernels.linear", exc_type=ImportError)

from vllm.platforms import PlatformEnum, current_platform  # noqa: E402
from vllm.scalar_type import scalar_types  # noqa: E402

from awqjit import config, toolchain  # noqa: E402
from awqjit.errors import ArgumentError, KernelRefusedError  # noqa: E402
from awqjit.integrations import vllm as plugin  # noqa: E402
from awqjit.jit import forget  # noqa: E402

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
KERNELS = linear._POSSIBLE_KERNELS


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    before = list(KERNELS[PlatformEnum.CPU])
    plugin.register()
    plugin._warn_once.cache_clear()
    yield
    KERNELS[PlatformEnum.CPU][:] = before


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """The plugin's log. vLLM's logger, above it, may or may not hand records on to pytest's handler."""
    logger = logging.getLogger("vllm.awqjit")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def layer_config(k: int = 64, n: int = 64, **changes: Any) -> Any:
    settings = {
        "full_weight_shape": (k, n),
        "partition_weight_shape": (k, n),
        "weight_type": scalar_types.uint4,
        "act_type": FP32,
        "group_size": 32,
        "zero_points": True,
    }
    return linear.MPLinearLayerConfig(**(settings | changes))


# ---- layers as vLLM holds them once a checkpoint is loaded, packed here by hand


def words(values: Tensor) -> Tensor:
    """[8 R, C] of 0 to 15 to int32 [R, C]: eight rows in a word, the first in the lowest bits."""
    lanes = values.to(torch.int64).view(-1, 8, values.shape[1])
    packed = sum(lanes[:, i] << (4 * i) for i in range(8))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


@dataclass(frozen=True)
class Numbers:
    """W[k, n] = (q[k, n] - z[g(k), n]) * s[g(k), n]."""

    q: Tensor
    z: Tensor
    s: Tensor
    g: Tensor  # int64 [K]

    @classmethod
    def draw(cls, k: int, n: int, groups: int, seed: int = 0) -> Numbers:
        """Any q and z; scales of any sign that have 8 bits, so that each product is exact in fp32."""
        of = torch.Generator().manual_seed(seed)
        s = torch.randint(1, 128, (groups, n), generator=of) * (1 - 2 * torch.randint(0, 2, (groups, n), generator=of))
        q, z = (torch.randint(0, 16, (rows, n), generator=of) for rows in (k, groups))
        return cls(q, z, s / 1024, torch.arange(k) // (k // groups))

    def weight(self, symmetric: bool = False) -> Tensor:
        """float32 [K, N], exact."""
        zeros = 8 if symmetric else self.z[self.g]
        return (self.q - zeros).float() * self.s[self.g]


def parameter(data: Tensor, transposed: bool, **dims: int) -> nn.Parameter:
    """A parameter [input, output] or, as compressed-tensors has it, the other way round; ``dims`` of the former."""
    made = nn.Parameter((data.t() if transposed else data).contiguous(), requires_grad=False)
    for name, dim in dims.items():
        setattr(made, name, 1 - dim if transposed else dim)
    return made


def layer_of(
    numbers: Numbers, dtype: torch.dtype, *, transposed: bool = False, symmetric: bool = False, whole: bool = False
) -> nn.Module:
    """Weights packed along the input, zero points along the output. ``whole``: every worker holds all scales."""
    layer = nn.Module()
    rows = {"output_dim": 1} if whole else {"output_dim": 1, "input_dim": 0}
    layer.register_parameter("q", parameter(words(numbers.q), transposed, input_dim=0, output_dim=1, packed_dim=0))
    layer.register_parameter("s", parameter(numbers.s.to(dtype), transposed, **rows))
    if not symmetric:
        zeros = words(numbers.z.t().contiguous()).t()
        layer.register_parameter("z", parameter(zeros, transposed, **rows, packed_dim=1))
    return layer


def served(layer: nn.Module, c: Any) -> Any:
    """The class that vLLM chooses, made and loaded as vLLM does it."""
    chosen = linear.choose_mp_linear_kernel(c)
    assert chosen.__name__ == plugin.NAME
    kernel = chosen(c, w_q_param_name="q", w_s_param_name="s", w_zp_param_name="z")
    kernel.process_weights_after_loading(layer)
    return kernel


def config_of(numbers: Numbers, dtype: torch.dtype, symmetric: bool = False, group_size: int | None = None) -> Any:
    (k, n), groups = numbers.q.shape, numbers.s.shape[0]
    return layer_config(
        k,
        n,
        act_type=dtype,
        group_size=group_size or k // groups,
        zero_points=not symmetric,
        weight_type=scalar_types.uint4b8 if symmetric else scalar_types.uint4,
    )


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("symmetric", [False, True], ids=["asym", "sym"])
@pytest.mark.parametrize("transposed", [False, True], ids=["gptq", "compressed-tensors"])
def test_rows_of_the_identity_give_the_weights_exactly(transposed: bool, symmetric: bool, dtype: torch.dtype) -> None:
    numbers = Numbers.draw(64, 64, 2)  # square: shapes cannot tell which side is which
    layer = layer_of(numbers, dtype, transposed=transposed, symmetric=symmetric)
    kernel = served(layer, config_of(numbers, dtype, symmetric))
    y = kernel.apply_weights(layer, torch.eye(64, dtype=dtype))
    assert torch.equal(y, numbers.weight(symmetric).to(dtype))


@pytest.mark.parametrize("transposed", [False, True])
def test_one_group_of_all_rows(transposed: bool) -> None:
    numbers = Numbers.draw(64, 48, 1)
    layer = layer_of(numbers, FP32, transposed=transposed)
    kernel = served(layer, config_of(numbers, FP32, group_size=-1))
    assert torch.equal(kernel.apply_weights(layer, torch.eye(64)), numbers.weight())


def test_activations_of_three_dimensions_and_any_strides_and_a_bias() -> None:
    numbers = Numbers.draw(64, 40, 2)
    layer = layer_of(numbers, FP32)
    layer.register_parameter("bias", nn.Parameter(torch.arange(40.0), requires_grad=False))
    kernel = served(layer, config_of(numbers, FP32))
    assert kernel.problem.bias
    x = torch.eye(64).view(2, 32, 64).transpose(0, 1)
    y = kernel.apply_weights(layer, x, layer.bias)
    assert torch.equal(y, numbers.weight().view(2, 32, 40).transpose(0, 1) + layer.bias)
    assert kernel.apply_weights(layer, x[:0]).shape == (0, 2, 40)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [4, 1], ids=["groups", "one-group"])
def test_shards_along_the_input_add_up(groups: int, transposed: bool) -> None:
    numbers = Numbers.draw(128, 32, groups)
    x = torch.randint(-8, 9, (5, 128), generator=torch.Generator().manual_seed(1)).float()  # sums are exact
    total = torch.zeros(5, 32)
    for rank in range(2):
        rows = slice(64 * rank, 64 * (rank + 1))
        held = slice(None) if groups == 1 else slice(2 * rank, 2 * (rank + 1))
        share = Numbers(
            numbers.q[rows], numbers.z[held], numbers.s[held], numbers.g[rows] - (2 * rank if groups > 1 else 0)
        )
        layer = layer_of(share, FP32, transposed=transposed, whole=groups == 1)
        c = config_of(share, FP32, group_size=-1 if groups == 1 else 32)
        total += served(layer, dataclasses.replace(c, full_weight_shape=(128, 32))).apply_weights(layer, x[:, rows])
    assert torch.equal(total, x @ numbers.weight())


def test_shards_along_the_output_stand_beside_each_other() -> None:
    numbers = Numbers.draw(64, 64, 2)
    parts = []
    for columns in (slice(0, 24), slice(24, 64)):
        share = Numbers(numbers.q[:, columns], numbers.z[:, columns], numbers.s[:, columns], numbers.g)
        layer = layer_of(share, FP16)
        c = dataclasses.replace(config_of(share, FP16), full_weight_shape=(64, 64))
        parts.append(served(layer, c).apply_weights(layer, torch.eye(64, dtype=FP16)))
    assert torch.equal(torch.cat(parts, 1), numbers.weight().half())


def test_the_worker_that_adds_no_bias_gets_a_kernel_without() -> None:
    numbers = Numbers.draw(64, 32, 2)
    c = dataclasses.replace(config_of(numbers, FP32), full_weight_shape=(128, 32))
    for rank, adds in ((0, True), (1, False)):
        layer = layer_of(numbers, FP32)
        layer.register_parameter("bias", nn.Parameter(torch.ones(32), requires_grad=False))
        layer.tp_rank = rank
        assert served(layer, c).problem.bias is adds


def test_columns_that_fill_up_the_last_word_are_left_out() -> None:
    numbers = Numbers.draw(64, 48, 2)
    layer = layer_of(numbers, FP32)
    c = dataclasses.replace(config_of(numbers, FP32), partition_weight_shape=(64, 44), full_weight_shape=(64, 44))
    assert torch.equal(served(layer, c).apply_weights(layer, torch.eye(64)), numbers.weight()[:, :44])


def test_what_vllm_loaded_is_replaced_by_packed_parameters() -> None:
    numbers = Numbers.draw(64, 64, 2)
    layer = layer_of(numbers, FP16)  # GPTQ layers have zero points that a symmetric kernel does not read
    served(layer, config_of(numbers, FP16, symmetric=True))
    held = {name: tensor.shape for name, tensor in layer.named_parameters()}
    assert held == {"q": (4, 8, 16), "s": (4, 2, 16)} and layer.z is None
    assert not any(tensor.requires_grad for tensor in layer.parameters())


@dataclass
class WithActOrder(linear.MPLinearLayerConfig):  # type: ignore[misc]  # vLLM has no types here
    """The layer config of versions that know act-order."""

    has_g_idx: bool = True


def test_act_order_where_vllm_knows_it() -> None:
    numbers = Numbers.draw(64, 32, 2)
    shuffled = numbers.g[torch.randperm(64, generator=torch.Generator().manual_seed(2))]
    numbers = dataclasses.replace(numbers, g=shuffled)
    layer = layer_of(numbers, FP32)
    layer.register_parameter("g_idx", nn.Parameter(shuffled.to(torch.int32), requires_grad=False))
    c = WithActOrder(**vars(config_of(numbers, FP32)))
    kernel = plugin.kernel_class()(c, "q", "s", "z")
    kernel.w_gidx_name = "g_idx"
    kernel.process_weights_after_loading(layer)
    assert torch.equal(kernel.apply_weights(layer, torch.eye(64)), numbers.weight())
    accepted, reason = plugin.kernel_class().can_implement(dataclasses.replace(c, full_weight_shape=(128, 32)))
    assert not accepted and "act-order" in reason


# ---- the decision between w4a16 and w4a8


@pytest.mark.parametrize(
    ("variable", "dtype", "act_bits"),
    [("0", BF16, 16), ("1", BF16, 8), (None, BF16, 8), ("1", FP16, 16), ("1", FP32, 16)],
)
def test_the_mode_is_vllms(variable: str | None, dtype: torch.dtype, act_bits: int, monkeypatch: Any) -> None:
    if variable is None:
        monkeypatch.delenv("VLLM_CPU_INT4_W4A8")
    else:
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", variable)
    numbers = Numbers.draw(64, 64, 2)
    kernel = served(layer_of(numbers, dtype), config_of(numbers, dtype))
    assert kernel.problem.act_bits == act_bits and kernel.problem.x_dtype == {BF16: "bf16", FP16: "fp16"}.get(
        dtype, "fp32"
    )


def test_the_mode_is_decided_when_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = Numbers.draw(64, 64, 2)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    layer = layer_of(numbers, BF16)
    kernel = served(layer, config_of(numbers, BF16))
    before = kernel.apply_weights(layer, x)
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert torch.equal(kernel.apply_weights(layer, x), before)
    other = layer_of(numbers, BF16)
    assert not torch.equal(served(other, config_of(numbers, BF16)).apply_weights(other, x), before)


def test_a_compiled_graph_holds_the_operator_and_gives_the_same_bits() -> None:
    numbers = Numbers.draw(64, 64, 2)
    layer = layer_of(numbers, FP32)
    kernel = served(layer, config_of(numbers, FP32))
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), backend=keep, fullgraph=True, dynamic=True)
    for rows in (2, 3, 7):
        x = torch.randn(rows, 64)
        assert torch.equal(compiled(x), kernel.apply_weights(layer, x))
    (graph,) = graphs
    assert torch.ops.awqjit.int4_mm.default in {node.target for node in graph.graph.nodes}


# ---- refusals


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"weight_type": scalar_types.uint8b128, "zero_points": False}, "4-bit"),
        ({"weight_type": scalar_types.int4, "zero_points": False}, "4-bit"),
        ({"weight_type": scalar_types.uint4, "zero_points": False}, "zero"),
        ({"act_type": torch.float8_e4m3fn}, "activations"),
        ({"act_type": BF16, "out_type": FP16}, "output"),
        ({"k": 36, "group_size": -1}, "multiple of 8"),
        ({"group_size": 48}, "group size 48"),
        ({"group_size": 128}, "group size 128"),
        ({"group_size": 0}, "group size 0"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(changes: dict[str, Any], part: str) -> None:
    accepted, reason = plugin.kernel_class().can_implement(layer_config(**changes))
    assert not accepted and part in reason


def test_a_refused_int4_layer_is_named_in_the_log_once(log: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert linear.choose_mp_linear_kernel(layer_config(64, 64, zero_points=False)).__name__ != plugin.NAME
    (record,) = log.records
    assert record.levelno == logging.WARNING and "(64, 64)" in record.getMessage() and "zero" in record.getMessage()


def test_without_a_compiler_only_kernels_in_a_cache_are_claimed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, log: pytest.LogCaptureFixture
) -> None:
    numbers = Numbers.draw(64, 72, 2)
    c = config_of(numbers, FP32)
    served(layer_of(numbers, FP32), c)  # now the cache has it
    forget()
    monkeypatch.setenv(config.CXX.name, str(tmp_path / "no-compiler"))
    toolchain.forget()
    other = layer_config(64, 80)
    accepted, reason = plugin.kernel_class().can_implement(other)
    assert not accepted and "no-compiler" in reason and "no-compiler" in log.text
    monkeypatch.delenv(config.CXX.name)
    monkeypatch.setenv(config.JIT.name, "0")
    assert plugin.kernel_class().can_implement(c) == (True, None)
    accepted, reason = plugin.kernel_class().can_implement(other)
    assert not accepted and "AWQJIT_JIT=0" in reason


def test_a_forced_row_is_obeyed_or_fails_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config.KERNEL.name, "torch")
    numbers = Numbers.draw(64, 64, 2)
    layer = layer_of(numbers, FP32)
    assert torch.equal(served(layer, config_of(numbers, FP32)).apply_weights(layer, torch.eye(64)), numbers.weight())
    monkeypatch.setenv(config.KERNEL.name, "abacus")
    with pytest.raises(KernelRefusedError, match="abacus"):
        linear.choose_mp_linear_kernel(layer_config())


@pytest.mark.parametrize(
    ("name", "attribute", "value"), [("q", "packed_dim", 1), ("s", "input_dim", 1), ("z", "output_dim", None)]
)
def test_parameters_that_lie_otherwise_are_refused(name: str, attribute: str, value: int | None) -> None:
    numbers = Numbers.draw(64, 64, 2)
    layer = layer_of(numbers, FP32)
    setattr(getattr(layer, name), attribute, value)
    with pytest.raises(ArgumentError, match=f"{name}: got .*{attribute}"):
        served(layer, config_of(numbers, FP32))


# ---- registration


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="awqjit")
    assert found.load() is plugin.register


def test_registering_again_changes_nothing() -> None:
    plugin.register()
    plugin.register()
    names = [kernel.__name__ for kernel in KERNELS[PlatformEnum.CPU]]
    assert names[0] == plugin.NAME and names.count(plugin.NAME) == 1 and len(names) > 1


def test_other_tables_are_left_alone() -> None:
    assert all(plugin.kernel_class() not in kernels for key, kernels in KERNELS.items() if key != PlatformEnum.CPU)


def test_vllm_can_be_told_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", plugin.NAME)
    assert linear.choose_mp_linear_kernel(layer_config()).__name__ == "CPUWNA16LinearKernel"


def test_on_another_device_nothing_is_done(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    table = [object()]
    monkeypatch.setitem(KERNELS, PlatformEnum.CPU, table)
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    plugin.register()
    assert len(table) == 1 and not log.records


def _no_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear, "_POSSIBLE_KERNELS", [])


def _no_base(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(linear, "MPLinearKernel")


def _less_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear, "MPLinearLayerConfig", dataclasses.make_dataclass("Config", ["weight_type"]))


def _more_asked(patch: pytest.MonkeyPatch) -> None:
    asking = linear.MPLinearKernel.__abstractmethods__ | {"apply_twice"}
    patch.setattr(linear, "MPLinearKernel", type("Base", (linear.MPLinearKernel,), {}))
    patch.setattr(linear.MPLinearKernel, "__abstractmethods__", asking)


@pytest.mark.parametrize(
    ("change", "part"),
    [(_no_table, "no list"), (_no_base, "MPLinearKernel"), (_less_told, "group_size"), (_more_asked, "apply_twice")],
)
def test_a_vllm_built_otherwise_is_left_as_it_is_and_told_why(
    change: Any, part: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    own = KERNELS[PlatformEnum.CPU]
    own.remove(plugin.kernel_class())
    before = list(own)
    change(monkeypatch)
    plugin.kernel_class.cache_clear()
    plugin.register()
    plugin.kernel_class.cache_clear()
    assert own == before
    (record,) = log.records
    assert record.levelno == logging.WARNING and part in record.getMessage()
