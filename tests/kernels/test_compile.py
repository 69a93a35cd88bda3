"""Tests of the operations and layers under torch.compile, FakeTensorMode, and torch.autocast.

torch.compile captures every operation and every layer in one graph. Fake tensors get the shapes
that real tensors get. torch.autocast changes no operation.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fem_common.config import load
from fem_megatron.block import Block
from fem_megatron.catalogue import MIXERS
from fem_megatron.config import ModelConfig
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context
from kernels import registered
from kernels.check import Inputs, Outputs, relative, results
from kernels.fem_projection import op as fem_projection
from kernels.gated_silu import op as gated_silu
from kernels.registered import NAMESPACE
from kernels.residual_norm import op as residual_norm
from tests.kernels.operations import SUITES
from tests.test_house import ROOT

LAYERS = [name for name, mixer in MIXERS.items() if mixer.package is None]
QUICK = ("transformer", "fem_softmax", "fem_gla")


@pytest.fixture(autouse=True)
def compiled_here() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("op", SUITES)
def test_an_operation_is_one_graph(op: str) -> None:
    """An operation compiles to one graph, forward and backward, and the results are the same.

    A registered operation runs the same code; a traced operation runs the same steps.
    """
    suite = SUITES[op]
    x = suite.cases[next(iter(suite.cases))](suite.small)
    full = torch.compile(lambda x: suite.call(x, "auto"), fullgraph=True, backend="eager")
    plain = results(lambda x: suite.call(x, "auto"), x, torch.float32, "cpu")
    for name, got in results(full, x, torch.float32, "cpu").items():
        # float32 rounding of sums in another order
        assert relative(got, plain[name]) <= 1e-6, name


OWN_BACKWARD = ("fem_attention", "cem_attention", "linear_attention", "symmetric_attention")
PRODUCTS = (
    *OWN_BACKWARD,
    "fem_projection",
    "free_energy",
    "gated_delta_rule",
    "second_order_attention",
    "ssm_read",
)


@pytest.mark.parametrize("op", PRODUCTS)
def test_autocast_changes_no_bit(op: str) -> None:
    """Autocast changes no bit of the results and gradients.

    For an operation with a custom backward, this is also true if the backward runs under autocast.
    """
    suite = SUITES[op]
    x = suite.cases[next(iter(suite.cases))](suite.small)
    if op == "second_order_attention":
        # The square of the identity is exact in every type.
        x = {**x, "factor": torch.eye(x["q"].shape[3]).double().repeat(x["q"].shape[1], 1, 1)}
    found = []
    for forward, backward in (
        (False, False),
        (True, False),
        *([(True, True)] if op in OWN_BACKWARD else []),
    ):
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):

            def call(x: Inputs, on: bool = forward) -> Outputs:
                with torch.autocast("cpu", torch.bfloat16, enabled=on):
                    return suite.call(x, "reference")

            found.append(results(call, x, torch.float32, "cpu"))
    # The suite itself squares the factor under autocast, which may change this gradient.
    for way in found[1:]:
        for name in way:
            assert name == "d factor" or torch.equal(way[name], found[0][name])


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS],
)
def test_a_layer_is_one_graph(name: str) -> None:
    model = replace(
        load(ModelConfig, ROOT / "configs" / "model" / "fem_sm_demo.yaml"),
        mixer=name,
        hidden_size=32,
        num_attention_heads=2,
    )
    block = Block(model.blocks()[0], OneProcess())
    rng = torch.Generator().manual_seed(1)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=rng)
    x = torch.randn(20, 2, model.stream_size, generator=rng)
    # Sums are rounded in another order, amplified by the layer. The gradient of fem_mamba's
    # delta_bias is a small sum of large terms: in float32 it differs by 2.7e-5 between the two, and
    # by 4e-5 from float64.
    narrow = 1e-4 if name == "fem_mamba" else 1e-5
    for dtype, limit in ((torch.float32, narrow), (torch.float64, 1e-12)):
        read, given = block.to(dtype), x.to(dtype).requires_grad_()
        found = []
        for layer in (read, torch.compile(read, fullgraph=True, backend="eager")):
            y = layer(given, Context())
            wanted = (given, *block.parameters())
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), wanted)))
        for got, plain in zip(*found, strict=True):
            assert relative(got, plain) <= limit


def test_a_copy_of_this_code_leaves_the_operations_alone() -> None:
    """Loading copies of the code does not replace the registered operations.

    The folder of an exported model contains a copy, and a process may load several copies.
    """

    def linear_attention(q: Tensor) -> Tensor:
        return 2 * q

    ours = torch.ops.fem.linear_attention.default
    spaces = []
    for copy in ("one.kernels_registered", "two.kernels_registered"):
        code = runpy.run_path(str(ROOT / "kernels" / "registered.py"), run_name=copy)
        other = code["registered"](lambda q: torch.empty_like(q), lambda q: False)(linear_attention)
        assert torch.compile(other, fullgraph=True, backend="eager")(torch.ones(3)).tolist() == [
            2,
            2,
            2,
        ]
        spaces.append(code["NAMESPACE"])
    assert len({"fem", *spaces}) == 3
    # A second registration would replace the operation and free the first one's memory.
    assert torch.ops.fem.linear_attention.default is ours


class Nodes(TorchDispatchMode):
    """Recorder of the registered operations that run, with their arguments.

    ``within`` is positive while one of them runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[Any, Any]] = {}
        self.within = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.found.setdefault(func.overloadpacket.__name__, (func, args))
        self.within += func.namespace == NAMESPACE
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.within -= func.namespace == NAMESPACE


@pytest.mark.parametrize("op", SUITES)
def test_a_node_of_a_graph_is_what_torch_library_wants(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph node has the operation's name, the same results and gradients, and passes opcheck.

    opcheck covers the schema (no result shares memory with an argument) and the fake results'
    layout.
    """
    suite = SUITES[op]
    x = suite.cases[next(iter(suite.cases))](suite.small)
    plain = results(lambda x: suite.call(x, "auto"), x, torch.float32, "cpu")

    with monkeypatch.context() as patch, Nodes() as nodes:
        for module in (registered, residual_norm, gated_silu, fem_projection):
            patch.setattr(module, "opaque", lambda *_: not nodes.within)
        node = results(lambda x: suite.call(x, "auto"), x, torch.float32, "cpu")
    # float32 rounding of sums in another order
    assert all(relative(node[name], plain[name]) <= 1e-6 for name in plain)
    name = {"free_energy": "linear_read_at_once"}.get(op, op)
    assert {name, f"{name}_backward"} <= set(nodes.found)
    for func, args in nodes.found.values():
        torch.library.opcheck(func, args, test_utils=("test_schema", "test_faketensor"))


CASES = [(op, case) for op, suite in SUITES.items() for case in suite.cases]


@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_tensor_without_numbers_gets_its_shape(op: str, case: str) -> None:
    """Forward and backward run on fake tensors and give the shapes and types of real ones.

    No step reads a value, and no size depends on one.
    """
    suite = SUITES[op]
    x = suite.cases[case](suite.small)
    given = {
        name: t.bfloat16() if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in x.items()
    }
    real = suite.call(given, "auto")
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(t) if isinstance(t, Tensor) else t for name, t in given.items()
        }
        leaves = [
            t.requires_grad_()
            for t in fake.values()
            if isinstance(t, Tensor) and t.is_floating_point()
        ]
        made = suite.call(fake, "auto")
        gradients = torch.autograd.grad([o.float().sum() for o in made], leaves, allow_unused=True)
    assert [(o.shape, o.dtype) for o in made] == [(o.shape, o.dtype) for o in real]
    assert all(
        g is None or (g.shape, g.dtype) == (t.shape, t.dtype)
        for g, t in zip(gradients, leaves, strict=True)
    )
