"""The declaration of an op: its schema, which variant computes what, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

from specgraph.kernels import catalogue, ops  # noqa: F401  (the catalogue declares all ops)
from specgraph.kernels.ops import DEVICES, OPS, Op, Variant, declare, find, triton_or_reference


@dataclass(slots=True)
class Everything:
    """An argument of every type."""

    x: Tensor
    y: Tensor | None
    several: list[Tensor]
    count: int
    limit: int | None = None
    _: KW_ONLY
    scale: float
    cap: float | None = None
    flag: bool = True
    word: str = "none"
    dtype: torch.dtype


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


def everything_fake(given: Everything) -> Pair:
    return Pair(given.x, given.several)


def plain(given: Any) -> Any:
    return given


REFERENCE = Variant("reference", plain, batch_invariant=False)


def test_the_schema_is_that_of_the_fields() -> None:
    op = Op("everything", Everything, everything_fake, (REFERENCE,), mutates=("y", "several"))
    assert op.schema == (
        "(Tensor x, Tensor(a!)? y, Tensor(b!)[] several, int count, int? limit=None, *, float scale, float? cap=None, "
        'bool flag=True, str word="none", ScalarType dtype) -> (Tensor, Tensor[])'
    )


@dataclass(slots=True)
class Scale:
    x: Tensor
    factor: float = 2.0
    _: KW_ONLY
    word: str = "fine"


@pytest.fixture
def scratch() -> Iterator[None]:
    """Ops that are declared in a test live in a namespace of their own, and are forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "NAMESPACE", "specgraph_tests")
        patch.setattr(ops, "OPS", {})
        yield


def scale_fake(given: Scale) -> Tensor:
    return given.x.new_empty(given.x.shape)


def small(given: Scale) -> bool:
    return given.x.numel() < 3


@pytest.mark.usefixtures("scratch")
def test_the_first_variant_that_covers_the_arguments_computes_them() -> None:
    seen: list[tuple[str, float, str]] = []

    def run(name: str) -> Any:
        def multiply(given: Scale) -> Tensor:
            seen.append((name, given.factor, given.word))
            return given.x * given.factor

        return multiply

    variants = (
        Variant("triton", run("triton"), batch_invariant=True),
        Variant("cpu", run("cpu"), batch_invariant=True, covers=small),
        Variant("reference", run("reference"), batch_invariant=False),
    )
    op = declare("scale", Scale, scale_fake, variants)
    call = torch.ops.specgraph_tests.scale
    assert call(torch.ones(2)).tolist() == [2, 2]
    assert call(torch.ones(3), 4.0, word="other").tolist() == [4, 4, 4]
    assert seen == [("cpu", 2.0, "fine"), ("reference", 4.0, "other")]
    assert op.choose("cpu", Scale(torch.ones(3))).name == "reference"
    assert [v.name for v in op.on("cuda")] == ["triton", "reference"]
    assert op.batch_invariant("cuda") and op.batch_invariant("cpu")
    assert op.form("triton")(torch.ones(1), factor=3.0).tolist() == [3] and seen[-1][0] == "triton"
    torch.library.opcheck(call.default, (torch.ones(3), 4.0), {"word": "other"})


@pytest.mark.usefixtures("scratch")
def test_a_name_is_declared_once() -> None:
    declare("twice", Scale, scale_fake, (REFERENCE,))
    with pytest.raises(ValueError, match=r"An op twice is declared already, with the arguments \(Tensor x, float fac"):
        declare("twice", Scale, scale_fake, (REFERENCE,))


def test_the_first_variant_makes_the_promise() -> None:
    first = Variant("library", plain, batch_invariant=False, covers=small)
    op = Op("scale", Scale, scale_fake, (first, *triton_or_reference(plain, plain)))
    assert not op.batch_invariant("cuda") and not op.batch_invariant("cpu")
    assert op.choose("cuda", Scale(torch.ones(2))) is first and op.choose("cuda", Scale(torch.ones(3))).name == "triton"


@dataclass(slots=True)
class Strange:
    x: dict[str, Tensor]


def test_what_no_declaration_may_say_is_refused() -> None:
    with pytest.raises(ValueError, match="of reference, cpu, triton, hopper, hopper_wide, library, not 'cuda'"):
        Variant("cuda", plain, batch_invariant=True)
    with pytest.raises(ValueError, match="scale needs a last variant for cpu that covers all arguments"):
        Op("scale", Scale, scale_fake, (Variant("triton", plain, batch_invariant=True),))
    with pytest.raises(ValueError, match="scale needs a last variant for cuda that covers all arguments"):
        Op("scale", Scale, scale_fake, (Variant("cpu", plain, batch_invariant=True),))
    with pytest.raises(ValueError, match="scale writes y, which is no argument of it"):
        Op("scale", Scale, scale_fake, (REFERENCE,), mutates=("y",))
    with pytest.raises(ValueError, match=r"strange.x is dict\[.*\], which no schema expresses; allowed are the types"):
        Op("strange", Strange, scale_fake, (REFERENCE,)).schema  # noqa: B018
    with pytest.raises(ValueError, match="scale has the variants reference, not 'hopper'"):
        Op("scale", Scale, scale_fake, (REFERENCE,)).variant("hopper")


def test_an_op_in_a_graph_is_found() -> None:
    assert find(torch.ops.specgraph.row_mean.default) is OPS["row_mean"]
    assert find(torch.ops.aten.add.Tensor) is None and find(print) is None
    graph = fx.Graph()
    node = graph.call_function(torch.ops.specgraph.verify.default)
    assert find(node.target) is OPS["verify"]


def test_every_op_of_the_namespace_is_declared_here() -> None:
    known = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("specgraph::")}
    assert known == set(OPS)
    for name, op in OPS.items():
        overload = getattr(torch.ops.specgraph, name).default
        assert [a.name for a in overload._schema.arguments if a.is_write] == list(op.mutates)
        assert all(op.on(device)[-1].covers is None for device in DEVICES)


def test_on_a_gpu_rows_are_independent_but_for_what_traces_hold() -> None:
    dense = {"attention", "block_attention", "causal_conv", "gated_delta_rule", "selective_scan"}
    assert {name for name, op in OPS.items() if not op.batch_invariant("cuda")} == dense
    floats = {"linear", "rms_norm", "verify", "paged_attention"}
    assert not any(OPS[name].batch_invariant("cpu") for name in floats)
    assert OPS["consecutive_rows"].batch_invariant("cpu") and not OPS["consecutive_rows"].batch_invariant("meta")


def test_a_form_for_cpus_stands_before_the_reference_and_promises_as_much() -> None:
    for moves_only in (False, True):
        kernel, cpu, reference = triton_or_reference(plain, plain, moves_only=moves_only, cpu=plain, cpu_covers=small)
        assert (kernel, reference) == triton_or_reference(plain, plain, moves_only=moves_only)
        assert (cpu.name, cpu.batch_invariant, cpu.covers) == ("cpu", moves_only, small)


def test_most_ops_are_a_triton_form_and_plain_pytorch() -> None:
    kernel, reference = triton_or_reference(plain, plain, covers=small)
    assert (kernel.name, kernel.batch_invariant, kernel.covers) == ("triton", True, small)
    assert (reference.name, reference.batch_invariant, reference.covers) == ("reference", False, None)
